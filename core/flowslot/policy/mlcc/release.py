# SPDX-License-Identifier: Apache-2.0
"""Takes the reservations of flows that do not use them, and lets them try again.

Ring flows that wait for their predecessors hold reservations that the predecessors need: nobody
can go on. Whoever sent nothing in a slot in which it had a rate therefore pauses: it keeps no later
slot. What a pause is for cannot be seen from here (a flow that has become able to send but finds
every slot reserved looks the same), so pauses end by themselves, and double when they were right.
"""

from collections.abc import Container

LONGEST = 8
"""Slots; below the horizon, so that a flow that may send again is never put off for a whole one."""


class Pauses:
    """Which flows pause until when."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._until: dict[int, int] = {}

    def observe(self, flow: int, rate: float, sent: float, slot: int) -> None:
        """The flow had `rate` (payload bytes/s) in `slot`, and sent so many bytes in it."""
        if sent > 0.0:
            self._lengths.pop(flow, None)
            self._until.pop(flow, None)
        elif rate > 0.0 and self._until.get(flow, slot) <= slot:
            length = min(2 * self._lengths[flow], LONGEST) if flow in self._lengths else 1
            self._lengths[flow] = length
            self._until[flow] = slot + 1 + length

    def paused(self, flow: int, slot: int) -> bool:
        """Whether the flow keeps to the current slot in `slot`."""
        return slot < self._until.get(flow, slot)

    def keep(self, flows: Container[int]) -> None:
        """Forget all but these."""
        for flow in [f for f in self._lengths if f not in flows]:
            del self._lengths[flow], self._until[flow]
