# SPDX-License-Identifier: Apache-2.0
"""What every back end promises on hosts that are not as expected."""

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from waiting import settle

from flowslot_shm.writer import cookie_of
from flowslotd.pace.pacer import PaceEntry
from flowslotd.pace.select import make_pacer

from .conformance import (
    FREE,
    MB,
    MUST,
    ON_DEVICES,
    OWN,
    Bench,
    apply,
    later,
    possible,
    set_rate,
    tc,
)
from .traffic import HERE, change

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


def changes_devices(on: Bench) -> bool:
    return on.backend in ("edt", "htb")


OTHER_DEVICE = (
    "link add other0 type veth peer name other1",
    "link set other0 up",
    "link set other1 up",
    "address add 10.80.0.1/24 dev other0",
)
FOREIGN = [
    ("edt", "tbf rate 800mbit burst 100k limit 1m"),
    ("htb", "htb default 1"),
    ("htb", "pfifo"),
    ("socket", "tbf rate 800mbit burst 100k limit 1m"),
]


@pytest.mark.parametrize(("on", "foreign"), FOREIGN, indirect=["on"])
def test_a_foreign_qdisc_is_not_touched(
    on: Bench, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = foreign.split(maxsplit=1)[0]
    change("tc", f"qdisc add dev eth0 root handle 7: {foreign}")
    before = on.host()
    pacer, flow = on.pair()
    paced = set_rate(pacer, {flow: MB})
    if changes_devices(on):
        assert paced == 0
        assert f"eth0 has a root qdisc of its own, {kind} 7:, which stays" in caplog.text
        assert on.host()["qdiscs"] == before["qdiscs"]
        assert flow.exceeds(FREE)
        on.refuses(f"eth0 .*{kind} 7:", "eth0")
    else:
        assert flow.comes_to(MB)
    pacer.close()
    assert on.host() == before


@pytest.mark.parametrize("kind", ["bridge", "bond"])
@ON_DEVICES
def test_a_master_is_refused_by_name(on: Bench, kind: str) -> None:
    if not possible("ip", f"link add top0 type {kind}"):
        pytest.skip(f"this kernel has no {kind}")
    on.pacer().close()  # or a reason to skip
    on.refuses(f"top0 is a {kind}", "top0")
    on.refuses("there is no network device nowhere0", "eth0", "nowhere0")


@ON_DEVICES
def test_the_ports_of_a_bond_are_paced_when_they_are_named(on: Bench) -> None:
    if not possible("ip", "link add bond0 type bond mode balance-xor"):
        pytest.skip("this kernel has no bond")
    change(
        "ip",
        "link set eth0 down",
        "link set eth0 master bond0",
        "address flush dev eth0",
        f"address add {HERE}/24 dev bond0",
        "link set bond0 up",
    )
    before = on.host()
    pacer = on.pacer(devices=["eth0"])
    flow = on.flow(pacer)
    assert set_rate(pacer, {flow: MB}) == 1
    assert flow.comes_to(MB)
    pacer.close()
    assert on.host() == before


@ON_DEVICES
def test_a_device_with_several_queues(on: Bench) -> None:
    change("ip", "link add many0 numtxqueues 4 type ifb", "link set many0 up")
    before = on.host()
    assert [one["kind"] for one in on.roots()].count("mq") == 1
    change("ip", "address add 10.81.0.1/24 dev many0")
    pacer = on.pacer(devices=["many0"])
    assert on.host() != before
    with on.datagrams(pacer, "10.81.0.2") as entry:
        assert apply(pacer, entry) == 1
        pacer.close()
    assert on.host() == before


@pytest.mark.parametrize("on", ["edt"], indirect=True)
def test_what_others_have_at_clsact_stays(on: Bench) -> None:
    for line in ("qdisc add dev eth0 clsact", "qdisc add dev eth0 root handle 7: fq"):
        if not possible("tc", line):
            on.pacer()  # says why it is skipped
    rule = "filter add dev eth0 egress pref {} protocol ip u32 match u32 0 0 action ok"
    change("tc", rule.format(10))
    before = on.host()
    pacer, flow = on.paced()
    assert before["egress"]
    assert flow.comes_to(MB)
    assert on.host()["qdiscs"] == before["qdiscs"]  # fq was there
    pacer.close()
    assert on.host() == before
    change("tc", rule.format(1))
    on.refuses("eth0 has a filter at its egress with preference 1", "eth0")


@pytest.mark.parametrize("on", ["edt"], indirect=True)
def test_an_ingress_qdisc_is_not_touched(on: Bench) -> None:
    on.pacer().close()  # or a reason to skip
    rule = "filter add dev eth0 ingress pref 1 protocol ip u32 match u32 0 0 action ok"
    change("tc", "qdisc add dev eth0 ingress", rule)
    on.refuses("eth0 has an ingress qdisc, which stays", "eth0")


@pytest.mark.parametrize("on", ["edt"], indirect=True)
def test_what_others_add_beside_our_filter_stays(on: Bench) -> None:
    pacer, _ = on.paced()
    theirs = "filter add dev eth0 egress pref 1 protocol all bpf flowid 1:1 bytecode"
    subprocess.run(["tc", *theirs.split(), "1,6 0 0 0"], check=True)
    assert len([one for one in on.host()["egress"] if one.get("options")]) == 2
    pacer.close()
    (left,) = [one for one in on.host()["egress"] if one.get("options")]
    assert left["options"]["bytecode"]
    assert "clsact" in {one["kind"] for one in on.host()["qdiscs"]}  # it needs it


def test_a_device_that_vanishes(on: Bench) -> None:
    pacer, flow = on.paced()
    change("ip", "link del eth0")
    for rate in (2 * MB, 3 * MB):
        paced = set_rate(pacer, {flow: rate})
        assert paced == (on.backend != "htb")  # the others do not need it to set a rate
        assert pacer.counters().cookie.tolist() == [flow.cookie]
    pacer.release(flow.cookie)
    pacer.close()


@ON_DEVICES
def test_an_administrator_takes_the_device_back(on: Bench) -> None:
    pacer, flow = on.paced()
    assert flow.comes_to(MB)
    change("tc", "qdisc replace dev eth0 root handle 7: pfifo")
    theirs = on.roots("eth0")
    assert [one["kind"] for one in theirs] == ["pfifo"]
    for rate in (2 * MB, 3 * MB):
        set_rate(pacer, {flow: rate})
    assert on.roots("eth0") == theirs
    pacer.close()
    assert on.roots("eth0") == theirs
    assert flow.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == OWN[12]
    assert flow.exceeds(FREE)


def test_sockets_that_nobody_can_pace(on: Bench) -> None:
    """A job may name any socket of its own."""
    pacer, flow = on.pair()
    with contextlib.ExitStack() as stack:
        pair = [stack.enter_context(one) for one in socket.socketpair()]
        plain = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        unconnected = stack.enter_context(socket.socket())
        elsewhere = stack.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
        odd = [pair[0], plain, unconnected, elsewhere]
        cookies = [cookie_of(sock) for sock in odd]
        for sock, cookie in zip(odd, cookies, strict=True):
            pacer.attach(cookie, os.getpid(), sock.fileno())
        apply(pacer, *(PaceEntry(c, MB, MB, True, 0) for c in (*cookies, flow.cookie)))
        assert flow.cookie in pacer.counters().cookie.tolist()
        if changes_devices(on):
            assert all(pacer.refusal(cookie) for cookie in cookies)
        for cookie in cookies:
            pacer.release(cookie)
        assert flow.comes_to(MB)


def test_over_a_path_with_delay_and_loss(on: Bench) -> None:
    """At the receiver's end of the switch, as the acknowledgements are on their way back."""
    tc, netem = f"tc -n {on.net.switch}", "qdisc add dev {} root netem delay 5ms loss 0.5%"
    if not possible(tc, netem.format("here")):
        assert not MUST
        pytest.skip("this kernel has no netem")
    change(tc, netem.format("there"))
    pacer, flow = on.pair()
    for rate in (2 * MB, MB):
        assert set_rate(pacer, {flow: rate}) == 1
        # A ceiling to TCP's own rate, but for `bpf`, which keeps it.
        settle(lambda rate=rate: 0.6 < flow.rate(0.6) / rate < 1.1, 30)


@pytest.mark.parametrize("on", ["edt", "htb", "socket"], indirect=True)
def test_whatever_congestion_control_the_job_uses(on: Bench) -> None:
    pacer, flow = on.pair()
    others = [name for name in ("dctcp", "cubic", "bbr", "reno") if _uses(flow, name)]
    assert others and ("dctcp" in others or not MUST)
    for name in others:
        assert _uses(flow, name)
        for rate in (2 * MB, MB):
            assert set_rate(pacer, {flow: rate}) == 1
            assert flow.comes_to(rate), name
        pacer.release(flow.cookie)


def _uses(flow: Any, congestion_control: str) -> bool:
    """Whether this kernel has it."""
    with contextlib.suppress(OSError):
        flow.enlist(congestion_control)
        return True
    return False


@ON_DEVICES
def test_a_socket_that_is_bound_to_a_device(on: Bench) -> None:
    """Its packets leave there, whatever the route says."""
    pacer = on.pacer()
    change("ip", *OTHER_DEVICE)
    with on.datagrams(pacer, "10.80.0.2", "other0") as entry:
        apply(pacer, entry)
        changed = {one["dev"] for one in on.host()["qdiscs"] if one["handle"] != "0:"}
        assert changed == {"other0"}


@ON_DEVICES
def test_devices_that_are_not_this_hosts_are_left_alone(on: Bench) -> None:
    """A job may have sockets on any device: with another program, or through `lo`."""
    pacer = on.pacer()
    pacer.leave_by([HERE])
    flow = on.flow(pacer)
    change("ip", "link set lo up", *OTHER_DEVICE)
    before = on.host()["qdiscs"]
    for device, to in (("lo", "127.0.0.1"), ("other0", "10.80.0.2")):
        with on.datagrams(pacer, to) as entry:
            assert apply(pacer, entry) == 0
            assert f"{device} has none of this host's addresses" in pacer.refusal(entry.cookie)
    assert on.host()["qdiscs"] == before
    assert set_rate(pacer, {flow: MB}) == 1
    assert flow.comes_to(MB)
    pacer.leave_by([HERE, "10.80.0.1"])  # as after a reload
    with on.datagrams(pacer, "10.80.0.2") as entry:
        assert apply(pacer, entry) == 1


@ON_DEVICES
def test_a_default_that_would_not_come_back(
    on: Bench, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """The kernel puts today's default qdisc where ours was, and that may not be what was there."""
    on.pacer().close()  # or a reason to skip
    change("ip", "link add old0 type ifb", "link set old0 up")
    before = on.host()
    (was,) = [one["kind"] for one in before["qdiscs"] if one["dev"] == "old0"]
    today = tmp_path / "default_qdisc"  # this namespace has no such file
    today.write_text("something\n")
    monkeypatch.setattr("flowslotd.pace.devices.DEFAULT_QDISC", today)
    on.refuses(f"old0 has {was}, which would come back as something", "old0")
    today.write_text(was + "\n")
    make_pacer(on.backend, "named", devices=["old0"]).close()
    assert on.host() == before


@ON_DEVICES
def test_a_device_without_a_queue_length_has_none_afterwards(on: Bench) -> None:
    change("ip", "link set eth0 txqueuelen 0")
    pacer = on.pacer(devices=["eth0"])
    pacer.refresh(later())
    pacer.close()
    shown = subprocess.run(["ip", "-j", "link", "show", "eth0"], capture_output=True, check=True)
    assert json.loads(shown.stdout)[0].get("txqlen", 0) == 0


@ON_DEVICES
def test_a_named_device_that_is_made_anew(on: Bench) -> None:
    make = "link add eth9 type veth peer name eth8"
    change("ip", make)
    pacer = on.pacer(devices=["eth9"])
    flow = on.flow(pacer)
    assert set_rate(pacer, {flow: MB}) == 1
    change("ip", "link del eth9", make)
    for rate in (2 * MB, 3 * MB):
        set_rate(pacer, {flow: rate})
    if on.backend == "htb":  # which notices; a filter is not missed by anybody
        assert [one["handle"] for one in on.roots("eth9")] == ["f510:"]


@pytest.mark.parametrize("on", ["htb"], indirect=True)
def test_one_device_is_begun_anew_without_the_others(on: Bench) -> None:
    change("ip", *OTHER_DEVICE)
    pacer = on.pacer()
    one, other = on.flow(pacer), on.flow(pacer)
    with on.datagrams(pacer, "10.80.0.2") as first, on.datagrams(pacer, "10.80.0.2") as second:
        assert apply(pacer, first) == 1
        assert set_rate(pacer, {one: MB, other: 2 * MB}) == 2
        change("tc", "qdisc del dev eth0 root")
        assert set_rate(pacer, {one: 3 * MB}) == 0
        assert apply(pacer, second) == 1
        shown = str(tc("class", "show", "dev", "other0"))
        assert shown.count("class htb") == 3, shown  # the first one's is still there
    assert not pacer.refresh(later())  # so the enforcer applies all again
    assert set_rate(pacer, {one: 3 * MB, other: 2 * MB}) == 2
    assert one.comes_to(3 * MB) and other.comes_to(2 * MB)
    assert pacer.refresh(later())
