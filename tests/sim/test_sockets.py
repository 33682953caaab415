# SPDX-License-Identifier: Apache-2.0
"""A job of several sockets beside a small one: nobody is worse off than where each socket has the
same rate, as under TCP in the ideal."""

import pytest
from bench.sockets import cases, simulated

WORST = 1.08


@pytest.mark.parametrize(("kind", "sockets", "small"), list(cases()))
def test_nobody_is_worse_off_than_under_tcp(
    kind: str, sockets: int, small: tuple[int, float]
) -> None:
    found = simulated(kind, sockets, small)
    assert max(found.values()) <= WORST, found
