# SPDX-License-Identifier: Apache-2.0
"""Models whose gradients go a program's way: the same training as plain averaging, with and without
the barrier; and ranks that are killed in the middle of an event."""

import os
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from collectives import NO_TORCH, Listeners, together, torch_gloo

torch = pytest.importorskip("torch", reason=NO_TORCH)

import torch.distributed as dist  # noqa: E402
from torch_ranks import meeting_point, processes  # noqa: E402

from flowslot_torch.cases.adaptive_fusion import AdaptiveFusion  # noqa: E402
from flowslot_torch.cases.gradient_scheduling import GradientScheduling  # noqa: E402
from flowslot_torch.engines import NumpyEngine  # noqa: E402
from flowslot_torch.program import Program  # noqa: E402
from flowslot_torch.tasks import TaskManager  # noqa: E402
from flowslot_torch.torch_engine import GlooTransport  # noqa: E402
from flowslot_torch.training import Training  # noqa: E402

STEPS = 8


class Tied(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Two layers with one weight, one with none of its own, and a module in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.b.weight = self.a.weight
        self.rest = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(16, 4))
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return self.rest(self.b(torch.relu(self.a(x)))) * self.scale


def model() -> Any:
    torch.manual_seed(3)
    return Tied()


def loss_of(net: Any, rank: int, step: int) -> Any:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
    return (net(x) - x[:, :4].sin()).square().mean()


def optimizer(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def averaged() -> list[list[float]]:
    """Losses of two ranks, by step, of training as it should be."""
    nets = [model(), model()]
    steps = [optimizer(net.parameters()) for net in nets]
    curves: list[list[float]] = [[], []]
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            loss = loss_of(net, rank, step)
            loss.backward()
            curves[rank].append(loss.item())
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            a.grad.add_(b.grad).mul_(0.5)
            b.grad.copy_(a.grad)
        for one in steps:
            one.step()
            one.zero_grad()
    return curves


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("program", [Program, GradientScheduling, AdaptiveFusion])
def test_losses_are_those_of_plain_averaging_bit_by_bit(program: Any, barrier: bool) -> None:
    nets = [model(), model()]

    def body(rank: int, _: Any, transport: Any) -> list[float]:
        training = Training(nets[rank], optimizer, program(), transport, barrier=barrier)
        losses = []
        for step in range(STEPS):
            loss = loss_of(nets[rank], rank, step)
            loss.backward()
            training.step()
            losses.append(loss.item())
        training.finish()
        assert len(training.tasks.statistics.get("iteration_s")) == STEPS - 1
        return losses

    assert together(2, torch_gloo(2), body) == averaged()


class Dying(Program):
    """Rank 1 is killed in the middle of an event."""

    timer_iterations = 1

    def __init__(self, where: str) -> None:
        self.where = where

    def die(self, where: str) -> None:
        if self.ops.rank == 1 and where == self.where and self.tasks.buffers > 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_tensor_ready(self, tensor: Any) -> Any:
        self.die("tensor")

    @property
    def repeats(self) -> bool:  # type: ignore[override]
        return self.where == "begun"

    def on_buffer_ready(self, buffer: Any) -> Any:
        if self.repeats:
            pending = self.ops.begin_allreduce(buffer)
            self.die("begun")
            return pending
        sent = self.ops.send(buffer[:1], self.connection.next())
        self.die("buffer")
        self.ops.recv(self.ops.alloc(1, "float32"), self.connection.previous())
        sent.wait()
        return super().on_buffer_ready(buffer)

    def on_timer_expired(self, statistics: Any) -> None:
        self.die("timer")
        self.ops.barrier()


def until_lost(rank: int, ranks: int, where: str, listeners: Any, port: int) -> str:
    if port:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        transport: Any = GlooTransport(store, rank, range(ranks), timeout_s=5)
    else:
        transport = listeners.tcp(rank, timeout_s=5)
    for one in listeners.sockets:
        one.close()
    tasks = TaskManager(Dying(where), NumpyEngine(), transport)
    for _ in range(1000):
        for index in range(3):
            tasks.enqueue(index, np.ones(5000, "float32"))
        try:
            tasks.wait_all()
        except ConnectionError as error:
            return str(error)
    return "nobody died"


@pytest.mark.parametrize("where", ["tensor", "buffer", "timer", "begun"])
@pytest.mark.parametrize("gloo", [False, True], ids=["tcp", "gloo"])
def test_a_rank_killed_in_an_event_is_a_clear_error(where: str, gloo: bool) -> None:
    with meeting_point() as port:
        met = port if gloo else 0
        found = processes(3, until_lost, where, Listeners(3), met, limit_s=15)
    assert found[1] is None
    assert all(text and text.startswith("rank ") for text in (found[0], found[2]))


def test_a_type_that_has_no_name_is_refused_beforehand() -> None:
    with pytest.raises(TypeError, match=r"rest\.1\.bias: is torch\.bfloat16; gradients must be"):
        net = model()
        net.rest[1].bias.data = net.rest[1].bias.data.bfloat16()
        Training(net, optimizer, Program(), None)  # type: ignore[arg-type]


def test_an_optimizer_that_is_not_made_leaves_nothing_behind() -> None:
    def refuse(_: Any) -> Any:
        raise LookupError("no such group")

    def body(rank: int, _: Any, transport: Any) -> int:
        net = model()
        with pytest.raises(LookupError, match="no such group"):
            Training(net, refuse, Program(), transport)
        return sum(len(one._forward_pre_hooks) for one in net.modules())

    before = set(threading.enumerate())
    assert together(2, torch_gloo(2), body) == [0, 0]
    new = set(threading.enumerate()) - before
    assert "flowslot-tasks" not in {one.name for one in new}


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def body(rank: int, _: Any, transport: Any) -> str:
        net = torch.nn.Embedding(4, 2, sparse=True)
        training = Training(net, optimizer, Program(), transport)
        with pytest.raises(TypeError, match=r"parameter 0: gradient is torch.sparse_coo; must be"):
            net(torch.tensor([1])).sum().backward()
        training.close()
        return "done"

    assert together(1, torch_gloo(1), body) == ["done"]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("barrier", [False, True])
def test_gradients_may_have_a_graph(barrier: bool) -> None:
    """`create_graph`, as for a penalty on gradients, leaves gradients that require one."""

    def body(graph: bool, rank: int, _: Any, transport: Any) -> list[float]:
        net, losses = nets[rank], []
        training = Training(net, optimizer, Program(), transport, barrier=barrier)
        for step in range(STEPS):
            loss = loss_of(net, rank, step)
            loss.backward(create_graph=graph)
            training.step()
            losses.append(loss.item())
        training.finish()
        training.close()
        return losses

    curves = []
    for graph in (False, True):
        nets = [model(), model()]
        curves.append(together(2, torch_gloo(2), partial(body, graph)))
    assert curves[0] == curves[1]


class Attentive(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Attention uses its projection's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.unused = torch.nn.Linear(2, 2).requires_grad_(False)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return self.out(self.block(x[:, None, :]))[:, 0, :4]


@pytest.mark.parametrize("barrier", [False, True])
def test_parameters_that_a_module_above_uses_are_unlocked_by_that_one(barrier: bool) -> None:
    def body(rank: int, _: Any, transport: Any) -> list[float]:
        net = nets[rank]
        training = Training(net, optimizer, Program(), transport, barrier=barrier)
        losses = []
        for step in range(STEPS):
            loss = loss_of(net, rank, step)
            loss.backward()
            training.step()
            losses.append(loss.item())
        assert barrier or not training._loose
        return losses

    curves = []
    for barrier_too in (barrier, True):
        torch.manual_seed(5)
        nets = [Attentive(), Attentive()]
        nets[1].load_state_dict(nets[0].state_dict())
        barrier = barrier_too
        curves.append(together(2, torch_gloo(2), body))
    assert curves[0] == curves[1]
