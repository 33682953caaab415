# SPDX-License-Identifier: Apache-2.0
"""What is known of each flow, and how one look at records and kernel counters advances it.

Pure array code over the columns of `ROW`: F flows at once.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flowslot.units import MILLISECOND, Nanos
from flowslot_shm.layout import State

Records = NDArray[np.void]
Ints = NDArray[np.int64]

SMOOTHING = 0.25
"""Weight of the latest iteration in learnt periods and volumes."""

MOST_STEPS, MOST_STEPS_QUIET = 8, 1000
"""Iterations from one look to the next; more say nothing about the period."""

ROW = np.dtype(
    [
        ("cookie", "u8"),
        ("job", "i4"),  # index into jobs
        ("path", "i4"),  # index into paths; 0: not mapped
        ("seen", "?"),  # a record was taken in
        ("looked", "i8"),  # when (monotonic)
        ("active", "?"),
        ("drained", "?"),  # the kernel said so since the last look
        ("kernel", "?"),  # the kernel's counter is available
        ("iteration", "u8"),
        ("inc", "i8"),
        ("counter", "i8"),  # the kernel's counter of acknowledged bytes,
        ("base", "i8"),  # and what it was when the iteration began
        ("target", "i8"),  # bytes of this iteration
        ("remaining", "i8"),
        ("expected", "i8"),  # bytes of an iteration, learnt; 0 unknown
        ("onset", "i8"),  # when the communication phase began (monotonic), 0 never
        ("onset_inc", "i8"),
        ("onset_iteration", "i8"),
        ("period", "i8"),  # ns, learnt; 0 unknown
        ("watched", "i8"),  # the kernel reports when the counter reaches this
        ("announced", "?"),  # the iteration's bytes are said at its beginning
        ("quiet", "?"),  # its grant stands in all phases: nobody waits for news of it
        ("rate", "f8"),  # granted; nan: no arbiter has a say
        ("ceiling", "f8"),
        ("share", "f8"),  # of its path, if its job had that for itself; 0: unknown
    ]
)


class Counters(Protocol):
    """The kernel's counters: `cookie`, `acked` (payload bytes), of the same length."""

    @property
    def cookie(self) -> NDArray[np.uint64]:
        """Socket cookies."""
        ...

    @property
    def acked(self) -> NDArray[np.uint64]:
        """Acknowledged payload bytes of each."""
        ...


def advance(
    now: Nanos,
    row: Records,
    record: Records,
    counters: Counters | None,
    quiet: NDArray[np.bool_],
) -> None:
    """Take one look at F flows: `row` ROW[F] (changed in place), `record` SLOT[F].

    `quiet`, bool[F]: they are looked at once per slot only, so that a phase may have come and gone.

    What remains is what the iteration's total says minus what the kernel saw acknowledged in it
    (without a kernel counter: minus what the record calls done).
    """
    counter, kernel = _join(row["cookie"], counters)
    done, posted, ready, total = (
        record[name].astype(np.int64) for name in ("done", "posted", "ready", "iteration_total")
    )
    working = record["state"] == State.ACTIVE

    began = ~row["seen"] | (record["iteration"] != row["iteration"])
    learn = began & (row["target"] > 0)
    row["expected"] = np.where(learn, _smooth(row["expected"], row["target"]), row["expected"])
    row["inc"] += began
    # An iteration that was complete ended at the counter's last value: libraries send some
    # bytes that they do not report (headers), and these must not add up.
    end = np.where(row["remaining"] == 0, row["counter"], row["base"] + row["target"])
    base = np.where(began, np.minimum(end, counter), row["base"])
    joined = kernel & ~(row["kernel"] & row["seen"])
    # The record lags behind the kernel, so `counter - done` is never below the true base: the
    # smallest one seen is the best estimate, and what is called done needs no other witness.
    most = np.maximum(counter - done, 0)
    # Iterations that were not seen have also been sent.
    joined |= kernel & began & (record["iteration"] > row["iteration"] + np.uint64(1))
    row["base"] = np.where(joined, most, np.where(kernel, np.minimum(base, most), base))

    # What is expected, while it works; once it is idle, what it has really handed over.
    target = np.where(total > 0, np.maximum(total, ready), np.maximum(ready, row["expected"]))
    target = np.where(working, target, posted)
    acked = np.where(kernel, np.maximum(counter - row["base"], done), done)
    remaining = np.maximum(target - acked, 0)
    announced = ~working & (ready == 0) & (total > 0)
    row["expected"] = np.where(announced, total, row["expected"])

    row["announced"] = (total > 0) | (target == 0)
    row["seen"], row["looked"], row["drained"] = True, now, False
    row["iteration"] = record["iteration"]
    row["kernel"], row["counter"] = kernel, counter
    row["target"], row["remaining"], row["active"] = target, remaining, remaining > 0
    _phase(now, row, quiet & (target > 0), record["t_iteration_start_ns"].astype(np.int64))


def _phase(now: Nanos, row: Records, quiet: NDArray[np.bool_], told: Ints) -> None:
    """Notice that a communication phase begins, and learn the period from one to the next.

    `told`: when the iterations began, as the record says. Where nobody looks at once, that is
    better than when it was noticed, if it can be true.
    """
    starts = (row["active"] | quiet) & (row["onset_inc"] != row["inc"])
    if not starts.any():
        return
    told = np.where(quiet & (told > row["onset"]) & (told <= now), told, now)
    steps = row["iteration"].astype(np.int64) - row["onset_iteration"]
    # Several iterations at once: notice came late, or the job skips numbers.
    most = np.where(quiet, MOST_STEPS_QUIET, MOST_STEPS)
    measured = starts & (row["onset"] > 0) & (steps >= 1) & (steps <= most)
    sample = np.maximum((told - row["onset"]) // np.clip(steps, 1, most), MILLISECOND)
    # One sample of several iterations counts as much as they would have one by one.
    weight = 1.0 - (1.0 - SMOOTHING) ** np.clip(steps, 1, most)
    row["period"] = np.where(measured, _smooth(row["period"], sample, weight), row["period"])
    row["onset"] = np.where(starts, told, row["onset"])
    row["onset_inc"] = np.where(starts, row["inc"], row["onset_inc"])
    row["onset_iteration"] = np.where(starts, row["iteration"], row["onset_iteration"])


def _smooth(old: Ints, new: Ints, weight: float | NDArray[np.float64] = SMOOTHING) -> Ints:
    """Exponentially weighted mean; the first sample counts alone."""
    smoothed: Ints = np.where(old > 0, old + ((new - old) * weight).astype(np.int64), new)
    return smoothed


def _join(cookies: NDArray[np.uint64], counters: Counters | None) -> tuple[Ints, NDArray[np.bool_]]:
    """The kernel's count of acknowledged bytes for each cookie, and whether it has one."""
    if counters is None or not len(counters.cookie):
        return np.zeros(len(cookies), np.int64), np.zeros(len(cookies), np.bool_)
    order = np.argsort(counters.cookie)
    known = counters.cookie[order]
    at = np.minimum(np.searchsorted(known, cookies), len(known) - 1)
    found = known[at] == cookies
    return np.where(found, counters.acked[order[at]].astype(np.int64), 0), found
