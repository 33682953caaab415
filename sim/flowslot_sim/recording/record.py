# SPDX-License-Identifier: Apache-2.0
"""Spans of time, and how much of each link was used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flowslot.model.units import SECOND
from flowslot.policy.base import Floats

MOST = 512
"""Bins of time; when there are more, they become twice as long."""
BIN_NS = 15_000_000
"""The shortest: a quarter of a slot."""


class Use:
    """Bytes that links have carried by the edges of bins. `capacity`: float64[L], bytes/s."""

    def __init__(self, capacity: Floats) -> None:
        self.capacity, self.bin_ns = capacity, BIN_NS
        self._edges = np.zeros((MOST + 1, len(capacity)))
        self._n, self._at, self._carried = 1, 0, np.zeros(len(capacity))

    def feed(self, now: int, carried: Floats) -> None:
        """Until `now`, ns, links have carried so many bytes, float64[L]. What is new came evenly
        since the last call."""
        while now > self.bin_ns * MOST:
            kept = self._edges[: self._n : 2].copy()
            self._n, self.bin_ns = len(kept), self.bin_ns * 2
            self._edges[: self._n] = kept
        last = now // self.bin_ns
        if last >= self._n:
            edges = np.arange(self._n, last + 1) * self.bin_ns
            part = (edges - self._at) / (now - self._at)
            self._edges[self._n : last + 1] = self._carried + part[:, None] * (
                carried - self._carried
            )
            self._n = last + 1
        self._at, self._carried = now, carried.copy()

    def shares(self) -> tuple[Floats, Floats]:
        """Edges of B bins, s, float64[B + 1], and the part of each link's capacity that was used in
        each, float64[B, L]. A last bin that is not full is left out."""
        edges = np.arange(self._n) * self.bin_ns / SECOND
        used = np.diff(self._edges[: self._n], axis=0)
        return edges, used / (self.capacity * self.bin_ns / SECOND)


class Span(NamedTuple):
    """`name` went on from `begins` to `ends`, ns, on a `track` (a job, a GPU, a flow) of a `group`
    (a host)."""

    group: str
    track: str
    name: str
    begins: int
    ends: int


class Recording:
    """Of one run, over links with these names and capacities (payload bytes/s)."""

    def __init__(self, links: Sequence[str], capacity: Floats) -> None:
        self.links = tuple(links)
        self.use = Use(capacity)
        self.spans: list[Span] = []

    def add(self, group: str, track: str, name: str, begins: int, ends: int) -> None:
        """A span; one that did not last is left out."""
        if ends > begins:
            self.spans.append(Span(group, track, name, begins, ends))
