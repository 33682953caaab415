# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Loops over the slots of a record, for whose sake this file is compiled (types: slot_check.pxd).

All arrays are views of uint64 words: int64[S, 32] for slots. What is done is the same when this
file is not compiled.
"""

from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot_shm.layout import State, offset

MAX_BYTES = 1 << 50  # of one flow in one iteration; 4096 of them still add up in 64 bits
MAX_COUNT = 1 << 62  # iterations and times
MAX_PERIOD = 1 << 50  # ns, 13 days
TAKEN, TORN, STRANGE = 0, 1, 2
"""What `settle` says of a slot."""


class Fault(IntFlag):
    """What had to be repaired in a slot."""

    STATE = 1  # unknown state, role, address family or transport
    RANGE = 2  # a number beyond its bound
    ORDER = 4  # not done <= posted <= ready <= iteration_total, or updated before it began
    BACKWARD = 8  # a counter of an iteration fell
    TEXT = 16  # a job name with other than visible ASCII characters


# The same as C variables: slot_check.pxd declares them.
_taken, _torn, _strange = TAKEN, TORN, STRANGE
_max_bytes, _max_count, _max_period = MAX_BYTES, MAX_COUNT, MAX_PERIOD
_free, _idle, _active = State.FREE.value, State.IDLE.value, State.ACTIVE.value
_state, _range = Fault.STATE.value, Fault.RANGE.value
_order, _backward = Fault.ORDER.value, Fault.BACKWARD.value
_family, _cookie, _iteration = (offset(f) // 8 for f in ("family", "sock_cookie", "iteration"))
_ready, _posted, _done = (offset(field) // 8 for field in ("ready", "posted", "done"))
_total, _start = offset("iteration_total") // 8, offset("t_iteration_start_ns") // 8
_update, _phases = offset("t_update_ns") // 8, offset("phases") // 8
_period = offset("period_ns") // 8


def changed(
    live: NDArray[np.int64],
    seen: NDArray[np.int64],
    at: NDArray[np.intp],
    seqs: NDArray[np.int64],
) -> int:
    """How many slots of `live`, int64[S, 32], have another sequence number than `seen`, int64[S];
    which, and what it is, in `at` and `seqs`, both [S]."""
    n = 0
    for s in range(len(seen)):
        seq = live[s, 0] & 0xFFFFFFFF
        if seq != seen[s]:
            at[n], seqs[n] = s, seq
            n += 1
    return n


def settle(  # noqa: PLR0917
    live: NDArray[np.int64],
    words: NDArray[np.int64],
    good: NDArray[np.int64],
    seen: NDArray[np.int64],
    faults: NDArray[np.int64],
    found: tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]],
) -> int:
    """Take over the slots that were copied whole, and hold the same flows as before.

    `found`: slots of `live` with the sequence numbers they had before they were copied to `words`,
    int64[n, 32], and room for a verdict on each. TAKEN: now in `good` and `seen`. STRANGE: a flow
    came or went, or is not known by a cookie. TORN: changed while it was copied. All but these are
    repaired, and `faults`, int64[S], has new bits. Returns how many are not TAKEN.
    """
    at, seqs, verdicts = found
    left = 0
    for i in range(len(words)):
        s = at[i]
        verdict = _taken
        if seqs[i] & 1 or (live[s, 0] & 0xFFFFFFFF) != seqs[i]:
            verdict = _torn
        else:
            if not is_same(words, i, good, s):
                verdict = _strange
            faults[s] |= repair(words, i, good, s)
        if verdict == _taken:
            good[s, :] = words[i, :]
            seen[s] = seqs[i]
        else:
            left += 1
        verdicts[i] = verdict
    return left


def is_same(words: Any, i: int, good: Any, s: int) -> bool:
    """The flow in `words[i]` is the one in `good[s]`, whose identity was checked when it came."""
    state = (words[i, 0] >> 32) & 0xFFFF
    if state not in (_idle, _active) or (words[i, 0] >> 48) != (good[s, 0] >> 48):
        return False
    if words[i, _cookie] == 0:
        return False
    for word in range(_family, _iteration):  # noqa: SIM110 - to be compiled
        if words[i, word] != good[s, word]:
            return False
    return True


def repair(words: Any, i: int, good: Any, s: int) -> int:
    """Force the numbers in `words[i]` into their bounds and in order; none may have fallen since
    `good[s]`, if that is the same socket. A free slot is all zero: what a closed flow left behind
    is nobody's business. Returns Fault bits."""
    state = (words[i, 0] >> 32) & 0xFFFF
    if state not in (_idle, _active):
        words[i, :] = 0
        return 0 if state == _free else _state
    bits = 0
    if not 0 <= words[i, _period] <= _max_period:
        words[i, _period] = 0
        bits |= _range
    for word in range(_iteration, _phases + 1):
        most = _max_bytes if _ready <= word <= _total else _max_count
        if not 0 <= words[i, word] <= most:  # they are unsigned
            words[i, word] = most
            bits |= _range
    # A slot without a cookie may have a new flow since we last looked.
    same = words[i, _cookie] != 0 and words[i, _cookie] == good[s, _cookie]
    if same and words[i, _iteration] == good[s, _iteration]:
        for word in range(_ready, _total):
            if words[i, word] < good[s, word]:
                words[i, word] = good[s, word]
                bits |= _backward
    posted, total = words[i, _posted], words[i, _total]
    bits |= force(words, i, _ready, max(words[i, _ready], posted))
    bits |= force(words, i, _done, min(words[i, _done], posted))
    bits |= force(words, i, _total, max(total, words[i, _ready]) if total > 0 else 0)
    bits |= force(words, i, _start, min(words[i, _start], words[i, _update]))
    return bits


def force(words: Any, i: int, word: int, right: int) -> int:
    """Set a word to what is right; returns ORDER if it was not."""
    if words[i, word] == right:
        return 0
    words[i, word] = right
    return _order
