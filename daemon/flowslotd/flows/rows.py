# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""What is known of each flow: one row of numbers, for loops that are compiled (rows.pxd).

A column must not be called as an attribute of NumPy's arrays: where nothing is compiled, loops read
columns as attributes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPILED = not __file__.endswith(".py")

Records = NDArray[np.void]
"""ROW[F]"""
Rows = NDArray[np.intp]
"""Indices of rows."""

ROW = np.dtype(
    [
        ("cookie", "u8"),  # 0: the row is free
        ("job", "i4"),  # index into jobs
        ("path", "i4"),  # index into paths; 0: not mapped
        ("aggregate", "i4"),  # index into the aggregates; 0: in none
        ("seen", "?"),  # a record was taken in
        ("looked", "i8"),  # when (monotonic)
        ("active", "?"),
        ("drained", "?"),  # the kernel said so since the last look
        ("kernel", "?"),  # the kernel's counter is available
        ("iteration", "i8"),
        ("phases", "i8"),  # iterations with bytes, as the record counts them; 0: it does not
        ("inc", "i8"),
        ("counter", "i8"),  # the kernel's counter of sent bytes,
        ("origin", "i8"),  # and what it was when the iteration began
        ("target", "i8"),  # bytes of this iteration
        ("remaining", "i8"),
        ("unreported", "i8"),  # headers and the like, which the kernel sends besides the target:
        ("unreported_last", "i8"),  # the least, and the last, of the last two iterations
        ("ready", "i8"),  # bytes of this iteration that may be sent by now, as the record says
        ("supplied", "i8"),  # when it last had something to send, or got it (monotonic)
        ("usable", "f8"),  # most that it can use of a rate, by what it uses; 0: it hangs; inf: all
        ("window_at", "i8"),  # when a window began in which that is measured (monotonic),
        ("window_from", "i8"),  # the counter then,
        ("window_left", "i8"),  # bytes that were ready, or in the kernel, then,
        ("window_rate", "f8"),  # the least rate since then,
        ("wastes", "u1"),  # and the windows before, one after the other, with rate to spare
        ("moved", "i8"),  # when it last sent or got anything
        ("expected", "i8"),  # bytes of an iteration, learnt; 0 unknown
        ("onset", "i8"),  # when the communication phase began (monotonic), 0 never
        ("onset_inc", "i8"),
        ("onset_phases", "i8"),
        ("period", "i8"),  # ns, learnt; 0 unknown
        ("watched", "i8"),  # the kernel reports when the counter reaches this
        ("announced", "?"),  # the iteration's bytes are said at its beginning
        ("suppressed", "?"),  # its grant stands in all phases: nobody waits for news of it
        ("rate", "f8"),  # granted; nan: no arbiter has a say
        ("ceiling", "f8"),
        ("share", "f8"),  # of its path, if its job had that for itself; 0: unknown
        ("path_share", "f8"),  # the same, of all flows of its job on its path together
        ("own_share", "f8"),  # the same, as far as this host's flows tell
        ("queue_us", "i8"),  # how long its path's smallest buffer lasts (model/top_up.py)
        ("line", "f8"),  # what its first link carries, payload bytes/s
        ("uplink", "i8"),  # number of that link, one of this host's own, from 1; 0: not mapped
        ("lender", "i8"),  # the row of the flow whose rate it may borrow; -1: none
    ]
)
FREE = np.zeros(1, ROW)
"""A row that belongs to no flow: idle, on no path, known to nobody."""
FREE["job"], FREE["rate"], FREE["ceiling"], FREE["lender"] = -1, np.nan, np.nan, -1
FREE["usable"] = np.inf
UNREPORTED = 2
"""At most a part of 1 in so many of what is reported; more is not taken for headers."""
TRAILING = 64
"""Headers beyond a part of 1 in so many of what is reported go before its last byte; the others may
go after it (the next requests), and an end that waits for them comes late."""

# The same as C variables: rows.pxd declares them.
_unreported, _trailing, _unknown = UNREPORTED, TRAILING, math.nan


def as_structs(rows: NDArray[np.void]) -> Any:
    """A structured array as the loops take it: `rows[i].column`."""
    return rows if COMPILED else rows.view(np.recarray)


class Typed:
    """An array as the loops of one module take it. Made once for each array: compiled, that takes
    longer than most loops."""

    def __init__(self, typed: Callable[[Any], Any]) -> None:
        """`typed`: the module's."""
        self._typed = typed
        self._of: NDArray[np.void] | None = None
        self._made: Any = None

    def __call__(self, rows: NDArray[np.void]) -> Any:
        """`rows[i].column`."""
        if rows is not self._of:
            self._of, self._made = rows, self._typed(as_structs(rows))
        return self._made


def headers(unreported: int, target: int) -> int:
    """Bytes that the kernel sends besides the `target` bytes of an iteration."""
    return min(unreported, target // _unreported)


def whole(unreported: int, target: int) -> int:
    """Bytes that the kernel sends until the last of the `target` bytes of an iteration."""
    return target + max(headers(unreported, target) - target // _trailing, 0)


def remains(rows: Any, i: int) -> float:
    """Bytes that flow `i` had yet to send when it was looked at, headers included."""
    more: float = rows[i].remaining
    target = rows[i].target
    if target > 0:
        more = more * (whole(rows[i].unreported, target) / target)
    return more


def typed(rows: Any) -> Any:
    """See Typed."""
    return rows


def bytes_of(rows: Any, at: Rows, left: NDArray[np.float64], sent: NDArray[np.float64]) -> None:
    """Of the rows `at`, float64[N] each: what `remains`, and what was sent so far; NaN: the kernel
    does not count it."""
    for k in range(len(at)):
        i = at[k]
        left[k] = remains(rows, i)
        sent[k] = rows[i].counter if rows[i].kernel else _unknown
