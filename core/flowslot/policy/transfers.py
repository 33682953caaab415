# SPDX-License-Identifier: Apache-2.0
"""What an allocator knows of whole transfers: of all that a job sends between two computations.

F flows, J jobs, L links, as in AllocationState. P: pairs of a job and a link that it crosses.
"""

from dataclasses import dataclass

import numpy as np

from flowslot.model.units import SECOND
from flowslot.policy.base import AllocationState, Bools, Floats, Paths, Rows

MOST_WAIT_NS = 5.0 * SECOND


@dataclass(frozen=True, slots=True, eq=False)
class TransferView:
    """By pair, ordered by job, then by link: which, and seconds at the link's rate; by job: the
    longest of these, on its bottleneck."""

    job: Rows  # [P]
    link: Rows  # [P]
    whole: Floats  # [P] of a whole iteration, as far as known
    ready: Bools  # [J] it has bytes to send, and can
    left_s: Floats  # [J]
    whole_s: Floats  # [J]
    wait_ns: Floats  # [J] since it became ready (0: it is not)
    period_ns: Floats  # [J] 0 = unknown
    paths: Paths  # int32[J, H]: the links of each job, padded with L


def look(state: AllocationState) -> TransferView:
    """At all jobs of a state."""
    n_links, n_jobs = len(state.capacity) - 1, len(state.job_names)
    hops = state.paths.shape[1]
    link = state.paths.ravel().astype(np.intp)
    placed = link < n_links
    job = np.repeat(state.job, hops)[placed]
    keys, pair = np.unique(job * n_links + link[placed], return_inverse=True)
    pair_job, pair_link = keys // max(n_links, 1), keys % max(n_links, 1)
    goodput = state.goodput[pair_link]
    active = state.remaining > 0
    sums = [
        np.bincount(pair, np.repeat(size, hops)[placed], len(keys)) / goodput
        for size in (state.remaining, np.maximum(state.next_bytes, state.remaining))
    ]
    left_s, whole_s = np.zeros(n_jobs), np.zeros(n_jobs)
    np.maximum.at(left_s, pair_job, sums[0])
    np.maximum.at(whole_s, pair_job, sums[1])
    ready, wait, period = np.zeros(n_jobs, np.bool_), np.zeros(n_jobs), np.zeros(n_jobs)
    ready[state.job[active & (state.cap > 0)]] = True
    np.maximum.at(wait, state.job, np.where(active, state.wait_ns, 0.0))
    np.maximum.at(period, state.job, state.period_ns)
    first = np.searchsorted(pair_job, np.arange(n_jobs + 1))
    paths = np.full((n_jobs, int(np.diff(first).max(initial=1))), n_links, np.int32)
    paths[pair_job, np.arange(len(keys)) - first[pair_job]] = pair_link
    return TransferView(pair_job, pair_link, sums[1], ready, left_s, whole_s, wait, period, paths)


def patience_ns(view: TransferView) -> Floats:
    """[J]: after so long a job's transfer waits no more. An iteration of its job: whatever lasts so
    long is no turn to wait for. Unknown: as long as four of its transfers."""
    known = np.where(view.period_ns > 0, view.period_ns, 4.0 * view.whole_s * SECOND)
    patience: Floats = np.minimum(known, MOST_WAIT_NS)
    return patience
