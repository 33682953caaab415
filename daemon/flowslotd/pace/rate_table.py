# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Loops over entries and over the kernel's tables. Compiled (types: rate_table.pxd); interpreted,
they do the same.

`ctl`, `stat`, `entries`, `held`, `rows`: what `as_structs` makes of CTL[S], STAT[S], ENTRY and the
flow table's ROW[F].
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot.model.top_up import burst, growth, highest, least
from flowslotd.flows.rows import Rows

MAX_RATE, MAX_SMALL = 2.0**60, 2.0**31 - 1
"""The largest numbers that are written: an infinite ceiling is none."""

# The same as C variables: rate_table.pxd declares them.
_max_rate, _max_small = MAX_RATE, MAX_SMALL


def typed_rows(rows: Any) -> Any:
    """See Typed."""
    return rows


def typed_entries(entries: Any) -> Any:
    """See Typed."""
    return entries


def typed_ctl(ctl: Any) -> Any:
    """See Typed."""
    return ctl


def typed_stat(stat: Any) -> Any:
    """See Typed."""
    return stat


def are(rows: Any, at: Rows, flows: NDArray[np.uint64]) -> bool:
    """`rows[at]` are these flows, in this order."""
    if len(at) != len(flows):
        return False
    for i in range(len(at)):  # noqa: SIM110 - to be compiled
        if rows[at[i]].cookie != flows[i]:
            return False
    return True


def lives(stat: Any, slots: Rows, cookies: NDArray[np.uint64]) -> bool:
    """Slot `slots[i]` is that of the flow `cookies[i]`; slot 0 is nobody's."""
    for i in range(len(slots)):
        if slots[i] == 0 or stat[slots[i]].cookie != cookies[i]:
            return False
    return True


def holds(ctl: Any, slots: Rows, cookies: NDArray[np.uint64]) -> bool:
    """The entry in slot `slots[i]` is that of the flow `cookies[i]`."""
    for i in range(len(slots)):  # noqa: SIM110 - to be compiled
        if ctl[slots[i]].cookie != cookies[i]:
            return False
    return True


def put(  # noqa: PLR0917
    held: Any,
    rows: Any,
    at: Rows,
    columns: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.uint8]],
    hard: bool,
    changed: Rows,
) -> int:
    """Make `held[at[i]]` the entry of the flow `rows[at[i]]`. Returns how many have changed; which
    of `at`, in `changed`, intp[N].

    `columns`: rate, ceiling, guaranteed, each [N]. There is no top-up and no burst where the
    ceiling does not exceed the rate, nor if `hard`.
    """
    rates, ceilings, guaranteed = columns
    n = 0
    for i in range(len(at)):
        r = at[i]
        rate, ceiling, grows = rates[i], rates[i], 0.0
        queue_us, most = rows[r].queue_us, 0.0
        # The arbiter also knows the job's flows on other hosts.
        share = rows[r].share if rows[r].share > 0 else rows[r].own_share
        lowest = least(share, 0.0 if hard else ceilings[i])
        if not hard and ceilings[i] > rate:
            ceiling = ceilings[i]
            taking_turns = 0.0 if rows[r].suppressed else rows[r].path_share
            grows = growth(rate, share, taking_turns, queue_us)
            ceiling = highest(rate, ceiling, share, taking_turns)
            most = burst(share, queue_us)
        same = held[r].cookie == rows[r].cookie and held[r].reserved == rate
        same = same and held[r].ceiling == ceiling and held[r].growth == grows
        same = same and held[r].guaranteed == guaranteed[i] and held[r].queue_us == queue_us
        same = same and held[r].burst == most and held[r].least == lowest
        same = same and held[r].line == rows[r].line and held[r].uplink == rows[r].uplink
        if not same:
            held[r].cookie, held[r].reserved, held[r].ceiling = rows[r].cookie, rate, ceiling
            held[r].growth, held[r].guaranteed = grows, guaranteed[i]
            held[r].queue_us, held[r].burst, held[r].least = queue_us, most, lowest
            held[r].line, held[r].uplink = rows[r].line, rows[r].uplink
            changed[n] = r
            n += 1
    return n


def within(value: float, most: float) -> int:
    """A number as the kernel takes it."""
    return int(min(value, most)) if value > 0 else 0


def write(ctl: Any, slots: Rows, entries: Any) -> int:
    """Write the numbers of entry i to slot `slots[i]`. Returns how many entries changed."""
    changed = 0
    for i in range(len(slots)):
        s = slots[i]
        reserved = within(entries[i].reserved, _max_rate)
        ceiling = within(entries[i].ceiling, _max_rate)
        grows = within(entries[i].growth, _max_small)
        queue_us = within(entries[i].queue_us, _max_small)
        most = within(entries[i].burst, _max_small)
        lowest = within(entries[i].least, _max_small)
        line, uplink = within(entries[i].line, _max_rate), within(entries[i].uplink, _max_small)
        guaranteed = 1 if entries[i].guaranteed else 0
        same = ctl[s].reserved == reserved and ctl[s].ceiling == ceiling
        same = same and ctl[s].guaranteed == guaranteed
        same = same and ctl[s].growth == grows and ctl[s].queue_us == queue_us
        same = same and ctl[s].burst == most and ctl[s].least == lowest
        same = same and ctl[s].line == line and ctl[s].uplink == uplink
        if not same or ctl[s].deadline_ns == 0:
            ctl[s].reserved, ctl[s].ceiling = reserved, ceiling
            ctl[s].guaranteed = guaranteed
            ctl[s].growth, ctl[s].queue_us, ctl[s].burst = grows, queue_us, most
            ctl[s].least, ctl[s].line, ctl[s].uplink = lowest, line, uplink
            changed += 1
    return changed


def refresh(  # noqa: PLR0917
    ctl: Any,
    stat: Any,
    live: Rows,
    path: Rows,
    base: NDArray[np.uint32],
    deadline_ns: int,
) -> int:
    """Extend the entries in the slots `live` that are still their flows', and give each the
    smallest RTT of its path.

    `path`, intp[S]: the path of each slot. `base`, uint32[P]: the largest number. Returns how many
    there are.
    """
    ours = 0
    for i in range(len(live)):
        s = live[i]
        if ctl[s].cookie == stat[s].cookie:
            ctl[s].deadline_ns = deadline_ns
            base[path[s]] = min(base[path[s]], stat[s].min_rtt_us)
            ours += 1
    for i in range(len(live)):
        s = live[i]
        if ctl[s].cookie == stat[s].cookie:
            ctl[s].base_rtt_us = base[path[s]]
    return ours


def read(stat: Any, known: NDArray[np.uint64], counters: NDArray[np.int64]) -> bool:
    """Read what all slots have sent and had acknowledged to `counters`, int64[2, S]. False: not
    all of them have the flows that are `known`, uint64[S]."""
    for s in range(1, len(known)):
        counters[0, s], counters[1, s] = stat[s].sent, stat[s].acked
    # Afterwards: a slot that has changed hands meanwhile is noticed. That needs loads and stores in
    # the order in which they stand here and in bpf/, as on x86.
    for s in range(1, len(known)):  # noqa: SIM110 - to be compiled
        if stat[s].cookie != known[s]:
            return False
    return True
