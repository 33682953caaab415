# SPDX-License-Identifier: Apache-2.0
"""What a job sees and does, the same in C and in Python: with, without and across daemons."""

import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from registering import Registrar
from waiting import settle

from flowslot_shm.client import JobClient
from flowslot_shm.layout import Collective, Message, Role, State, Transport, address
from flowslot_shm.reader import RecordReader
from flowslotd.observe.registration import Limits

from .conftest import CJob, Ear, Job, StartJob, registered

StartDaemon = Callable[..., Registrar]
PRESENT = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
# The kernel's own; others come and go with the daemons that run beside this test.
ALLOWED = [name for name in PRESENT if name in ("reno", "cubic", "bbr")]
COUNTS = ["iteration", "ready", "posted", "done", "iteration_total"]


def test_a_flow_as_the_daemon_sees_it(pair: tuple[Registrar, Job], port: int) -> None:
    daemon, job = pair
    assert job(f"flow 0 127.0.0.1 {port} {Role.RING} -") == "0"
    record = daemon.record
    assert (record.job, record.rank, record.uid) == ("resnet50", 3, os.getuid())
    slot = record.reader.snapshot()[0]
    assert slot["state"] == State.IDLE
    assert slot["transport"] == Transport.TCP
    assert slot["role"] == Role.RING
    assert address(slot["family"], slot["src"].item()) == "127.0.0.1"
    assert slot["dport"] == port
    assert slot["sport"] not in (0, port)
    assert slot["sock_cookie"] != 0
    assert slot["fd"] > 0
    assert (slot["job"], slot["rank"], slot["peer"], slot["channel"]) == (b"resnet50", 3, 100, 0)

    job("begin 0 7 1000")
    job("ready 0 600")
    job("posted 0 400")
    job("done 0 100")
    slot = record.reader.snapshot()[0]
    assert slot[COUNTS].item() == (7, 600, 400, 100, 1000)
    assert slot["state"] == State.ACTIVE
    assert 0 < slot["t_iteration_start_ns"] <= slot["t_update_ns"]
    job("ready 0 500")  # more than was announced: the total follows
    job("done 0 1000")  # a library that skips `posted`
    slot = record.reader.snapshot()[0]
    assert slot[COUNTS].item() == (7, 1100, 1100, 1100, 1100)
    assert slot["state"] == State.IDLE
    job("begin 0 7 1200")  # the running iteration: its total was corrected
    assert record.reader.snapshot()[0][COUNTS].item() == (7, 1100, 1100, 1100, 1200)
    job("begin 0 8 0")
    assert record.reader.snapshot()[0][COUNTS].item() == (8, 0, 0, 0, 0)
    job("close 0")
    assert not record.reader.snapshot().tobytes().strip(b"\0")
    settle(lambda: len(daemon.bells) == 3)
    assert daemon.bells == [(1, 0, kind) for kind in (Message.BEGIN, Message.END, Message.END)]
    assert not record.reader.faults.any()


def test_iterations_with_bytes_are_counted(pair: tuple[Registrar, Job], port: int) -> None:
    """Each once, whatever its number, and however often the flow becomes active in it."""
    daemon, job = pair
    job(f"flow 0 127.0.0.1 {port} {Role.RING} -")
    counted = []
    for iteration, total, bursts in ((4, 10, 1), (8, 0, 3), (9, 0, 0), (512, 10, 1), (8, 0, 1)):
        job(f"begin 0 {iteration} {total}")
        for _ in range(bursts):
            job("ready 0 10")
            job("done 0 10")
        job(f"begin 0 {iteration} {total}")  # the same again
        counted.append(int(daemon.record.reader.snapshot()[0]["phases"]))
    assert counted == [1, 2, 2, 3, 4]
    job("close 0")
    job(f"flow 0 127.0.0.1 {port} {Role.RING} -")
    assert daemon.record.reader.snapshot()[0]["phases"] == 0


def test_a_part_that_becomes_known_later(
    start_daemon: StartDaemon, driver: Path, tmp_path: Path, port: int
) -> None:
    daemon = start_daemon()
    with closing(CJob(driver, str(tmp_path / "register.sock"), 8)) as job:
        settle(lambda: registered(job))
        job(f"flow 0 127.0.0.1 {port} {Role.RING} -")
        job("begin 0 1 10")
        job("ready 0 10")
        before = daemon.record.reader.snapshot()[0]
        for part in ((5, -1, 1, 0), (5, 6, 7, Collective.ALL_REDUCE)):
            job("part 0 {} {} {} {}".format(*map(int, part)))
            slot = daemon.record.reader.snapshot()[0]
            assert slot[["rank", "peer", "channel", "collective"]].item() == part
        assert slot[COUNTS] == before[COUNTS] and slot["state"] == State.ACTIVE
        job(f"part 0 5 6 7 {int(Collective.ALL_REDUCE)}")
        assert daemon.record.reader.snapshot()[0]["seq"] == slot["seq"], "nothing new"
        assert not daemon.record.reader.faults.any()


def test_a_udp_flow(pair: tuple[Registrar, Job], port: int) -> None:
    daemon, job = pair
    assert job(f"flow 0 127.0.0.1 {port} {Role.RING} udp") == "0"
    slot = daemon.record.reader.snapshot()[0]
    assert slot["transport"] == Transport.UDP
    assert address(slot["family"], slot["dst"].item()) == "127.0.0.1"
    assert (slot["dport"], slot["sock_cookie"] != 0) == (port, True)
    assert not daemon.record.reader.faults.any()


def test_active_lasts_for_the_whole_iteration_only_where_its_total_is_known(
    pair: tuple[Registrar, Job],
) -> None:
    daemon, job = pair
    job("flow 0 - 0 0 -")
    for total, rings in ((30, 2), (0, 6)):
        daemon.bells.clear()
        job(f"begin 0 {total} {total}")
        for _ in range(3):
            job("ready 0 10")
            job("done 0 10")
        job("flow 1 - 0 0 -")
        job("close 1")  # doorbells keep their order: this is the last one
        settle(lambda: (1, 1, Message.END) in daemon.bells)
        assert len(daemon.bells) == rings + 1
    assert daemon.record.reader.snapshot()[0]["transport"] == Transport.RDMA


def test_more_flows_than_slots_go_unreported(
    start_daemon: StartDaemon, start_job: StartJob
) -> None:
    daemon, job = start_daemon(), start_job(slots=2)
    settle(lambda: registered(job))
    assert [job(f"flow {i} - 0 0 -") for i in range(3)] == ["0", "0", "-1"]
    for command in ("begin 2 1 10", "ready 2 10", "done 2 10", "close 2", "close 0"):
        job(command)
    assert job("flow 5 - 0 0 -") == "0"
    slots = daemon.record.reader.snapshot()
    assert sorted(slots["channel"]) == [1, 5]


def test_without_a_daemon_everything_works_and_one_that_comes_later_is_found(
    start_daemon: StartDaemon, start_job: StartJob, port: int
) -> None:
    job = start_job()
    job(f"flow 0 127.0.0.1 {port} 1 {ALLOWED[-1]}")
    for i in range(5):
        job(f"begin 0 {i} 10")
        job("ready 0 10")
        job("done 0 5")
    assert job("poll") == "0"
    assert job("cc 0") == ALLOWED[-1]
    daemon = start_daemon(ALLOWED[0])
    # Nothing but the ordinary begin of an iteration is needed.
    settle(lambda: job("begin 0 5 10") == "" and daemon.server.records)
    settle(lambda: job("begin 0 5 10") == "" and job("cc 0") == ALLOWED[0])
    assert daemon.record.reader.snapshot()[0]["iteration"] == 5


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two allowed congestion controls")
def test_a_restarted_daemon_gets_the_live_sockets(
    start_daemon: StartDaemon, start_job: StartJob, port: int
) -> None:
    first, second = ALLOWED[0], ALLOWED[-1]
    daemon, job = start_daemon(first), start_job()
    settle(lambda: registered(job))
    job(f"flow 0 127.0.0.1 {port} {Role.PUSH} {second}")
    job(f"flow 1 127.0.0.1 {port} {Role.RECEIVE} {second}")
    job(f"flow 2 127.0.0.1 {port} {Role.PUSH} {second}")
    assert [job(f"cc {f}") for f in range(3)] == [first, second, first]
    job("close 2")
    job("begin 0 4 100")
    job("ready 0 60")
    daemon.close()
    settle(lambda: not registered(job))
    job("ready 0 30")
    daemon = start_daemon(second)
    settle(lambda: registered(job))
    assert [job(f"cc {f}") for f in (0, 2)] == [second, first], "a closed flow's socket is not ours"
    slot = daemon.record.reader.snapshot()[0]
    assert (slot["iteration"], slot["ready"]) == (4, 90)
    # The name may also change while the daemon lives.
    daemon.call(daemon.server.set_congestion_control, first)
    settle(lambda: registered(job) and job("cc 0") == first)
    daemon.call(daemon.server.set_congestion_control, "")
    assert registered(job)
    job(f"flow 3 127.0.0.1 {port} 1 {second}")
    assert (job("cc 0"), job("cc 3")) == (first, second)


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two allowed congestion controls")
def test_a_reused_descriptor_is_not_enlisted(
    start_daemon: StartDaemon, c_job: Callable[..., CJob], port: int
) -> None:
    """A library that closes a socket before its flow must not get another socket changed."""
    daemon = start_daemon()
    job = c_job(daemon.server.path)
    job(f"flow 0 127.0.0.1 {port} 1 {ALLOWED[-1]}")
    job(f"flow 1 127.0.0.1 {port} 1 {ALLOWED[-1]}")
    assert job(f"swap 0 127.0.0.1 {port} {ALLOWED[-1]}") == "1"
    daemon.call(daemon.server.set_congestion_control, ALLOWED[0])
    settle(lambda: registered(job) and job("cc 1") == ALLOWED[0])
    assert job("cc 0") == ALLOWED[-1]


def test_an_unknown_congestion_control_leaves_the_socket_alone(
    start_daemon: StartDaemon, start_job: StartJob, port: int
) -> None:
    start_daemon("no_such_cc")
    job = start_job()
    settle(lambda: registered(job))
    job(f"flow 0 127.0.0.1 {port} 1 {ALLOWED[0]}")
    assert job("cc 0") == ALLOWED[0]
    assert registered(job)


def test_a_refused_job_knows_why_and_goes_on(
    start_daemon: StartDaemon, start_job: StartJob
) -> None:
    daemon = start_daemon(limits=Limits(slots=4))
    job = start_job(slots=5)
    settle(lambda: daemon.server.refused)
    settle(lambda: not registered(job) and job("reason"))
    assert job("reason") == "field `slots`: must be 1 to 4, got 5"
    job("flow 0 - 0 0 -")
    job("begin 0 1 1")
    job("ready 0 1")


def test_a_job_that_leaves_is_gone_and_may_still_call(pair: tuple[Registrar, Job]) -> None:
    daemon, job = pair
    job("flow 0 - 0 0 -")
    job("leave")
    settle(lambda: daemon.left)
    assert not daemon.server.records
    assert not daemon.left[0].reader.snapshot()["state"].any()
    for command in ("begin 0 1 1", "ready 0 1", "close 0", "poll", "leave"):
        job(command)


def test_a_doorbell_on_a_full_queue_does_not_block(start_job: StartJob, tmp_path: Path) -> None:
    job, ear = start_job(), Ear(tmp_path / "register.sock")
    ear.accept(job)
    job("flow 0 - 0 0 -")
    job("begin 0 1 0")
    job("flip 0 20000")  # 40,000 doorbells: blocking would hang here
    assert 0 < ear.heard() < 40000
    job("flip 0 1")
    assert ear.heard() == 2
    ear.die()


def test_a_daemon_with_a_full_backlog_does_not_block(start_job: StartJob, tmp_path: Path) -> None:
    path = str(tmp_path / "register.sock")
    server, first = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with server, first:
        server.bind(path)
        server.listen(0)
        first.connect(path)  # a backlog of 0 holds one
        job = start_job()
        job("flow 0 - 0 0 -")
        job("begin 0 1 0")
        assert job("poll") == "0"


@pytest.mark.parametrize("path", ["/nonexistent/register.sock", "/" + "x" * 200, "/etc/passwd"])
def test_an_impossible_path_is_just_an_absent_daemon(start_job: StartJob, path: str) -> None:
    job = start_job(path)
    job("flow 0 - 0 0 -")
    job("begin 0 1 0")
    assert job("poll") == "0"


def test_path_from_the_environment(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon()
    monkeypatch.setenv("FLOWSLOT_SOCKET", daemon.server.path)
    client = JobClient(None, "a b\n\xff" + "c" * 40, rank=0)
    settle(client.poll)
    assert daemon.record.job == "a_b___" + "c" * 16 + "-d012b422"
    client.close()


def test_ipv6_and_mapped_addresses() -> None:
    client = JobClient("/nonexistent", "job", rank=0)
    assert client._record is not None
    reader = RecordReader(client._record.fd)
    six: Any = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    for index, (listening, to) in enumerate((("::1", "::1"), ("::", "127.0.0.1"))):
        with (
            socket.create_server((listening, 0), **six) as server,
            socket.create_connection((to, server.getsockname()[1])),
            server.accept()[0] as accepted,
        ):
            client.flow(accepted, 0, index)
            slot = reader.snapshot()[index]
            assert address(slot["family"], slot["src"].item()) == to
            assert address(slot["family"], slot["dst"].item()) == to
    client.close()


@pytest.mark.root
def test_from_a_container(
    start_daemon: StartDaemon, c_job: Callable[..., CJob], shared: Path
) -> None:
    """Own network, process and mount namespace; only the socket's folder is mounted into it."""
    folder, target = shared / "here", shared / "there"
    folder.mkdir()
    target.mkdir()
    daemon = start_daemon(path=f"{folder}/register.sock")
    script = f'mount --bind {folder} {target} && exec "$0" "$@"'
    unshare = ("unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", script)
    job = c_job(target / "register.sock", unshare)
    record = daemon.record
    assert record.reader.pid == 1, "as the job sees itself"
    command = Path(f"/proc/{record.pid}/cmdline").read_bytes()
    assert b"driver" in command, "as the daemon sees it"
    job("flow 0 - 0 0 -")
    job("ready 0 5")
    assert record.reader.snapshot()[0]["ready"] == 5
    job.process.kill()
    os.kill(record.pid, 9)
    settle(lambda: daemon.left)


@pytest.mark.root
def test_a_job_of_another_user(
    start_daemon: StartDaemon, c_job: Callable[..., CJob], shared: Path
) -> None:
    daemon = start_daemon(path=f"{shared}/register.sock")
    setpriv = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    c_job(shared / "register.sock", setpriv)
    assert daemon.record.uid == 65534
