# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS at a real switch process, by stock clients of gRPC: who is let in, as whom."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tlsfiles
from switchproc import EmulatedSwitchStub, Peer
from tlsfiles import TlsSwitch
from waiting import settle

from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.grpcio import grpc

DENIED = grpc.StatusCode.PERMISSION_DENIED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
OF_H1 = ("h1->s1", "s1->h2")


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSwitch]:
    with TlsSwitch(tmp_path_factory.mktemp("tls")) as process:
        yield process.start()


def fails(channel: grpc.Channel) -> tuple[grpc.StatusCode, str]:
    with channel, pytest.raises(grpc.RpcError) as error:
        EmulatedSwitchStub(channel).Describe(pb.DescribeRequest(), timeout=20)
    return error.value.code(), error.value.details()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (None, "it does not speak TLS"),
        ("", "it has no certificate"),
        ("other/h1", "its certificate is not accepted: unable to get local issuer certificate"),
        ("expired/h1", "its certificate is not accepted: certificate has expired"),
        ("s1", "its certificate is not accepted: unsupported certificate purpose"),
    ],
)
def test_who_has_no_good_certificate_is_refused_and_the_log_says_why(
    tmp_path: Path, name: str | None, reason: str
) -> None:
    with TlsSwitch(tmp_path) as switch:  # one line in ten seconds for each address
        switch.start()
        plain = grpc.insecure_channel(switch.address)
        assert fails(plain if name is None else switch.channel(name))[0] == UNAVAILABLE
        log = switch.logged("rejected")
        [line] = [line for line in log.splitlines() if "rejected" in line]
        assert line.startswith("flowslot-switch: rejected 127.0.0.1:")
        assert line.endswith(f": TLS: {reason}")
        assert not switch.describe().sessions


def test_a_client_knows_the_switch_by_its_name(switch: TlsSwitch) -> None:
    code, details = fails(switch.channel(target="s2"))
    assert code == UNAVAILABLE and "Hostname" in details
    code, details = fails(switch.channel(ca="other"))
    assert code == UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in details


@pytest.mark.parametrize(
    ("hello", "code", "field"),
    [
        ({"host": "h2", "links": OF_H1}, DENIED, '`hello.host`: is "h2"'),
        ({"host": "", "links": OF_H1}, DENIED, "`hello.host`"),
        ({"host": "h1", "links": ("h1->s1", "h2->s1")}, DENIED, "`hello.links[1]`"),
    ],
)
def test_a_hello_is_about_the_certificates_host(
    switch: TlsSwitch, hello: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    before = switch.describe().counters.rejected
    with switch.channel() as channel:
        said, details = Peer(channel, 1).hello("d", **hello).status()
    assert said == code and field in details
    reply = switch.describe()
    assert not reply.sessions and reply.counters.rejected == before + 1
    assert '("h1"): field `hello' in switch.logged("hello")


def test_a_host_that_is_not_in_the_topology_is_nobody(switch: TlsSwitch) -> None:
    tlsfiles.make(switch.folder, hosts="stranger", switches="")
    assert fails(switch.channel("stranger"))[0] == DENIED
    with switch.channel("stranger") as channel:
        peer = Peer(channel, 1).hello("d", host="stranger", links=())
        assert peer.status()[0] == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("scheduler", "links", "code"),
    [
        ("h1", OF_H1, grpc.StatusCode.OK),
        ("h1/one", OF_H1, grpc.StatusCode.OK),
        ("h2", OF_H1, DENIED),
        ("", OF_H1, DENIED),
        ("h1", ("h2->s1",), DENIED),
    ],
)
def test_a_schedule_is_the_certificates_hosts(
    switch: TlsSwitch, scheduler: str, links: tuple[str, ...], code: grpc.StatusCode
) -> None:
    request = pb.UpdateScheduleRequest(scheduler=scheduler, flow=1, links=links)
    with switch.channel() as channel:
        call = EmulatedSwitchStub(channel).UpdateSchedule.future(request, timeout=20)
        assert call.code() == code


def test_nobody_takes_another_hosts_daemon_over(switch: TlsSwitch) -> None:
    with switch.channel("h1") as first, switch.channel("h2") as second:
        victim = Peer(first, 5).hello("d", host="h1", links=OF_H1).fence()
        [seen] = EmulatedSwitchStub(second).Describe(pb.DescribeRequest()).sessions
        assert (seen.daemon, seen.session) == ("d", 0), "its number is nobody else's business"
        attacker = Peer(second, 2**61).hello("d", host="h2", links=()).fence()
        victim.fence()
        victim.close()
        again = Peer(first, 6).hello("d", host="h1", links=OF_H1).fence()
        for peer in (again, attacker):
            peer.close()
    settle(lambda: not switch.describe().sessions, what="they are gone")


def test_changed_files_are_taken_over_and_broken_ones_are_not(tmp_path: Path) -> None:
    with TlsSwitch(tmp_path) as switch:
        switch.start()
        with switch.channel() as channel:
            old = Peer(channel, 1).hello("d", host="h1", links=OF_H1).fence()
            good = {name: (tmp_path / name).read_bytes() for name in ("s1.pem", "s1.key")}
            (tmp_path / "s1.pem").write_bytes(good["s1.pem"][:100])
            switch.describe()
            log = switch.logged("TLS: going on with the files as they were")
            assert "field `tls.certificate`" in log and log.count("going on") == 1
            switch.describe()
            assert switch.log.read_text().count("going on") == 1
            # A new CA: first both sides trust both, then everybody has the new one's certificates.
            ca = (tmp_path / "ca.pem").read_bytes()
            (tmp_path / "s1.pem").write_bytes(good["s1.pem"])
            (tmp_path / "ca.pem").write_bytes(ca + (tmp_path / "other" / "ca.pem").read_bytes())
            switch.logged("took over the changed files") if switch.describe() else None
            assert EmulatedSwitchStub(switch.channel("other/h1")).Describe(pb.DescribeRequest())
            for file in ("s1.key", "s1.pem", "ca.pem"):
                shutil.copy(tmp_path / "other" / file, tmp_path / file)
            assert fails(switch.channel("h1", ca="other"))[0] == UNAVAILABLE
            assert EmulatedSwitchStub(switch.channel("other/h1")).Describe(pb.DescribeRequest())
            old.fence()  # who was there goes on
            old.close()
