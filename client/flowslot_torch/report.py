# SPDX-License-Identifier: Apache-2.0
"""What a training process tells the daemon of its host: one flow per connection that carries its
gradients.

Which connections do is seen, not guessed: those to other ranks that carried bytes in the last
iteration. What each carried then, per byte of gradients, is its share of the next one. So ring,
tree and any number of sockets are the same code.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from flowslot_shm.client import JobClient
from flowslot_shm.layout import Role
from flowslot_shm.writer import FlowWriter
from flowslot_torch.peers import Peers
from flowslot_torch.sockets import Borrowed, Gone, connections

_log = logging.getLogger(__name__)
_SLOTS = 256
_CARRIES = 64
"""A connection carries gradients if it had at least 1/64 of the bytes of the one with most."""
_LOOK_AGAIN = 100
"""Iterations after which all connections are looked at, though none has gone. While none carries
gradients, the pause doubles up to this."""
_MEASURE_AGAIN_S, _SAME = 0.2, 0.01
"""Shares that stay the same, but for so much, are measured again after so long: to ask the kernel
took 0.09 ms of an iteration of 12 (by hand)."""


@dataclass(slots=True)
class _Carrier:
    """A connection that carries gradients. All in bytes. `base`: acknowledged when it was measured;
    `share`: sent per byte of gradients."""

    sock: Borrowed
    flow: FlowWriter
    role: Role
    base: int
    share: float
    ready: int = 0


class Reporter:
    """Of one process. Nothing here raises or waits; calls may come from any thread.

    `iteration`: the running one, from 0, -1 before the first; `buckets`, `bytes`: of the last
    complete one; `peers`: ranks to which gradients are sent; `error`: why nothing is reported any
    more, "" if it is.
    """

    def __init__(self, job: str, rank: int, peers: Peers, path: str | None = None) -> None:
        self.iteration, self.buckets, self.bytes = -1, 0, 0
        self.error = ""
        self._lock = threading.Lock()
        self._peers = peers
        self._carriers: dict[int, _Carrier] = {}
        self._before: dict[int, int] = {}  # acknowledged when the iteration began, by cookie
        self._running = [0, 0]  # buckets, bytes
        self._look_at, self._pause = 0, 1  # iterations
        self._measure_at = 0.0  # time.monotonic()
        self._measured = 0  # bytes of gradients since shares were measured
        self._since = 0  # bytes of gradients since all connections were looked at
        self._channels: dict[int, int] = {}
        self._client: JobClient | None = None
        self._safely(lambda: self._open(path, job, rank))

    @property
    def registered(self) -> bool:
        """A daemon knows of this process."""
        return self._client is not None and self._client.registered

    @property
    def peers(self) -> list[int]:
        """Ranks that gradients are sent to."""
        ranks = {self._peers.rank_of(one.sock) for one in list(self._carriers.values())}
        return sorted(rank for rank in ranks if rank is not None)

    def begin(self) -> None:
        """The first bytes of another iteration are about to come."""
        self._safely(self._begin)

    def ready(self, amount: int) -> None:
        """A bucket of `amount` bytes may be sent."""
        self._safely(lambda: self._ready(amount))

    def complete(self) -> None:
        """All that was ready has been exchanged."""
        self._safely(self._complete)

    def close(self) -> None:
        """Report no more; the daemon forgets this process."""
        self._safely(self._close)

    def _safely(self, action: Callable[[], Any]) -> None:
        """Training goes on whatever happens here; after an error without us."""
        with self._lock:
            if self.error:
                return
            try:
                action()
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                _log.warning("flowslot reports nothing from now on: %s", self.error)
                try:
                    self._close()
                except Exception as second:
                    _log.debug("closing: %s", second)

    def _open(self, path: str | None, job: str, rank: int) -> None:
        self._client = JobClient(path, job, rank, slots=_SLOTS)

    def _begin(self) -> None:
        before, (self.buckets, self.bytes) = self._before, self._running
        self._running = [0, 0]
        self._since += self.bytes
        self._measured += self.bytes
        self.iteration += 1
        news = self._peers.news()
        looks = news or self.iteration >= self._look_at
        if looks or time.monotonic() >= self._measure_at:
            self._measure()
        if news or self.iteration >= self._look_at:
            self._look(before)
        for carrier in self._carriers.values():
            carrier.ready = 0
            carrier.flow.begin(self.iteration, round(carrier.share * self.bytes))
        if not self._carriers and self._client is not None:
            self._client.poll()

    def _measure(self) -> None:
        """What each carrier has carried."""
        same = bool(self._carriers) and self._measured > 0
        for cookie, carrier in list(self._carriers.items()):
            try:
                acked = carrier.sock.acked()
            except Gone:
                self._drop(cookie)
                continue
            if self._measured:
                share = (acked - carrier.base) / self._measured
                same &= abs(share - carrier.share) <= _SAME * share
                carrier.share = share
            if not carrier.share:
                self._look_at = self.iteration
            self._before[cookie] = carrier.base = acked
        self._measured = 0
        self._measure_at = time.monotonic() + _MEASURE_AGAIN_S if same else 0.0

    def _look(self, before: dict[int, int]) -> None:
        """Find out again which connections carry gradients, after at least one iteration."""
        found = connections()
        since, self._since = self._since, 0
        self._before = {cookie: acked for cookie, (_, acked) in found.items()}
        self._look_at = self.iteration + (_LOOK_AGAIN if self._carriers else self._pause)
        self._pause = 1 if self._carriers else min(2 * self._pause, _LOOK_AGAIN)
        if not since:
            return
        share = {c: (acked - before.get(c, 0)) / since for c, (_, acked) in found.items()}
        share |= {cookie: carrier.share for cookie, carrier in self._carriers.items()}
        self._peers.look_up([sock for sock, _ in found.values()])
        unsure = self._peers.looking() and not self._carriers  # the main one may not be known yet
        known = {c for c, (sock, _) in found.items() if self._peers.rank_of(sock) is not None}
        least = max((share[c] for c in (found if unsure else known)), default=0) / _CARRIES
        carry = {c for c in known if share[c] > 0 and share[c] >= least}
        to = {self._peers.rank_of(found[cookie][0]) for cookie in carry}
        role = Role.RING if len(to) == 1 else Role.UNKNOWN
        for cookie, carrier in list(self._carriers.items()):
            if cookie not in carry or carrier.role != role:
                self._drop(cookie)
        for cookie in carry - self._carriers.keys():
            self._carry(*found[cookie], share[cookie], role)

    def _carry(self, sock: Borrowed, acked: int, share: float, role: Role) -> None:
        peer = self._peers.rank_of(sock)
        assert self._client is not None and peer is not None
        channel = self._channels.get(peer, 0)
        self._channels[peer] = channel + 1
        flow = self._client.flow(cast(socket.socket, sock), peer, channel, role)
        self._carriers[sock.cookie] = _Carrier(sock, flow, role, acked, share)
        self._measure_at = 0.0

    def _drop(self, cookie: int) -> None:
        self._carriers.pop(cookie).flow.close()
        self._look_at = self.iteration

    def _ready(self, amount: int) -> None:
        """How far they are, the daemon sees in the kernel."""
        self._running[0] += 1
        self._running[1] += amount
        for carrier in self._carriers.values():
            more = round(carrier.share * self._running[1]) - carrier.ready
            if more > 0:
                carrier.ready += more
                carrier.flow.advance(ready=more)

    def _complete(self) -> None:
        """The library calls complete what it has handed to the kernel."""
        for carrier in self._carriers.values():
            carrier.flow.advance(posted=carrier.ready, done=carrier.ready)

    def _close(self) -> None:
        self._peers.close()
        client, self._client = self._client, None
        carriers, self._carriers = list(self._carriers.values()), {}
        for carrier in carriers:
            carrier.flow.close()
        if client is not None:
            client.close()
        self.error = self.error or "closed"


class Attached:
    """What `attach` returns. `iteration`, `buckets`, `bytes`, `peers`, `registered`, `error`: see
    Reporter."""

    _reporters: ClassVar[list[Reporter]] = []
    """The process's own: all that is attached shares its connections."""

    def __init__(self, reporter: Reporter, owns: bool) -> None:
        """`owns`: an iteration of this is one of the process."""
        self.reporter, self._owns = reporter, owns

    @classmethod
    def reporter_of(cls, make: Callable[[], Reporter]) -> tuple[Reporter, bool]:
        """The process's, and whether it has just been made."""
        owns = not cls._reporters
        if owns:
            cls._reporters.append(make())
        return cls._reporters[0], owns

    @property
    def iteration(self) -> int:
        """Of the process."""
        return self.reporter.iteration

    @property
    def buckets(self) -> int:
        """Of the last complete iteration."""
        return self.reporter.buckets

    @property
    def bytes(self) -> int:
        """Of gradients in the last complete iteration."""
        return self.reporter.bytes

    @property
    def peers(self) -> list[int]:
        """Ranks that gradients are sent to."""
        return self.reporter.peers

    @property
    def registered(self) -> bool:
        """A daemon knows of this process."""
        return self.reporter.registered

    @property
    def error(self) -> str:
        """Why nothing is reported any more; "" if it is."""
        return self.reporter.error

    def close(self) -> None:
        """Report no more. Training goes on as before."""
        if self._owns:
            self._owns = False
            self._reporters.clear()
            self.reporter.close()
