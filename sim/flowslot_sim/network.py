# SPDX-License-Identifier: Apache-2.0
"""The fluid network: flows with rates that change only at events, over links with capacities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Floats, Paths, Rows
from flowslot.policy.mlcc.peers import Group
from flowslot_sim import fluid, queues

STEP, BATCHES = 500_000, 2048
"""ns, of links with queues; and how many steps' bytes a queue tells apart."""


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """One flow: a socket of a job, which sends so many payload bytes in each iteration.

    `host`: who sends. `links`: indices. `preds`: flows of which it forwards what they bring: unless
    one has sent all of the iteration, it has sent at most `own` bytes, or those of the other and
    `head` more (less than 0: fewer; -inf: none before they have ended). `to`, `group`: the host
    that receives it, and what its job's record calls it, for those that wait for each other; None:
    nobody needs to know.
    """

    host: str
    links: tuple[int, ...]
    total: float
    own: float = 0.0
    head: float = 0.0
    preds: tuple[int, ...] = ()
    to: str = ""
    group: Group | None = None


class Queues:
    """Links' queues and flows' kernels; see queues.py."""

    def __init__(self, network: Network, buffers: Floats) -> None:
        """`buffers`: bytes, float64[L]."""
        paths, links = network.paths, len(network.capacity)
        self.kernel = np.zeros(len(paths), queues.KERNEL)
        self.kernel["idle"] = -math.inf
        level = np.zeros(links, np.int64)
        hops = [(link, i, h) for (i, h), link in np.ndenumerate(paths) if link < links - 1]
        for link, _, h in hops:
            level[link] = max(level[link], h)
        hops.sort(key=lambda hop: (level[hop[0]], hop))
        place = {(i, h): n for n, (_, i, h) in enumerate(hops)}
        self._hops = np.array(
            [(link, i, place.get((i, h + 1), -1), h == 0) for link, i, h in hops], np.int32
        ).reshape(-1, 4)
        self._line = np.zeros(links, queues.QUEUE)
        self._line["buffer"] = np.append(buffers, math.inf)
        self._table, self._lines = queues.table(self.kernel), queues.table(self._line)
        self._coming = np.zeros(len(hops))
        self._batches, self._sums = np.zeros((len(hops), BATCHES)), np.zeros((links, BATCHES))
        self._now = 0

    def advance(self, network: Network, elapsed: Nanos) -> int:
        """So much time passes; of how many flows an iteration has arrived."""
        if elapsed <= 0:
            return 0
        self._now += elapsed
        n: int = queues.step(
            network.table,
            self._table,
            network.live,
            network.paths,
            network.capacity,
            network.supply,
            self._lines,
            self._hops,
            self._coming,
            self._batches,
            self._sums,
            network.carried,
            self._now / SECOND,
            elapsed / SECOND,
            network.at,
        )
        return n


class Network:
    """F flows over L links; see `FLOW` in fluid.py for the columns of `rows`.

    Writers of `reserved` and `ceiling` set `stale`; `share` then finds the rates anew.
    """

    def __init__(self, flows: Sequence[FlowSpec], capacity: Sequence[float]) -> None:
        """`capacity`: goodput of each link, payload bytes/s. `preds` are indices of `flows`."""
        longest = max((len(flow.links) for flow in flows), default=1)
        self.paths = np.full((len(flows), longest), len(capacity), np.int32)
        for i, flow in enumerate(flows):
            self.paths[i, : len(flow.links)] = flow.links
        self.capacity: Floats = np.append(np.array(capacity, np.float64), np.inf)
        self.rows = np.zeros(len(flows), fluid.FLOW)
        self.rows["size"] = [flow.total for flow in flows]
        self.rows["own"] = [flow.own for flow in flows]
        self.rows["head"] = [flow.head for flow in flows]
        self.rows["ceiling"] = self.rows["holds"] = math.inf
        self.carried = np.zeros(len(capacity) + 1)
        """Bytes of flows that each link has carried."""
        self.other = np.zeros(len(capacity) + 1)
        """And those of other traffic: a port counts both."""
        self._background = np.zeros(len(capacity) + 1)
        self._free = self.capacity  # without the background
        self.stale = False
        counts = [len(flow.preds) for flow in flows]
        self._first = np.concatenate(([0], np.cumsum(counts))).astype(np.intp)
        self._preds = np.array([p for flow in flows for p in flow.preds], np.intp)
        self.supply = self._first, self._preds
        self.table = fluid.table(self.rows)
        self._work = np.zeros((3, max(len(flows), len(capacity) + 1)))
        self.at = np.zeros(len(flows), np.intp)
        self.live = np.zeros(0, np.intp)
        self._queues: Queues | None = None
        self.kernel: NDArray[np.void]
        """Once there are queues."""
        self._small: Paths | None = None  # live flows' paths, links numbered anew
        self._capacities = self.capacity  # of these links

    def begin(self, at: Iterable[int]) -> None:
        """These flows begin an iteration; what has not arrived of the last one comes first."""
        at = np.fromiter(at, np.intp)
        rows = self.rows
        rows["begun"][at] += 1
        rows["total"][at] += rows["size"][at]
        idle = at[~rows["active"][at]]
        rows["goal"][idle], rows["active"][idle] = rows["total"][idle], True
        self.live = np.union1d(self.live, at)
        self._small, self.stale = None, True

    def left(self, at: Rows | slice = slice(None)) -> Floats:
        """Bytes of what they have begun that these flows have left; 0: idle."""
        rows = self.rows[at]
        left: Floats = np.where(rows["active"], np.maximum(rows["total"] - rows["sent"], 1.0), 0.0)
        return left

    def posted(self, i: int) -> bool:
        """Whether the socket of flow `i` has taken all of what it has begun."""
        row = self.rows[i]
        return bool(row["total"] - row["sent"] <= row["holds"] + 1.0)

    def sent(self, i: int) -> float:
        """Bytes that flow `i` has sent of this iteration."""
        row = self.rows[i]
        return max(float(row["sent"] - row["total"] + row["size"]), 0.0)

    def ready(self, i: int) -> float:
        """Bytes of this iteration that flow `i` can have sent: its own, and what has come."""
        row, size = self.rows[i], float(self.rows["size"][i])
        may = []
        for p in self._preds[self._first[i] : self._first[i + 1]]:
            came = fluid.brought(self.table, i, p)
            if came < self.rows["size"][p] - 1.0:
                may.append(max(row["own"], row["head"] + max(came, 0.0)))
        return float(min(size, *may)) if may else size

    def pace(self, at: Rows, reserved: Floats, ceiling: Floats) -> None:
        """From now on these flows have these rates in force."""
        self.rows["reserved"][at] = reserved
        self.rows["ceiling"][at] = ceiling
        self.stale = True

    def set_background(self, rates: Sequence[float]) -> None:
        """From now on other traffic takes so many bytes/s of each link, flows have what is left."""
        self._background[:-1] = np.minimum(rates, self.capacity[:-1])
        self._free = self.capacity - self._background
        self._small, self.stale = None, True

    def use_queues(self, buffers: Floats) -> NDArray[np.void]:
        """From now on links have queues, and flows are paced in small steps: see queues.py.
        `buffers`: bytes, float64[L]. Returns KERNEL[F], to be filled in."""
        self._queues = Queues(self, buffers)
        self.kernel = self._queues.kernel
        return self.kernel

    @property
    def queued(self) -> bool:
        """Links have queues: rates are what moved in the last step."""
        return self._queues is not None

    def share(self) -> None:
        """Find all rates anew if anything has changed."""
        if self.stale and self._queues is None:
            if self._small is None:
                # In a large network few flows are active, on few links.
                paths, crossed = self.paths[self.live], np.zeros(len(self.capacity), np.bool_)
                crossed[paths] = crossed[-1] = True
                self._small = (np.cumsum(crossed, dtype=np.int32) - 1)[paths]
                self._capacities = self._free[crossed]
            fluid.share(
                self.table,
                self.live,
                self._small,
                self._capacities,
                self._first,
                self._preds,
                self._work,
            )
            self.stale = False

    def next_event(self) -> int:
        """In how many ns something happens by itself; 2**62: nothing does."""
        if self._queues is not None:
            return STEP if len(self.live) else 1 << 62
        seconds = fluid.until_next(self.table, self.live, self._first, self._preds)
        if seconds > 1e9:
            return 1 << 62
        # Never early: a byte that is left would be an event of its own.
        return max(math.ceil(seconds * SECOND), 1)

    def advance(self, elapsed: Nanos) -> list[int]:
        """So much time passes, in which nothing happens before its end; returns the flows of which
        an iteration has arrived then."""
        self.other += self._background * (elapsed / SECOND)
        if self._queues is not None:
            n = self._queues.advance(self, elapsed)
        else:
            n = fluid.advance(
                self.table, self.live, elapsed / SECOND, self.paths, self.carried, self.at
            )
        arrived: list[int] = self.at[:n].tolist()
        if arrived:
            self.live = self.live[self.rows["active"][self.live]]
            self._small = None
        return arrived
