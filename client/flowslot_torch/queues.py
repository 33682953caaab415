# SPDX-License-Identifier: Apache-2.0
"""The first part of a gradient's way (SDCC, Figure 4): readiness queue, `on_tensor_ready`,
scheduling queue.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from flowslot_torch.tensors import Tensor, index_of

_POLL_S = 0.0002
"""How often an accelerator is asked whether a tensor's values are there."""
_ROUND_S, _LONGEST_S = 0.0005, 0.005


class Queues:
    """Filled by the thread that trains, emptied by who communicates.

    A buffer that is not full waits for the next tensor as long as another buffer of its own would
    take, no longer: so waiting is never much dearer than not to wait. A full one, and the last one
    of a backward pass, wait for nothing.
    """

    def __init__(self, changed: threading.Condition) -> None:
        """`changed`: notified of all that the thread that communicates waits for."""
        self._changed = changed
        self._ready: list[tuple[Tensor, Callable[[], bool] | None]] = []
        self._scheduled: list[tuple[int, int, Tensor]] = []
        self._bytes = 0  # of what is scheduled
        self._sequence = itertools.count()
        self._flushed = False
        self._round_s = _ROUND_S
        self._due = 0.0
        self._fusion_bytes = 0
        self._planned: list[int] | None = None
        self._absent: set[int] = set()
        """Indices of the tensors of a planned buffer that were not put here."""
        self._patient = False

    def __bool__(self) -> bool:
        """Whether anything is here."""
        return bool(self._ready or self._scheduled)

    def put(self, tensor: Tensor, ready: Callable[[], bool] | None = None) -> bool:
        """A gradient; `ready`: whether its values are there (None: they are). Whether what is here
        is worth a look: else a thread that looks would take the processor from who computes."""
        with self._changed:
            self._ready.append((tensor, ready))
            self._absent.discard(tensor.index)
            self._flushed = False
            return not self._absent

    def flush(self) -> None:
        """Nothing more comes before something has gone."""
        self._flushed = True

    def wake(self) -> None:
        """The thread that communicates."""
        with self._changed:
            self._changed.notify_all()

    def complete(self) -> bool:
        """Whether the next buffer is planned, and all of it is here, with values."""
        return (
            bool(self._ready)
            and self._planned is not None
            and not self._absent
            and not any(ready for _, ready in self._ready)
        )

    def took(self, round_s: float) -> None:
        """How long ranks took to agree; others may just have been late, so the shortest counts."""
        self._round_s = min(round_s, 2 * self._round_s, _LONGEST_S)

    def expect(self, fusion_bytes: int, planned: list[int] | None, patient: bool) -> None:
        """What the next buffer is: full at so many bytes, unless its tensors are `planned`.
        `patient`: it waits until it is full, or the last one."""
        with self._changed:
            self._fusion_bytes, self._planned, self._patient = fusion_bytes, planned, patient
            self._absent = {index_of(one) for one in planned or ()}
            self._absent -= {tensor.index for tensor, _ in self._ready}
            self._absent -= {entry[2].index for entry in self._scheduled}

    def wait(self, longest_s: float | None, also: Callable[[], bool]) -> None:
        """Until something is ready (of a planned buffer, all), `also` holds, or one is due."""
        with self._changed:
            if self._scheduled and self._planned is None and not self._patient:
                longest_s = max(self._due - time.monotonic(), 0)
            self._changed.wait_for(lambda: also() or self._ripe() or self.due(), longest_s)

    def _ripe(self) -> bool:
        """Whether what has come is worth a look: of a planned buffer, all of it."""
        return bool(self._ready) and (self._flushed or not self._absent)

    def schedule(self, event: Callable[[Tensor], Sequence[Tensor] | None]) -> None:
        """Move what is ready; `event`: on_tensor_ready. ValueError: it returned something else."""
        with self._changed:
            pending, self._ready = self._ready, []
        late = []
        for tensor, ready in pending:
            if ready is None or ready():
                self.push(_parts(tensor, event(tensor)))
            else:
                late.append((tensor, ready))
        if len(late) < len(pending):  # an exchange takes at least as long again as to agree on it
            self._due = time.monotonic() + 2 * self._round_s
        if late:
            with self._changed:
                self._ready[:0] = late
            time.sleep(_POLL_S)

    def push(self, tensors: Sequence[Tensor]) -> None:
        """Into the scheduling queue."""
        for tensor in tensors:
            heapq.heappush(self._scheduled, (-tensor.priority, next(self._sequence), tensor))
            self._bytes += tensor.nbytes

    def missing(self) -> list[int]:
        """Indices of the tensors for which a planned buffer waits: they were not put here, have no
        values yet, or came in other parts. From any thread."""
        here = {entry[2].id for entry in list(self._scheduled)}
        return sorted({index_of(one) for one in self._planned or () if one not in here})

    def idle(self) -> bool:
        """Whether nothing more comes before something has gone."""
        return self._flushed and not self._ready

    def due(self) -> bool:
        """Whether the next buffer is to be exchanged, or agreed on, now."""
        planned = self._planned  # who does not communicate now may ask
        if planned is not None:
            return {entry[2].id for entry in self._scheduled}.issuperset(planned)
        if not self._scheduled:
            return False
        late = not self._patient and time.monotonic() >= self._due
        return self.idle() or late or self._bytes >= self._fusion_bytes

    def tensors(self) -> list[Tensor]:
        """What is scheduled, most urgent first; of a planned buffer, its own."""
        if self._planned is not None:
            named = {entry[2].id: entry[2] for entry in self._scheduled}
            return [named[one] for one in self._planned]
        return [entry[2] for entry in sorted(self._scheduled)]

    def remove(self, tensors: Sequence[Tensor]) -> None:
        """They are on their way."""
        ids = {tensor.id for tensor in tensors}
        self._scheduled = [entry for entry in self._scheduled if entry[2].id not in ids]
        heapq.heapify(self._scheduled)
        self._bytes = sum(entry[2].nbytes for entry in self._scheduled)

    def pause(self, longest_s: float) -> None:
        """Ranks have nothing in common: until a tensor comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready, longest_s)


def _parts(tensor: Tensor, parts: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """What a program has made of a tensor."""
    assert tensor.whole is not None
    if not parts:
        tensor.whole.left = 1
        return (tensor,)
    ids = {part.id for part in parts}
    whole = sum(len(part.array) for part in parts) == len(tensor.array)
    if not whole or len(ids) < len(parts) or {part.index for part in parts} != {tensor.index}:
        raise ValueError(
            f"on_tensor_ready: must return all parts of tensor {tensor.index}, each once; make them"
            " with its `split`"
        )
    tensor.whole.left = len(parts)
    for part in parts:
        part.whole = tensor.whole
    return parts
