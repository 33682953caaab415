# SPDX-License-Identifier: Apache-2.0
"""A training job of a scenario: what it computes, and what it sends from host to host."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, FiniteFloat

from flowslot.model.settings import Settings, Text
from flowslot.policy.job_classes import JobClass, Part
from flowslot_scenario.fields import JobName

WORD_BYTES = 2
"""Jobs send 16-bit numbers, as small as gradients often are: keys of odd sizes stripe evenly."""


class Transfer(NamedTuple):
    """What one iteration of a job sends from one host to another: payload bytes, and the flows
    that share them."""

    src: str
    dst: str
    sent_bytes: int
    flows: int


class Job(Settings):
    """A training job: compute, then communicate, again and again.

    `ring` and `ps` are the lab's own programs; `pslite` is ps-lite itself, where each key is at one
    of several servers; `nccl` is a ring all-reduce by a network plugin of NCCL; `ddp` trains a
    model with PyTorch on Gloo, whose computation takes `compute_s` at least.
    """

    name: JobName
    kind: Literal["ring", "ps", "pslite", "nccl", "ddp"]
    hosts: tuple[Text, ...] = Field(min_length=1)
    server: Text | None = None
    servers: tuple[Text, ...] = ()
    bytes: Annotated[int, Field(ge=1, le=10_000_000_000)]
    sockets: Annotated[int, Field(ge=1, le=64)] = 1
    channels: Annotated[int, Field(ge=1, le=32)] = 1
    """Of NCCL: rings side by side, each with its part of the tensor and so many sockets."""
    threads: Annotated[int, Field(ge=0, le=16)] = 0
    """Of NCCL: helper threads per connection, each with its part of the sockets."""
    iterations_by: Literal["pauses", "bytes", "calls"] = "pauses"
    """Of NCCL: how the plugin finds out where an iteration begins, and what it will send."""
    model: Literal["vgg", "resnet", "transformer"] = "resnet"
    """Of `ddp`: what is trained; `bytes` is the size of its gradients."""
    program: Literal["ddp", "sum", "partial", "float16", "scheduling", "two-level", "fusion"] = (
        "ddp"
    )
    """Of `ddp`: DistributedDataParallel, or a program of flowslot_torch."""
    fusion_kb: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Of `ddp`, KiB: what a bucket of DDP holds, or a program's fusion buffer at first."""
    slice_kb: Annotated[FiniteFloat, Field(ge=1, le=1e6)] = 50.0
    keys: Annotated[int, Field(ge=1, le=65_536)] = 64
    barrier: bool = False
    library: Literal["flowslot-calm", "flowslot", "calm", "upstream"] = "flowslot-calm"
    """Of ps-lite: which of those that pslite_patch/build.sh builds."""
    compute_s: Annotated[FiniteFloat, Field(ge=0, le=30)]
    jitter: Annotated[FiniteFloat, Field(ge=0, le=0.5)] = 0.02
    start_s: Annotated[FiniteFloat, Field(ge=0, le=3600)] = 0.0
    protected: bool = False
    """It comes first: its packets bear DSCP EF, which the lab's ports heed under policy `prio`
    only; and our arbiters have it in a class of protected jobs."""
    floor: Part | None = None
    ceiling: Part | None = None
    """Parts of each link, for its class at our arbiters. TCP knows of neither."""

    @property
    def job_class(self) -> JobClass | None:
        """What an administrator would write for it; None: nothing."""
        if not self.protected and self.floor is None and self.ceiling is None:
            return None
        return JobClass(
            jobs=self.name, protected=self.protected, floor=self.floor, ceiling=self.ceiling
        )

    @property
    def reports(self) -> bool:
        """Its processes register with the daemon, which otherwise looks on from outside."""
        return self.library.startswith("flowslot")

    @property
    def workers(self) -> int:
        """Number of workers (a parameter server is none)."""
        return len(self.hosts)

    @property
    def server_hosts(self) -> tuple[str, ...]:
        """The parameter servers' hosts; none in a ring."""
        return self.servers if self.server is None else (self.server,)

    @property
    def is_ring(self) -> bool:
        """Each worker sends to the next one."""
        return self.kind in ("ring", "nccl", "ddp")

    @property
    def flows(self) -> int:
        """Connections that share what one process sends to another."""
        return self.channels * self.sockets

    @property
    def processes(self) -> tuple[str, ...]:
        """The host of every process by rank: the workers, then the servers, then ps-lite's
        scheduler, beside the first of them."""
        return (*self.hosts, *self.server_hosts, *self.servers[:1])

    @property
    def slices(self) -> int:
        """Slices in which one socket's part of a chunk is forwarded: about `slice_kb` each.

        `nccl`: a channel's part, each striped over its sockets. With parameter servers: the keys.
        Each is striped over all sockets of `ps`.
        """
        if not self.is_ring:
            return self.keys
        parts = self.workers * (self.sockets if self.kind == "ring" else self.channels)
        return max(1, round(self.bytes / parts / (self.slice_kb * 1000)))

    @property
    def slice_bytes(self) -> int:
        """Size of a slice (`ring`) or of a slice's or a key's stripe: whole words, rounded up."""
        parts = self.flows * self.slices * (self.workers if self.is_ring else 1)
        return WORD_BYTES * -(-self.bytes // (WORD_BYTES * parts))

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that each worker sends in an iteration."""
        whole = self.slice_bytes * self.slices * self.flows
        return 2 * (self.workers - 1) * whole if self.is_ring else whole

    def transfers(self) -> Iterator[Transfer]:
        """What one iteration sends from host to host."""
        if self.is_ring:
            for src, dst in zip(self.hosts, (*self.hosts[1:], self.hosts[0]), strict=True):
                yield Transfer(src, dst, self.sent_bytes, self.flows)
            return
        share = self.sent_bytes // len(self.server_hosts)
        for worker, server in itertools.product(self.hosts, self.server_hosts):
            yield Transfer(worker, server, share, self.sockets)
            yield Transfer(server, worker, share, self.sockets)

    @property
    def turns(self) -> int:
        """How often an iteration waits for its busiest link: with a barrier, all push before any
        pulls, and each way has links as fast as the other way's."""
        return 2 if self.barrier else 1

    @property
    def rounds(self) -> int:
        """Round trips that an iteration takes one after the other, even with nothing to send."""
        return 2 * (self.workers - 1) if self.is_ring else 0

    def compute_ns(self, seed: int, iteration: int) -> int:
        """Length of a computation phase: the same on every worker, and whoever asks."""
        return compute_ns(seed, self.name, self.compute_s, self.jitter, iteration)

    def same_as(self, other: Job) -> bool:
        """Whether the two differ in nothing but name and start."""
        plain = {"name": "x", "start_s": 0.0}
        return self.model_copy(update=plain) == other.model_copy(update=plain)


def compute_ns(seed: int, job: str, compute_s: float, jitter: float, iteration: int) -> int:
    """Length of the computation phase in an iteration of a job: normal, seeded, at least 0."""
    generator = np.random.default_rng([seed, zlib.crc32(job.encode()), iteration])
    factor = 1.0 + jitter * float(generator.standard_normal())
    return round(compute_s * max(0.0, factor) * 1e9)
