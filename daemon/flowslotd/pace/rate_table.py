# SPDX-License-Identifier: Apache-2.0
"""Loops over the kernel's tables, for whose sake this file is compiled (types: rate_table.pxd).

`ctl`, `stat`, `entries`, `held`: what `as_structs` makes of CTL[S], STAT[S] and ENTRY.
What is done is the same when this file is not compiled.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_RATE, MAX_SMALL = 2.0**60, 2.0**31
"""The largest numbers that are written: an infinite ceiling is none."""

# The same as C variables: rate_table.pxd declares them.
_max_rate, _max_small = MAX_RATE, MAX_SMALL


def put(
    held: Any,
    at: NDArray[np.intp],
    flows: NDArray[np.uint64],
    columns: tuple[NDArray[Any], ...],
    changed: NDArray[np.intp],
) -> int:
    """Make `held[at[i]]`, of ENTRY[F], the entry of `flows[i]`. Returns how many have changed;
    which of `at`, in `changed`, intp[N].

    `columns`, all [N]: rate, ceiling, growth (float64), guaranteed (uint8), queue_us (int64). There
    is no top-up where the ceiling does not exceed the rate.
    """
    rates, ceilings, growths, guaranteed, queues = columns
    n = 0
    for i in range(len(at)):
        r = at[i]
        rate, ceiling, growth = rates[i], ceilings[i], growths[i]
        if ceiling <= rate:
            ceiling, growth = rate, 0.0
        same = held[r].cookie == flows[i] and held[r].reserved == rate
        same = same and held[r].ceiling == ceiling and held[r].growth == growth
        same = same and held[r].guaranteed == guaranteed[i] and held[r].queue_us == queues[i]
        if not same:
            held[r].cookie, held[r].reserved, held[r].ceiling = flows[i], rate, ceiling
            held[r].growth, held[r].guaranteed = growth, guaranteed[i]
            held[r].queue_us = queues[i]
            changed[n] = r
            n += 1
    return n


def within(value: float, most: float) -> int:
    """A number as the kernel takes it."""
    return int(min(value, most)) if value > 0 else 0


def write(ctl: Any, slots: NDArray[np.intp], entries: Any) -> int:
    """Write the numbers of entry i to slot `slots[i]`. Returns how many entries changed."""
    changed = 0
    for i in range(len(slots)):
        s = slots[i]
        reserved = within(entries[i].reserved, _max_rate)
        ceiling = within(entries[i].ceiling, _max_rate)
        growth = within(entries[i].growth, _max_small)
        queue_us = within(entries[i].queue_us, _max_small)
        guaranteed = 1 if entries[i].guaranteed else 0
        same = ctl[s].reserved == reserved and ctl[s].ceiling == ceiling
        same = same and ctl[s].guaranteed == guaranteed
        same = same and ctl[s].growth == growth and ctl[s].queue_us == queue_us
        if not same or ctl[s].deadline_ns == 0:
            ctl[s].reserved, ctl[s].ceiling = reserved, ceiling
            ctl[s].guaranteed = guaranteed
            ctl[s].growth, ctl[s].queue_us = growth, queue_us
            changed += 1
    return changed


def refresh(  # noqa: PLR0917
    ctl: Any,
    stat: Any,
    live: NDArray[np.intp],
    path: NDArray[np.intp],
    base: NDArray[np.uint32],
    deadline_ns: int,
) -> int:
    """Extend the entries in the slots `live` that are still their flows', and tell each the
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


def read(stat: Any, known: NDArray[np.uint64], acked: NDArray[np.int64]) -> bool:
    """Read the counters of all slots to `acked`, int64[S]. False: not all of them have the flows
    that are `known`, uint64[S]."""
    for s in range(1, len(known)):
        acked[s] = stat[s].acked
    # Afterwards: a slot that has changed hands meanwhile is noticed.
    for s in range(1, len(known)):  # noqa: SIM110 - to be compiled
        if stat[s].cookie != known[s]:
            return False
    return True
