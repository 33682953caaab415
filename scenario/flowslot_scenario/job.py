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
    of several servers.
    """

    name: JobName
    kind: Literal["ring", "ps", "pslite"]
    hosts: tuple[Text, ...] = Field(min_length=1)
    server: Text | None = None
    servers: tuple[Text, ...] = ()
    bytes: Annotated[int, Field(ge=1, le=10_000_000_000)]
    sockets: Annotated[int, Field(ge=1, le=64)] = 1
    slice_kb: Annotated[FiniteFloat, Field(ge=1, le=1e6)] = 50.0
    keys: Annotated[int, Field(ge=1, le=65_536)] = 64
    barrier: bool = False
    library: Literal["flowslot-calm", "flowslot", "calm", "upstream"] = "flowslot-calm"
    """Of ps-lite: which of those that pslite_patch/build.sh builds."""
    compute_s: Annotated[FiniteFloat, Field(ge=0, le=30)]
    jitter: Annotated[FiniteFloat, Field(ge=0, le=0.5)] = 0.02
    start_s: Annotated[FiniteFloat, Field(ge=0, le=3600)] = 0.0
    protected: bool = False
    """Its packets bear DSCP EF, which the lab's ports heed under policy `prio` only."""

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
    def processes(self) -> tuple[str, ...]:
        """The host of every process by rank: the workers, then the servers, then ps-lite's
        scheduler, beside the first of them."""
        return (*self.hosts, *self.server_hosts, *self.servers[:1])

    @property
    def slices(self) -> int:
        """Slices in which one socket's part of a chunk is forwarded: about `slice_kb` each.

        With parameter servers: the keys. Each is striped over all sockets of `ps`.
        """
        if self.kind != "ring":
            return self.keys
        section = self.bytes / (self.workers * self.sockets)
        return max(1, round(section / (self.slice_kb * 1000)))

    @property
    def slice_bytes(self) -> int:
        """Size of a slice (ring) or of a key's stripe: whole words, rounded up."""
        parts = self.sockets * self.slices * (self.workers if self.kind == "ring" else 1)
        return WORD_BYTES * -(-self.bytes // (WORD_BYTES * parts))

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that each worker sends in an iteration."""
        whole = self.slice_bytes * self.slices * self.sockets
        return 2 * (self.workers - 1) * whole if self.kind == "ring" else whole

    def transfers(self) -> Iterator[Transfer]:
        """What one iteration sends from host to host."""
        if self.kind == "ring":
            for src, dst in zip(self.hosts, (*self.hosts[1:], self.hosts[0]), strict=True):
                yield Transfer(src, dst, self.sent_bytes, self.sockets)
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
        return 2 * (self.workers - 1) if self.kind == "ring" else 0

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
