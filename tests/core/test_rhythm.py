# SPDX-License-Identifier: Apache-2.0
"""What is learnt of iterations from a short history of bursts: patterns made at random."""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowslot.model.rhythm import AGREE, FIRST_NS, Burst, Rhythm, learn
from flowslot.model.units import MILLISECOND

KEEP, WITHIN, SOON = 64, 0.03, 5
SPEED = 40_000  # bytes per ms
Pattern = Sequence[tuple[float, int]]
"""Of an iteration: (pause before it in ms, bytes) of each burst."""


def bursts(
    pattern: Pattern, seed: int = 0, jitter: float = 0.0, blur_ms: float = 0.0, skip: int = 0
) -> Iterator[tuple[list[Burst], int]]:
    """For ever: the last bursts, of which the newest only begins, and how many iterations have
    begun since the first one that was seen from its beginning. Pauses vary by `jitter`; when a
    burst begins is seen up to `blur_ms` late. `skip`: bursts before anybody looked."""
    chance = random.Random(seed)
    seen: list[Burst] = []
    at, end, iterations = 0.0, 0.0, 0
    for n, (index, (pause, size)) in enumerate(cycle(enumerate(pattern))):
        at += pause * (1 + chance.uniform(-jitter, jitter))
        begun = at + chance.uniform(0, blur_ms)
        if n >= skip:
            iterations += index == skip % len(pattern)
            seen.append(Burst(round(begun * MILLISECOND), round((begun - end) * MILLISECOND)))
            del seen[:-KEEP]
            yield seen, iterations - 1
            seen[-1].size = size
        at += size / SPEED
        end = at + chance.uniform(0, blur_ms)


def truth(pattern: Pattern) -> tuple[int, float]:
    """Bytes, and ms."""
    total = sum(size for _, size in pattern)
    return total, sum(pause for pause, _ in pattern) + total / SPEED


def right(found: Rhythm, pattern: Pattern, within: float = WITHIN) -> bool:
    total, period = truth(pattern)
    of_total = abs(found.total / total - 1)
    return max(of_total, abs(found.period / MILLISECOND / period - 1)) <= within


def known_after(pattern: Pattern, iterations: int, within: float = WITHIN, **how: float) -> bool:
    """What is known at every boundary of the iterations from then on, 20 of them, is right."""
    for seen, begun in bursts(pattern, **how):  # type: ignore[arg-type]
        if begun > iterations + 20:
            return True
        if begun >= iterations:
            found = learn(seen)
            if seen[-1].pause > found.threshold and not right(found, pattern, within):
                return False
    raise AssertionError


SIZES = st.integers(100_000, 8_000_000)


@st.composite
def long_pause(draw: st.DrawFn) -> Pattern:
    """Buckets, apart: computing takes longer than what is between them."""
    inner = draw(st.lists(st.floats(2, 60), max_size=7))
    longest = 10 + max([*inner, 20]) * draw(st.floats(2, 20))
    sizes = draw(st.one_of(SIZES.map(lambda s: [s] * 8), st.lists(SIZES, min_size=8, max_size=8)))
    return list(zip([longest, *inner], sizes, strict=False))


@st.composite
def unequal_bursts(draw: st.DrawFn) -> Pattern:
    """As much computing before each, but not as many bytes in each."""
    pause = draw(st.floats(20, 200))
    number = draw(st.integers(2, 6))
    least = draw(st.integers(100_000, 3_000_000))
    sizes = draw(st.permutations([least + 1_000_000 * n for n in range(number)]))
    return [(pause, size) for size in sizes]


@settings(max_examples=80, deadline=None)
@given(st.one_of(long_pause(), unequal_bursts()), st.integers(0, 99), st.integers(0, 7))
def test_any_pattern_is_known_after_a_few_iterations(
    pattern: Pattern, seed: int, skip: int
) -> None:
    period = truth(pattern)[1]
    assert known_after(pattern, SOON, seed=seed, skip=skip, blur_ms=min(5.0, 0.04 * period))


@settings(max_examples=40, deadline=None)
@given(long_pause(), st.integers(0, 99))
def test_computing_may_take_longer_and_shorter(pattern: Pattern, seed: int) -> None:
    """By a tenth, each pause; a mean of few is then not more exact."""
    assert known_after(pattern, SOON, 0.1, seed=seed, jitter=0.1)


@pytest.mark.parametrize("ratio", [1.4, 2.0])
def test_parts_of_one_size_take_turns_in_time(ratio: float) -> None:
    assert known_after([(100, 1_000_000), (100 * ratio, 1_000_000)], 6, blur_ms=4)


def test_nothing_is_known_before_it_has_repeated() -> None:
    pattern = [(100.0, 3_000_000)]
    known = [learn(seen).total for seen, _ in islice(bursts(pattern), AGREE + 2)]
    assert known == [0] * (AGREE + 1) + [3_000_000] or known == [0] * AGREE + [3_000_000] * 2


def test_another_volume_is_known_soon_and_no_mixture_of_both() -> None:
    both = [*[(100.0, 3_000_000)] * 10, *[(100.0, 5_000_000)] * 10]
    known = [learn(seen).total for seen, _ in islice(bursts(both), 20)]
    assert set(known) <= {0, 3_000_000, 5_000_000}
    assert known[-1] == 5_000_000


def test_what_never_repeats_is_never_known() -> None:
    chance = random.Random(4)
    pattern = [(chance.uniform(50, 150), chance.randrange(10**5, 10**7)) for _ in range(200)]
    known = [learn(seen) for seen, _ in islice(bursts(pattern), 200)]
    assert {one.total for one in known} == {0}
    assert {one.period for one in known} == {0}


def test_an_iteration_that_takes_longer_does_not_count_into_the_period() -> None:
    pattern = [(100.0, 3_000_000)] * 7 + [(2000.0, 3_000_000)]
    seen, _ = next(islice(bursts(pattern), 7 + 6, None))
    assert learn(seen).period == pytest.approx(175 * MILLISECOND, rel=0.001)


def test_no_bursts() -> None:
    assert learn([]) == Rhythm(FIRST_NS)
