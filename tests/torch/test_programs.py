# SPDX-License-Identifier: Apache-2.0
"""Programs of SDCC: the same on every engine and transport."""

import ast
import inspect
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from collectives import MAKERS, in_threads, numpy_tcp, together
from waiting import settle

from flowslot_torch.cases.adaptive_fusion import AdaptiveFusion
from flowslot_torch.cases.gradient_scheduling import GradientScheduling
from flowslot_torch.cases.partial_compression import PartialCompression
from flowslot_torch.cases.two_level import TwoLevel
from flowslot_torch.coordination import Coordination
from flowslot_torch.engines import NumpyEngine
from flowslot_torch.operations import Operations
from flowslot_torch.plan import Plan
from flowslot_torch.program import ITERATIONS, Connection, Links, Program
from flowslot_torch.tasks import Stuck, TaskManager
from flowslot_torch.tensors import Tensor

RANKS = 4
SIZES = [1, 7, 1000, 20_001]
Make = Callable[[int], Callable[[int], tuple[Any, Any]]]
each = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)


def gradients(rank: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng([seed, rank])
    return [random.standard_normal(size).astype("float32") for size in SIZES]


def array(engine: Any, values: Any) -> Any:
    made = engine.alloc(len(values), str(values.dtype))
    np.frombuffer(engine.memory(made), values.dtype)[:] = values
    return made


def values_of(engine: Any, made: Any) -> Any:
    return np.frombuffer(engine.memory(made), engine.dtype(made))


@each
def test_operations_over_groups_and_pairs(maker: Make) -> None:
    def body(rank: int, engine: Any, transport: Any) -> None:
        ops = Operations(engine, transport)
        for size in (0, 1, 3, 1025):
            whole = np.arange(size, dtype="float32")
            mine = array(engine, whole * (rank + 1))
            pair = (rank, rank ^ 1) if rank % 2 == 0 else (rank ^ 1, rank)
            if size:
                ops.allreduce(mine)
            assert size == 0 or (values_of(engine, mine) == whole * 10).all()
            some = array(engine, whole + rank)
            parts = values_of(engine, ops.allgather(some, pair)).reshape(2, size)
            assert (parts == [whole + pair[0], whole + pair[1]]).all()
            ops.broadcast(some, 2)
            assert (values_of(engine, some) == whole + 2).all()
            if rank != 3:
                third = array(engine, whole * (rank + 1))
                part = values_of(engine, ops.reduce_scatter(third, (2, 0, 1)))
                place = ((2, 0, 1).index(rank) + 1) % 3
                assert (part == whole[size * place // 3 : size * (place + 1) // 3] * 6).all()
        ops.barrier()
        with pytest.raises(ValueError, match="group: must be different ranks"):
            ops.allreduce(mine, [rank, 9])

    together(RANKS, maker(RANKS), body)


def run_program(
    maker: Make, program: Callable[[], Any], iterations: int = 2, **options: Any
) -> tuple[list[list[Any]], list[Any]]:
    """Means that each rank got, [iteration][tensor] each, and the programs."""

    def body(rank: int, engine: Any, transport: Any) -> tuple[list[Any], Any]:
        links = Links(options.get("rates"))
        mine = program()
        tasks = TaskManager(
            mine, engine, transport, links=links, fusion_bytes=options.get("fusion", 8000)
        )
        got = []
        for iteration in range(iterations):
            arrays = [array(engine, values) for values in gradients(rank, iteration)]
            order = list(range(len(SIZES)))
            for index in order if rank % 2 else order[::-1]:  # ranks differ
                tasks.enqueue(index, arrays[index])
            tasks.wait_all()
            got.append([values_of(engine, one) for one in arrays])
        return got, mine

    results = together(RANKS, maker(RANKS), body)
    return [got for got, _ in results], [mine for _, mine in results]


def means(iteration: int) -> list[Any]:
    ranks = [gradients(rank, iteration) for rank in range(RANKS)]
    return [np.mean([one[i] for one in ranks], axis=0, dtype="float64") for i in range(len(SIZES))]


PROGRAMS: list[Callable[[], Program]] = [
    Program,
    GradientScheduling,
    lambda: TwoLevel([(0,), (1, 3, 2)]),
    lambda: TwoLevel([(0, 2), (1, 3)]),
    PartialCompression,
    AdaptiveFusion,
]


CASES = [(maker, program) for maker in MAKERS for program in PROGRAMS]
CASES = [case for case in CASES if case[0] is numpy_tcp or case[1] in PROGRAMS[::2]]  # Gloo is slow


@pytest.mark.parametrize(("maker", "program"), CASES)
def test_every_program_leaves_the_means_on_all_ranks(
    maker: Make, program: Callable[[], Program]
) -> None:
    got, _ = run_program(maker, program)
    for iteration in range(2):
        for index, mean in enumerate(means(iteration)):
            mine = [rank[iteration][index] for rank in got]
            assert all((one == mine[0]).all() for one in mine)
            assert np.allclose(mine[0], mean, atol=1e-6)


def test_groups_follow_the_membership() -> None:
    program = TwoLevel([(0, 1), (2, 3)])
    for ranks, groups in (
        ((0, 1, 2), [[0, 1], [2]]),
        ((1, 2, 4), [[1], [2], [4]]),
        ((2, 3), [[2, 3]]),
    ):
        program.ops = SimpleNamespace(ranks=ranks)  # type: ignore[assignment]
        assert program.members() == groups


SLOW = {(a, b): 1e6 if 3 in (a, b) else 1e7 for a in range(4) for b in range(4) if a != b}


@each
def test_partial_compression_loses_less_than_float16(maker: Make) -> None:
    class Plain(PartialCompression):
        everywhere = True

    far = []
    for program in (PartialCompression, Plain):
        got, _ = run_program(maker, program, rates=SLOW)
        off = [rank[i][k] - means(i)[k] for rank in got for i in range(2) for k in range(4)]
        far.append(sum(float(np.linalg.norm(one)) for one in off))
        assert all((rank[1][3] == got[0][1][3]).all() for rank in got)
    assert 0 < far[0] < 0.9 * far[1]


def test_scheduling_puts_the_first_layers_first_in_small_parts() -> None:
    class Scheduling(GradientScheduling):
        elements = 700

        def __init__(self) -> None:
            self.log: list[int] = []
            self.inside, self.gate = threading.Event(), threading.Event()

        def on_buffer_ready(self, buffer: Any) -> None:
            self.inside.set()  # whatever comes meanwhile is there for the next buffer
            assert self.gate.wait(10)
            self.log.append(len(buffer))
            super().on_buffer_ready(buffer)

    def body(rank: int, engine: Any, transport: Any) -> list[int]:
        mine = Scheduling()
        tasks = TaskManager(mine, engine, transport, fusion_bytes=4000)
        for _ in range(2):  # the order is known from the second iteration on
            mine.inside.clear(), mine.gate.clear()
            mine.log.clear()
            tasks.enqueue(9, array(engine, gradients(rank)[1]))
            assert mine.inside.wait(10)
            for index in (3, 2, 1, 0):
                tasks.enqueue(index, array(engine, gradients(rank)[index]))
            mine.gate.set()
            tasks.wait_all()
        return mine.log

    (log, *others) = together(2, numpy_tcp(2), body)
    assert log == others[0] and sum(log) == 7 + sum(SIZES)
    # Tensors 0 and 1 with 700 of 2, then the rest of 2, before all but one part of the last layer.
    assert log[:3] == [7, 708, 1000]


def test_fusion_climbs_and_takes_the_mode() -> None:
    class Adaptive(AdaptiveFusion):
        timer_iterations = 1
        least = 1 << 10

        def on_timer_expired(self, statistics: Any) -> bool:
            sizes[self.ops.rank].append(self.tasks.fusion_bytes)
            took = 1.0 + abs(math.log2(self.tasks.fusion_bytes / (1 << 14)))
            statistics.record(ITERATIONS, took if self.ops.rank else 0.1)  # one is misled
            return super().on_timer_expired(statistics)

    sizes: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
    run_program(numpy_tcp, Adaptive, iterations=200, fusion=1 << 12)
    steps = [size.bit_length() - 1 for size in sizes[1]]
    #              up until that is slower, back; rest, down; rest twice as long, up
    assert steps[:15] == [12, 12, 13, 14, 15, 14, 13, 14, 14, 15, 14, 14, 14, 14, 13]
    assert sum(step != 14 for step in steps[100:]) <= 2
    assert all(of == sizes[1] for of in sizes.values())


def negotiated(wishes: list[int]) -> list[int]:
    def body(rank: int, engine: Any, transport: Any) -> int:
        program = AdaptiveFusion()
        program.ops = Operations(engine, transport)
        return program.negotiate(wishes[rank])

    return together(RANKS, numpy_tcp(RANKS), body)


def test_the_ranks_most_frequent_wish_counts_if_it_is_a_size() -> None:
    small, large = 1 << 17, 1 << 18
    assert negotiated([1 << 16, small, small, large]) == [small] * RANKS
    assert negotiated([large, small, small, large]) == [small] * RANKS
    for lie in (-5, 0, 1 << 40):
        with pytest.raises(ValueError, match=rf"rank 1: wants buffers of {lie} bytes, must be"):
            negotiated([small, lie, small, large])


@pytest.mark.parametrize("kept", [False, True])
def test_a_program_that_repeats_agrees_again_only_after_a_timer(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    class Repeating(Program):
        timer_iterations = 4
        repeats = True

        def on_timer_expired(self, statistics: Any) -> bool:
            return kept

    def counted(self: Any, *told: Any, over: bool) -> Any:
        asked.append(self._ops.rank)
        return agree(self, *told, over=over)

    asked: list[int] = []
    agree = Coordination.agree
    monkeypatch.setattr(Coordination, "agree", counted)
    got, _ = run_program(numpy_tcp, Repeating, iterations=20)
    for iteration in range(20):
        for index, mean in enumerate(means(iteration)):
            assert all(np.allclose(rank[iteration][index], mean, atol=1e-6) for rank in got)
    agreed = 2 if kept else 6  # iterations: the first two, and those after timers
    assert agreed <= asked.count(0) <= agreed * len(SIZES)
    assert all(asked.count(r) == asked.count(0) for r in range(4))


class Ending:
    """Says when it is waited for."""

    def __init__(self, pending: Any, log: list[str]) -> None:
        self.pending, self.log = pending, log

    def wait(self) -> None:
        self.log.append("end")
        self.pending.wait()


@pytest.mark.parametrize("maker", [one for one in MAKERS if one.__name__ != "torch_tcp"])
def test_planned_buffers_are_under_way_beside_each_other(maker: Make) -> None:
    class Beside(AdaptiveFusion):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[str] = []

        def on_buffer_ready(self, buffer: Any) -> Any:
            self.log.append("begin")
            return Ending(super().on_buffer_ready(buffer), self.log)

    got, programs = run_program(maker, Beside, iterations=6)
    for iteration in range(6):
        for index, mean in enumerate(means(iteration)):
            assert all(np.allclose(rank[iteration][index], mean, atol=1e-6) for rank in got)
    for program in programs:
        assert program.log[-4:] == ["begin", "begin", "end", "end"]


def test_a_plan_is_learnt_again_when_a_tensor_comes_no_more() -> None:
    plan = Plan()
    for buffers in ([[1], [2, 3]], [[1, 2]], [[1, 2]], [[1], [2]], [[1], [2]]):
        assert plan.next() is None
        for buffer in buffers:
            plan.took(buffer, 1 in buffer)
    for buffer in ([1], [2], [1], [2]):
        assert plan.next() == buffer
        plan.took(buffer, 1 in buffer)


def test_a_buffer_that_repeats_is_looked_at_once_it_is_whole() -> None:
    class Seeing(AdaptiveFusion):
        seen: ClassVar[list[int]] = []

        def on_tensor_ready(self, tensor: Tensor) -> None:
            self.seen.append(tensor.index)

    tasks = TaskManager(Seeing(), NumpyEngine(), numpy_tcp(1)(0)[1])
    for _ in range(4):  # from the third on, buffers are those of the one before
        for index in (1, 2, 3):
            tasks.enqueue(index, np.ones(4, "float32"))
        tasks.wait_all()
    Seeing.seen.clear()
    for index in (3, 1):
        tasks.enqueue(index, np.ones(4, "float32"))
        time.sleep(0.05)  # in which the other thread could see it
        assert Seeing.seen == []
    tasks.enqueue(2, np.ones(4, "float32"))
    settle(lambda: Seeing.seen == [3, 1, 2])
    tasks.wait_all()
    tasks.close()


def test_parts_that_are_not_the_tensors_are_refused() -> None:
    class Losing(Program):
        def on_tensor_ready(self, tensor: Any) -> Any:
            return tensor.split(10)[1:]

    with pytest.raises(ValueError, match="on_tensor_ready: must return all parts of tensor 3, eac"):
        run_program(numpy_tcp, Losing, iterations=1)


def test_a_gradient_that_a_rank_lacks_is_named_and_other_mistakes_too() -> None:
    def body(rank: int, engine: Any, transport: Any) -> str:
        transport.timeout_s = 0.5
        tasks = TaskManager(Program(), engine, transport)
        values = gradients(rank)[0]
        tasks.enqueue(0, array(engine, values))
        with pytest.raises(ValueError, match="tensor 0: is on its way already"):
            tasks.enqueue(0, array(engine, values))
        tasks.wait(0)
        assert not tasks.wait(0)
        tasks.enqueue(1 + rank, array(engine, values))
        with pytest.raises(Stuck, match=r"tensor \d: no result within 0.5 s; not ready on ranks"):
            tasks.wait(1 + rank)
        return "done"

    assert together(2, numpy_tcp(2), body) == ["done"] * 2


def test_what_an_event_raises_ends_all_ranks() -> None:
    class Wrong(Program):
        def on_buffer_ready(self, buffer: Any) -> None:
            if self.ops.rank == 1:
                raise ZeroDivisionError("of the user's")
            super().on_buffer_ready(buffer)

    def body(rank: int) -> None:
        engine, transport = make(rank)
        tasks = TaskManager(Wrong(), engine, transport)
        tasks.enqueue(0, array(engine, gradients(rank)[2]))
        tasks.wait(0)

    make = numpy_tcp(3)
    errors = [type(error).__name__ for error in in_threads(3, body)]
    assert errors == ["PeerLost", "ZeroDivisionError", "PeerLost"]


def test_links_without_a_daemon_are_what_is_known_beforehand(tmp_path: Path) -> None:
    links = Links({(0, 1): 4.0, (1, 0): 10.0}, {0: "10.0.0.1"}, control=str(tmp_path / "nobody"))
    assert not links.refresh() and links.load(0, 1) is None and links.rate(2, 0) is None
    assert links.is_slow(0, 1) and not links.is_slow(1, 0) and not links.is_slow(2, 0)
    assert not links.is_slow(0, 1, below=0.3)


def test_connection_is_a_ring() -> None:
    ring = Connection(5, [2, 5, 9])
    assert (ring.next(), ring.previous(), ring.next(9), ring.previous(2)) == (9, 2, 2, 9)


def test_lines_of_user_code_are_those_of_table_4() -> None:
    table = {PartialCompression: 247, GradientScheduling: 10, TwoLevel: 50, AdaptiveFusion: 43}
    for program, published in table.items():
        assert lines_of(inspect.getmodule(program)) <= 1.5 * published


def lines_of(module: Any) -> int:
    """Lines with code: neither empty, nor comments, nor docstrings."""
    tree = ast.parse(inspect.getsource(module))
    lines = set()
    for node in ast.walk(tree):
        strings = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.Expr)]
        for string in strings:
            if isinstance(string.value, ast.Constant):
                string.value.lineno = 0
        if getattr(node, "lineno", 0) and not isinstance(node, ast.Expr):
            lines.add(node.lineno)  # type: ignore[attr-defined]
    return len(lines)
