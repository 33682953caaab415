# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""How jobs share links, flow by flow. Compiled (types: gang_rates.pxd); interpreted, it does the
same. __init__.py says what is done in which order, and why.

F flows, L links, J jobs, C cells (see JobLinks). `paths` are int32[F, H], padded with L; arrays
over links have L + 1 entries, of which the last one counts for nothing. Rates are bytes/s; times
are ns, or seconds where they are named so.
"""

import math
from typing import Any

import numpy as np

from flowslot.policy.base import Floats, Ints, Paths, Rows
from flowslot.policy.fill import crosses, link_sum, weighted
from flowslot.policy.job_links import JobLinks, lasts
from flowslot.policy.stagger.packing import pack

COMPILED = not __file__.endswith(".py")

KEEP_RATIO = 1.1
KEEP_SLACK_S = 0.004
"""Rates are kept while the job ends at most 10 % + 4 ms (a renegotiation) later than it could."""
NEAR_NS = 10_000_000.0
"""An idle flow this close before its start, or after its end, keeps its rate from its siblings."""
NEAR_OVERDUE_NS = 20_000_000.0
"""... unless it is overdue by more than this."""
OVERDUE_NS = 250_000_000.0
"""An idle job overdue by more (and by more than half a period) stands last in the queue."""
WORTHWHILE = 20.0
"""A standing grant below this fraction (1/20) of what the job could use alone is not made."""
FULL = 1e-3
"""A link with less than this share of its capacity left has nothing to top up with."""
ROUNDING = 1e-9
"""Relative; present goals that fill a link must not seem too much for it."""

OUT, ACTIVE, IDLE, KEPT, COMING = range(5)
"""Roles of flows in one allocation. OUT: takes no part in the turns; ACTIVE: has bytes to send;
IDLE: will have; KEPT: idle, but keeps its rate beside its active siblings; COMING: still to come
in the present phase of its job."""

FLOW = np.dtype(
    [
        ("job", np.int64),
        ("remaining", np.float64),  # these eight as in AllocationState
        ("cap", np.float64),
        ("wait", np.float64),
        ("period", np.float64),
        ("due", np.float64),
        ("next", np.float64),
        ("idle", np.float64),
        ("goal", np.float64),
        ("role", np.int64),
        ("alone", np.bool_),  # no other job needs a link of its path
        ("uncontended", np.bool_),  # no other job needs a link of its job
        ("volume", np.float64),  # bytes: what remains, or what it will send in its next phase
        ("rate", np.float64),  # the result
    ]
)
JOB = np.dtype(  # of the job's flows with one role
    [
        ("present", np.bool_),  # there are some
        ("fresh", np.bool_),  # one has no rate yet
        ("holds", np.bool_),  # one has a rate
        ("lasts", np.float64),  # seconds until the last one ends at the present goals
        ("wait", np.float64),  # the longest
        ("period", np.float64),  # the longest
        ("due", np.float64),  # the first one's
    ]
)

# The same as C variables: gang_rates.pxd declares them.
_keep_ratio, _keep_slack, _full, _rounding = KEEP_RATIO, KEEP_SLACK_S, FULL, ROUNDING
_near, _near_overdue, _overdue = NEAR_NS, NEAR_OVERDUE_NS, OVERDUE_NS
_worthwhile = WORTHWHILE
_out, _active, _idle, _kept, _coming, _inf = OUT, ACTIVE, IDLE, KEPT, COMING, math.inf


def earlier(first: float, edge: float) -> float:
    """`first`, or an edge that comes before that and is not over."""
    return edge if 0 < edge < first else first


class Sharing:
    """Flows and jobs that share links, and what is left of these. Used for one allocation after
    another: making the arrays takes longer than using them.

    `rows`: FLOW[F], to be filled in by the caller; `flows`: the same for loops. By role: `per_job`,
    JOB[5, J] (`jobs`: the same for loops), and sums by job and link, float64[5, C]: `need`, of
    bytes, and `hold`, of present goals. `left`: float64[L + 1], not yet given out. `seconds`:
    float64[J], of what was timed last.
    """

    def __init__(self, n_flows: int, n_jobs: int, n_links: int, longest: int) -> None:
        self.rows = np.zeros(n_flows, FLOW)
        self.per_job = np.zeros((5, n_jobs), JOB)
        self.flows: Any = self.rows if COMPILED else self.rows.view(np.recarray)
        self.jobs: Any = self.per_job if COMPILED else self.per_job.view(np.recarray)
        self.cells = JobLinks(n_flows, n_jobs, n_links, longest)
        self.need = np.zeros((5, n_flows * longest))
        self.hold = np.zeros((5, n_flows * longest))
        self.sums = np.zeros(n_flows * longest)
        self.left, self.use = np.zeros(n_links + 1), np.zeros(n_links + 1)
        self.links = np.zeros(n_links + 1, np.intp)
        self.seconds, self.meets = np.zeros(n_jobs), np.zeros(n_jobs, np.intp)
        self.rates, self.most = np.zeros(n_flows), np.zeros(n_flows)

    def begin(self, paths: Paths, job: Ints, capacity: Floats, sockets: Floats) -> None:
        """`rows` have been filled in, of flows of `job`, int64[F]: begin with all of `capacity`,
        float64[L + 1]. `sockets`, float64[F]: as so many flows each one counts where shares are
        equal."""
        self.paths, self.capacity, self.sockets = paths, capacity, sockets
        for link in range(len(capacity)):
            self.left[link] = max(capacity[link], 0.0)
        for i in range(len(self.flows)):
            self.flows[i].rate = 0.0
        self.cells.find(paths, job)

    # --- helpers

    def take_away(self) -> None:
        """`rates` are given out: they are not left any more."""
        self.use[...] = 0.0
        link_sum(self.paths, self.rates, self.use)
        for link in range(len(self.left)):
            self.left[link] = max(self.left[link] - self.use[link], 0.0)

    def raise_to_fill(self) -> None:
        """Add what is left on their paths to the flows' rates, max-min by sockets, each at most
        `most`."""
        for link in range(len(self.left)):
            self.links[link] = self.left[link] < _full * self.capacity[link]
        for i in range(len(self.flows)):
            if crosses(self.paths, i, self.links):
                self.most[i] = 0.0
        weighted(self.paths, self.left, self.most, self.sockets, self.rates)
        for i in range(len(self.flows)):
            self.flows[i].rate += self.rates[i]
        self.take_away()

    def fits(self, role: int, job: int) -> bool:
        """What a job's flows with one role hold is left on all links that they cross."""
        for c in range(self.cells.start[job], self.cells.start[job + 1]):
            if self.hold[role, c] > self.left[self.cells.link[c]] * (1 + _rounding):
                return False
        return True

    def take(self, role: int, job: int) -> None:
        """Rates of a job's flows with one role, as a gang: all end at the same time, as early as
        they can; or the present goals, if these fit and are good enough. What active flows cannot
        use is left to others."""
        seconds = self.cells.bottleneck(self.need[role], job, self.left, 0.0)
        keeps = self.fits(role, job)
        i = self.cells.first[job] if role == _active else -1
        while i >= 0:
            if self.flows[i].role == role:
                seconds = max(seconds, lasts(self.flows[i].volume, self.flows[i].cap))
                keeps = keeps and self.flows[i].goal <= self.flows[i].cap * (1 + _rounding)
            i = self.cells.following[i]
        keeps = keeps and self.jobs[role, job].lasts <= _keep_ratio * seconds + _keep_slack
        i = self.cells.first[job]
        for c in range(self.cells.start[job], self.cells.start[job + 1]):
            self.use[self.cells.link[c]] = 0.0
        while i >= 0:
            if self.flows[i].role == role:
                rate = self.flows[i].goal if keeps else lasts(self.flows[i].volume, seconds)
                self.flows[i].rate = rate
                for h in range(self.paths.shape[1]):
                    self.use[self.paths[i, h]] += rate
            i = self.cells.following[i]
        for c in range(self.cells.start[job], self.cells.start[job + 1]):
            link = self.cells.link[c]
            self.left[link] = max(self.left[link] - self.use[link], 0.0)

    # --- which flows take part

    def serve_uncontended(self) -> bool:
        """Jobs that share no link with another one get their rates; True: no other job is left.

        Their flows' role, and that of those whose path is closed, is OUT. Rates depend on the bytes
        per iteration only, not on which flows are active or how far. What an idle sibling leaves
        unused for the moment is for the top-up in the kernel.
        """
        self.find_uncontended()
        found, settled = False, True
        for i in range(len(self.flows)):
            job = self.flows[i].job
            self.rates[i] = self.most[i] = 0.0
            if self.flows[i].volume > 0 and not self.meets[job]:
                self.rates[i] = lasts(self.flows[i].volume, self.seconds[job])
                self.flows[i].rate, self.most[i], found = self.rates[i], _inf, True
        if found:
            self.take_away()
            self.raise_to_fill()
        for i in range(len(self.flows)):
            self.flows[i].uncontended = self.flows[i].rate > 0
            if self.flows[i].uncontended:
                self.flows[i].role = _out
            settled = settled and self.flows[i].role == _out
        return settled

    def find_uncontended(self) -> None:
        """Which jobs meet others (`meets`), and how long an iteration of each takes (`seconds`)."""
        for link in range(len(self.left)):
            self.links[link] = self.capacity[link] <= 0
        self.cells.clear(self.sums)
        for i in range(len(self.flows)):
            closed, following = crosses(self.paths, i, self.links), self.flows[i].next
            volume = following if following > 0 else self.flows[i].remaining
            self.flows[i].role = _out if closed else _idle
            self.flows[i].volume = 0.0 if closed else volume
            self.cells.add(i, self.flows[i].volume, self.sums)
        self.cells.contested(self.sums, self.links)
        for job in range(len(self.meets)):
            self.meets[job] = 0
            self.seconds[job] = self.cells.bottleneck(self.sums, job, self.left, 0.0)
        for i in range(len(self.flows)):
            unknown = self.flows[i].volume > 0 and self.flows[i].next <= 0
            if unknown or crosses(self.paths, i, self.links):
                self.meets[self.flows[i].job] = 1

    def classify(self) -> None:
        """Which flows take part in the turns: active ones, and idle ones that will send."""
        self.cells.clear(self.sums)
        for i in range(len(self.flows)):
            if self.flows[i].remaining > 0 and self.flows[i].role != _out:
                self.cells.add(i, self.flows[i].remaining, self.sums)
        self.cells.contested(self.sums, self.links)
        for i in range(len(self.flows)):
            flow = self.flows[i]
            # What a dependency leaves unused matters only where another job could use it.
            flow.alone = not crosses(self.paths, i, self.links)
            flow.cap = _inf if flow.alone else flow.cap
            flow.volume = flow.remaining if flow.remaining > 0 else flow.next
            # A flow that cannot send now is as good as idle: it must not hold up its gang.
            if flow.remaining > 0 and flow.role != _out and flow.cap > 0:
                flow.role = _active
            else:
                flow.role = _idle if flow.volume > 0 and not flow.uncontended else _out
            self.flows[i] = flow

    def sum_up(self, role: int) -> None:
        """Sum up the flows with one role: `need`, `hold` and `jobs`."""
        self.cells.clear(self.need[role])
        self.cells.clear(self.hold[role])
        for k in range(self.jobs.shape[1]):
            job = self.jobs[role, k]
            job.present, job.fresh, job.holds, job.lasts = False, False, False, 0.0
            job.wait, job.period, job.due = 0.0, 0.0, _inf
            self.jobs[role, k] = job
        for i in range(len(self.flows)):
            flow = self.flows[i]
            if flow.role == role:
                job = self.jobs[role, flow.job]
                self.cells.add(i, flow.volume, self.need[role])
                self.cells.add(i, flow.goal, self.hold[role])
                job.present = True
                job.fresh, job.holds = job.fresh or flow.goal <= 0, job.holds or flow.goal > 0
                job.wait, job.period = max(job.wait, flow.wait), max(job.period, flow.period)
                job.due = min(job.due, flow.due)
                if flow.cap > 0:
                    job.lasts = max(job.lasts, lasts(flow.volume, flow.goal))
                self.jobs[role, flow.job] = job

    def keep(self) -> None:
        """Idle flows that are about to start, or have just ended, are KEPT: they are to keep their
        rates beside their active siblings, but not from one that has none yet.

        `need` of theirs is what they will send soon.
        """
        self.cells.clear(self.need[_kept])
        self.cells.clear(self.hold[_kept])
        for i in range(len(self.flows)):
            flow = self.flows[i]
            job = self.jobs[_active, flow.job]
            idle = flow.role == _idle and flow.remaining <= 0
            near = -_near_overdue <= flow.due <= _near or flow.idle < _near
            if idle and near and flow.alone and flow.goal > 0 and job.present and not job.fresh:
                self.flows[i].role = _kept
                self.cells.add(i, flow.goal, self.hold[_kept])
                if flow.due <= _near:
                    self.cells.add(i, flow.volume, self.need[_kept])

    def find_coming(self) -> None:
        """Idle flows of active jobs are still to come, unless they have ended in this phase: those
        are due in a period, as all others."""
        for i in range(len(self.flows)):
            job = self.flows[i].job
            here = self.flows[i].role == _idle and self.jobs[_active, job].present
            if here and self.flows[i].idle >= self.jobs[_active, job].wait:
                self.flows[i].role = _coming

    def time_active(self) -> None:
        """Seconds that each job needs for what is active, or KEPT and soon active, if it has all
        links for its own: `seconds`."""
        for c in range(self.cells.count):
            self.sums[c] = self.need[_active, c] + self.need[_kept, c]
        for job in range(len(self.seconds)):
            self.seconds[job] = self.cells.bottleneck(self.sums, job, self.capacity, 1.0)

    def time_whole(self) -> None:
        """The same for whole iterations of all flows that are not OUT."""
        self.cells.clear(self.sums)
        for i in range(len(self.flows)):
            if self.flows[i].role != _out:
                whole = max(self.flows[i].next, self.flows[i].remaining)
                self.cells.add(i, whole, self.sums)
        for job in range(len(self.seconds)):
            self.seconds[job] = self.cells.bottleneck(self.sums, job, self.capacity, 1.0)

    def pack(self, order: Rows, worth: Floats) -> None:
        """Change the order of jobs by what `time_active` looked at: see packing.pack."""
        pack(self.cells, self.need[_active], self.capacity, worth, order)

    # --- what each flow gets

    def lay_floors(self, parts: Floats) -> None:
        """Set a part of all active flows' fair rates aside: `sums`, as `hold`. `parts`, float64[J]:
        which, by job."""
        for i in range(len(self.flows)):
            self.most[i] = self.flows[i].cap if self.flows[i].role == _active else 0.0
        weighted(self.paths, self.left, self.most, self.sockets, self.rates)
        self.cells.clear(self.sums)
        for i in range(len(self.flows)):
            part = parts[self.flows[i].job]
            self.cells.add(i, part * self.rates[i], self.sums)
        self.use[...] = 0.0
        for c in range(self.cells.count):
            self.use[self.cells.link[c]] += self.sums[c]
        for link in range(len(self.left) - 1):  # floors may be too much for it, by rounding
            self.left[link] = max(self.left[link] - self.use[link], 0.0)

    def serve(self, order: Rows) -> None:
        """Give the jobs, in this order, their floors and what is left.

        Their KEPT flows have their rates first, unless these do not fit.
        """
        for k in range(len(order)):
            job = order[k]
            for c in range(self.cells.start[job], self.cells.start[job + 1]):
                self.left[self.cells.link[c]] += self.sums[c]
            fit, i = self.fits(_kept, job), self.cells.first[job]
            while i >= 0:
                if self.flows[i].role == _kept:
                    if fit:
                        self.flows[i].rate = self.flows[i].goal
                    else:
                        self.flows[i].role = _idle
                i = self.cells.following[i]
            if fit:
                for c in range(self.cells.start[job], self.cells.start[job + 1]):
                    link = self.cells.link[c]
                    self.left[link] = max(self.left[link] - self.hold[_kept, c], 0.0)
            self.take(_active, job)

    def stand(self, role: int, order: Rows) -> None:
        """Give the idle flows with one role what is left, job by job, where it is worthwhile."""
        for k in range(len(order)):
            job = order[k]
            alone = self.cells.bottleneck(self.need[role], job, self.capacity, 1.0)
            seconds = self.cells.bottleneck(self.need[role], job, self.left, 0.0)
            if self.jobs[role, job].present and seconds <= _worthwhile * alone:
                self.take(role, job)

    def top_up(self, everyone: bool) -> None:
        """Max-min over the active flows' sockets, of what is left; if not for `everyone`, then for
        flows that are alone."""
        for i in range(len(self.flows)):
            more = max(self.flows[i].cap - self.flows[i].rate, 0.0)
            takes = self.flows[i].role == _active and (everyone or self.flows[i].alone)
            self.most[i] = more if takes else 0.0
        self.raise_to_fill()

    # --- for how long

    def find_edges(self, first: Floats) -> None:
        """In how many ns each flow begins or ceases to be near, beside active siblings, or else
        overdue: float64[F]; inf: never. 0: it is active beside another job, and the two change
        places as they wait and lag."""
        for i in range(len(self.flows)):
            flow, edge = self.flows[i], _inf
            if flow.role == _active and not flow.alone:
                edge = 0.0
            elif flow.role != _out and flow.remaining <= 0:
                edge = earlier(edge, flow.due + max(_overdue, flow.period / 2))
                if self.jobs[_active, flow.job].present:
                    edge = earlier(edge, flow.due - _near)
                    edge = earlier(edge, flow.due + _near_overdue)
                    edge = earlier(edge, _near - flow.idle)
            first[i] = edge
