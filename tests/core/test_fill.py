# SPDX-License-Identifier: Apache-2.0
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowslot.policy import fill

LINKS = 5


@st.composite
def networks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flows = draw(
        st.lists(
            st.sets(st.integers(0, LINKS - 1), min_size=1, max_size=3), min_size=1, max_size=12
        )
    )
    paths = np.full((len(flows), 3), LINKS, dtype=np.int32)
    for row, links in enumerate(flows):
        paths[row, : len(links)] = sorted(links)
    rate = st.floats(0.0, 100.0)
    capacity = np.array([*draw(st.lists(rate, min_size=LINKS, max_size=LINKS)), np.inf])
    bound = st.one_of(rate, st.just(np.inf))
    limit = np.array(draw(st.lists(bound, min_size=len(flows), max_size=len(flows))))
    return paths, capacity, limit


def max_min(paths: np.ndarray, capacity: np.ndarray, limit: np.ndarray) -> np.ndarray:
    rate = np.zeros(len(limit))
    fill.max_min(paths, capacity, limit, rate)
    return rate


@settings(deadline=None)
@given(networks())
def test_max_min(network: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Feasible, and every flow is at its limit or has a full link on which nobody has more."""
    paths, capacity, limit = network
    rate, used = max_min(paths, capacity, limit), np.zeros(LINKS + 1)
    fill.link_sum(paths, rate, used)
    assert np.all(used[:-1] <= capacity[:-1] * (1 + 1e-9) + 1e-9)
    assert np.all(rate <= limit)
    for f in range(len(rate)):
        if rate[f] < limit[f] - 1e-9:
            bottlenecks = [
                link
                for link in paths[f]
                if link != LINKS
                and used[link] >= capacity[link] - 1e-6
                and rate[f] >= rate[(paths == link).any(axis=1)].max() - 1e-6
            ]
            assert bottlenecks, (f, rate, used)


@settings(deadline=None)
@given(networks(), st.data())
def test_a_flow_of_weight_n_has_what_n_flows_have(
    network: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    paths, capacity, limit = network
    weight = np.array([data.draw(st.integers(1, 4)) for _ in limit])
    rate = np.zeros(len(limit))
    fill.weighted(paths, capacity, limit * weight, weight.astype(float), rate)
    each = max_min(np.repeat(paths, weight, axis=0), capacity, np.repeat(limit, weight))
    starts = np.cumsum(weight) - weight
    np.testing.assert_allclose(rate, np.add.reduceat(each, starts), rtol=1e-6, atol=1e-6)
