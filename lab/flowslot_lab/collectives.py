# SPDX-License-Identifier: Apache-2.0
"""The communication of one iteration: ring all-reduce, and both sides of a parameter server.

All sums are really computed (NumPy, 16-bit integers). Every received byte is checked, once the
iteration's communication is over: what is checked are the sums that all of them went into.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from flowslot_lab.connect import Links
from flowslot_lab.content import Content, Word, Words
from flowslot_lab.jobspec import JobSpec
from flowslot_lab.wire import Flow, Loop, Receiver, Sender, start
from flowslot_scenario.job import WORD_BYTES

_PULLED_AT_ONCE = 4  # keys

MakeFlow = Callable[[socket.socket, int, int, str], Flow | None]
"""(socket, peer rank, channel, "ring" | "push" | "pull") -> where to report its progress."""


class Collective(Protocol):
    """What a worker does in the communication phase."""

    verified: int

    @property
    def losses(self) -> Sequence[float]:
        """Of all iterations; none where nothing is trained."""

    def prepare(self, iteration: int) -> None:
        """Make this iteration's data; part of the computation phase."""

    def communicate(self, iteration: int) -> None:
        """Returns when all data of this iteration has arrived and all of ours was sent."""

    def verify(self, iteration: int) -> None:
        """Check what has arrived; part of the next computation phase. CorruptionError."""


def _view(words: Words) -> memoryview:
    return words.data.cast("B")


class Ring:
    """Ring all-reduce in 2(N-1) steps, pipelined by slices.

    Chunk c of the tensor starts at rank c. In step s a rank sends chunk (rank - s) mod N and
    receives chunk (rank - 1 - s) mod N; the first N-1 steps add, the others replace. A slice is
    forwarded as soon as it arrived and was added. Array layout: [chunk, channel, slice, word].
    """

    losses: Sequence[float] = ()

    def __init__(
        self, spec: JobSpec, out: Links, into: Links, loop: Loop, make_flow: MakeFlow
    ) -> None:
        n = len(spec.addresses)
        self._rank, self._ranks, self._steps = spec.rank, n, 2 * (n - 1)
        self._slices, self._slice_bytes = spec.slices, spec.slice_bytes
        shape = (n, spec.sockets, spec.slices, spec.slice_bytes // WORD_BYTES)
        self._content = Content(spec.seed, spec.job, int(np.prod(shape)), n)
        self._data: Words = np.empty(shape, Word)
        self._incoming: Words = np.empty(shape[1:], Word)
        self._loop = loop
        self._receivers: list[Receiver] = []
        self._senders: list[Sender] = []
        self.verified = 0
        next_rank, previous = (spec.rank + 1) % n, (spec.rank - 1) % n
        for channel in range(spec.sockets):
            self._add_channel(channel, out[next_rank, channel], into[previous, channel], make_flow)

    def _add_channel(
        self, channel: int, out: socket.socket, into: socket.socket, make_flow: MakeFlow
    ) -> None:
        def section(k: int) -> memoryview:
            return _view(self._data[(self._rank - k % self._steps) % self._ranks, channel])

        def place(k: int) -> memoryview:
            step = k % self._steps
            adds = step < self._ranks - 1
            return _view(
                self._incoming[channel] if adds else self._data[self._chunk(step), channel]
            )

        def arrived(k: int, first: int, n: int) -> None:
            step, new = k % self._steps, slice(first, first + n)
            if step < self._ranks - 1:
                self._data[self._chunk(step), channel, new] += self._incoming[channel, new]
            if step < self._steps - 1:
                sender.allow(n * self._slice_bytes)

        flow = make_flow(out, (self._rank + 1) % self._ranks, channel, "ring")
        sender = Sender(out, self._slices * self._slice_bytes, section, flow)
        receiver = Receiver(into, self._slice_bytes, self._slices, place, arrived)
        self._loop.add(out, sender, None)
        self._loop.add(into, None, receiver)
        self._senders.append(sender)
        self._receivers.append(receiver)

    def _chunk(self, step: int) -> int:
        return (self._rank - 1 - step) % self._ranks

    def prepare(self, iteration: int) -> None:
        """This rank's own contribution."""
        self._content.fill(self._data.reshape(-1), self._rank, iteration)

    def communicate(self, iteration: int) -> None:
        """One all-reduce."""
        section = self._slices * self._slice_bytes
        for receiver in self._receivers:
            receiver.raise_limit(self._steps * self._slices)
        start(self._senders, iteration, self._steps * section, section)
        loop, total = self._loop, (iteration + 1) * self._steps * section * len(self._senders)
        loop.run(lambda: loop.received == total and loop.posted == total)

    def verify(self, iteration: int) -> None:
        """See Collective. What was received was added to these sums, or is one of them."""
        constant = self._content.constant(range(self._ranks), iteration)
        self._content.check(self._data.reshape(-1), 0, self._ranks, constant)
        self.verified += self._steps * self._incoming.nbytes


class PsWorker:
    """A worker of a parameter server: pushes its keys, pulls their sums.

    Each key is striped over all sockets, as NCCL does with what it sends to a peer. Array layout:
    [channel, key, word].
    """

    losses: Sequence[float] = ()

    def __init__(self, spec: JobSpec, out: Links, loop: Loop, make_flow: MakeFlow) -> None:
        self._rank, self._workers = spec.rank, spec.workers
        shape = (spec.sockets, spec.slices, spec.slice_bytes // WORD_BYTES)
        self._content = Content(spec.seed, spec.job, int(np.prod(shape)), self._workers)
        self._gradient: Words = np.empty(shape, Word)
        self._weights: Words = np.empty(shape, Word)
        # Nobody waits for a single key here: several at once wake the process up less often.
        self._pulls = spec.slices // math.gcd(spec.slices, _PULLED_AT_ONCE)
        self._section = spec.slices * spec.slice_bytes
        self._loop = loop
        self._pairs: list[tuple[Sender, Receiver]] = []
        self.verified = 0
        for channel in range(spec.sockets):
            sock = out[self._workers, channel]
            flow = make_flow(sock, self._workers, channel, "push")
            self._add_channel(channel, sock, flow)

    def _add_channel(self, channel: int, sock: socket.socket, flow: Flow | None) -> None:
        gradient, weights = _view(self._gradient[channel]), _view(self._weights[channel])
        sender = Sender(sock, self._section, lambda _: gradient, flow)
        size = self._section // self._pulls
        receiver = Receiver(sock, size, self._pulls, lambda _: weights, lambda *_: None)
        self._loop.add(sock, sender, receiver)
        self._pairs.append((sender, receiver))

    def prepare(self, iteration: int) -> None:
        """This worker's gradient."""
        self._content.fill(self._gradient.reshape(-1), self._rank, iteration)

    def communicate(self, iteration: int) -> None:
        """Push all keys, pull all sums."""
        for _, receiver in self._pairs:
            receiver.raise_limit(self._pulls)
        senders = [sender for sender, _ in self._pairs]
        start(senders, iteration, self._section, self._section)
        loop, total = self._loop, (iteration + 1) * self._weights.nbytes
        loop.run(lambda: loop.received == total and loop.posted == total)

    def verify(self, iteration: int) -> None:
        """See Collective."""
        constant = self._content.constant(range(self._workers), iteration)
        self._content.check(self._weights.reshape(-1), 0, self._workers, constant)
        self.verified += self._weights.nbytes


class PsServer:
    """The parameter server: sums the workers' pushes and sends each key back when complete.

    The sums are checked when it has nothing else to do: while the workers compute.

    Two generations of sums: a fast worker may push iteration i+1 while sums of i are still on
    their way to a slow one; it cannot push i+2 before the slow one has pushed i+1. Layout:
    [generation, channel, key, word].
    """

    def __init__(self, spec: JobSpec, into: Links, loop: Loop, make_flow: MakeFlow) -> None:
        self._workers, self._keys = spec.workers, spec.slices
        self._channels, self._stripe_bytes = spec.sockets, spec.slice_bytes
        self._barrier = spec.barrier
        shape = (spec.sockets, spec.slices, spec.slice_bytes // WORD_BYTES)
        self._content = Content(spec.seed, spec.job, int(np.prod(shape)), self._workers)
        self._sums: Words = np.zeros((2, *shape), Word)
        self._incoming: Words = np.empty(shape[1:], Word)  # each stripe is added as it comes
        self._stripes = [[0] * self._keys, [0] * self._keys]  # arrived, by generation and key
        self._released = 0  # keys of the running iteration
        self._unverified: int | None = None
        self._loop = loop
        self._senders: list[Sender] = []
        self._measured = spec.iterations
        self.verified = 0
        for (worker, channel), sock in into.items():
            flow = make_flow(sock, worker, channel, "pull")
            self._add(channel, sock, flow)

    def _add(self, channel: int, sock: socket.socket, flow: Flow | None) -> None:
        sections = [_view(generation[channel]) for generation in self._sums]

        def arrived(iteration: int, first: int, n: int) -> None:
            new = slice(first, first + n)
            self._sums[iteration % 2, channel, new] += self._incoming[new]
            self._count(iteration, first, n)

        sender = Sender(sock, self._keys * self._stripe_bytes, lambda k: sections[k % 2], flow)
        incoming = _view(self._incoming)
        receiver = Receiver(sock, self._stripe_bytes, self._keys, lambda _: incoming, arrived)
        receiver.raise_limit(1 << 40)
        self._loop.add(sock, sender, receiver)
        self._senders.append(sender)

    def _count(self, iteration: int, first: int, n: int) -> None:
        """Stripes of n keys have been added: send back the keys that are complete now."""
        stripes, whole = self._stripes[iteration % 2], self._workers * self._channels
        for key in range(first, first + n):
            stripes[key] += 1
        done = self._released
        while done < self._keys and stripes[done] == whole:
            done += 1
        if done > self._released and (not self._barrier or done == self._keys):
            self._release(iteration, done - self._released)
            self._released = done
        if done == self._keys:
            self._turn(iteration)

    def _release(self, iteration: int, keys: int) -> None:
        """Send back the next `keys` keys, to every worker."""
        ready = keys * self._stripe_bytes
        if self._released == 0:
            start(self._senders, iteration, self._keys * self._stripe_bytes, ready)
            return
        for sender in self._senders:
            sender.allow(ready)

    def _turn(self, iteration: int) -> None:
        """All keys are complete: make ready for the next iteration, and to be checked."""
        self._verify()
        self._unverified = iteration
        # Whoever pushes the next iteration has pulled all of the last one.
        self._sums[(iteration + 1) % 2] = 0
        self._stripes[(iteration + 1) % 2] = [0] * self._keys
        self._released = 0

    def _verify(self) -> None:
        """Check the sums of the last complete iteration, unless that has been done."""
        iteration, self._unverified = self._unverified, None
        if iteration is None:
            return
        sums = self._sums[iteration % 2]
        constant = self._content.constant(range(self._workers), iteration)
        self._content.check(sums.reshape(-1), 0, self._workers, constant)
        if iteration < self._measured:
            self.verified += self._workers * sums.nbytes

    def serve(self, iterations: int) -> None:
        """Returns when that many iterations (from the first) have been sent back."""
        loop, posted = self._loop, iterations * self._workers * self._sums[0].nbytes
        loop.run(lambda: loop.posted >= posted, idle=self._verify)
        self._verify()
