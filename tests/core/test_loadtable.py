# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowslot.model.errors import ScheduleRefused
from flowslot.model.loadtable import LoadTable


def test_what_is_removed_or_over_is_gone_and_time_never_goes_back() -> None:
    table = LoadTable(2, 3, [10.0, 10.0])
    table.update("f", [0, 1], [3.0, 2.0])
    table.advance(1)
    table.update("g", [1], [7.0], offset=2)
    assert table.peak().tolist() == [2, 7]
    table.advance(0)  # never back
    assert table.slot == 1
    table.remove("f")
    assert table.load([0]).tolist() == [[0, 0, 0]]
    table.advance(50)
    assert len(table) == 0 and not table.load([0, 1]).any()


def test_refusal_changes_nothing() -> None:
    table = LoadTable(2, 3, [10.0, 10.0])
    table.update("f", [0, 1], [6.0, 6.0, 6.0])
    before = table.load([0, 1])
    with pytest.raises(ScheduleRefused) as caught:
        table.update("g", [0, 1], [1.0, 5.0], committed=np.array([0.0, 0.0]))
    assert caught.value.link == 0
    with pytest.raises(ScheduleRefused) as caught:
        table.update("f", [0, 1], [6.0, 6.0], committed=np.array([0.0, 5.0]))
    assert caught.value.link == 1
    assert np.array_equal(table.load([0, 1]), before)
    table.update("f", [0, 1], [10.0])  # its own old schedule is not in its way


@pytest.mark.parametrize(
    ("links", "rates", "offset"),
    [
        ([2], [1.0], 0),
        ([-1], [1.0], 0),
        ([], [1.0], 0),
        ([0, 0], [1.0], 0),
        ([0], [1.0] * 4, 0),
        ([0], [1.0], 3),
        ([0], [1.0], -1),
        ([0], [float("nan")], 0),
        ([0], [float("inf")], 0),
        ([0], [-1.0], 0),
    ],
)
def test_nonsense_is_refused(links: list[int], rates: list[float], offset: int) -> None:
    table = LoadTable(2, 3, [10.0, 10.0])
    with pytest.raises(ScheduleRefused):
        table.update("f", links, rates, offset)
    assert not table.load([0, 1]).any()


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.integers(0, 4),
                st.sets(st.integers(0, 2), min_size=1),
                st.lists(st.floats(0, 8), min_size=1, max_size=4),
                st.integers(0, 2),
            ),
            st.integers(1, 3),
        ),
        max_size=40,
    )
)
def test_agrees_with_a_plain_table_and_never_over_commits(
    events: list[tuple[int, set[int], list[float], int] | int],
) -> None:
    capacity = np.array([10.0, 8.0, 12.0])
    table, plain, slot = LoadTable(3, 4, capacity), {}, 0
    for event in events:
        if isinstance(event, int):
            slot += event
            table.advance(slot)
        else:
            flow, links, rates, offset = event
            rates = rates[: 4 - offset]
            try:
                table.update(flow, sorted(links), rates, offset)
            except ScheduleRefused:
                pass
            else:
                plain[flow] = (links, {slot + offset + k: r for k, r in enumerate(rates)})
        expected = np.zeros((3, 4))
        for links, rate_in in plain.values():
            for link in links:
                expected[link] += [rate_in.get(slot + k, 0.0) for k in range(4)]
        assert np.allclose(table.load([0, 1, 2]), expected, atol=1e-6)
        assert np.all(table.load([0, 1, 2]) <= capacity[:, None] * (1 + 1e-6))
