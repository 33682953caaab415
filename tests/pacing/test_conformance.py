# SPDX-License-Identifier: Apache-2.0
"""What every way of pacing promises, on every kernel that has what it needs.

FLOWSLOT_BACKENDS names those that must work here: then nothing is skipped for want of them.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowslotd.pacing import Pacer, PacingError, guardian, make_pacer, pack
from flowslotd.pacing.base import PaceEntry

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

MB = 1_000_000
LONG = 3600 * 10**9
SLOT_S = 0.060
BACKENDS = ("bpf", "edt", "htb", "socket")
ON_DEVICES = ("edt", "htb")
MUST = os.environ.get("FLOWSLOT_BACKENDS", "").split()
FREE = 15 * MB
"""Only a flow that nobody paces is faster..."""
MOST = 25 * MB
"""... and is this fast, no more: emulated processors have other things to do."""


class UdpFlow:
    """Datagrams, as fast as the socket takes them."""

    def __init__(self, here: str, there: str, helpers: Any) -> None:
        with helpers.inside(there):
            self.peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            self.peer.bind((helpers.THERE, 0))
        with helpers.inside(here):
            self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.sock.connect(self.peer.getsockname())
        self.peer.settimeout(0.1)
        self.sock.settimeout(0.1)
        self.cookie = helpers.cookie_of(self.sock)
        self.size = 1400
        self._meter = helpers.Meter(MOST)
        self._received = 0
        self._running = True
        self._threads = [threading.Thread(target=self._drain), threading.Thread(target=self._fill)]
        for thread in self._threads:
            thread.start()

    def received(self) -> int:
        return self._received

    def rate(self, seconds: float = 0.3) -> float:
        before, start = self._received, time.monotonic()
        time.sleep(seconds)
        return (self._received - before) / (time.monotonic() - start)

    def stop(self) -> None:
        self._running = False
        for thread in self._threads:
            thread.join(5)
        self.sock.close()
        self.peer.close()

    def _fill(self) -> None:
        data = bytes(65_000)
        while self._running:
            with contextlib.suppress(OSError):
                self._meter.sent(self.sock.send(data[: self.size]))

    def _drain(self) -> None:
        into = bytearray(65_536)
        while self._running:
            with contextlib.suppress(OSError):
                self._received += self.peer.recv_into(into)


class Bench:
    """A sender's namespace with this test's thread in it, and pacers and flows there."""

    def __init__(self, backend: str, net: Any, helpers: Any) -> None:
        self.backend, self.net, self.helpers = backend, net, helpers
        self._pacers: list[Pacer] = []
        self.flows: list[Any] = []

    def pacer(self, **options: Any) -> Pacer:
        try:
            pacer = make_pacer(self.backend, f"conf{len(self._pacers)}", **options)
        except PacingError as error:
            if self.backend in MUST:
                raise
            pytest.skip(f"{self.backend}: {error}")
        self._pacers.append(pacer)
        return pacer

    def flow(self, pacer: Pacer, protocol: str = "tcp", **more: Any) -> Any:
        if protocol == "udp":
            flow = UdpFlow(self.net.here, self.net.there, self.helpers)
        else:
            flow = self.helpers.Flow(self.net, most=MOST, **more)
            if pacer.congestion_control:
                flow.enlist(pacer.congestion_control)
        self.flows.append(flow)
        pacer.attach(flow.cookie, os.getpid(), flow.sock.fileno())
        return flow

    def host(self) -> dict[str, Any]:
        """All that a back end may change here, flows' sockets aside."""
        return snapshot()

    def close(self) -> None:
        for pacer in self._pacers:
            pacer.close()
        for flow in self.flows:
            flow.stop()


def tc(*arguments: str) -> Any:
    """What `tc -j` prints; as it is where it knows no JSON (for classes of TBF)."""
    run = subprocess.run(["tc", "-j", *arguments], capture_output=True, text=True, check=True)
    with contextlib.suppress(ValueError):
        return json.loads(run.stdout)
    return run.stdout


def snapshot() -> dict[str, Any]:
    """Of the namespace that this thread is in."""
    said: dict[str, Any] = {"qdiscs": tc("qdisc", "show")}
    for qdisc in said["qdiscs"]:
        qdisc["options"].pop("direct_packets_stat", None)  # HTB counts there
    side = "filter", "show", "dev", "eth0"
    return said | {
        "classes": tc("class", "show", "dev", "eth0"),
        "egress": tc(*side, "egress"),
        "ingress": tc(*side, "ingress"),
        "tcp_tso_rtt_log": Path(guardian.SYSCTL).read_text(),
    }


def options(flow: Any) -> dict[str, bytes]:
    """Of a flow's socket, all that a back end may set."""
    numbers = {"priority": (12, 4), "max_pacing_rate": (47, 8), "mark": (36, 4), "sndbuf": (7, 4)}
    return {
        name: flow.sock.getsockopt(socket.SOL_SOCKET, *how)
        for name, how in numbers.items()
        if not (name == "sndbuf" and flow.sock.type == socket.SOCK_STREAM)  # TCP tunes it
    }


def set_rate(pacer: Pacer, rates: dict[Any, float], lasts: int = LONG) -> int:
    entries = [
        PaceEntry(flow.cookie, rate, rate, guaranteed=True, growth=0)
        for flow, rate in rates.items()
    ]
    return pacer.apply(pack(entries), time.monotonic_ns() + lasts)


def slots(flow: Any, count: int = 20) -> np.ndarray:
    """Bytes/s that arrived in each of so many slots."""
    at, seen = [time.monotonic()], [flow.received()]
    for k in range(1, count + 1):
        time.sleep(max(0.0, at[0] + k * SLOT_S - time.monotonic()))
        seen.append(flow.received())
        at.append(time.monotonic())
    return np.diff(seen) / np.diff(at)


@pytest.fixture(params=BACKENDS)
def on(request: pytest.FixtureRequest, net: Any, from_here: Any) -> Iterator[Bench]:
    with from_here.inside(net.here):
        bench = Bench(request.param, net, from_here)
        try:
            yield bench
        finally:
            bench.close()


# -- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_slot_carries_what_its_rate_says(on: Bench, protocol: str) -> None:
    pacer = on.pacer()
    if protocol not in pacer.traits.protocols:
        pytest.skip(f"{on.backend} does not pace {protocol}")
    flow = on.flow(pacer, protocol)
    for rate in (5 * MB, MB, 3 * MB):
        assert set_rate(pacer, {flow: rate}) == 1
        assert set_rate(pacer, {flow: rate}) == 0  # nothing to change

        def holds(rate: float = rate) -> bool:
            # A busy machine stops everything for a slot's time now and then.
            errors = np.sort(np.abs(slots(flow) / rate - 1))
            return bool(errors[-4] <= 0.10)

        assert on.helpers.soon(holds, 30), slots(flow) / rate


def test_over_ipv6(on: Bench) -> None:
    pacer = on.pacer()
    flow = on.flow(pacer, address=on.helpers.THERE_6)
    assert set_rate(pacer, {flow: 2 * MB}) == 1
    assert on.helpers.soon(lambda: abs(flow.rate(0.6) / (2 * MB) - 1) <= 0.05), flow.rate(0.6)


def test_large_datagrams_are_paced_too(on: Bench) -> None:
    pacer = on.pacer()
    if "udp" not in pacer.traits.protocols:
        pytest.skip(f"{on.backend} does not pace udp")
    flow = on.flow(pacer, "udp")
    flow.size = 30_000
    set_rate(pacer, {flow: 4 * MB})

    def holds() -> bool:
        pacer.counters()  # what a packet carries is learnt
        return abs(flow.rate(1.0) / (4 * MB) - 1) <= 0.05

    assert on.helpers.soon(holds, 30), flow.rate(1.0)


def test_steps_and_resuming_from_a_floor(on: Bench) -> None:
    pacer = on.pacer()
    flow = on.flow(pacer)
    waits = []
    for _ in range(6):
        set_rate(pacer, {flow: 0.3 * MB})
        assert on.helpers.soon(lambda: flow.rate(0.2) < 0.6 * MB)
        before, start = flow.received(), time.monotonic()
        set_rate(pacer, {flow: 5 * MB})
        assert on.helpers.soon(lambda before=before: flow.received() > before + 100_000)
        waits.append(time.monotonic() - start)
    # 20 ms at the new rate; a burst of 64 kB at the old one would last 200 ms.
    assert min(waits) < 0.12, waits


def test_many_flows_each_at_its_rate(on: Bench) -> None:
    pacer = on.pacer()
    flows = [on.flow(pacer) for _ in range(24)]
    wanted = {flow: (0.3 + 0.02 * k) * MB for k, flow in enumerate(flows)}
    assert set_rate(pacer, wanted) == len(flows)

    def holds() -> bool:
        before, start = [flow.received() for flow in flows], time.monotonic()
        time.sleep(1.0)
        took = time.monotonic() - start
        got = [
            (flow.received() - then) / took / wanted[flow]
            for flow, then in zip(flows, before, strict=True)
        ]
        return max(abs(one - 1) for one in got) <= 0.10

    assert on.helpers.soon(holds, 40)
    cookies = sorted(flow.cookie for flow in flows)
    assert on.helpers.soon(lambda: pacer.counters().cookie.tolist() == cookies)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_counters_tell_what_was_delivered(on: Bench, protocol: str) -> None:
    pacer = on.pacer()
    if protocol not in pacer.traits.protocols:
        pytest.skip(f"{on.backend} does not pace {protocol}")
    flow = on.flow(pacer, protocol)
    set_rate(pacer, {flow: 2 * MB})
    time.sleep(0.3)
    first = int(pacer.counters().acked[0]), flow.received()
    time.sleep(0.6)
    last = int(pacer.counters().acked[0]), flow.received()
    assert last[0] - first[0] == pytest.approx(last[1] - first[1], rel=0.2)
    assert last[0] > first[0]


# -- fail open ----------------------------------------------------------------------------------


def test_fail_open_when_the_daemon_sleeps(on: Bench) -> None:
    pacer = on.pacer()
    flow = on.flow(pacer)
    set_rate(pacer, {flow: MB}, lasts=LONG)
    assert flow.comes_to(MB)
    set_rate(pacer, {flow: MB}, lasts=10**8)
    pacer.refresh(time.monotonic_ns() + 10**8)
    assert on.helpers.soon(lambda: flow.rate() > FREE)
    # Awake again: it knows that nothing is paced any more, or that its entry is there still.
    pacer.refresh(time.monotonic_ns() + LONG)
    set_rate(pacer, {flow: 2 * MB})
    assert flow.comes_to(2 * MB)


OWNER = """
import sys, time
from flowslotd.pacing import PaceEntry, make_pacer, pack
pacer = make_pacer(sys.argv[1], "victim")
print(pacer.congestion_control, flush=True)
cookie, pid, fd = map(int, sys.stdin.readline().split())
pacer.attach(cookie, pid, fd)
entry = PaceEntry(cookie, 1e6, 1e6, True, 0)
applied = pacer.apply(pack([entry]), time.monotonic_ns() + 2 * 10**9)
guard = getattr(getattr(pacer, "_undo", None), "guard", None)
print(applied, guard.pid if guard else 0, flush=True)
while True:
    pacer.refresh(time.monotonic_ns() + 2 * 10**9)
    time.sleep(0.2)
"""


@contextlib.contextmanager
def owned_by_another(on: Bench) -> Iterator[tuple[Any, int]]:
    """A flow, and the guardian of the process that paces it; that is killed afterwards."""
    command = [sys.executable, "-c", OWNER, on.backend]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        try:
            name = owner.stdout.readline()
            if not name:
                pacer = on.pacer()  # says why, or that it works after all
                pytest.fail(f"{pacer.name} works here, but not in a process of its own")
            flow = on.helpers.Flow(on.net, most=MOST)
            on.flows.append(flow)
            if name.strip():
                flow.enlist(name.strip())
            print(flow.cookie, os.getpid(), flow.sock.fileno(), file=owner.stdin, flush=True)
            applied, watcher = map(int, owner.stdout.readline().split())
            assert applied == 1
            assert flow.comes_to(MB)
            yield flow, watcher
        finally:
            owner.kill()
            owner.communicate()


def test_fail_open_and_restore_when_the_daemon_is_killed(on: Bench) -> None:
    before, plain = on.host(), on.helpers.Flow(on.net, busy=False)
    on.flows.append(plain)
    with owned_by_another(on) as (flow, _):
        if on.backend != "bpf":
            assert on.host() != before or options(flow) != options(plain)
    assert on.helpers.soon(lambda: flow.rate() > FREE)
    assert on.helpers.soon(lambda: on.host() == before), on.host()
    assert on.helpers.soon(lambda: options(flow) == options(plain))


@pytest.mark.parametrize("backend", ON_DEVICES)
def test_what_was_left_behind_is_removed_by_the_next(
    backend: str, net: Any, from_here: Any
) -> None:
    with from_here.inside(net.here):
        on = Bench(backend, net, from_here)
        try:
            before = on.host()
            with owned_by_another(on) as (flow, watcher):
                os.kill(watcher, signal.SIGKILL)
            assert on.host() != before  # nobody was there to do it
            if backend == "htb":  # paced by nobody's daemon: what the next one is for
                assert flow.rate() < 2 * MB
            pacer = on.pacer()
            pacer.attach(flow.cookie, os.getpid(), flow.sock.fileno())
            set_rate(pacer, {flow: 2 * MB})
            assert flow.comes_to(2 * MB)
            pacer.close()
            # What the sysctl was has died with the two.
            assert on.host() | {"tcp_tso_rtt_log": 0} == before | {"tcp_tso_rtt_log": 0}
        finally:
            on.close()


# -- restore --------------------------------------------------------------------------------------


def test_closing_restores_everything(on: Bench) -> None:
    before = on.host()
    pacer = on.pacer()
    flows = [on.flow(pacer) for _ in range(3)]
    if "udp" in pacer.traits.protocols:
        flows.append(on.flow(pacer, "udp"))
    as_they_were = [options(flow) for flow in flows]
    set_rate(pacer, dict.fromkeys(flows, MB))
    assert flows[0].comes_to(MB)
    pacer.release(flows[0].cookie)
    assert options(flows[0]) == as_they_were[0]
    assert on.helpers.soon(lambda: flows[0].rate() > FREE)
    pacer.close()
    assert on.host() == before
    assert [options(flow) for flow in flows] == as_they_were
    assert on.helpers.soon(lambda: flows[1].rate() > FREE)


def test_a_released_flow_is_paced_again_when_asked(on: Bench) -> None:
    pacer = on.pacer()
    flow = on.flow(pacer)
    for rate in (MB, 2 * MB):
        assert set_rate(pacer, {flow: rate}) == 1
        assert flow.comes_to(rate)
        pacer.release(flow.cookie)
        assert on.helpers.soon(lambda: flow.rate() > FREE)


def test_two_daemons_at_once(on: Bench) -> None:
    before = on.host()
    first, second = on.pacer(), on.pacer()
    one, other = on.flow(first), on.flow(second)
    assert set_rate(first, {one: MB}) == set_rate(second, {other: 2 * MB}) == 1
    assert set_rate(first, {other: MB}) == 0  # not its flow
    assert one.comes_to(MB) and other.comes_to(2 * MB)
    first.close()
    assert on.helpers.soon(lambda: one.rate() > FREE)
    one.stop()
    assert other.comes_to(2 * MB)
    second.close()
    assert on.host() == before


# -- hosts that are not as expected ---------------------------------------------------------------


FOREIGN = ("htb default 1", "tbf rate 800mbit burst 100k limit 1m", "pfifo")


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_qdisc_is_not_touched(
    on: Bench, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = foreign.split(maxsplit=1)[0]
    root = f"qdisc add dev eth0 root handle 7: {foreign}".split()
    subprocess.run(["tc", "-n", on.net.here, *root], check=True)
    before = on.host()
    pacer = on.pacer()
    flow = on.flow(pacer)
    paced = set_rate(pacer, {flow: MB})
    if on.backend in ON_DEVICES:
        assert paced == 0
        assert f"eth0 has a root qdisc of its own, {kind} 7:, which stays" in caplog.text
        assert on.host()["qdiscs"] == before["qdiscs"]
        assert flow.rate() > FREE
        with pytest.raises(PacingError, match=f"eth0 .*{kind} 7:"):
            make_pacer(on.backend, "named", devices=["eth0"])
    else:
        assert flow.comes_to(MB)
    pacer.close()
    assert on.host() == before


@pytest.mark.parametrize("kind", ["bridge", "bond"])
def test_a_master_is_refused_by_name(on: Bench, kind: str) -> None:
    if on.backend not in ON_DEVICES:
        pytest.skip(f"{on.backend} is not set up on devices")
    made = subprocess.run(
        ["ip", "link", "add", "top0", "type", kind], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip(f"this kernel has no {kind}")
    on.pacer().close()  # or a reason to skip
    before = on.host()
    with pytest.raises(PacingError, match=f"top0 is a {kind}"):
        make_pacer(on.backend, "named", devices=["top0"])
    with pytest.raises(PacingError, match="there is no network device nowhere0"):
        make_pacer(on.backend, "named", devices=["eth0", "nowhere0"])
    assert on.host() == before


def test_the_ports_of_a_bond_are_paced_when_they_are_named(on: Bench) -> None:
    if on.backend not in ON_DEVICES:
        pytest.skip(f"{on.backend} is not set up on devices")
    for line in (
        "link add bond0 type bond mode balance-xor",
        "link set eth0 down",
        "link set eth0 master bond0",
        "address flush dev eth0",
        f"address add {on.helpers.HERE}/24 dev bond0",
        "link set bond0 up",
    ):
        done = subprocess.run(["ip", *line.split()], check=False, capture_output=True, text=True)
        if "bond0 type bond" in line and done.returncode:
            pytest.skip("this kernel has no bond")
        assert not done.returncode, (line, done.stderr)
    before = on.host()
    pacer = on.pacer(devices=["eth0"])
    flow = on.flow(pacer)
    assert set_rate(pacer, {flow: MB}) == 1
    assert flow.comes_to(MB)
    pacer.close()
    assert on.host() == before


def test_a_device_with_several_queues(on: Bench) -> None:
    if on.backend not in ON_DEVICES:
        pytest.skip(f"{on.backend} is not set up on devices")
    for line in ("link add many0 numtxqueues 4 type ifb", "link set many0 up"):
        subprocess.run(["ip", *line.split()], check=True)
    before = on.host()
    assert [one["kind"] for one in before["qdiscs"] if one.get("root")].count("mq") == 1
    pacer = on.pacer(devices=["many0"])
    assert on.host() != before
    pacer.close()
    assert on.host() == before


@pytest.mark.parametrize("backend", ["edt"])
def test_what_others_have_at_clsact_stays(backend: str, net: Any, from_here: Any) -> None:
    with from_here.inside(net.here):
        on = Bench(backend, net, from_here)
        try:
            for line in ("qdisc add dev eth0 clsact", "qdisc add dev eth0 root handle 7: fq"):
                done = subprocess.run(["tc", *line.split()], check=False, capture_output=True)
                if done.returncode:
                    on.pacer()  # says why it is skipped
            rule = "filter add dev eth0 egress pref 10 protocol ip u32 match u32 0 0 action ok"
            subprocess.run(["tc", *rule.split()], check=False, capture_output=True)
            before = on.host()
            pacer = on.pacer()
            flow = on.flow(pacer)
            set_rate(pacer, {flow: MB})
            assert on.host()["qdiscs"] == before["qdiscs"]  # fq was there
            pacer.close()
            assert on.host() == before
        finally:
            on.close()


def test_a_device_that_vanishes(on: Bench) -> None:
    pacer = on.pacer()
    flow = on.flow(pacer)
    set_rate(pacer, {flow: MB})
    subprocess.run(["ip", "-n", on.net.here, "link", "del", "eth0"], check=True)
    for rate in (2 * MB, 3 * MB):
        set_rate(pacer, {flow: rate})
        pacer.counters()
    pacer.release(flow.cookie)
    pacer.close()


@pytest.mark.parametrize("backend", ON_DEVICES)
def test_an_administrator_takes_the_device_back(
    backend: str, net: Any, from_here: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with from_here.inside(net.here):
        on = Bench(backend, net, from_here)
        try:
            pacer = on.pacer()
            flow = on.flow(pacer)
            set_rate(pacer, {flow: MB})
            assert flow.comes_to(MB)
            pfifo = "qdisc replace dev eth0 root handle 7: pfifo"
            subprocess.run(["tc", "-n", net.here, *pfifo.split()], check=True)
            theirs = [one for one in on.host()["qdiscs"] if one["kind"] == "pfifo"]
            for rate in (2 * MB, 3 * MB):
                set_rate(pacer, {flow: rate})
            assert [one for one in on.host()["qdiscs"] if one["kind"] == "pfifo"] == theirs
            pacer.close()
            assert [one for one in on.host()["qdiscs"] if one["kind"] == "pfifo"] == theirs
            assert flow.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0
            assert on.helpers.soon(lambda: flow.rate() > FREE)
        finally:
            on.close()


def test_nothing_of_ours_is_a_number_of_somebody_elses() -> None:
    """Handles that administrators and other programs use are small, or given by the kernel from
    8000: on."""
    for handle in (guardian.HTB, guardian.FQ):
        assert 0xF000 < handle >> 16 < 0xFFFF
