# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""A fair run from event to event. Compiled (types: fluid.pxd); interpreted, it does the same.

F flows, G aggregates, J jobs, L links, C cells (see JobLinks); arrays over links have L + 1
entries, of which the last one counts for nothing. `paths`: int32[G, H], padded with L; `job`:
int64[G]; `volume`, float64[G]: bytes per iteration; `need`, float64[C]: the same by job and link.
Times are ns, rates payload bytes/s.
"""

import math
from typing import Any

import numpy as np

from flowslot.policy.base import Bools, Floats, Ints, Keys, Paths, Rows
from flowslot.policy.fill import weighted
from flowslot.policy.job_links import JobLinks

COMPILED = not __file__.endswith(".py")

JOB = np.dtype(
    [
        ("now", np.float64),  # how far the reference has come with it
        ("runs", np.bool_),  # enough is known of the job
        ("lead", np.int64),  # iterations that the reference has ended more than the real job
        ("sends", np.bool_),  # in the reference; or else it computes
        ("under_way", np.int64),  # aggregates that have not sent all of the reference's iteration
        ("until", np.float64),  # when the reference's computation ends
        ("compute", np.float64),  # ns, that of the aggregate that computes for the shortest time
        # Of the real job, since its last iteration was counted:
        ("active", np.bool_),  # an aggregate has begun
        ("anew", np.bool_),  # the reference has begun anew, or has to
        ("counted", np.float64),  # when the last one was counted; 0: none, or it has paused since
        ("takes", np.float64),  # ns from one to the next, smoothed; 0: unknown
    ]
)
MOST_WORK = 1_000_000
"""Visits to aggregates on links, from one look to the next: some milliseconds. After more, what is
left of the time is left out: many tiny iterations are not worth what they cost."""
PAUSE, PAUSE_NS = 3.0, 100e6
"""A job that computes for so many times longer than usual, and by so much, has paused: that is none
of our doing, and the reference begins anew together with the job."""
SAME_NS = 10e6
"""An aggregate that began later than was known by more than this is in another iteration."""
LEAST_NS = 100e3
"""No computation is shorter in the reference: thousands of iterations between two looks say
nothing."""
SMOOTHING = 0.25
"""Weight of the latest observation in the times of a computation and of an iteration."""

# The same as C variables: fluid.pxd declares them.
_most_work, _inf, _second, _rounding = MOST_WORK, math.inf, 1e9, 1e-9
_pause, _pause_ns, _least_ns, _smoothing, _same = PAUSE, PAUSE_NS, LEAST_NS, SMOOTHING, SAME_NS

_UNKNOWN = np.zeros(1, JOB)


def grown(rows: Any, n: int) -> Any:
    """An array with at least `n` rows."""
    more = max(n - len(rows), 0)
    return np.append(rows, np.zeros(2 * more, rows.dtype)) if more else rows


def typed(rows: Any) -> Any:
    """JOB[n] for loops. To type it takes longer than most of these."""
    same = rows if COMPILED else rows.view(np.recarray)
    return same


def end_of(numbers: Rows) -> int:
    """The largest one, and 1 more; 0: there is none."""
    end = 0
    for k in range(len(numbers)):
        end = max(end, numbers[k] + 1)
    return end


def find_new(keys: Keys, turns: Ints, new: Bools) -> int:
    """Which of these have other turns than `turns`, int64[at least as many as the largest number],
    says; it says the same afterwards. `new`: bool[N], all False before. Returns how many."""
    numbers, now, n = keys.numbers, keys.turns, 0
    for k in range(len(numbers)):
        if turns[numbers[k]] != now[k]:
            turns[numbers[k]], new[k] = now[k], True
            n += 1
    return n


def sum_up(  # noqa: PLR0917
    cells: JobLinks,
    of: Ints,
    job: Ints,
    remaining: Floats,
    following: Floats,
    sockets: Floats,
    sums: Floats,
    member: Rows,
    need: Floats,
) -> None:
    """What each aggregate sends in an iteration. By flow: its aggregate (`of`) and `job`; bytes
    `remaining`, those of the `following` iteration (0: unknown), and `sockets`. All zero before:
    `sums`, float64[3, G]: bytes, sockets that have some, and the bytes as a part of those on the
    job's busiest link; `member`, intp[G]: one of its flows; `need`: bytes by job and link."""
    for i in range(len(of)):
        member[of[i]] = i
        size = following[i] if following[i] > 0 else remaining[i]
        if size > 0 and cells.cell[i, 0] >= 0:
            sums[0, of[i]] += size
            sums[1, of[i]] += sockets[i]
            cells.add(i, size, need)
    for k in range(len(member)):
        j, most = job[member[k]], 0.0
        for c in range(cells.start[j], cells.start[j + 1]):
            most = max(most, need[c])
        sums[2, k] = sums[0, k] / most if most > 0 else sums[0, k]


def meets(cells: JobLinks, need: Any, k: int, uses: Any) -> bool:
    """Whether a job sends on a link that `uses`, intp[L], is not 0 for."""
    for c in range(cells.start[k], cells.start[k + 1]):
        if need[c] > 0 and uses[cells.link[c]]:
            return True
    return False


class Run:
    """One fair run. `slack`: time passes so many times slower in it.

    From `begin` to `end` it is about some of the jobs: `jobs`, JOB[J]. By aggregate, float64[G]:
    `left`, the part of the iteration that is not sent yet, `speed`, the part of it that is sent per
    ns, and room for what `advance` works with. To make arrays takes longer than most loops. Of the
    real communication: when it has `begun` (NaN: it does not send), when it `ended` last (NaN:
    never), whether that was after the job's last iteration was counted (`over`, 1 or 0), and how
    long it computes, from its end to its next beginning, smoothed (`rests`, ns; NaN: unknown).
    """

    def __init__(self, slack: float) -> None:
        self.slack, self.now = slack, 0.0
        self.all_rows, self.unknown = np.zeros(0, JOB), typed(_UNKNOWN)
        self.all_jobs, self.all_left = typed(self.all_rows), np.zeros(0)
        self.all_real = np.zeros((0, 4))
        self.room = typed(np.zeros(0, JOB))
        self.floats, self.sending = np.zeros(0), np.zeros(0, np.intp)

    def begin(  # noqa: PLR0917
        self, now: float, jobs: Keys, gone: Bools, others: Bools, aggregates: Keys, new: Bools
    ) -> None:
        """Look at these jobs and aggregates. Which of them were `gone` for a while (those stood
        still), are `others` than before, or are `new`: bool[J], bool[J], bool[G]."""
        self.numbers, self.aggregates = jobs.numbers, aggregates.numbers
        if end_of(self.numbers) > len(self.all_jobs):
            self.all_rows = grown(self.all_rows, end_of(self.numbers))
            self.all_jobs = typed(self.all_rows)
        if len(self.numbers) > len(self.room):
            self.room = typed(np.zeros(2 * len(self.numbers), JOB))
        self.jobs = self.room[: len(self.numbers)]
        for k in range(len(self.numbers)):
            self.jobs[k] = self.all_jobs[self.numbers[k]]
            if others[k]:
                self.jobs[k] = self.unknown[0]
            if gone[k]:
                self.jobs[k].now = now / self.slack
                self.jobs[k].active, self.jobs[k].anew = False, True
                self.jobs[k].counted = 0.0
        if end_of(self.aggregates) > len(self.all_left):
            self.all_left = grown(np.asarray(self.all_left), end_of(self.aggregates))
            # What this repeats is of new ones, and not read.
            self.all_real = np.resize(np.asarray(self.all_real), (len(self.all_left), 4))
        n = len(self.aggregates)
        if n > len(self.sending):
            self.floats, self.sending = np.zeros(16 * n), np.zeros(2 * n, np.intp)
        self.left, self.speed = self.floats[:n], self.floats[n : 2 * n]
        self.limit, self.rate = self.floats[2 * n : 3 * n], self.floats[3 * n : 4 * n]
        self.begun, self.ended = self.floats[4 * n : 5 * n], self.floats[5 * n : 6 * n]
        self.over, self.rests = self.floats[6 * n : 7 * n], self.floats[7 * n : 8 * n]
        for k in range(n):
            number, self.speed[k] = self.aggregates[k], 0.0
            self.left[k] = 1.0 if new[k] else self.all_left[number]
            self.begun[k] = math.nan if new[k] else self.all_real[number, 0]
            self.ended[k] = math.nan if new[k] else self.all_real[number, 1]
            self.over[k] = 0.0 if new[k] else self.all_real[number, 2]
            self.rests[k] = math.nan if new[k] else self.all_real[number, 3]

    def end(self, lags: Bools) -> None:
        """Set `lags`, bool[J], of the jobs that lag in this run."""
        for k in range(len(self.numbers)):
            self.all_jobs[self.numbers[k]] = self.jobs[k]
            if self.jobs[k].lead > 0:
                lags[k] = True
        for k in range(len(self.aggregates)):
            number = self.aggregates[k]
            self.all_left[number], self.all_real[number, 0] = self.left[k], self.begun[k]
            self.all_real[number, 1], self.all_real[number, 2] = self.ended[k], self.over[k]
            self.all_real[number, 3] = self.rests[k]

    # --- the real jobs

    def tell(self, compute: Floats, takes: Floats) -> None:
        """How long the jobs compute, and their iterations take, ns; NaN where too little is known:
        float64[J] each."""
        for j in range(len(self.jobs)):
            compute[j] = self.jobs[j].compute if self.jobs[j].runs else math.nan
            takes[j] = self.jobs[j].takes if self.jobs[j].takes > 0 else math.nan

    def see(  # noqa: PLR0917
        self,
        now: float,
        cells: JobLinks,
        need: Floats,
        of: Ints,
        remaining: Floats,
        wait: Floats,
        idle: Floats,
    ) -> None:
        """Find the aggregates whose real communication has begun or ended since the last look.

        Hosts are not in step: in a ring, one may send again before another one has ended. So what
        counts is each aggregate's own end and beginning. By flow, as in AllocationState: its
        aggregate (`of`, int64[F]), and `remaining`, `wait` and `idle`, float64[F].
        """
        work = np.zeros((3, len(self.aggregates)))
        sends, waits, idles = work[0], work[1], work[2]
        for k in range(len(self.aggregates)):
            idles[k] = _inf
        for i in range(len(of)):
            k = of[i]
            idles[k] = min(idles[k], idle[i])
            if remaining[i] > 0:
                sends[k], waits[k] = 1.0, max(waits[k], wait[i])
        for k in range(len(self.aggregates)):
            if sends[k]:
                self.overlap(k, now - waits[k])
            elif not math.isnan(self.begun[k]):
                self.end_real(k, now - idles[k] if idles[k] < _inf else now)
        self.count_real(now, self.find_over())
        self.count_real(now, self.find_sat_out(sends))
        self.begin_real(now, sends, waits, cells, need)

    def end_real(self, k: int, at: float) -> None:
        """An aggregate's real communication has ended. Not if it was idle all the time, and only
        expected to begin."""
        j, took = self.job[k], self.begun[k] - self.ended[k]
        self.begun[k] = math.nan
        if at <= self.ended[k] + 1.0:
            return
        if took <= _pause * self.jobs[j].compute + _pause_ns:
            took = max(took, _least_ns)
            before = took if math.isnan(self.rests[k]) else self.rests[k]
            self.rests[k] = before + (took - before) * _smoothing
        self.over[k], self.ended[k] = 1.0, at

    def overlap(self, k: int, begun: float) -> None:
        """An aggregate that still sends has `begun` another iteration: what is in its host's
        sockets does not hold up its job."""
        if begun > self.begun[k] + _same:  # NaN: no
            self.over[k], self.begun[k], self.ended[k] = 1.0, math.nan, math.nan

    def find_over(self) -> Any:
        """Which jobs' iterations are over, intp[J]: each aggregate that has something to send has
        ended since the last one."""
        found = np.zeros((2, len(self.jobs)), np.intp)
        over, missing = found[0], found[1]
        for k in range(len(self.job)):
            missing[self.job[k]] += self.over[k] <= 0 and self.volume[k] > 0
        for k in range(len(self.job)):
            if self.over[k] > 0 and not missing[self.job[k]]:
                over[self.job[k]] = 1
        return over

    def find_sat_out(self, sends: Any) -> Any:
        """The same where an aggregate begins again, and none that has not ended `sends`,
        float64[G]: those had nothing to send this time."""
        found = np.zeros((2, len(self.jobs)), np.intp)
        over, going = found[0], found[1]
        for k in range(len(self.job)):
            going[self.job[k]] += self.over[k] <= 0 and not math.isnan(self.begun[k])
        for k in range(len(self.job)):
            begins = sends[k] > 0 and math.isnan(self.begun[k])
            if begins and self.over[k] > 0 and not going[self.job[k]]:
                over[self.job[k]] = 1
        return over

    def count_real(self, now: float, over: Any) -> None:
        """An iteration of these real jobs, intp[J], has ended."""
        for j in range(len(self.jobs)):
            if over[j]:
                if self.jobs[j].counted > 0:
                    took, before = now - self.jobs[j].counted, self.jobs[j].takes
                    weight = _smoothing if before > 0 else 1.0
                    self.jobs[j].takes = before + (took - before) * weight
                self.jobs[j].counted = now
                self.jobs[j].active = self.jobs[j].anew = False
                self.jobs[j].lead -= 1
                if self.jobs[j].runs:
                    self.jobs[j].compute = self.shortest(j)
        for k in range(len(self.job)):
            if over[self.job[k]]:
                self.over[k] = 0.0

    def shortest(self, j: int) -> float:
        """The shortest computation of a job's aggregates: it waits least for others. As long as
        before, if none is known."""
        least: float = _inf
        for k in range(len(self.job)):
            if self.job[k] == j and self.volume[k] > 0:
                least = min(least, self.rests[k])  # NaN is never the smaller one
        return least if least < _inf else self.jobs[j].compute

    def begin_real(self, now: float, sends: Any, waits: Any, cells: JobLinks, need: Any) -> None:
        """Find the aggregates whose real communication has begun: `waits` ns ago, float64[G]."""
        rest, found = np.zeros(len(self.jobs)), np.zeros((2, len(self.jobs)), np.intp)
        first, anew = found[0], found[1]
        for j in range(len(self.jobs)):
            rest[j] = -_inf
        for k in range(len(self.job)):
            # NaN is never the larger one.
            rest[self.job[k]] = max(rest[self.job[k]], self.ended[k])
        for k in range(len(self.job)):
            j = self.job[k]
            if sends[k] > 0 and math.isnan(self.begun[k]):
                self.begun[k] = now - waits[k]
                first[j] += not self.jobs[j].active
                anew[j] += self.begins_anew(k, rest[j])
        for j in range(len(self.jobs)):
            if anew[j] and self.jobs[j].runs:
                self.restart(j)
                self.jobs[j].counted = 0.0
            elif first[j]:
                self.forgive(j, cells, need)

    def begins_anew(self, k: int, rest: float) -> bool:
        """Whether the reference has to begin anew with this aggregate, which has begun to send.
        `rest`: when the last of its job's ended; -inf: they are all new."""
        j, known = self.job[k], not math.isnan(self.ended[k])
        first, self.jobs[j].active = not self.jobs[j].active, True
        paused = first and _pause * self.jobs[j].compute + _pause_ns < self.begun[k] - rest < _inf
        if self.over[k] > 0:
            return bool(paused)  # it is in the next iteration, before this one has ended
        if self.jobs[j].anew:
            return bool(known or first)  # the reference began with the first one: now with this one
        if known and not self.jobs[j].runs:
            took = self.begun[k] - self.ended[k]
            self.jobs[j].runs, self.jobs[j].compute = True, max(took, _least_ns)
            return True
        return bool(paused)

    def forgive(self, j: int, cells: JobLinks, need: Any) -> None:
        """Where all jobs lag, none can be helped: all would have their fair shares for ever, and
        never take turns again. Such a job begins anew together with the reference."""
        if self.jobs[j].lead <= 0:
            return
        others = 0
        uses = np.zeros(cells.links, np.intp)
        for c in range(cells.start[j], cells.start[j + 1]):
            uses[cells.link[c]] = need[c] > 0
        for k in range(len(self.jobs)):
            if self.jobs[k].runs and meets(cells, need, k, uses):
                if self.jobs[k].lead <= 0:
                    return
                others += 1
        if others > 1:
            self.restart(j)

    def restart(self, j: int) -> None:
        """The reference begins an iteration together with the real job."""
        self.jobs[j].lead, self.jobs[j].anew = 0, True
        self.start(j)

    # --- the reference

    def advance(  # noqa: PLR0917
        self, now: float, job: Ints, paths: Paths, goodput: Floats, volume: Floats, weight: Floats
    ) -> None:
        """Go on to `now`: aggregates send everything, and jobs compute. `goodput`: float64[L + 1];
        `weight`, float64[G]: so much faster than others an aggregate may be. A job takes part from
        where it has come to: jobs that shared no link may not have come equally far."""
        self.job, self.volume = job, volume
        then, left, stale, n = now / self.slack, float(_most_work), True, 0
        self.now = then
        for j in range(len(self.jobs)):
            self.now = min(self.now, self.jobs[j].now)
        limit, rate, sending = self.limit, self.rate, self.sending
        self.count()
        while self.now < then and left > 0:
            if stale:
                n = self.find_sending(sending, limit)
                left -= weighted(paths, goodput, limit, weight, rate)
                for k in range(n):
                    self.speed[sending[k]] = rate[sending[k]] / volume[sending[k]] / _second
            step = self.until_next(sending[:n], then - self.now)
            before, self.now = self.now, self.now + step
            stale = self.send(sending[:n], step)
            for j in range(len(self.jobs)):
                stale = stale or before < self.jobs[j].now <= self.now
                if self.computes(j) and self.now >= self.jobs[j].until:
                    self.start(j)
                    left -= len(job)
                    stale = True
            left -= n + len(self.jobs)
        self.now = then
        for j in range(len(self.jobs)):
            self.jobs[j].now = then

    def takes_part(self, j: int) -> bool:
        """Enough is known of the job, and the others have come as far as it has."""
        return bool(self.jobs[j].runs and self.jobs[j].now <= self.now)

    def computes(self, j: int) -> bool:
        """It does in the reference, now."""
        return self.takes_part(j) and not self.jobs[j].sends

    def count(self) -> None:
        """Flows have come and gone: what does each job send in the reference?"""
        known = np.zeros(len(self.jobs), np.intp)
        for j in range(len(self.jobs)):
            self.jobs[j].under_way = 0
        for i in range(len(self.job)):
            if self.volume[i] > 0:
                known[self.job[i]] += 1
                self.jobs[self.job[i]].under_way += self.left[i] > 0
        for j in range(len(self.jobs)):
            # A job all of whose flows have gone stands still.
            if self.jobs[j].sends and self.jobs[j].under_way == 0 and known[j] > 0:
                self.end_iteration(j)

    def find_sending(self, sending: Any, limit: Any) -> int:
        """Put the aggregates that have something to send into `sending`, intp[G]; returns how many
        they are. `limit`, float64[G]: without bound for these, 0 for others."""
        n = 0
        for i in range(len(self.job)):
            j, limit[i] = self.job[i], 0.0
            sends = self.jobs[j].sends and self.takes_part(j)
            if sends and self.left[i] > 0 and self.volume[i] > 0:
                sending[n], limit[i] = i, _inf
                n += 1
        return n

    def until_next(self, sending: Any, most: float) -> float:
        """In how many ns the first one has sent all, or the first job begins; at most `most`."""
        step = most
        for k in range(len(sending)):
            if self.speed[sending[k]] > 0:
                step = min(step, self.left[sending[k]] / self.speed[sending[k]])
        for j in range(len(self.jobs)):
            if self.computes(j):
                step = min(step, max(self.jobs[j].until - self.now, 0.0))
            elif self.jobs[j].runs and self.jobs[j].now > self.now:
                step = min(step, self.jobs[j].now - self.now)
        return step

    def send(self, sending: Any, step: float) -> bool:
        """All aggregates have sent for so long; True: one of them has nothing left."""
        ended = False
        for k in range(len(sending)):
            i = sending[k]
            self.left[i] -= step * self.speed[i]
            if self.left[i] <= _rounding:
                self.left[i], ended, j = 0.0, True, self.job[i]
                self.jobs[j].under_way -= 1
                if self.jobs[j].under_way == 0:
                    self.end_iteration(j)
        return ended

    def end_iteration(self, j: int) -> None:
        """In the reference, a job has sent everything, and computes."""
        now = max(self.now, self.jobs[j].now)
        self.jobs[j].sends, self.jobs[j].until = False, now + self.jobs[j].compute
        self.jobs[j].lead += 1

    def start(self, j: int) -> None:
        """In the reference, a job begins to send."""
        self.jobs[j].sends, self.jobs[j].under_way = True, 0
        for i in range(len(self.job)):
            if self.job[i] == j:
                # Also where it is not known yet how much: the job waits for that.
                self.left[i] = 1.0
                self.jobs[j].under_way += self.volume[i] > 0
