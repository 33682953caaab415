# SPDX-License-Identifier: Apache-2.0
"""What records of packets (`tap`) say: how far a flow's bytes are, and when a link was busy."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowslot_lab.tap import RECORD, Records
from flowslot_scenario.budget import Floats

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Steps:
    """A quantity that changes at moments: `values[i]` from `at[i]` (ns) on; before, `first`."""

    at: Ints
    values: Floats
    first: float = 0.0

    def on(self, moments: Ints) -> Floats:
        """Its values then."""
        i = np.searchsorted(self.at, moments, "right") - 1
        if not len(self.at):
            return np.full(len(moments), self.first)
        return np.where(i < 0, self.first, self.values[i])

    def reaches(self, value: float) -> int | None:
        """When it is first so large, if it only grows; None: never."""
        i = int(np.searchsorted(self.values, value))
        return int(self.at[i]) if i < len(self.at) else None


NOTHING = Steps(np.zeros(0, np.int64), np.zeros(0))


def key_of(src: int, dst: int, sport: int, dport: int) -> int:
    """What a flow is called in `by_flow`; addresses by their last bytes."""
    return src << 40 | dst << 32 | sport << 16 | dport


def by_flow(records: Records) -> dict[int, Records]:
    """Packets by the flow that they are of."""
    if not len(records):
        return {}
    src, dst, sport, dport = (
        records[name].astype(np.int64) for name in ("src", "dst", "sport", "dport")
    )
    key = src << 40 | dst << 32 | sport << 16 | dport  # as key_of
    order = np.argsort(key, kind="stable")
    records, key = records[order], key[order]
    cuts = np.flatnonzero(np.diff(key)) + 1
    firsts = np.concatenate(([0], cuts))
    return dict(zip(key[firsts].tolist(), np.split(records, cuts), strict=True))


def positions(numbers: npt.NDArray[np.uint32], base: int) -> Ints:
    """Sequence numbers as bytes after `base`, beyond 2**32 too."""
    if not len(numbers):
        return np.zeros(0, np.int64)
    first = (int(numbers[0]) - base + 2**31) % 2**32 - 2**31
    steps = np.diff(numbers).astype(np.uint32).view(np.int32).astype(np.int64)
    return np.concatenate(([first], first + np.cumsum(steps)))


def in_order(starts: Ints, ends: Ints) -> Ints:
    """Up to where bytes have come without a hole, after each packet. What precedes the first byte
    seen, or byte 0, has come."""
    have, later = max(min(starts.tolist(), default=0), 0), list[tuple[int, int]]()
    found = np.empty(len(starts), np.int64)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start > have:
            heapq.heappush(later, (start, end))
        else:
            have = max(have, end)
            while later and later[0][0] <= have:
                have = max(have, heapq.heappop(later)[1])
        found[i] = have
    return found


def growing(at: npt.NDArray[np.uint64], bytes_: Ints, first: float = 0.0) -> Steps:
    """The furthest so far, at these moments."""
    return Steps(at.astype(np.int64), np.maximum.accumulate(bytes_).astype(np.float64), first)


NO_PACKETS = np.zeros(0, RECORD)


def passed(at: Ints, takes: Floats, most: float) -> Floats:
    """When packets had passed a link, ns. They came out `at`, in order; each occupies the link for
    `takes`. That is `at`, or up to `most` earlier where the next ones followed too fast."""
    sums = np.cumsum(takes)
    latest = np.minimum.accumulate((at - sums)[::-1])[::-1] + sums
    return np.asarray(np.maximum(latest, at - most), np.float64)


def shares(ends: Floats, takes: Floats, edges: Ints) -> Floats:
    """The part of the time between each two edges that these packets take, up to their ends; more
    than 1 where they overlap."""
    if not len(ends):
        return np.zeros(len(edges) - 1)
    sums = np.cumsum(takes)
    moments = np.maximum.accumulate(np.stack((ends - takes, ends), 1).ravel())
    taken = np.interp(edges, moments, np.stack((sums - takes, sums), 1).ravel())
    return np.asarray(np.diff(taken) / np.diff(edges), np.float64)
