# SPDX-License-Identifier: Apache-2.0
"""When a planned buffer is looked at, and what is said of one that waits."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from collectives import numpy_tcp, together
from waiting import settle

from flowslot_torch.cases.adaptive_fusion import AdaptiveFusion
from flowslot_torch.queues import Queues
from flowslot_torch.tasks import Stuck, TaskManager
from flowslot_torch.tensors import Tensor


def tensor(index: int) -> Tensor:
    return Tensor(index, np.ones(8, "float32"))


def test_a_planned_buffer_wakes_nobody_until_it_is_whole() -> None:
    queues = Queues(threading.Condition())
    first, second, third = (tensor(index) for index in (1, 2, 3))
    assert queues.put(first)  # before it is known that it is planned
    queues.expect(1 << 20, [one.id for one in (first, second, third)], False)
    looks: list[int] = []

    def also() -> bool:
        looks.append(1)
        return False

    waiter = threading.Thread(target=queues.wait, args=(10, also))
    waiter.start()
    settle(lambda: looks == [1])
    assert not queues.put(second)
    time.sleep(0.05)  # in which the waiter could look
    assert looks == [1]
    assert queues.put(third)
    queues.wake()
    waiter.join(5)
    assert not waiter.is_alive() and looks == [1, 1]


def early(rank: int, engine: Any, transport: Any) -> str:
    """Waits for a tensor before all of a later buffer have come."""
    transport.timeout_s = 1
    tasks = TaskManager(AdaptiveFusion(), engine, transport, fusion_bytes=65)
    for iteration in range(6):
        values = [np.ones(8, "float32") for _ in range(5)]
        for index in range(4):
            tasks.enqueue(index, values[index])
            time.sleep(0.01)
        if iteration > 3:
            tasks.wait(0)
        tasks.enqueue(4, values[4])
        tasks.wait_all()
    tasks.close()
    return "done"


def test_who_waits_for_an_early_tensor_does_not_wait_for_later_buffers() -> None:
    assert together(2, numpy_tcp(2), early) == ["done"] * 2


class Parted(AdaptiveFusion):
    """Splits tensor 2."""

    size = 4

    def on_tensor_ready(self, tensor: Tensor) -> Any:
        return tensor.split(self.size) if tensor.index == 2 else None


@pytest.mark.parametrize("other", ["none", "parts", "values"])
def test_what_a_planned_buffer_lacks_is_named(other: str) -> None:
    """A tensor that does not come, comes in other parts than the plan's, or has no values."""

    def body(rank: int, engine: Any, transport: Any) -> str:
        transport.timeout_s = 0.3
        program = Parted()
        tasks = TaskManager(program, engine, transport)
        for iteration in range(5):
            last = iteration == 4
            if last and other == "parts":
                program.size = 100
            for index in (1,) if last and other == "none" else (1, 2):
                late = last and other == "values" and index == 2
                tasks.enqueue(index, np.ones(8, "float32"), lambda late=late: not late)
            if not last:
                tasks.wait_all()
        with pytest.raises(
            Stuck, match=r"tensor 1: .*; the program repeats .*, and tensors \[2\] have not come"
        ):
            tasks.wait(1)
        return "done"

    assert together(2, numpy_tcp(2), body) == ["done"] * 2
