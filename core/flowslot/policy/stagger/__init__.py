# SPDX-License-Identifier: Apache-2.0
"""The default policy: jobs take turns on shared links; short, waiting and slowed ones come first.

Per allocation, in this order:
1. Floors: a part of each active flow's max-min fair rate, by sockets as under TCP, is always its
   own. A job that lags behind the fair reference (see ../fair_reference) has its whole share.
2. Gangs, job by job in order of `G / s^2`. G is the time that the job's bottleneck needs for what
   is left, s how much slower than alone the job is. Two jobs change places where more is sent then
   (packing.py). All flows of a gang end at the same time.
3. Top-up: what is left goes to active flows, in the same way.
4. Standing grants: what is still unused goes to flows that are computing now. They can start at
   full rate without a negotiation.

A job whose present rates are good enough keeps them: progress reports are noisy, and every change
costs messages and a round trip. For the same reason a job that shares no link with another one has
the same rates in all its phases: each flow's part of the bottleneck's rate is its part of the bytes
per iteration there.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.model.schedule import constant
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import (
    FLOOR_SHARE,
    AllocationState,
    Bools,
    Floats,
    Pace,
    Rows,
    Terms,
    View,
)
from flowslot.policy.fair_reference import MOST_SLOWDOWN, FairReference
from flowslot.policy.stagger import gang_rates
from flowslot.policy.stagger.gang_rates import ACTIVE, COMING, IDLE, NEAR_NS, OVERDUE_NS

USUAL_SLOWDOWN = 1.25
"""Of a job whose slowdown is not known."""
AGEING = 4.0
"""Weight of waiting time to a partial arbiter: after one period a job counts as five times shorter.
Without a known period, so many times what is left counts as one."""
NEARLY_DONE = 0.25
"""A job with at most this part of its iteration left is let finish by a partial arbiter."""
SIZE_CLASS = 4.0
"""Jobs within this factor are of one size to a partial arbiter."""
_SHAPES, _CELLS = 16, 1 << 18  # arrays are kept for so many numbers of flows, jobs and links, and
# in all for so many entries of paths; the last ones always


class StaggerAllocator:
    """See the module. `floor_share`: part of its max-min fair rate that is always a flow's own,
    as long as its job does not lag.

    `top_up`: what the turns leave is given to active flows as well, and not only to those in the
    kernel that are quick to take it (`bench.protocol` shows what that is good for). Without it,
    flows that meet no other job have what is left in the end.
    `partial`: other arbiters, unheard, decide about other links of the same jobs. If two of them
    put the same two jobs in different order, each job waits for the other, all the time. So the
    order depends on what all of them see alike: size classes of whole iterations, then names.
    """

    def __init__(
        self, floor_share: float = FLOOR_SHARE, *, partial: bool = False, top_up: bool = True
    ) -> None:
        if not 0.0 < floor_share <= 1.0:
            raise ValueError("floor_share must be greater than 0 and at most 1")
        self._floor_share = floor_share
        self._fair = FairReference()
        self._partial = partial
        self._top_up = top_up
        self._settled = False
        self._standing: Bools | None = None
        self._sharing = gang_rates.Sharing(0, 0, 0, 0)
        self._sharings: dict[tuple[int, int, int, int], gang_rates.Sharing] = {}

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        n, longest = state.paths.shape
        shape = n, len(state.job_names), len(state.capacity) - 1, longest
        sharing = self._sharings.pop(shape, None) or gang_rates.Sharing(*shape)
        self._sharing = self._sharings[shape] = sharing
        self._forget_shapes()
        _fill_in(sharing.rows, state)
        sharing.begin(state.paths, state.job, state.capacity, state.sockets)
        # A job that lags gets what it would have without us.
        lags = self._fair.look(state, now, sharing.cells)
        floors = np.where(lags, 1.0, self._floor_share)
        # No job shares a link: it does not matter which flows are active or due.
        self._settled = sharing.serve_uncontended()
        self._standing = sharing.rows["uncontended"].copy()
        if not self._settled:
            self._take_turns(sharing, floors, state.job_names)
        rates: Floats = sharing.rows["rate"].copy()
        return rates

    def _forget_shapes(self) -> None:
        """The oldest ones, if there are too many."""
        kept = self._sharings
        cells = sum(flows * longest for flows, *_, longest in kept)
        while len(kept) > _SHAPES or (cells > _CELLS and len(kept) > 1):
            oldest = next(iter(kept))
            cells -= oldest[0] * oldest[3]
            del kept[oldest]

    def next_change(self, state: AllocationState) -> Floats:
        """See Allocator: idle flows begin or cease to count as about to start; active jobs that
        share a link age."""
        first = np.full(len(state.remaining), np.inf)
        if not self._settled:
            self._sharing.find_edges(first)
        return first

    def terms(self) -> Terms:
        """See Allocator: grants of the flows of jobs that share no link with another one stand."""
        return Terms(self._standing)

    def _take_turns(
        self, sharing: gang_rates.Sharing, floors: Floats, names: Sequence[str]
    ) -> None:
        """Let the jobs that share links take turns, and use what that leaves."""
        whole: list[float] | None = None
        if self._partial:
            # Others of a job's arbiters may not have heard yet which of its flows have ended.
            sharing.time_whole()
            whole = np.asarray(sharing.seconds).tolist()
        sharing.classify()
        sharing.sum_up(ACTIVE)
        sharing.keep()
        order = _turns(sharing, names, whole, self._fair.seen)
        # Floors, so that every job makes progress; then what is left, gang by gang.
        sharing.lay_floors(floors)
        sharing.serve(order)
        if self._top_up:
            sharing.top_up(True)
        # Standing grants: flows of active jobs that are still to come, then jobs as they are due.
        sharing.find_coming()
        sharing.sum_up(COMING)
        sharing.stand(COMING, order)
        sharing.sum_up(IDLE)
        sharing.stand(IDLE, _queue(sharing, names))
        if not self._top_up:
            sharing.top_up(False)


def _jobs(sharing: gang_rates.Sharing, role: int, *columns: str) -> Iterator[tuple[Any, ...]]:
    """Number and these columns of JOB of each job that has flows with this role."""
    rows = sharing.per_job[role]
    here = np.flatnonzero(rows["present"])
    return zip(here.tolist(), *(rows[column][here].tolist() for column in columns), strict=True)


def _turns(
    sharing: gang_rates.Sharing, names: Sequence[str], whole: list[float] | None, seen: Floats
) -> Rows:
    """Active jobs, the most urgent first; ties by name. `whole`, to a partial arbiter: seconds of
    each job's whole iterations. `seen`, float64[3, J]: by the fair reference, see there."""
    sharing.time_active()
    seconds: list[float] = np.asarray(sharing.seconds).tolist()
    keys: dict[int, tuple[float, str]] = {}
    worth = np.ones(len(names))
    for j, wait, period in _jobs(sharing, ACTIVE, "wait", "period"):
        bottleneck = seconds[j] * SECOND
        if whole is not None:
            size = whole[j] * SECOND
            size = size if bottleneck > NEARLY_DONE * size else bottleneck
            waits = math.floor(wait / (period or AGEING * bottleneck + 1.0))
            aged = max(size / (1.0 + AGEING * waits), 1.0)
            keys[j] = math.floor(math.log(aged) / math.log(SIZE_CLASS)), names[j]
        else:
            slowdown, length, alone = seen[:, j].tolist()
            worth[j] = _slowed(slowdown, length, alone, wait, bottleneck) ** 2
            keys[j] = bottleneck / worth[j], names[j]
    order = _by_key(keys)
    if whole is None:
        sharing.pack(order, worth)
    return order


def _slowed(slowdown: float, length: float, alone: float, wait: float, left: float) -> float:
    """A job's slowdown, and by how much more its present iteration is late, in parts of `alone`. It
    has waited for so many ns, and needs so many for what is `left`. From 1 to MOST_SLOWDOWN.

    A job that makes progress in the part f of the time has the slowdown 1 / f: a little less of f
    costs slowdown^2 times as much.
    """
    known = USUAL_SLOWDOWN if math.isnan(slowdown) else slowdown
    if alone > 0:
        late = (wait + left - length) / alone
    else:  # nothing is known of it yet: only after a long time
        late = max(wait / (AGEING * left + 1.0) - 1.0, 0.0)
    return min(max(known + late, 1.0), MOST_SLOWDOWN)


def _queue(sharing: gang_rates.Sharing, names: Sequence[str]) -> Rows:
    """Jobs with idle flows, in the order in which these are expected back."""
    keys: dict[int, tuple[bool, float, str]] = {}
    for j, due, period, holds in _jobs(sharing, IDLE, "due", "period", "holds"):
        lost = due < -max(OVERDUE_NS, period / 2)
        # Two jobs due at about the same time must not pass the capacity to and fro.
        keys[j] = lost, due - (NEAR_NS if holds else 0.0), names[j]
    return _by_key(keys)


def _by_key(keys: dict[int, Any]) -> Rows:
    """Jobs, the one with the least key first."""
    return np.array(sorted(keys, key=keys.__getitem__), dtype=np.intp)


def _fill_in(rows: NDArray[np.void], state: AllocationState) -> None:
    """What the state says, into FLOW[F]."""
    rows["job"], rows["goal"] = state.job, state.goal
    rows["remaining"], rows["next"], rows["cap"] = state.remaining, state.next_bytes, state.cap
    rows["wait"], rows["period"] = state.wait_ns, state.period_ns
    rows["due"], rows["idle"] = state.due_ns, state.idle_ns


class StaggerPolicy:
    """The daemon's part: paces every flow at its grant."""

    def decide(self, now: Nanos, view: View) -> Pace:
        """See HostPolicy."""
        assert view.grants is not None and view.ceilings is not None
        known = ~np.isnan(view.grants)
        schedule = constant(view.slot, view.grants[known])
        return Pace(view.flow[known], schedule, view.ceilings[known], view.guaranteed[known])
