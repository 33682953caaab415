# SPDX-License-Identifier: Apache-2.0
from flowslot_scenario.drawing import ecdf


def test_the_share_of_values_that_are_at_most_as_large() -> None:
    values, share = ecdf([3, 1, 2, 2])
    assert values.tolist() == [1.0, 2.0, 2.0, 3.0]
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]
