# SPDX-License-Identifier: Apache-2.0
"""Tells when a schedule has stopped going anywhere, instead of waiting for ever."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowslot.policy.base import Bools, Floats

LIVELOCK_SLOTS = 10
"""The horizon: a plan may leave its first K - 1 slots empty, and with the literal cost often does.
Whatever was planned when a flow last moved has run out after K slots, so that only planning again
and again to wait explains more."""
STARVED_SLOTS = 50
"""Five horizons, 3 s of 60 ms: the longest phase of the evaluated jobs (1.2 GB at 10 Gbit/s) takes
16 slots, so a flow that gets nothing for so long was passed over by three or more of them."""
PROGRESS_BYTES = 1.0
"""Less than this is rounding, not progress."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A failure to be reported: ready flows that do not move.

    `livelock`: no ready flow of all that were fed does. `starvation`: these do not while others do.
    `since`: the first slot without progress of all of `flows`; `slot`: when it was found.
    """

    kind: Literal["livelock", "starvation"]
    flows: tuple[int, ...]
    since: int
    slot: int


@dataclass(slots=True)
class _Wait:
    """A ready flow: its bytes left when it last moved (or was first seen), the first slot after."""

    remaining: float
    since: int
    reported: bool = False


class LivelockDetector:
    """Fed once per slot with all flows; reports each episode once."""

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}
        self._slot: int | None = None
        self.moved_at = 0
        """The last slot in which a flow moved, or none was ready."""
        self._reported = False

    def feed(
        self, slot: int, flows: Sequence[int], remaining: Floats, ready: Bools
    ) -> tuple[Stall, ...]:
        """Take the state of F flows at the end of slot `slot`; what is found wrong, mostly ().

        `flows`: identifiers [F]. `remaining`: bytes, float64[F]; more than before: a new iteration,
        which is progress. `ready`: in its communication phase, bool[F]; a flow that waits for its
        predecessor's bytes is ready, or a ring of which all wait would not be seen. What a flow
        did in slots that were not fed counts for the slot that is. Raises ValueError when a slot is
        fed twice or out of order.
        """
        if self._slot is not None and slot <= self._slot:
            raise ValueError(f"slot {slot} was fed after {self._slot}")
        left: list[float] = np.asarray(remaining, dtype=np.float64).tolist()
        rows = zip(map(int, flows), left, ready.tolist(), strict=True)
        here = {flow: (bytes_left, is_ready) for flow, bytes_left, is_ready in rows}
        moved = self._follow(slot, here)
        if moved or not self._waits or self._slot is None:
            self.moved_at, self._reported = slot, False
        self._slot = slot
        stall = self._livelock(slot) if self.moved_at < slot else self._starvation(slot)
        return () if stall is None else (stall,)

    def _follow(self, slot: int, here: dict[int, tuple[float, bool]]) -> bool:
        """Bring the waits up to date; whether any flow moved or ended."""
        moved = False
        for flow in list(self._waits):
            left, is_ready = here.get(flow, (0.0, False))
            if left <= 0.0 or not is_ready:
                moved = moved or left <= 0.0
                del self._waits[flow]
        for flow, (left, is_ready) in here.items():
            if left <= 0.0 or not is_ready:
                continue
            wait = self._waits.get(flow)
            if wait is None:
                self._waits[flow] = _Wait(left, slot + 1)
            elif not wait.remaining - PROGRESS_BYTES < left <= wait.remaining:
                self._waits[flow] = _Wait(left, slot + 1)
                moved = True
        return moved

    def _livelock(self, slot: int) -> Stall | None:
        if self._reported or slot - self.moved_at < LIVELOCK_SLOTS:
            return None
        self._reported = True
        return Stall("livelock", tuple(sorted(self._waits)), self.moved_at + 1, slot)

    def _starvation(self, slot: int) -> Stall | None:
        """Only asked for when others move: in a livelock it is no news that one flow does not."""
        starved = {
            flow: wait
            for flow, wait in self._waits.items()
            if slot - wait.since + 1 >= STARVED_SLOTS and not wait.reported
        }
        if not starved:
            return None
        for wait in starved.values():
            wait.reported = True
        since = max(wait.since for wait in starved.values())
        return Stall("starvation", tuple(sorted(starved)), since, slot)
