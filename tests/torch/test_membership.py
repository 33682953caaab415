# SPDX-License-Identifier: Apache-2.0
"""Workers that come and go while a job trains."""

import io
import os
import signal
import socket
import time
from typing import Any

import numpy as np
import pytest
from collectives import KEY, NO_TORCH, Listeners, in_threads

torch = pytest.importorskip("torch", reason=NO_TORCH)

import torch.distributed as dist  # noqa: E402
from torch_ranks import meeting_point, processes  # noqa: E402

from flowslot_torch.cases.two_level import TwoLevel  # noqa: E402
from flowslot_torch.engines import NumpyEngine  # noqa: E402
from flowslot_torch.membership import LeftOut, Membership  # noqa: E402
from flowslot_torch.operations import Operations  # noqa: E402
from flowslot_torch.program import Program  # noqa: E402
from flowslot_torch.state import tell  # noqa: E402
from flowslot_torch.tasks import TaskManager  # noqa: E402
from flowslot_torch.torch_engine import GlooTransport  # noqa: E402
from flowslot_torch.training import Training  # noqa: E402
from flowslot_torch.transport import TcpTransport  # noqa: E402

STEPS, DIES_AT, NEWCOMER = 40, 5, 4
CONNECTING = {"connecting": (2, 1), "joining": (NEWCOMER, 2)}
"""Who is killed after its flag, while the members of which epoch connect; worker 1 was before."""
SECOND = {"removed": 2, "added": 2, **{where: who for where, (who, _) in CONNECTING.items()}}
"""Who is killed after worker 1."""


class Watching(Program):
    """Worker 1 is killed in an event of iteration DIES_AT or, where there is a second one, when a
    buffer is ready."""

    timer_iterations = 1

    def __init__(self, where: str) -> None:
        self.where, self.seen = where, []  # type: ignore[var-annotated]
        self.training: Any = None

    def die(self, where: str, worker: int = 1) -> None:
        late = self.training is not None and self.training.iteration >= DIES_AT
        if where == self.where and late and self.ops.rank == worker:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_tensor_ready(self, tensor: Any) -> Any:
        self.die("tensor")

    def on_buffer_ready(self, buffer: Any) -> None:
        for where in ("buffer", "groups", *SECOND):
            self.die(where)
        if self.where == "star":
            return self.star(buffer)
        super().on_buffer_ready(buffer)

    def star(self, buffer: Any) -> None:
        """Worker 1 is killed when worker 0 has the sums, and the others have not."""
        ops = self.ops
        root = 1 if 1 in ops.ranks else 0
        if ops.rank != root:
            ops.send(buffer, root).wait()
            ops.recv(buffer, root)
            return
        others = [rank for rank in ops.ranks if rank != root]
        for rank in others:
            buffer += ops.recv(ops.alloc(len(buffer), "float32"), rank)
        for rank in others:
            ops.send(buffer, rank).wait()
            self.die("star")

    def on_timer_expired(self, statistics: Any) -> None:
        self.die("timer")

    def on_worker_removed(self, connection: Any) -> None:
        self.die("removed", SECOND["removed"])
        self.seen.append(("removed", connection.ranks))

    def on_worker_added(self, connection: Any) -> None:
        self.die("added", SECOND["added"])
        self.seen.append(("added", connection.ranks))


class InGroups(Watching, TwoLevel):
    """The same, of a program that has groups of its own."""

    groups = ((0, 1), (2, 3))


def member(store: Any, worker: int, gloo: bool, where: str, members: Any) -> Membership:
    listener = socket.create_server(("127.0.0.1", 0))

    def make(epoch: int, about: Any) -> Any:
        if CONNECTING.get(where) == (worker, epoch):
            os.kill(os.getpid(), signal.SIGKILL)
        if gloo:
            limit_s = 60 if where in SECOND else 5
            return GlooTransport(store, worker, sorted(about), epoch=epoch, timeout_s=limit_s)
        addresses = {w: ("127.0.0.1", int(port)) for w, port in sorted(about.items())}
        return TcpTransport(worker, listener, addresses, key=KEY, epoch=epoch, timeout_s=5)

    about = str(listener.getsockname()[1])
    return Membership(store, worker, make, members=members, about=about, grace_s=0.7, timeout_s=20)


class Slow(torch.optim.SGD):  # type: ignore[misc,unused-ignore]
    """Of worker 0, from which the others get their state: slow while somebody is let in."""

    training: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.training is not None and self.training.tasks.let_in:
            time.sleep(0.3)
        return super().step(closure)


def train(worker: int, _: int, port: int, gloo: bool, where: str) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while worker == NEWCOMER and not (store.check(["flowslot/1/members"])):
        time.sleep(0.02)
    members = None if worker == NEWCOMER else range(4)
    membership = member(store, worker, gloo, where, members)
    torch.manual_seed(worker if worker == NEWCOMER else 1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    program = InGroups(where) if where == "groups" else Watching(where)
    training = Training(
        model,
        lambda p: Slow(p, lr=0.05, momentum=0.9),
        program,
        membership.transport,
        membership=membership,
        fusion_bytes=600,
    )
    program.training = training
    Slow.training = training if worker == 0 and where == "star" else None
    longest = 0.0
    last = 2 if where == "joining" else 1
    while training.iteration < STEPS or (
        membership.epoch <= last or program.connection.ranks != survivors(where)
    ):
        began = time.monotonic()
        assert training.iteration < 3000, "nobody joined"
        noise = torch.Generator().manual_seed(1000 * worker + training.iteration)
        x = torch.randn(4, 8, generator=noise)
        (model(x) - x.sin()).square().mean().backward()
        training.step()
        longest = max(longest, time.monotonic() - began)
    momentum = [layer.optimizer.state_dict() for layer in training._layers]
    kept = [v["momentum_buffer"] for one in momentum for v in one["state"].values()]
    flat = torch.cat([p.detach().reshape(-1) for p in [*model.parameters(), *kept]])
    training.tasks._ops.barrier()  # nothing is under way: nobody leaves while others train
    return longest, training.iteration, program.seen, flat.numpy().tobytes()


def survivors(where: str) -> tuple[int, ...]:
    return tuple(w for w in range(5) if w not in (1, SECOND.get(where)))


EVENTS = {
    "buffer": [("removed", (0, 2, 3)), ("added", (0, 2, 3, NEWCOMER))],
    "connecting": [("removed", (0, 3)), ("added", (0, 3, NEWCOMER))],
    "joining": [("removed", (0, 2, 3))],
    "removed": [("removed", (0, 2, 3)), ("removed", (0, 3)), ("added", (0, 3, NEWCOMER))],
    "added": [
        ("removed", (0, 2, 3)),
        ("added", (0, 2, 3, NEWCOMER)),
        ("removed", (0, 3, NEWCOMER)),
    ],
}
"""Of whoever was there from the beginning; of the newcomer, those after its coming."""
ON_GLOO = ("buffer", "groups", *SECOND)
WHERE = [(False, "star"), (False, "timer"), (False, "tensor"), *((True, w) for w in ON_GLOO)]


@pytest.mark.parametrize(("gloo", "where"), WHERE)
def test_a_worker_is_killed_and_another_joins(gloo: bool, where: str) -> None:
    with meeting_point() as port:
        found = processes(5, train, port, gloo, where, limit_s=25)
    there = {worker: one for worker, one in enumerate(found) if one is not None}
    assert tuple(there) == survivors(where)
    events = EVENTS.get(where, EVENTS["buffer"])
    later = events[[*(kind for kind, _ in events), "added"].index("added") + 1 :]
    for worker, (longest, iteration, seen, flat) in there.items():
        # No hang; how long it takes, bench.torch_membership measures.
        assert longest < 15 and iteration == there[0][1] and flat == there[0][3]
        assert seen == (later if worker == NEWCOMER else events)


class Closing(Program):
    """Worker 1 closes in its second event."""

    def on_buffer_ready(self, buffer: Any) -> None:
        if self.ops.rank == 1 and self.tasks.buffers == 1:
            self.tasks.close()
        super().on_buffer_ready(buffer)


def test_who_closes_is_no_member_of_the_next_epoch() -> None:
    store = dist.HashStore()

    def body(rank: int) -> Any:
        membership, program = member(store, rank, False, "", range(3)), Closing()
        tasks = TaskManager(program, NumpyEngine(), membership.transport, membership=membership)
        for _ in range(3):
            tasks.enqueue(0, np.ones(9, "float32"))
            tasks.wait(0)
        tasks._ops.barrier()
        return program.connection.epoch, program.connection.ranks

    left, closed, other = in_threads(3, body)
    assert left == other == (1, (0, 2)) and "was closed" in str(closed)


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ((3, -1, 0, 8, 4), "state: rank 0 tells of a number below 0"),
        ((3, 3, 0, 8, 1 << 62), "state: rank 0 tells of 4611686018427387904 bytes"),
        ((3, 3, 0, 8, -1), "state: rank 0 tells of -1 bytes"),
    ],
)
def test_what_those_who_join_are_told_is_checked(told: tuple[int, ...], error: str) -> None:
    listeners = Listeners(2)

    def body(rank: int) -> None:
        ops = Operations(NumpyEngine(), listeners.tcp(rank))
        if rank:
            tell(NumpyEngine(), ops, 0, [0] * 4, b"")
        ops.broadcast(np.array(told), 0)

    assert str(in_threads(2, body)[1]).startswith(error)


@pytest.mark.parametrize("iteration", ["x", -1, True])
def test_a_state_whose_iteration_is_none_is_refused(iteration: object) -> None:
    model = torch.nn.Linear(2, 2)
    transport = Listeners(1).tcp(0)
    training = Training(model, lambda p: torch.optim.SGD(p, lr=0.1), Program(), transport)
    file = io.BytesIO()
    torch.save([iteration, model.state_dict(), []], file)
    with pytest.raises(ValueError, match="state: iteration must be a number from 0, is"):
        training._load(file.getvalue())
    assert training.iteration == 0
    training.close()


def test_a_rank_that_is_too_far_ahead_is_named() -> None:
    listeners = Listeners(2)

    def body(rank: int) -> None:
        tasks = TaskManager(Program(), NumpyEngine(), listeners.tcp(rank))
        tasks.buffers, tasks._exchange.last = 0 if rank else 5, np.ones(1)
        try:
            tasks._repair(joining=False)
        finally:
            tasks.close()

    error = in_threads(2, body)[1]
    assert str(error) == "rank 0 has 5 buffers, this one has 0"


class Fake:
    """A peer that writes what it likes into the store."""

    def __init__(self, **values: str) -> None:
        self.values = {key.replace("_", "/"): value for key, value in values.items()}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


class Alone:
    def __init__(self, about: Any) -> None:
        self.members, self.rank = tuple(about), 0

    def close(self) -> None: ...


def test_what_is_no_wish_to_join_lets_nobody_in() -> None:
    store = Fake(flowslot_1_join="5")
    alone = Membership(store, 0, lambda _, about: Alone(about), members=[0], grace_s=0.05)  # type: ignore
    assert alone.waiting() == []
    alone.change(admit=True)
    assert alone.members == (0,)


def test_others_are_let_in_only_between_two_iterations() -> None:
    """The first one's word counts for all: whoever is in an iteration lets nobody in."""
    store = Fake(flowslot_1_join="[3]", flowslot_1_flag_3="-", flowslot_2_join="[3]")
    store.set("flowslot/2/flag/3", "-")
    alone = Membership(store, 0, lambda _, about: Alone(about), members=[0], grace_s=0.05)  # type: ignore
    alone.change()
    assert alone.members == (0,)
    alone.change(admit=True)
    assert alone.members == (0, 3)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("[1, 2]", "strangers among"),
        ("[[[", "flowslot/1/members: must be a list of workers"),
        ("[-1]", "must be a list of workers"),
        ('{"0": 1}', "must be a list of workers"),
        ("[true]", "must be a list of workers"),
        ("[]", "worker 0: epoch 1 is"),
    ],
)
def test_what_a_peer_proposes_is_checked(said: str, error: str) -> None:
    store = Fake(flowslot_1_members=said)
    alone = Membership(store, 0, lambda _, about: Alone(about), members=[0], grace_s=0)  # type: ignore
    with pytest.raises((ValueError, LeftOut), match=error):
        alone.change()


@pytest.mark.parametrize("said", ["x", "-1", "9" * 5000])
def test_an_epoch_that_is_none_is_named(said: str) -> None:
    store = Fake(flowslot_epoch=said)
    with pytest.raises(ValueError, match="flowslot/epoch: must be a number below"):
        Membership(store, 0, lambda _, about: Alone(about), members=None, timeout_s=1)  # type: ignore
