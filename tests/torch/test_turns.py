# SPDX-License-Identifier: Apache-2.0
"""Who communicates: who trains, where nothing is to be agreed on; else the thread made for it."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collectives import numpy_tcp, together
from waiting import settle

from flowslot_torch.cases.adaptive_fusion import AdaptiveFusion
from flowslot_torch.engines import NumpyEngine
from flowslot_torch.program import Program
from flowslot_torch.tasks import Stuck, TaskManager
from flowslot_torch.turns import Turns

AGREED = 2  # iterations until buffers are known


class Repeating(Program):
    """Does something in its last buffers."""

    repeats = True
    timer_iterations = 1000
    beside = True

    def __init__(self, then: Callable[["Repeating"], None]) -> None:
        self.threads: list[threading.Thread] = []
        self.then = then

    def on_buffer_ready(self, buffer: Any) -> Any:
        self.threads.append(threading.current_thread())
        if len(self.threads) > AGREED + 2:
            self.then(self)
        self.ops.allreduce(buffer)
        return Gone() if self.beside else None


class Gone:
    """Under way, and over when it is waited for."""

    def wait(self) -> None: ...


def trained(program: Program, engine: Any, transport: Any, iterations: int) -> TaskManager:
    tasks = TaskManager(program, engine, transport)
    for _ in range(iterations):
        train(tasks)
    return tasks


def train(tasks: TaskManager) -> None:
    settle(lambda: bool(tasks._changed._waiters))  # the other thread's last turn is over
    arrays = [np.ones(4, "float32") for _ in range(3)]
    for index, values in enumerate(arrays):
        tasks.enqueue(index, values)
    tasks.wait_all()
    assert all((values == 1).all() for values in arrays)


def alone(then: Callable[[Repeating], None]) -> TaskManager:
    """Of one rank; in the next iteration that happens."""
    return trained(Repeating(then), NumpyEngine(), numpy_tcp(1)(0)[1], AGREED + 2)


def test_who_trains_begins_and_ends_what_is_planned() -> None:
    def body(rank: int, engine: Any, transport: Any) -> None:
        program = Repeating(lambda _: None)
        tasks = trained(program, engine, transport, 9)
        me = threading.current_thread()
        assert [thread is me for thread in program.threads[AGREED:]] == [True] * 7
        assert me not in program.threads[:AGREED]
        assert all(thread.name == "flowslot-tasks" for thread in program.threads[:AGREED])
        tasks.close()

    together(2, numpy_tcp(2), body)


def test_a_sum_that_blocks_does_not_hold_up_who_trains() -> None:
    """Rank 1 comes when rank 0 is through."""
    through = threading.Event()

    def body(rank: int, engine: Any, transport: Any) -> bool:
        program = Repeating(lambda _: None)
        program.beside = False
        tasks = trained(program, engine, transport, AGREED + 2)
        in_time = rank == 0 or through.wait(10)
        for index in range(3):
            tasks.enqueue(index, np.ones(4, "float32"))
        through.set()
        tasks.wait_all()
        tasks.close()
        return in_time

    assert all(together(2, numpy_tcp(2), body))


def test_what_is_due_after_a_turn_of_who_trains_is_done_by_the_other_thread() -> None:
    """Which looked in the middle of the turn, and saw nothing to do."""

    def look(program: Repeating) -> None:
        if threading.current_thread() is me:
            program.tasks._queues.wake = wake  # type: ignore[method-assign]
            wake()
            time.sleep(0.05)  # in which it looks

    me, program = threading.current_thread(), Repeating(look)
    program.beside = False
    tasks = TaskManager(program, NumpyEngine(), numpy_tcp(1)(0)[1], fusion_bytes=16)
    wake = tasks._queues.wake
    for _ in range(5):
        for index in (0, 1):
            tasks.enqueue(index, np.ones(4, "float32"))
        tasks.wait_all()
    settle(lambda: bool(tasks._changed._waiters))
    began = len(program.threads)
    tasks._queues.wake = lambda: None  # type: ignore[method-assign]  # it comes late
    for index in (1, 0):
        tasks.enqueue(index, np.ones(4, "float32"))
    tasks.wait(0)
    settle(lambda: len(program.threads) == began + 2)
    assert program.threads[-2] is me is not program.threads[-1]
    tasks.close()


def test_who_waits_for_what_others_lack_is_told() -> None:
    """Something has begun that could end, and ranks have nothing more in common."""

    def body(rank: int, engine: Any, transport: Any) -> str:
        transport.timeout_s = 0.3
        tasks = TaskManager(Repeating(lambda _: None), engine, transport, fusion_bytes=64)
        tasks.enqueue(0, np.ones(100, "float32"))
        tasks.enqueue(1 + rank, np.ones(4, "float32"))
        with pytest.raises(Stuck, match="not ready on ranks"):
            tasks.wait_all()
        return "told"

    assert together(2, numpy_tcp(2), body) == ["told"] * 2


def test_the_first_ranks_buffer_size_counts_for_a_program_that_rests() -> None:
    class Adaptive(AdaptiveFusion):
        timer_iterations = 3

    def body(rank: int, engine: Any, transport: Any) -> int:
        tasks = TaskManager(Adaptive(), engine, transport, fusion_bytes=(1 + rank) << 16)
        for _ in range(40):
            for index in range(8):
                tasks.enqueue(index, np.ones(8192, "float32"))
            tasks.wait_all()
        tasks.close()
        return tasks.fusion_bytes

    first, second = together(2, numpy_tcp(2), body)
    assert first == second


def test_an_event_that_waits_is_told() -> None:
    tasks = alone(lambda program: program.tasks.wait_all())
    with pytest.raises(RuntimeError, match="tensor 0: is waited for in the middle"):
        train(tasks)


@pytest.mark.parametrize(
    ("raised", "after"),
    [(ZeroDivisionError, ZeroDivisionError), (KeyboardInterrupt, RuntimeError)],
)
def test_what_ends_a_turn_of_who_trains_ends_all(raised: Any, after: Any) -> None:
    def fail(_: Any) -> None:
        raise raised

    tasks = alone(fail)
    with pytest.raises(raised):
        train(tasks)
    for _ in range(2):
        with pytest.raises(after):
            tasks.wait(0)
    settle(lambda: not tasks._turns._thread.is_alive())
    tasks.close()


def test_an_event_of_who_trains_may_close(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = alone(lambda program: program.tasks.close())
    joined: list[float] = []
    monkeypatch.setattr(tasks._turns._thread, "join", joined.append)
    with pytest.raises(RuntimeError, match="was closed"):
        for _ in range(2):
            train(tasks)
    assert not joined  # nobody waits for the other thread, which waits for this one's turn


def test_one_at_a_time() -> None:
    inside: list[int] = []
    most: list[int] = []
    work: deque[int] = deque()
    acted: list[int] = []
    changed = threading.Condition()

    def act() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        if work:
            acted.append(work.popleft())
        inside.pop()

    def wait() -> None:
        with changed:
            changed.wait_for(lambda: work or turns.error)

    def wake() -> None:
        with changed:
            changed.notify_all()

    turns = Turns(wait, act, wake, lambda: None)
    turns.start()
    for k in range(50):
        work.append(k)
        if not turns.take(lambda: bool(work)):
            wake()
    settle(lambda: not work)
    assert set(most) == {1} and acted == list(range(50))
    turns.error = RuntimeError("enough")
    wake()
    turns.join(5)
    assert not turns.take(lambda: True) and len(acted) == 50
