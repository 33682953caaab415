# SPDX-License-Identifier: Apache-2.0
"""`flowslot_torch.attach`: the same training, and a daemon that knows how far it is."""

import copy
import fcntl
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from registering import Registrar
from waiting import settle

torch = pytest.importorskip("torch", reason="torch is missing: `attach` was not tested")

import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_ranks import processes, run  # noqa: E402

import flowslot_torch  # noqa: E402
from flowslot_shm.layout import SLOT, Role, State  # noqa: E402
from flowslot_torch import ddp as ddp_module  # noqa: E402
from flowslot_torch import report  # noqa: E402
from flowslot_torch.peers import Peers  # noqa: E402
from flowslot_torch.sockets import connections  # noqa: E402

WIDTH = 512
BYTES = 4 * (2 * 64 * WIDTH + WIDTH + 64)
STEPS = 5


def model() -> Any:
    torch.manual_seed(7)
    layers = torch.nn.Linear(64, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 64)
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)


def train(ddp: Any, rank: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 64, generator=data)
        loss = (ddp(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(ddp: Any) -> list[bytes]:
    tensors = [tensor for p in ddp.parameters() for tensor in (p.grad, p.data)]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def compare(rank: int, ranks: int, path: str, how: str) -> tuple[bool, str, int, int, int]:
    plain, attached = model(), model()
    hook = (None, default_hooks.fp16_compress_hook) if how == "hook" else None
    if hook:
        plain.register_comm_hook(*hook)
    if how == "broken":
        report.connections = lambda: [][rank]  # type: ignore[attr-defined]
    if how != "some" or rank:
        one = flowslot_torch.attach(attached, job="j", daemon=path, hook=hook)
        copy.deepcopy(one), pickle.dumps(one)
    same = train(plain, rank, STEPS) == train(attached, rank, STEPS)
    same = same and bits(plain) == bits(attached)
    if how == "some" and not rank:
        train(attached, rank, 1)
        return same, "", 0, 2, BYTES
    found = one.error, one.iteration, one.buckets, one.bytes
    one.close()
    train(attached, rank, 1)
    return same, *found


@pytest.mark.parametrize(("ranks", "how"), [(4, ""), (2, "hook"), (2, "broken"), (3, "some")])
def test_gradients_and_losses_are_ddps_bit_by_bit(ranks: int, how: str, tmp_path: Path) -> None:
    """Without a daemon; around a hook of the user's; after an error of ours; attached by some."""
    for same, error, iteration, buckets, total in run(ranks, compare, str(tmp_path / "no"), how):
        assert same
        assert ("IndexError" in error) == (how == "broken")
        if how == "":
            assert (iteration, total) == (STEPS - 1, BYTES) and buckets >= 2


def until(rank: int, ranks: int, path: str, end: Path) -> tuple[list[str], list[int], str]:
    ddp = model()
    one = flowslot_torch.attach(ddp, job="j", daemon=path)
    more = torch.ones(1)
    while more.item():
        train(ddp, rank, 1)
        more[0] = not end.exists()
        dist.all_reduce(more, dist.ReduceOp.MIN)
    socks = [carrier.sock for carrier in one.reporter._carriers.values()]
    cc = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for s in socks]
    found = [name.rstrip(b"\0").decode() for name in cc], one.peers, one.error
    one.close()
    assert not list(end.parent.glob("*.sock")) or not one.registered
    return found


def sending(daemon: Registrar) -> dict[int, Any]:
    """Slots by rank of those that send, once an iteration is complete."""
    found = {}
    for record in list(daemon.server.records.values()):
        record.reader.look()
        for slot in record.reader.good.view(SLOT)[:, 0]:
            if slot["state"] != State.FREE and slot["done"] == slot["iteration_total"] > 0:
                found[int(slot["rank"])] = slot.copy()
    return found


def test_a_daemon_learns_connections_peers_bytes_and_iterations(
    start_daemon: Callable[..., Registrar], tmp_path: Path
) -> None:
    daemon = start_daemon("reno")
    path, end = daemon.environment["FLOWSLOT_SOCKET"], tmp_path / "end"
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run, 3, until, path, end)
        try:

            def all_three() -> dict[int, Any]:
                assert not ranks.done(), ranks.result()
                found = sending(daemon)
                ring = all(slot["role"] == Role.RING for slot in found.values())
                return found if len(found) == 3 and ring else {}

            slots = settle(all_three, 20)
            first = max(slot["iteration"] for slot in slots.values())
            settle(lambda: all(s["iteration"] > first for s in (all_three() or slots).values()), 20)
        finally:
            end.touch()
        results = ranks.result()
    for rank, slot in slots.items():
        assert slot["peer"] == (rank - 1) % 3
        assert slot["iteration_total"] == pytest.approx(BYTES * 4 / 3, rel=0.02)
        assert slot["sock_cookie"] and slot["sport"] and bytes(slot["job"]) == b"j"
        assert results[rank] == (["reno"], [(rank - 1) % 3], "")
    assert not daemon.server.records and len(daemon.left) == 3


HOLDS = """import fcntl, sys
fcntl.lockf(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)"""


def test_a_look_at_connections_keeps_the_locks_of_files(tmp_path: Path) -> None:
    """POSIX: a process loses a file's locks when it closes any descriptor of that file."""
    with (tmp_path / "held").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        connections()
        command = [sys.executable, "-c", HOLDS, file.name]
        other = subprocess.run(command, capture_output=True, check=False)
    assert b"BlockingIOError" in other.stderr


ENDS = """import time, types, torch.distributed as dist
from flowslot_torch import peers
peers._FIRST_S, peers._TRIES = 0.0, 1 << 60  # always in the store's code
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
looking = peers.Peers(0, 2, lambda: store)
looking.look_up([types.SimpleNamespace(local=("a", 1), remote=("b", 2))])
time.sleep(0.1)"""


def test_a_script_ends_well_while_peers_are_looked_up() -> None:
    assert subprocess.run([sys.executable, "-c", ENDS], timeout=30, check=False).returncode == 0


def test_connections_are_looked_at_less_often_while_none_is_a_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    monkeypatch.setattr(report, "connections", lambda: looks.append(1) or {})
    reporter = report.Reporter("j", 0, Peers(0, 2, None), "/nonexistent")
    for _ in range(500):
        reporter.begin()
        reporter.ready(1000)
        reporter.complete()
    assert 8 <= len(looks) < 20 and not reporter.error


def uneven(rank: int, ranks: int, path: str) -> list[bytes]:
    found = []
    for attached in (False, True):
        ddp = model()
        if attached:
            flowslot_torch.attach(ddp, job="j", daemon=path)
        losses = []
        for by_first_size in (False, True):
            with ddp.join(divide_by_initial_world_size=by_first_size):
                losses += train(ddp, rank, 1 + rank)
                found += bits(ddp)
            losses += train(ddp, rank, 1)
            found += bits(ddp)
        found.append(repr(losses).encode())
    return found


def test_ranks_that_run_out_of_data_have_ddps_gradients(tmp_path: Path) -> None:
    for found in run(3, uneven, str(tmp_path / "no")):
        half = len(found) // 2
        assert found[:half] == found[half:]


def named(rank: int, ranks: int, rendezvous: str) -> str:
    options = {"rank": rank, "world_size": ranks}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=rendezvous, **options)
    dist.barrier()  # who ends while others connect is lost to them
    return ddp_module._job_name()


def test_jobs_that_met_without_an_address_in_the_environment_have_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLOWSLOT_JOB", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    names = [n for where in "ab" for n in set(processes(2, named, f"file://{tmp_path / where}"))]
    assert len(set(names)) == 2 and all(name.startswith("torch:") for name in names)
