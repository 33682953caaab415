# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Sums of flows by aggregate, and each flow's share of its aggregate's rate (compiled: shares.pxd).

`rows` is what `as_structs` makes of ROW[F]. Times are ns. What is done is the same when this file
is not compiled.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslotd.flows.rows import remains, whole

KEPT_BEFORE_NS, KEPT_AFTER_NS = 10_000_000, 20_000_000
"""An idle flow of an active aggregate keeps its part from so long before its start to so long after
it was expected."""
KEEP_RATIO = 1.1
KEEP_SLACK_S = 0.004
"""Flows keep their rates while the last one ends at most 10 % + 4 ms later than it could."""
STALLED_NS = 60_000_000
"""A flow that had nothing to send for so long, and got nothing, is given no rate until it has
something: a slot of usual length, or from one look to the next where slots are longer."""
LEFT_NS = 1_000_000_000
"""A flow that sends and gets nothing for so long takes no part until it moves: nobody keeps room
for it, and others need not give any back at each of their phases."""
NEVER = 2**62

# The same as C variables: shares.pxd declares them.
_kept_before, _kept_after = KEPT_BEFORE_NS, KEPT_AFTER_NS
_keep_ratio, _keep_slack = KEEP_RATIO, KEEP_SLACK_S
_never, _second, _full, _stalled = NEVER, 1_000_000_000, 1 + 1e-9, STALLED_NS
_left = LEFT_NS


def typed(rows: Any) -> Any:
    """See Typed."""
    return rows


def size_of(rows: Any, i: int) -> float:
    """Bytes that a flow's iterations are expected to send, headers included."""
    size = rows[i].expected if rows[i].expected > 0 else rows[i].target
    return whole(rows[i].unreported, size)


def left(now: int, rows: Any, i: int) -> float:
    """Bytes that an active flow has yet to send, headers included, estimated for now."""
    if rows[i].drained:
        return 0.0
    sent = rows[i].rate * (now - rows[i].looked) / _second if rows[i].rate > 0 else 0.0
    return max(remains(rows, i) - sent, 1.0)


def add_up(
    now: int,
    rows: Any,
    tops_up: bool,
    times: NDArray[np.int64],
    sizes: NDArray[np.float64],
) -> None:
    """Sum up flows by aggregate; 0 is none, and its sums mean nothing.

    `times`, int64[B, 5]: 1 if any is active, when the first active one began, when the first one
    is due again, the longest period; how many flows have any bytes in an iteration.
    `sizes`, float64[B, 4]: bytes remaining, of this iteration, and expected of each iteration; with
    headers, because links and rates carry these too; and what the active ones can use, bytes/s. One
    that has had nothing to send for STALLED_NS can use nothing, if `tops_up`. One that has not
    moved for LEFT_NS is left out.
    """
    for b in range(len(times)):
        times[b, 0], times[b, 1], times[b, 2], times[b, 3] = 0, _never, _never, 0
        times[b, 4] = 0
        sizes[b, 0], sizes[b, 1], sizes[b, 2], sizes[b, 3] = 0.0, 0.0, 0.0, 0.0
    for i in range(len(rows)):
        b = rows[i].aggregate
        onset, period = rows[i].onset, rows[i].period
        if rows[i].active and rows[i].looked - rows[i].moved >= _left:
            continue
        if rows[i].active:
            times[b, 0] = 1
            if not tops_up or rows[i].looked - rows[i].supplied < _stalled:
                sizes[b, 3] += rows[i].usable
            times[b, 1] = min(times[b, 1], onset)
            sizes[b, 0] += left(now, rows, i)
        if onset > 0:
            # Before the first period is known: as if computing took as long as communicating.
            times[b, 2] = min(times[b, 2], onset + (period if period > 0 else 2 * (now - onset)))
        times[b, 3] = max(times[b, 3], period)
        sizes[b, 1] += whole(rows[i].unreported, rows[i].target)
        size = size_of(rows, i)
        times[b, 4] += size > 0
        sizes[b, 2] += size


def share_out(now: int, rows: Any, terms: NDArray[np.float64], changed: NDArray[np.uint8]) -> None:
    """Share each aggregate's rate out among its flows, so that all end together; NaN: no rate.

    An aggregate keeps the rates that its flows have while they add up to what it may send and
    nobody is held up by that. One without bytes to send gives all its flows the same.

    `terms`, float64[B, 7], of aggregates: rate; 1 where the phase is on, and rates follow what
    remains; and for `hand_out`. `changed`, uint8[F], zeros: 1 where the flow has another rate now.
    """
    weight = np.empty(len(rows))
    for i in range(len(rows)):
        weight[i] = weigh(now, rows, i, terms[rows[i].aggregate, 1] > 0)
    sums = np.zeros((len(terms), 4))  # weight, flows, present rate, seconds until the last one ends
    fill(rows, weight, sums)
    for i in range(len(rows)):
        b, before = rows[i].aggregate, rows[i].rate
        rate, size, flows, used, lasts = terms[b, 0], sums[b, 0], sums[b, 1], sums[b, 2], sums[b, 3]
        # Not less than all of it either: what nobody uses might be given to somebody else.
        keep = rate > 0 and used <= rate * _full and used * _full >= rate
        if keep and size > 0:
            keep = lasts <= _keep_ratio * (size / rate) + _keep_slack
        if keep:
            continue
        part = rate * (weight[i] / size) if size > 0 else rate / flows
        # NaN is no change from NaN.
        if part != before and (part == part or before == before):  # noqa: PLR0124
            changed[i] = 1
        rows[i].rate = part


def hand_out(rows: Any, terms: NDArray[np.float64], changed: NDArray[np.uint8]) -> None:
    """What else an aggregate was granted, to its flows. `terms[b, 2:]`: ceiling; the share of its
    path; among how many flows; 1 if it is standing; 1 if it was granted since the last time.
    `changed`: 1 where it was."""
    for i in range(len(rows)):
        b = rows[i].aggregate
        rows[i].ceiling, rows[i].path_share = terms[b, 2], terms[b, 3]
        rows[i].share = terms[b, 3] / terms[b, 4]
        rows[i].suppressed = terms[b, 5] > 0
        if terms[b, 6] > 0:
            changed[i] = 1


def weigh(now: int, rows: Any, i: int, at_work: bool) -> float:
    """How many bytes of a flow its aggregate's rate is for."""
    size = size_of(rows, i)
    if not at_work:
        return size  # for the next phase, or for all of them
    if rows[i].active:
        return left(now, rows, i) if rows[i].usable > 0 else 0.0
    due = rows[i].onset + rows[i].period - now
    coming = rows[i].period > 0 and -_kept_after < due < _kept_before
    return size if coming else 0.0


def fill(rows: Any, weight: Any, sums: Any) -> None:
    """The sums of `share_out`, by aggregate. Without a rate yet, a flow lasts for ever."""
    for i in range(len(rows)):
        b, present = rows[i].aggregate, rows[i].rate
        sums[b, 0] += weight[i]
        sums[b, 1] += 1.0
        sums[b, 2] += present  # NaN is kept by nobody
        if weight[i] > 0:
            lasts = weight[i] / present if present > 0 else _never
            sums[b, 3] = max(sums[b, 3], lasts)
