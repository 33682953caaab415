# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that trains for real: PyTorch on Gloo, on the processor. Needs torch.

Program "ddp" is DistributedDataParallel; all others are programs of `flowslot_torch`. The forward
pass is computation; where a layer is faster than its share of what the scenario says, it waits: so
what comes in time for a later layer is in time. Then gradients are computed and exchanged side by
side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flowslot_torch
from flowslot_lab import models
from flowslot_lab.content import CorruptionError
from flowslot_lab.jobspec import JobSpec
from flowslot_lab.wire import PeerGone
from flowslot_scenario.job import compute_ns
from flowslot_torch.cases.adaptive_fusion import AdaptiveFusion
from flowslot_torch.cases.gradient_scheduling import GradientScheduling
from flowslot_torch.cases.partial_compression import PartialCompression
from flowslot_torch.cases.two_level import TwoLevel
from flowslot_torch.engines import Array
from flowslot_torch.peers import Peers
from flowslot_torch.program import Links, Program
from flowslot_torch.report import Reporter
from flowslot_torch.torch_engine import GlooTransport
from flowslot_torch.training import Training
from flowslot_torch.transport import Pending

_LIMIT_S = 30.0
_RATE, _MOMENTUM = 0.02, 0.9


class Timer:
    """Waits for a process, and keeps its trace: (monotonic ns, bytes received)."""

    def __init__(self, each: int) -> None:
        """`each`: bytes that an iteration brings."""
        self.tracing = True
        self.trace: list[tuple[int, int]] = []
        self._each = each

    def sleep_until(self, at_ns: int) -> None:
        """Compute, if that is not done yet."""
        while (left := at_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        self._mark(0)

    def arrived(self) -> None:
        """An iteration's gradients have come."""
        self._mark(self._each)

    def _mark(self, more: int) -> None:
        if self.tracing:
            before = self.trace[-1][1] if self.trace else 0
            self.trace.append((time.monotonic_ns(), before + more))


class DdpWorker:
    """A rank. `losses`: of all iterations."""

    def __init__(self, spec: JobSpec, timer: Timer) -> None:
        """Returns when all ranks are there. ValueError: the model has other bytes than `bytes`."""
        torch.set_num_threads(1)
        self._spec, self._timer = spec, timer
        self._model = models.make(spec.model, spec.seed)
        size = sum(4 * p.numel() for p in self._model.parameters())
        if size != spec.tensor_bytes:
            raise ValueError(f"bytes: model {spec.model} has {size}, not {spec.tensor_bytes}")
        meet = f"tcp://{spec.addresses[0]}:{spec.port}"
        limit = timedelta(seconds=_LIMIT_S)
        dist.init_process_group("gloo", meet, limit, spec.workers, spec.rank)
        self._layers = [m for m in self._model.modules() if models.is_layer(m)]
        self._layer_ns, self._layer_began = 0, 0
        self._step: Callable[[Any], None] = self._ddp() if spec.program == "ddp" else self._own()
        for layer in self._layers:  # after the locks' hooks: a layer computes once it is unlocked
            layer.register_forward_pre_hook(self._begin_layer)
            layer.register_forward_hook(self._end_layer)
        self.losses: list[float] = []
        self.verified = 0

    def _begin_layer(self, *_: Any) -> None:
        self._layer_began = time.monotonic_ns()

    def _end_layer(self, *_: Any) -> None:
        left = self._layer_began + self._layer_ns - time.monotonic_ns()
        time.sleep(max(left, 0) / 1e9)

    def _ddp(self) -> Callable[[Any], None]:
        spec = self._spec
        self._model = DistributedDataParallel(self._model, bucket_cap_mb=spec.fusion_kb / 1024)
        if spec.register:
            flowslot_torch.attach(self._model, job=spec.job, daemon=spec.register)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=_RATE, momentum=_MOMENTUM)

        def step(loss: Any) -> None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _own(self) -> Callable[[Any], None]:
        spec = self._spec
        store = dist.distributed_c10d._get_default_store()
        reporter = None
        if spec.register:
            peers = Peers(spec.rank, spec.workers, store.clone)
            reporter = Reporter(spec.job, spec.rank, peers, spec.register)
        training = Training(
            self._model,
            lambda parameters: torch.optim.SGD(parameters, lr=_RATE, momentum=_MOMENTUM),
            program_of(spec),
            GlooTransport(store, spec.rank, range(spec.workers), timeout_s=_LIMIT_S),
            links=Links(rates_of(spec)),
            fusion_bytes=spec.fusion_kb << 10,
            barrier=spec.program != "scheduling",
            reporter=reporter,
        )

        def step(loss: Any) -> None:
            loss.backward()
            training.step()

        return step

    def prepare(self, iteration: int) -> None:
        """The forward pass."""
        spec = self._spec
        whole = compute_ns(spec.seed, spec.job, spec.compute_s, spec.jitter, iteration)
        self._layer_ns = whole // len(self._layers)
        self._loss = models.loss_of(self._model, spec.model, spec.seed, spec.rank, iteration)

    def communicate(self, iteration: int) -> None:
        """The backward pass, and the update. Raises PeerGone."""
        try:
            self._step(self._loss)
        except (RuntimeError, OSError) as error:
            raise PeerGone(str(error)) from None
        self.losses.append(float(self._loss.detach()))
        self._timer.arrived()

    def verify(self, iteration: int) -> None:
        """See Collective: the loss is a number. Whether all ranks have one model, `same` says."""
        if not self.losses[-1] < 1e6:
            raise CorruptionError(f"iteration {iteration}: the loss is {self.losses[-1]}")
        self.verified = (iteration + 1) * self._spec.sent_bytes
        if iteration + 1 == self._spec.iterations:
            self._same(iteration)

    def _same(self, iteration: int) -> None:
        """All ranks have the same parameters, bit by bit."""
        flat = torch.cat([p.detach().view(-1) for p in self._model.parameters()])
        mine = flat.view(torch.int32).to(torch.int64).sum().reshape(1)
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if least != most:
            raise CorruptionError(f"iteration {iteration}: the ranks' parameters differ")


class Sum(Program):
    """As adaptive fusion, with buffers of one size."""

    repeats = True

    def on_buffer_ready(self, buffer: Array) -> Pending:
        """Sum it, beside others."""
        return self.ops.begin_allreduce(buffer)


def program_of(spec: JobSpec) -> Program:
    """What the job's `program` names. KeyError: nothing."""
    float16 = PartialCompression()
    float16.everywhere = spec.program == "float16"
    racks = dict.fromkeys(spec.racks)
    groups = [[r for r, of in enumerate(spec.racks) if of == rack] for rack in racks]
    made: dict[str, Callable[[], Program]] = {
        "sum": Sum,
        "partial": lambda: float16,
        "float16": lambda: float16,
        "scheduling": GradientScheduling,
        "two-level": lambda: TwoLevel(groups),
        "fusion": AdaptiveFusion,
    }
    return made[spec.program]()


def rates_of(spec: JobSpec) -> dict[tuple[int, int], float]:
    """Of the path from rank to rank: what the slower of both hosts' links carries."""
    ranks = range(spec.workers)
    rates = spec.host_rates
    return {(a, b): min(rates[a], rates[b]) for a in ranks for b in ranks if a != b}
