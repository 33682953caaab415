# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Loops over the slots of a record, for whose sake this file is compiled (types: slot_check.pxd).

All arrays are views of uint64 words: int64[S, 32] for slots. What is done is the same when this
file is not compiled.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslot_shm.layout import State, offset

MAX_BYTES = 1 << 50  # of one flow in one iteration; 4096 of them still add up in 64 bits
MAX_COUNT = 1 << 62  # iterations and times
TAKEN, TORN, STRANGE = 0, 1, 2
"""What `settle` says of a slot."""

# The same as C variables: slot_check.pxd declares them.
_taken, _torn, _strange = TAKEN, TORN, STRANGE
_max_bytes, _max_count = MAX_BYTES, MAX_COUNT
_idle, _active = State.IDLE.value, State.ACTIVE.value
_family, _cookie, _iteration = (offset(f) // 8 for f in ("family", "sock_cookie", "iteration"))
_ready, _posted, _done = (offset(field) // 8 for field in ("ready", "posted", "done"))
_total, _start = offset("iteration_total") // 8, offset("t_iteration_start_ns") // 8
_update = offset("t_update_ns") // 8


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


def settle(
    live: NDArray[np.int64],
    words: NDArray[np.int64],
    good: NDArray[np.int64],
    seen: NDArray[np.int64],
    found: tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]],
) -> int:
    """Take over the slots that were copied whole, and in which nothing needs to be repaired.

    `found`: slots of `live` with the sequence numbers they had before they were copied to `words`,
    int64[n, 32], and room for a verdict on each. TAKEN: now in `good` and `seen`. TORN: changed
    while it was copied. STRANGE: something is wrong or a flow came or went; to be looked at with
    more care. Returns how many are not TAKEN.
    """
    at, seqs, verdicts = found
    left = 0
    for i in range(len(words)):
        s = at[i]
        verdict = _taken
        if seqs[i] & 1 or (live[s, 0] & 0xFFFFFFFF) != seqs[i]:
            verdict = _torn
        elif not is_sound(words, i, good, s):
            verdict = _strange
        if verdict == _taken:
            good[s, :] = words[i, :]
            seen[s] = seqs[i]
        else:
            left += 1
        verdicts[i] = verdict
    return left


def is_sound(words: Any, i: int, good: Any, s: int) -> bool:
    """The flow in `words[i]` is the same as in `good[s]`, and all its numbers can be true."""
    state = (words[i, 0] >> 32) & 0xFFFF
    return state in (_idle, _active) and is_same(words, i, good, s) and is_true(words, i, good, s)


def is_same(words: Any, i: int, good: Any, s: int) -> bool:
    """Nothing has changed in who the flow is, which was checked when it came."""
    if words[i, _cookie] == 0 or (words[i, 0] >> 48) != (good[s, 0] >> 48):
        return False
    for word in range(_family, _iteration):  # noqa: SIM110 - to be compiled
        if words[i, word] != good[s, word]:
            return False
    return True


def is_true(words: Any, i: int, good: Any, s: int) -> bool:
    """All numbers are in their bounds, in order, and none has gone back."""
    for word in range(_iteration, _update + 1):
        most = _max_bytes if _ready <= word <= _total else _max_count
        if not 0 <= words[i, word] <= most:
            return False
    if words[i, _iteration] == good[s, _iteration]:
        for word in range(_ready, _total):
            if words[i, word] < good[s, word]:
                return False
    elif words[i, _iteration] < good[s, _iteration]:
        return False
    total, ready = words[i, _total], words[i, _ready]
    in_order: bool = words[i, _done] <= words[i, _posted] <= ready
    in_time: bool = words[i, _start] <= words[i, _update]
    return in_order and in_time and (total == 0 or total >= ready)
