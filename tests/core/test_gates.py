# SPDX-License-Identifier: Apache-2.0
"""Gates: which transfers begin."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreted import plain

from flowslot.policy import adadual, gate, srsf, srsf_chunked
from flowslot.policy.adadual import AdaDual, best_start, total_ends
from flowslot.policy.gate import Gate, Transfers
from flowslot.policy.srsf import Srsf
from flowslot.policy.srsf_chunked import ChunkedSrsf

B, ETA = 0.856e-9, 0.235e-9
MB = 1e6


def transfers(paths, sizes, *, services=None, sending=(), left=None, links=4, made=gate):
    width = max(len(path) for path in paths)
    padded = np.full((len(paths), width), links, np.int32)
    for i, path in enumerate(paths):
        padded[i, : len(path)] = path
    state = made.Transfers(padded, links)
    np.asarray(state.ready)[:] = np.arange(len(paths))
    np.asarray(state.size)[:] = sizes
    np.asarray(state.left)[:] = sizes if left is None else left
    np.asarray(state.service)[:] = services or [1] * len(paths)
    np.asarray(state.sends)[list(sending)] = 1
    return state


def decided(policy: Gate, state: Transfers) -> list[int]:
    policy.decide(state, len(state.ready))
    return np.flatnonzero(np.asarray(state.sends)).tolist()


def ends(left: list[float], size: float, start: float) -> float:
    """Sum of all ends on one link by stepping through time, if the new one begins at `start`."""
    rest, now, total = {k: x for k, x in enumerate(left)}, 0.0, 0.0
    joined = False
    while rest or not joined:
        if not joined and (not rest or now >= start - 1e-12):
            now, joined = max(now, start), True
            rest[-1] = size
        each = len(rest) * B + (len(rest) - 1) * ETA
        first = min(rest.values()) * each
        step = first if joined else min(first, start - now)
        now += step
        for k in list(rest):
            rest[k] -= step / each
            if rest[k] <= 1e-6:
                del rest[k]
                total += now
    return total


sizes = st.floats(1.0, 600.0).map(lambda mb: mb * MB)


@given(st.lists(sizes, max_size=5).map(sorted), sizes)
def test_the_best_start_is_now_or_when_a_transfer_ends(left: list[float], size: float) -> None:
    array = np.array(left)
    best = best_start(B, ETA, array, size)
    found = total_ends(B, ETA, array, size, best)
    alone = [0.0]  # ends of those that run, without the new one
    sent = 0.0
    for k, x in enumerate(left):
        each = (len(left) - k) * B + (len(left) - k - 1) * ETA
        alone.append(alone[-1] + (x - sent) * each)
        sent = x
    assert found == pytest.approx(ends(left, size, alone[best]), rel=1e-6)
    for start in np.linspace(0.0, alone[-1], 60):
        assert found <= ends(left, size, float(start)) * (1 + 1e-9)


@given(sizes, sizes, st.lists(sizes, max_size=3), sizes)
def test_a_short_transfer_begins_beside_k_if_it_is_short_enough(
    first: float, gap: float, more: list[float], size: float
) -> None:
    """For x <= min(r1, r2 - r1): now is better than waiting for the first end iff
    2 (b + eta) x < f(m) r1."""
    left = np.array([first, *sorted(first + gap + x for x in more)])
    size = min(size, first, gap)
    m = len(left)
    now, wait = (total_ends(B, ETA, left, size, k) for k in (0, 1))
    short, long = 2 * (B + ETA) * size, (m * B + (m - 1) * ETA) * first
    if abs(short - long) > 1e-6 * long:
        assert (now < wait) == (short < long)


def test_one_transfer_begins_beside_another_by_theorem_2() -> None:
    limit = B / (2 * (B + ETA))
    for ratio, begins in ((limit * 0.999, True), (limit * 1.001, False), (2.0, False)):
        state = transfers([[0], [0]], [100 * MB, 50 * MB * ratio], sending=[0], left=[50 * MB, 1.0])
        assert decided(AdaDual(B, ETA), state) == ([0, 1] if begins else [0])
        assert np.asarray(state.asked).tolist() == ([0, 0] if begins else [1, 0])
        array = np.array([50 * MB])
        assert (best_start(B, ETA, array, 50 * MB * ratio) == 0) == begins


def test_beside_two_none_begins_unless_it_may_have_three_ways() -> None:
    def state() -> Transfers:
        return transfers([[0], [0], [0]], [400 * MB, 400 * MB, MB], sending=[0, 1])

    assert decided(AdaDual(B, ETA), state()) == [0, 1]
    assert decided(AdaDual(B, ETA, ways=2), state()) == [0, 1, 2]


def test_of_several_servers_the_first_one_with_the_most_counts() -> None:
    """Algorithm 2, lines 2 to 7; `every` looks at all of them."""
    paths = [[0], [1], [0, 1]]
    state = transfers(paths, [400 * MB, 4 * MB, 40 * MB], sending=[0, 1])
    assert decided(AdaDual(B, ETA), state) == [0, 1, 2]
    state = transfers(paths, [400 * MB, 4 * MB, 40 * MB], sending=[0, 1])
    assert decided(AdaDual(B, ETA, every=True), state) == [0, 1]


@pytest.mark.parametrize("ways", [1, 2, 3])
def test_srsf_lets_so_many_begin_shortest_service_first(ways: int) -> None:
    state = transfers([[0], [0], [0], [1]], [MB] * 4, services=[3, 1, 2, 9])
    assert decided(Srsf(ways), state) == sorted([[1], [1, 2], [0, 1, 2]][ways - 1] + [3])


def test_chunked_lets_a_transfer_with_less_left_pass() -> None:
    state = transfers([[0], [0, 1], [1]], [9.0, 5.0, 7.0], sending=[0, 2], left=[4.0, 5.0, 6.0])
    assert decided(ChunkedSrsf(), state) == [0, 2]
    state = transfers([[0], [0, 1], [1]], [9.0, 5.0, 7.0], sending=[0, 2], left=[6.0, 5.0, 6.0])
    assert decided(ChunkedSrsf(), state) == [1]


def test_settings_out_of_range_are_refused() -> None:
    for make in (lambda: Srsf(0), lambda: AdaDual(0.0, ETA), lambda: AdaDual(B, -1.0)):
        with pytest.raises(ValueError, match="at least"):
            make()


def drawn(seed: int, made=gate) -> Transfers:
    draw = np.random.default_rng(seed)
    n, links = int(draw.integers(1, 12)), 4
    pairs = list(combinations(range(links), 2))
    paths = [list(pairs[draw.integers(len(pairs))]) for _ in range(n)]
    size = draw.uniform(1, 600, n) * MB
    sending = np.flatnonzero(draw.random(n) < 0.3)
    services = draw.integers(1, 5, n).tolist()
    left = size * draw.uniform(0.01, 1, n)
    return transfers(paths, size, services=services, sending=sending, left=left, made=made)


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_the_list_does_not_matter(seed: int) -> None:
    for policy in (Srsf(2), AdaDual(B, ETA, ways=2), ChunkedSrsf()):
        state, other = drawn(seed), drawn(seed)
        np.asarray(other.ready)[:] = np.asarray(other.ready)[::-1].copy()
        assert decided(policy, state) == decided(policy, other)


@pytest.mark.parametrize("seed", range(40))
def test_compiled_gates_decide_as_their_source_says(seed: int) -> None:
    assert all(module.COMPILED for module in (gate, adadual, srsf, srsf_chunked))
    source = plain(gate)
    imported = ("flowslot.policy.gate", source)
    for compiled, interpreted in (
        (Srsf(2), plain(srsf, imported).Srsf(2)),
        (AdaDual(B, ETA), plain(adadual, imported).AdaDual(B, ETA)),
        (AdaDual(B, ETA, 3, every=True), plain(adadual, imported).AdaDual(B, ETA, 3, every=True)),
        (ChunkedSrsf(), plain(srsf_chunked, imported).ChunkedSrsf()),
    ):
        state, other = drawn(seed), drawn(seed, source)
        assert decided(compiled, state) == decided(interpreted, other)
        assert np.asarray(state.asked).tolist() == other.asked.tolist()
