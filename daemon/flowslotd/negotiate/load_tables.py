# SPDX-License-Identifier: Apache-2.0
"""The I/O around `Reserving`: makes its calls to switch processes, one round after the other.

The slot loop is never waited for, nor does it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from flowslot.model.units import SECOND, Nanos
from flowslot.policy.mlcc import Dependency
from flowslot.policy.mlcc.planner import Feedback, Fetch, Reserve, Reserving
from flowslotd.clock import monotonic
from flowslotd.metrics import Durations

if TYPE_CHECKING:  # without switch processes a daemon does without gRPC
    from flowslotd.negotiate.feedback_grpc import GrpcRemote

OnPlanned = Callable[[Nanos], None]
OnBug = Callable[[str, BaseException], None]
_log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """A switch process does not answer, in time or in a way that makes sense; says why."""


class FeedbackClient:
    """Runs the rounds of one `Reserving`. `on_planned`: its rates have changed."""

    def __init__(
        self,
        policy: Reserving,
        remotes: Sequence[GrpcRemote],
        *,
        dependencies: Callable[[Nanos], Mapping[int, Dependency]],
        on_planned: OnPlanned,
        on_bug: OnBug,
    ) -> None:
        """`remotes`: as `policy` numbers switch processes."""
        self.livelocks = self.starvations = 0
        self.last_error = ""
        self._policy = policy
        self._remotes = remotes
        self._dependencies = dependencies
        self._on_planned = on_planned
        self._on_bug = on_bug
        self._round_trip = Durations()
        """From asking for the load tables to the last of them."""
        self._settled = Durations()
        """From there to the end of the round."""
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
        await asyncio.gather(*map(self._reserve, self._policy.end(monotonic())))
        for remote in self._remotes:
            await remote.close()

    @property
    def grpc_connections(self) -> int:
        """Open connections to switch processes."""
        return sum(remote.connected for remote in self._remotes)

    def describe(self) -> dict[str, object]:
        """For `flowslot status`."""
        counts = self._policy.counts
        return {
            "switches": [
                {"switch": remote.switch, "live": remote.connected} for remote in self._remotes
            ],
            "rounds": counts.rounds,
            "late": counts.late,
            "undone": counts.undone,
            "livelocks": self.livelocks,
            "starvations": self.starvations,
            "round_trip": self._round_trip.summary(),
            "settled": self._settled.summary(),
            "error": self.last_error,
        }

    def reservations(self) -> dict[str, int]:
        """See RateSource; scheduled: accepted by all switch processes of their path."""
        counts = self._policy.counts
        return {
            "granted": 0,
            "scheduled": counts.accepted,
            "refused": counts.refused,
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
                while self._policy.wanted:
                    await self._round()
            except Exception as error:  # ours; flows are let go as of a switch without answer
                self._on_bug("feedback", error)

    async def _round(self) -> None:
        began = monotonic()
        fetches = self._policy.begin(began)
        answers = await asyncio.gather(*map(self._fetch, fetches))
        fetched = monotonic()
        self._round_trip.add(fetched - began)
        calls = self._policy.plan(fetched, answers, self._dependencies(fetched))
        if calls is None:
            return
        if calls:
            self._on_planned(monotonic())
        while calls:
            accepted = await asyncio.gather(*map(self._reserve, calls))
            calls = self._policy.reserved(monotonic(), accepted)
        self._on_planned(monotonic())
        self._settled.add(monotonic() - fetched)

    async def _fetch(self, call: Fetch) -> Feedback | None:
        remote = self._remotes[call.switch]
        try:
            return await remote.fetch(call.links, _left_s(call.until))
        except NoAnswer as error:
            self._silent(remote, error)
            return None

    async def _reserve(self, call: Reserve) -> bool | None:
        remote, left_s = self._remotes[call.switch], _left_s(call.until)
        if left_s <= 0.0:
            return False  # no time left: as if it were refused
        try:
            return await remote.update(call.update, left_s)
        except NoAnswer as error:
            self._silent(remote, error)
            return None

    # --- what is said of it

    def _silent(self, remote: GrpcRemote, error: NoAnswer) -> None:
        text = f"switch process {remote.switch}: {error}"
        if text != self.last_error:
            _log.warning("%s", text)
        self.last_error = text

    def _report_stalls(self) -> None:
        for stall in self._policy.stalls:
            n, slots = len(stall.flows), stall.slot - stall.since + 1
            if stall.kind == "livelock":
                self.livelocks += 1
                text = f"livelock: none of {n} flows with bytes to send moved for {slots} slots"
            else:
                self.starvations += 1
                text = f"starvation: {n} flows did not move for {slots} slots while others did"
            _log.error("%s", text)
            self.last_error = text
        self._policy.stalls.clear()


def _left_s(until: Nanos) -> float:
    return (until - monotonic()) / SECOND
