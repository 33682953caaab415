# SPDX-License-Identifier: Apache-2.0
"""From what is seen of running jobs to who is held back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowslot.policy.cassini.drift import Drift
from flowslot.policy.cassini.profile import LONGEST_NS, Profile, alone
from flowslot.policy.cassini.shifts import Settings, plan

MEASURED = 2
"""Computations that are seen before a job takes part. The first one does not count: the end before
it is noticed late, while daemons have yet to learn what an iteration is, and it seems too short."""
SMOOTHING = 0.25
"""Weight of the latest."""
CHANGED = 0.1
"""Part of an iteration by which a job's phases may differ from those planned with."""
MEASURING = Settings(tolerance=0.05)
"""Equal jobs are not measured as equal: computations vary. Drift holds nobody to rounded times."""
HELD_NS = 5_000_000
"""What starts no later than this after it might was held back: its wait says nothing about how
long it computes."""


@dataclass(slots=True)
class Seen:
    """Of a job. `idle`: from its last byte to its next one, as measured while nobody held it back,
    ns; `samples` of it. `after`: what was said last, 0: nothing."""

    sent: dict[int, float] = field(default_factory=dict)
    start: int = 0
    end: int | None = None
    idle: float = 0.0
    samples: int = 0
    after: int = 0
    planned: Profile | None = None


class Coordinator:
    """Of one contention domain. `capacity`: payload bytes/s of each of its links; more may be added
    to it later. Times in ns of any one clock. Never raises for what jobs do: of a job that it does
    not understand it says nothing."""

    def __init__(self, capacity: Mapping[int, float], settings: Settings = MEASURING) -> None:
        self._capacity = capacity
        self._settings = settings
        self._jobs: dict[str, Seen] = {}
        self._drift: Drift | None = None
        self._news: dict[str, int] = {}
        self._stale = False  # jobs of the plan have gone
        self.plans = 0
        """So often shifts were computed."""

    def started(self, job: str, now: int, sent: Mapping[int, float]) -> None:
        """The job begins to send. `sent`: bytes of this iteration on each link of the domain;
        empty: as last."""
        seen = self._jobs.setdefault(job, Seen())
        if seen.end is not None:
            self._measure(seen, now)
        if sent:
            seen.sent = dict(sent)
        seen.start, seen.end = now, None
        if self._drift is not None:
            self._drift.started(job, now)

    def ended(self, job: str, now: int) -> None:
        """It has sent everything, and computes."""
        seen = self._jobs.get(job)
        if seen is None or seen.end is not None or now < seen.start:
            return
        if self._stale:
            self._plan()
        seen.end = now
        if self._outdated(job, seen):
            self._plan(job)
        if self._drift is None:
            return
        seen.after = 0
        for held, after in self._drift.ended(job, now).items():
            self._news[held] = self._jobs[held].after = after

    def gone(self, job: str) -> None:
        """It is no more. There is a new plan when another one ends: many may go at once."""
        seen = self._jobs.pop(job, None)
        self._news.pop(job, None)
        if seen is not None and seen.planned is not None:
            self._stale = True

    def changed(self) -> dict[str, int]:
        """Holds that are new since the last call: of each such job, how long after the start
        reported last its next one is to come, at the earliest; 0: whenever it likes, after all."""
        news, self._news = self._news, {}
        return news

    def _measure(self, seen: Seen, now: int) -> None:
        """It has computed until now."""
        assert seen.end is not None
        idle = now - seen.end
        held = seen.after > 0 and now <= seen.start + seen.after + HELD_NS
        if held or not 0 <= idle < LONGEST_NS:
            return
        seen.samples += 1
        seen.idle += (idle - seen.idle) * (SMOOTHING if seen.samples > MEASURED else 1.0)

    def _outdated(self, job: str, seen: Seen) -> bool:
        """What is planned with is not what the job does."""
        if seen.samples < MEASURED:
            return False
        profile = self._profile(job, seen)
        old = seen.planned
        if profile is None or old is None:
            return profile is not old
        near = CHANGED * old.period_ns
        return (
            abs(profile.period_ns - old.period_ns) > near
            or abs(profile.phases[0].length_ns - old.phases[0].length_ns) > near
            or profile.links.keys() != old.links.keys()
        )

    def _profile(self, job: str, seen: Seen) -> Profile | None:
        profile = alone(job, round(seen.idle), seen.sent, self._capacity)
        return profile if profile is not None and profile.period_ns <= LONGEST_NS else None

    def _plan(self, ending: str = "") -> None:
        """Anew, with what is known by now. Jobs that had a place keep it; job `ending` is
        about to be said to have ended, and gets one."""
        profiles = []
        old = {job for job, seen in self._jobs.items() if seen.planned is not None} - {ending}
        for job, seen in self._jobs.items():
            seen.planned = self._profile(job, seen) if seen.samples >= MEASURED else None
            if seen.planned is not None:
                profiles.append(seen.planned)
        self._drift = Drift(
            profiles, self._capacity, plan(profiles, self._capacity, self._settings)
        )
        for one in profiles:
            seen = self._jobs[one.job]
            end = None if one.job == ending else seen.end
            until = seen.start + seen.after
            self._drift.resume(one.job, seen.start, end, until, one.job in old)
        self.plans, self._stale = self.plans + 1, False
