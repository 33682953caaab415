# SPDX-License-Identifier: Apache-2.0
"""The way of a gradient (SDCC, Figure 4): readiness queue, `on_tensor_ready`, scheduling queue,
coordination, fusion buffer, `on_buffer_ready`.

Ranks agree on each buffer's content: all tell which tensors they have, the first rank's order
counts, what some do not have yet waits. What becomes ready meanwhile, and is more urgent, is in the
next buffer: a buffer, or a part of a split tensor, is never interrupted. Where nothing is to be
agreed on, the thread that trains begins and ends buffers itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from flowslot_torch.buffers import Buffers
from flowslot_torch.coordination import Coordination
from flowslot_torch.engines import Array, Engine
from flowslot_torch.membership import Membership
from flowslot_torch.operations import Operations
from flowslot_torch.passes import Passes
from flowslot_torch.plan import Plan
from flowslot_torch.program import Connection, Links, Program, Statistics
from flowslot_torch.queues import Queues
from flowslot_torch.report import Reporter
from flowslot_torch.state import tell
from flowslot_torch.tensors import Tensor, Whole, id_of
from flowslot_torch.transport import PeerLost, Transport
from flowslot_torch.turns import Turns

DEFAULT_FUSION_BYTES = 128 << 20
_log = logging.getLogger(__name__)
_PAUSE_S, _LONGEST_S = 0.0002, 0.005  # when no tensor is ready on all ranks
_LOOK_S = 0.2
"""How often an idle worker asks whether the membership changes."""


class Stuck(RuntimeError):
    """A gradient was waited for too long: it says which, and who has not got it."""


class TaskManager:
    """Of one rank. `fusion_bytes`: most that a buffer holds, unless a single tensor has more; the
    first rank's counts."""

    def __init__(
        self,
        program: Program,
        engine: Engine,
        transport: Transport,
        *,
        links: Links | None = None,
        fusion_bytes: int = DEFAULT_FUSION_BYTES,
        average: bool = True,
        reporter: Reporter | None = None,
        membership: Membership | None = None,
    ) -> None:
        """`average`: leave means, not sums. `reporter`: to the daemon.
        `membership`: may change; `transport` is its. Without one, a lost peer ends all."""
        self._reporter = reporter
        self.fusion_bytes = fusion_bytes
        self.statistics = Statistics()
        self.buffers = 0
        self._engine, self._transport = engine, transport
        self._program, self._membership = program, membership
        self._timeout_s = transport.timeout_s
        program.tasks, program.statistics = self, self.statistics
        self._bind(transport)
        program.links = links or Links()
        every = os.environ.get("FLOWSLOT_TIMER_ITERATIONS", program.timer_iterations)
        if not str(every).isdecimal() or int(every) < 1:
            raise ValueError(f"FLOWSLOT_TIMER_ITERATIONS: must be 1 or more, is {every}")
        program.timer_iterations = self._timer = int(every)
        self._changed = threading.Condition()
        self._came = threading.Condition()
        """Results have."""
        self._queues = Queues(self._changed)
        self._waiting: dict[int, Whole] = {}
        self._passes = Passes(self.statistics, reporter)
        self._iterations = 0
        self._mark = -1
        """The tensor whose first part begins an iteration, alike on all ranks."""
        scale = lambda: 1.0 / len(self._ops.ranks) if average else 1.0  # noqa: E731
        self._exchange = Buffers(engine, membership is not None, scale, self._finish)
        self._progress, self._changing = 0.0, False
        self._asked, self._wish, self.let_in = -1, 0, False
        self._looked = 0.0
        self._admitting: threading.Event | None = None
        self.save: Callable[[], bytes] = bytes
        """What those who join need to know, beside what is kept here."""
        self.told = b""
        """What `save` returned on the worker that told us."""
        self._pause_s = _PAUSE_S
        self._closed = False
        look_s = _LOOK_S if membership is not None else None
        wait = lambda: self._queues.wait(look_s, self._is_called)  # noqa: E731
        self._turns = Turns(wait, self._act, self._queues.wake, self._end)
        if membership is not None and membership.joined:
            self._repair(joining=True)
        self._expect()
        self._turns.start()
        atexit.register(self.close)  # a thread that is in a library's code then would abort

    def enqueue(self, index: int, array: Array, ready: Callable[[], bool] | None = None) -> None:
        """A gradient; `ready`: whether its values are there, where an accelerator computes them.
        Its array has the result once it has been waited for. ValueError: it is on its way. Raises
        what ended the communication."""
        with self._changed:
            self._turns.check()
            if index in self._waiting:
                raise ValueError(f"tensor {index}: is on its way already; wait for it first")
            order = self._passes.came(index, self._engine.nbytes(array))
            whole = self._waiting[index] = Whole(index)
            ripe = self._queues.put(Tensor(index, array, order, whole=whole), ready)
        if ripe and (not self._turns.take(self._is_beside) or self._queues.due()):
            self._queues.wake()

    def get_backward_order(self, tensor: Tensor) -> int:
        """When it was ready in the last backward pass, from 0: the first layer's is the largest."""
        return tensor.order

    def flush(self) -> None:
        """A backward pass is over: what has come waits for nothing more."""
        self._queues.flush()
        self._queues.wake()

    def wait(self, index: int) -> bool:
        """Until that gradient has its result; False: it was not on its way. Raises what ended the
        communication; RuntimeError in an event, which is part of it; Stuck, when nothing was
        exchanged for the transport's timeout: what is under way has timeouts of its own."""
        whole = self._waiting.get(index)
        if whole is None:
            self._turns.check()
            return False
        if whole.left and self._turns.is_mine():
            raise RuntimeError(f"tensor {index}: is waited for in the middle of the communication")
        began = time.monotonic()
        while whole.left:
            self._queues.flush()  # again: another thread may bring more meanwhile
            if self._turns.take(self._is_at_hand):
                if self._queues.due():  # the other thread may have looked in the middle of the turn
                    self._queues.wake()
                continue
            self._queues.wake()
            with self._came:
                ended = lambda: not whole.left or self._turns.error is not None  # noqa: E731
                self._came.wait_for(ended, min(self._timeout_s, _LOOK_S))
            self._turns.check()
            busy = self._changing or self._exchange.flying
            if busy or time.monotonic() < max(began, self._progress) + self._timeout_s + 1:
                continue
            raise Stuck(f"tensor {index}: no result within {self._timeout_s:g} s{self._lacking()}")
        self._turns.check()
        self._waiting.pop(index, None)  # two threads may wait
        return True

    def _lacking(self) -> str:
        """What is waited for."""
        missing, ranks = self._queues.missing(), self._coordination.lacking
        if missing:
            return f"; the program repeats its buffers, and tensors {missing} have not come"
        return f"; not ready on ranks {ranks}" if ranks else ""

    def wait_all(self) -> None:
        """Until all gradients have theirs."""
        for index in list(self._waiting):
            self.wait(index)

    def boundary(self) -> bool:
        """Between two iterations, everything having been waited for: let those in who wait. Whether
        there were some. Raises as `wait`."""
        with self._changed:
            self._turns.check()
            if not self.let_in:
                return False
            self.let_in = False
            admitting = self._admitting = threading.Event()
            self._changed.notify_all()
        admitting.wait()
        self._turns.check()
        return True

    def close(self) -> None:
        """End the thread and the transport; whoever waits gets an error."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._transport.close()
        self._turns.join(5)  # an event may close

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the task manager was closed")

    def _is_planned(self) -> bool:
        """Whether the next buffer can begin without a word to anybody."""
        if self._membership is not None:
            return False
        return self._queues.complete() and not self._is_timer_due(self._plan.next() or ())

    def _is_beside(self) -> bool:
        """The same, and it is exchanged beside computation."""
        return self._exchange.beside and self._is_planned()

    def _is_at_hand(self) -> bool:
        """Whether that can, or what has begun is to end."""
        return self._is_planned() or (self._ends() and not self._queues.due())

    def _ends(self) -> bool:
        return bool(self._exchange) and self._queues.idle()

    def _end(self) -> None:
        with self._changed:
            if self._admitting is not None:
                self._admitting.set()
        with self._came:
            self._came.notify_all()
        self._exchange.drop()
        self._transport.close()

    def _act(self) -> None:
        """RuntimeError: the manager is closed."""
        self._check_open()
        if not self._change_if_due():
            self._queues.schedule(self._program.on_tensor_ready)
            if self._queues.due():
                if self._is_lost(self._round):
                    self._change()
            elif self._queues.idle():
                self._exchange.end()
        self._expect()

    def _expect(self) -> None:
        repeats = self._program.repeats
        planned = self._plan.next() if repeats else None  # a change makes another plan
        self._queues.expect(self.fusion_bytes, planned, patient=repeats)

    def _is_called(self) -> bool:
        """Whether there is something else to do than to wait for a tensor."""
        ended = self._closed or self._turns.error is not None
        return ended or self._admitting is not None or self._ends()

    def _round(self) -> None:
        """Agree on a set, unless it is planned, and exchange it."""
        planned = self._program.repeats and self._plan.next() is not None
        chosen = self._queues.tensors() if planned else self._coordinate()
        if not chosen:  # woken by the next tensor; others may get theirs sooner
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)
            self._queues.pause(self._pause_s)
            return
        self._pause_s = _PAUSE_S
        self._exchange.flying = chosen
        self._queues.remove(chosen)
        if self._mark < 0:
            self._mark = chosen[0].index
        ids = [tensor.id for tensor in chosen]
        if self._is_timer_due(ids):
            kept = self._program.on_timer_expired(self.statistics)
            if not kept or self._membership is not None:  # who wants to join is told of then
                self._plan.renew()
        self._exchange.begin(chosen, self._program.on_buffer_ready, not self._program.repeats)
        self._plan.took(ids, self._begins_iteration(ids))

    def _begins_iteration(self, ids: Sequence[int]) -> bool:
        return self._mark >= 0 and id_of(self._mark) in ids

    def _is_timer_due(self, ids: Sequence[int]) -> bool:
        """With a buffer of these."""
        return (self._iterations + 1) % self._timer == 0 and self._begins_iteration(ids)

    def _coordinate(self) -> list[Tensor]:
        """The next buffer's tensors, in its order, alike on all ranks."""
        joining, began = self._joining(), time.monotonic()
        agreed = self._coordination.agree(
            self._queues.tensors(), self.fusion_bytes, joining, over=self._program.repeats
        )
        self._queues.took(time.monotonic() - began)
        self.fusion_bytes = agreed.fusion_bytes
        if any(tensor.index == self._mark for tensor in agreed.chosen):
            self.let_in = agreed.joining
        return agreed.chosen

    def _finish(self) -> None:
        """A buffer's results are in place."""
        chosen = self._exchange.flying
        self.buffers += 1
        self._progress = time.monotonic()
        if self._begins_iteration([tensor.id for tensor in chosen]):
            self._iterations += 1
        with self._came:
            for tensor in chosen:
                assert tensor.whole is not None
                tensor.whole.left -= 1
            self._came.notify_all()
        if self._reporter is not None and not self._queues and not self._exchange:
            self._reporter.complete()

    def _bind(self, transport: Transport) -> None:
        """The control plane and the data plane of an epoch."""
        self._transport, self._ops = transport, Operations(self._engine, transport)
        self._coordination, self._plan = Coordination(self._engine, self._ops), Plan()
        epoch = self._membership.epoch if self._membership is not None else 0
        self._program.ops = self._ops
        self._program.connection = Connection(transport.rank, transport.members, epoch)

    def _is_lost(self, action: Callable[[], None]) -> bool:
        """Whether a peer was lost meanwhile, without which the others are to go on. The error is
        gone when this returns: what it holds would keep connections open."""
        try:
            action()
        except PeerLost as lost:
            self._check_open()  # who closes takes no part in what the others agree on then
            if self._membership is None:
                raise
            _log.warning("%s: the others go on", str(lost))  # a handler may keep what it gets
            return True
        return False

    def _joining(self) -> int:
        """Whether somebody wants to join; the store is asked once in an iteration."""
        if self._membership is not None and self._asked != self._iterations:
            self._asked, self._wish = self._iterations, int(bool(self._membership.waiting()))
        return self._wish

    def _change_if_due(self) -> bool:
        """Where others are in need of us, our connections end, too: a look now and then will do."""
        if self._membership is None:
            return False
        due = self._admitting is not None
        if not due and time.monotonic() >= self._looked + _LOOK_S:
            self._looked = time.monotonic()
            due = self._membership.changing()
        if due:
            self._change()
        return due

    def _change(self) -> None:
        """Go on with other members; what was under way is finished, or done again."""
        assert self._membership is not None
        before = set(self._ops.ranks)
        self._changing = True
        self._membership.change(admit=self._admitting is not None, enter=self._enter)
        self._queues.push(self._exchange.flying)
        self._exchange.flying = ()
        self._wish = 0
        now = set(self._ops.ranks)
        if before - now:
            self._program.on_worker_removed(self._program.connection)
        if now - before:
            self._program.on_worker_added(self._program.connection)
        self._progress, self._changing = time.monotonic(), False
        with self._changed:  # whoever was not let in is let in after another iteration
            self.let_in = False
            admitting, self._admitting = self._admitting, None
        if admitting is not None:
            admitting.set()

    def _enter(self, transport: Transport) -> None:
        self._bind(transport)
        self._check_open()
        self._repair(joining=False)

    def _repair(self, *, joining: bool) -> None:
        """Some ranks may have the last buffer's results, others not: these get them. Nobody can be
        further ahead, as each buffer is agreed upon by all. Then those who join get the state."""
        told = self._ops.alloc(1, "int64")
        told[0] = -1 if joining else self.buffers
        counts = [int(count) for count in self._ops.allgather(told)]
        old = [rank for rank, count in zip(self._ops.ranks, counts, strict=True) if count >= 0]
        if not old:
            raise PeerLost(self._ops.ranks, "nobody is left who knows the job's state")
        most = max(counts)
        behind = [r for r, count in zip(self._ops.ranks, counts, strict=True) if 0 <= count < most]
        ahead = next(r for r, count in zip(self._ops.ranks, counts, strict=True) if count == most)
        if behind and not joining:
            self._catch_up(old, ahead, most)
        if len(old) < len(counts):
            self._tell_state(old[0], joining)

    def _catch_up(self, old: Sequence[int], ahead: int, most: int) -> None:
        buffer, flying = self._exchange.last, self._exchange.flying
        if self.buffers < most:
            if self.buffers < most - 1 or not flying:
                raise RuntimeError(f"rank {ahead} has {most} buffers, this one has {self.buffers}")
            buffer = self._exchange.alloc(flying)
        self._ops.broadcast(buffer, ahead, old)
        if self.buffers < most:
            self._exchange.last = buffer
            self._exchange.put(buffer)

    def _state(self) -> bytes:
        """What `save` returns, between two iterations. Somebody has reached the end of this one, or
        nobody would have been let in: so nothing is missing here either, unless that one died."""
        with self._changed:
            done = lambda: self._admitting is not None or self._closed  # noqa: E731
            if self._exchange.flying or not self._changed.wait_for(done, self._timeout_s):
                raise PeerLost((self._ops.rank,), "has not come to the end of its iteration")
            self._check_open()
        return self.save()

    def _tell_state(self, root: int, joining: bool) -> None:
        """Four numbers, and what `save` returns."""
        state = self._state() if self._ops.rank == root else b""
        mine = self._iterations, self.buffers, self._mark + 1, self.fusion_bytes
        numbers, told = tell(self._engine, self._ops, root, mine, state)
        if joining:
            self._iterations, self.buffers, mark, self.fusion_bytes = numbers
            self._mark, self.told = mark - 1, bytes(told)
