# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""What a flow may send above its reserved rate in the kernel (ADR 3): how fast its top-up grows,
and how large its burst is. Compiled (types: top_up.pxd); interpreted, the same.

Daemons write the results into the kernel's table; the simulator's kernel goes by them. Rates and
shares are bytes/s. A flow's share: its bottleneck, divided among its job's flows there. `queue_us`:
how long its path's smallest buffer lasts at its link's rate, at most LONGEST_QUEUE_US.
"""

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND

FEEDBACK_MS = 2.0
"""Least time after which a queue shows in the RTT. Until then a job's top-up may..."""
QUEUE_PART = 0.2
"""... fill this part of the smallest buffer, and grow by..."""
FASTEST_PER_MS = 0.3
"""... no more than this share of the bottleneck per ms, all flows of the job there together, and at
least by..."""
SLOWEST_PER_MS = 0.001
"""... this share. That is with an empty queue: see `longest`."""
LATE_US, SPARE_US = 2000.0, 3000.0
"""A queue may also be so long where it leaves so much of the buffer: busy hosts are late by 1 to 2
ms. A queue on the way back does not count: acknowledgements wait there, which drain nothing."""
WAITING = 0.25
"""A flow with less than this part of its share waits for another job: it may fill what that job
leaves when it ends, before anybody has noticed and negotiated."""
ALONE = 1 / 40
"""Where jobs do not take turns only what is never given out is free. Of what fits, this part counts
there, for flows that do not wait; least and greatest growth are the same."""
LONGEST_QUEUE_US = 5000.0
"""A buffer that lasts longer counts as this: behind a longer queue the next steps of all jobs wait,
also of those whose turn it is."""
BURST_PART = 0.6
"""All bursts of a job together fill at most this part of the smallest buffer."""
LEAST_RATE = 256_000.0
"""Bytes/s: a flow notices a raised rate after one segment at the old one. Below this rate (a held
flow) that would be more than 6 ms."""
HELD_PART = 0.125
"""A flow is never paced below LEAST_RATE, or this part of its share where that is less: many held
flows of a job would fill a link."""

EPOCH_S, GAP_S, REFILL_S = 0.002, 0.001, 0.01
"""As in bpf/consts.h (FS_EPOCH_US, FS_GAP_NS, FS_REFILL_NS): the time of which the least RTT
counts; a flow without anything to send for longer loses its extra; and so long it takes its bucket
to fill."""
LEAST_RTT_S, LEAST_WINDOW = 0.001, 3
"""FS_MIN_RTT_US and FS_MIN_CWND, of the window."""
AHEAD_BYTES, SEGMENT_BYTES = 1 << 17, 1448
"""FS_AHEAD: so far below nothing may a bucket be. What is left to a flow that has no backlog."""

NOTICED_RATE = SEGMENT_BYTES * SECOND / DEFAULT_SLOT
"""Bytes/s: a segment in a slot. No ceiling makes a flow slower: at a few bytes/s it would wait for
minutes after its last segment, whatever it may send by then."""

# The same as C variables: top_up.pxd declares them.
_slowest, _fastest, _waiting, _alone = SLOWEST_PER_MS, FASTEST_PER_MS, WAITING, ALONE
_burst_part = BURST_PART
_least, _held_part, _noticed = LEAST_RATE, HELD_PART, NOTICED_RATE
# Growing by g per ms, top-up sends g t^2 / 2 too much in t ms: that must fit.
_fits_per_us = 2.0 * QUEUE_PART / 1000.0 / FEEDBACK_MS**2


def longest(lasts: float) -> float:
    """The queue at which top-up is given up, and towards which it grows ever more slowly. `lasts`:
    how long the path's smallest buffer does, at most LONGEST_QUEUE_US; both in us."""
    return max(lasts * QUEUE_PART, min(lasts - SPARE_US, LATE_US), 1.0)


def growth(rate: float, share: float, path_share: float, queue_us: float) -> float:
    """By how many bytes/s the top-up of a flow that has `rate` grows per ms, while there is no
    queue. `path_share`: as below."""
    part = _alone if path_share <= 0 and rate >= _waiting * share else 1.0
    return share * min(max(_fits_per_us * queue_us * part, _slowest), _fastest)


def burst(share: float, queue_us: float) -> float:
    """Bytes that a flow may send at its ceiling."""
    return share * _burst_part * queue_us / 1e6


def highest(rate: float, ceiling: float, share: float, path_share: float) -> float:
    """What reserved rate and top-up may come to. `path_share`: share of all the job's flows on the
    path together, where jobs take turns there; else 0.

    A flow that does not wait gains nothing for its job by more than that: its host runs ahead of
    the others.
    """
    if path_share > 0 and rate >= _waiting * share:
        return max(min(ceiling, path_share), rate)
    return ceiling


def least(share: float, ceiling: float) -> float:
    """A lower rate than this becomes this one. `share`: 0 where it is not known. `ceiling`: what
    the flow may have at most, top-up included; 0: not known. See NOTICED_RATE."""
    lowest = min(_least, _held_part * share) if share > 0 else _least
    return min(lowest, max(ceiling, _noticed)) if ceiling > 0 else lowest
