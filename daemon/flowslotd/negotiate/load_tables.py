# SPDX-License-Identifier: Apache-2.0
"""Fetches load tables and sends schedules for policies that plan: the I/O around `Reserving`.

One task, one round after the other; the slot loop is never waited for, nor does it wait. A round
ends before the slot is over, whatever the switch processes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.mlcc import Dependency, Update
from flowslot.policy.mlcc.planner import Feedback, Reserving
from flowslotd.clock import monotonic
from flowslotd.metrics import Durations

ROUND_PART = 0.8
"""Of a slot: a round that takes longer gives up what it has not sent yet."""
FETCH_PART = 0.4
"""Of a slot: load tables that take longer are too old to plan with."""
AGAIN = 3
"""Rounds in a row when schedules are refused; then the next slot is waited for."""

OnPlanned = Callable[[Nanos], None]
OnBug = Callable[[str, BaseException], None]
_log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """A switch process does not answer, in time or in a way that makes sense; says why."""


class Remote(Protocol):
    """The two unary calls of a switch process. Both raise NoAnswer."""

    switch: str
    held: frozenset[int]
    """Its links, by index in the topology."""

    async def fetch(self, links: Sequence[int], timeout_s: float) -> Feedback:
        """Load of these links of its own."""
        ...

    async def update(self, update: Update, links: Sequence[int], timeout_s: float) -> bool:
        """Reserve on these links of its own; False: refused, nothing has changed there."""
        ...

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        ...

    async def close(self) -> None:
        """Let the connection go."""
        ...


@dataclass(slots=True)
class FeedbackStats:
    """What the rounds have brought, since the policy was put in place."""

    rounds: int = 0
    late: int = 0
    """Rounds without a decision: a load table did not come in time."""
    accepted: int = 0
    refused: int = 0
    undone: int = 0
    """Schedules taken back because another switch process of the path refused them."""
    livelocks: int = 0
    starvations: int = 0
    last_error: str = ""


class FeedbackClient:
    """Runs the rounds of one `Reserving`. `on_planned`: its decisions have changed."""

    def __init__(
        self,
        policy: Reserving,
        remotes: Sequence[Remote],
        slot_ns: Nanos,
        *,
        dependencies: Callable[[Nanos], Mapping[int, Dependency]],
        on_planned: OnPlanned,
        on_bug: OnBug,
    ) -> None:
        self.stats = FeedbackStats()
        self._policy = policy
        self._remotes = remotes
        self._slot_s = slot_ns / SECOND
        self._dependencies = dependencies
        self._on_planned = on_planned
        self._on_bug = on_bug
        self._round_trip = Durations()
        """From asking for the load tables to the last of them."""
        self._settled = Durations()
        """From there to the end of the round."""
        self._held: dict[int, Update] = {}
        """The last update of each flow that all its switch processes accepted."""
        self._failed: set[str] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """A round is wanted."""
        self._wake.set()

    async def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End; reservations are taken back as far as the switch processes answer."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        until = self._now_s() + self._slot_s
        ends = [replace(held, rates=0.0 * held.rates) for held in self._held.values()]
        await asyncio.gather(*(self._send(end, until) for end in ends))
        for remote in self._remotes:
            await remote.close()

    @property
    def grpc_connections(self) -> int:
        """Open connections to switch processes."""
        return sum(remote.connected for remote in self._remotes)

    def describe(self) -> dict[str, object]:
        """For `flowslot status`."""
        stats = self.stats
        return {
            "switches": [
                {"switch": remote.switch, "live": remote.connected} for remote in self._remotes
            ],
            "rounds": stats.rounds,
            "late": stats.late,
            "undone": stats.undone,
            "livelocks": stats.livelocks,
            "starvations": stats.starvations,
            "round_trip": self._round_trip.summary(),
            "settled": self._settled.summary(),
            "error": stats.last_error,
        }

    def reservations(self) -> dict[str, int]:
        """See RateSource; scheduled: accepted by all switch processes of their path."""
        stats = self.stats
        return {
            "granted": 0,
            "scheduled": stats.accepted,
            "refused": stats.refused,
            "preempted": 0,
            "expired": 0,
        }

    # --- rounds

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                self._report_stalls()
                for _ in range(AGAIN):
                    if not await self._round():
                        break
            except Exception as error:  # ours; flows are let go as of a switch without answer
                self._on_bug("feedback", error)

    async def _round(self) -> bool:
        """Fetch, plan, send. True: some of it was refused, so do it again."""
        until = self._now_s() + ROUND_PART * self._slot_s
        self.stats.rounds += 1
        self._failed = set()
        links, began = self._policy.links(), monotonic()
        parts = self._by_switch(links)
        answers = await asyncio.gather(*(self._fetch(remote, parts[remote]) for remote in parts))
        feedback = [answer for answer in answers if answer is not None]
        fetched = monotonic()
        self._round_trip.add(fetched - began)
        updates = self._policy.plan(fetched, feedback, self._dependencies)
        if updates is None:
            self.stats.late += 1
            self._answered(parts)
            return False
        refused = list(updates)  # until the contrary is known
        try:
            self._on_planned(monotonic())
            refused = await self._send_all(updates, until)
        finally:
            again = self._policy.settle(refused)
        self._answered(parts)
        self._on_planned(monotonic())
        self._settled.add(monotonic() - fetched)
        return again

    def _answered(self, parts: dict[Remote, list[int]]) -> None:
        for remote, links in parts.items():
            if remote.switch not in self._failed:
                self._policy.answered(monotonic(), links)

    async def _fetch(self, remote: Remote, links: list[int]) -> Feedback | None:
        try:
            return await remote.fetch(links, FETCH_PART * self._slot_s)
        except NoAnswer as error:
            self._silent(remote, error)
            return None

    async def _send_all(self, updates: Sequence[Update], until: float) -> list[Update]:
        """Returns those that are not in force.

        What is given back goes first. The others are begun in their order, who needs least first,
        and not waited for one by one, which would take as many round trips: should they overtake
        each other, only a preference is lost.
        """
        refused: list[Update] = []
        back = [update for update in updates if update.key == 0.0]
        more = [update for update in updates if update.key != 0.0]
        for part in (back, more):
            accepted = await asyncio.gather(*(self._send(update, until) for update in part))
            refused += [update for update, ok in zip(part, accepted, strict=True) if not ok]
        return refused

    async def _send(self, update: Update, until: float) -> bool:
        """Reserve on all links of the path, or on none."""
        parts = self._by_switch(update.links)
        tried = (self._update(remote, update, links, until) for remote, links in parts.items())
        accepted = await asyncio.gather(*tried)
        if all(accepted):
            self.stats.accepted += bool(parts)
            self._held[update.flow] = update
            if not update.rates.any():
                del self._held[update.flow]
            return True
        self.stats.refused += 1
        before = self._held.get(update.flow, replace(update, rates=0.0 * update.rates))
        for (remote, links), ok in zip(parts.items(), accepted, strict=True):
            if ok:
                # Less than it has just accepted, unless the policy does not give back first: then
                # it may be refused, and what is too much there ends with the next update.
                self.stats.undone += 1
                await self._update(remote, before, links, until)
        return False

    async def _update(self, remote: Remote, update: Update, links: list[int], until: float) -> bool:
        left = until - self._now_s()
        if left <= 0.0:
            return False  # no time left: as if it were refused
        try:
            return await remote.update(update, links, left)
        except NoAnswer as error:
            self._silent(remote, error)
            return False

    def _by_switch(self, links: Sequence[int]) -> dict[Remote, list[int]]:
        """Which of these links each switch process holds."""
        parts = {r: [link for link in links if link in r.held] for r in self._remotes}
        return {remote: mine for remote, mine in parts.items() if mine}

    # --- what is said of it

    def _silent(self, remote: Remote, error: NoAnswer) -> None:
        self._failed.add(remote.switch)
        text = f"switch process {remote.switch}: {error}"
        if text != self.stats.last_error:
            _log.warning("%s", text)
        self.stats.last_error = text

    def _report_stalls(self) -> None:
        for stall in self._policy.stalls:
            n, slots = len(stall.flows), stall.slot - stall.since + 1
            if stall.kind == "livelock":
                self.stats.livelocks += 1
                text = f"livelock: none of {n} flows with bytes to send moved for {slots} slots"
            else:
                self.stats.starvations += 1
                text = f"starvation: {n} flows did not move for {slots} slots while others did"
            _log.error("%s", text)
            self.stats.last_error = text
        self._policy.stalls.clear()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
