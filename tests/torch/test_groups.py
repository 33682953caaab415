# SPDX-License-Identifier: Apache-2.0
"""`flowslot_torch.attach` of a process group: what FSDP and scripts call themselves."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from registering import Registrar
from waiting import settle

torch = pytest.importorskip("torch", reason="torch is missing: `attach` was not tested")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_ranks import run  # noqa: E402

import flowslot_torch  # noqa: E402
from flowslot_shm.layout import SLOT, State  # noqa: E402

STEPS, COUNT = 4, 60_000


def net() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))


def train(model: Any, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(rank: int, ranks: int, path: str) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    plain = train(fully_shard(net(), mesh=mesh), rank)
    one = flowslot_torch.attach(mesh.get_group(), job="j", daemon=path)
    same = train(fully_shard(net(), mesh=mesh), rank) == plain
    ddp = DistributedDataParallel(net())
    more = flowslot_torch.attach(ddp, job="j", daemon=path)
    train(ddp, rank)
    found = one.error, one.iteration, one.buckets, one.bytes
    more.close()
    one.close()
    before = one.iteration
    dist.all_reduce(torch.ones(1))
    with pytest.raises(TypeError, match="hook: is DDP's"):
        flowslot_torch.attach(mesh.get_group(), hook=(None, None))
    with pytest.raises(TypeError, match="model: must be a DistributedDataParallel or a ProcessGro"):
        flowslot_torch.attach(net())
    return same, found, one.iteration - before


def test_fsdp_is_the_same_and_its_iterations_are_known(tmp_path: Path) -> None:
    """And a model of DDP on the same group is counted once."""
    size = 4 * sum(p.numel() for p in net().parameters())
    for same, (error, iteration, _, total), later in run(2, sharded, str(tmp_path / "no")):
        assert same and not error and later == 0
        assert iteration == 2 * STEPS - 1 and total == size  # of DDP: the last but one


def twice(rank: int, ranks: int, path: str) -> list[Any]:
    """Both kinds, each attached twice, and let go of in any order."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def steps(one: Any) -> tuple[int, int]:
        before = one.iteration
        for _ in range(3):
            dist.all_reduce(torch.ones(8))
            weight.grad = torch.ones(8)
            optimizer.step()
        return one.iteration - before, one.bytes

    ddp = DistributedDataParallel(net())
    of_ddp, again = (flowslot_torch.attach(ddp, job="j", daemon=path) for _ in range(2))
    train(ddp, rank)
    found: list[Any] = [(of_ddp.iteration, of_ddp.error, again.error)]
    stale = flowslot_torch.attach(dist.group.WORLD, job="j", daemon=path)
    of_ddp.close()
    fresh = DistributedDataParallel(net())
    of_fresh = flowslot_torch.attach(fresh, daemon=path)
    train(fresh, rank)
    found.append(of_fresh.bytes)
    of_fresh.close()
    one, other = (flowslot_torch.attach(dist.group.WORLD, daemon=path) for _ in range(2))
    found.append(steps(one))
    for closed in (of_ddp, stale, other):
        closed.close()
    found.append(steps(one))
    one.close()
    found.append(steps(one))
    return found


def test_attached_twice_is_attached_once(tmp_path: Path) -> None:
    size = 4 * sum(p.numel() for p in net().parameters())
    for found in run(2, twice, str(tmp_path / "no")):
        assert found == [(STEPS - 1, "", ""), size, (3, 32), (3, 32), (0, 32)]


def until(rank: int, ranks: int, path: str, end: Path) -> str:
    one = flowslot_torch.attach(dist.group.WORLD, job="j", daemon=path)
    weight = torch.nn.Parameter(torch.ones(COUNT))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    more = torch.ones(1)
    while more.item():
        weight.grad = torch.ones(COUNT)
        dist.all_reduce(weight.grad)
        parts = [torch.empty(COUNT) for _ in range(ranks)]
        dist.all_gather(parts, weight.detach())
        more[0] = not end.exists()
        dist.all_reduce(more, dist.ReduceOp.MIN)
        optimizer.step()
    error = one.error
    one.close()
    return error


def test_a_daemon_learns_of_collectives_that_a_script_calls(
    start_daemon: Callable[..., Registrar], tmp_path: Path
) -> None:
    daemon = start_daemon("reno")
    path, end = daemon.environment["FLOWSLOT_SOCKET"], tmp_path / "end"

    def sending() -> dict[int, Any]:
        assert not ranks.done(), ranks.result()
        found = {}
        for record in list(daemon.server.records.values()):
            record.reader.look()
            for slot in record.reader.good.view(SLOT)[:, 0]:
                if slot["state"] != State.FREE and slot["iteration_total"] > 0:
                    found[int(slot["rank"])] = slot.copy()
        return found if len(found) == 2 else {}

    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run, 2, until, path, end)
        try:
            first = settle(sending, 20)
            settle(
                lambda: all(s["iteration"] > first[r]["iteration"] for r, s in sending().items())
            )
        finally:
            end.touch()
        assert ranks.result() == ["", ""]
    for rank, slot in first.items():  # a rank sends its sum's half twice, and its own part
        assert slot["peer"] == 1 - rank and slot["sock_cookie"]
        assert int(slot["iteration_total"]) == pytest.approx(2 * 4 * COUNT, rel=0.03)
