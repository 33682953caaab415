# SPDX-License-Identifier: Apache-2.0
"""Which raises are made when not all fit."""

import numpy as np
import pytest

from flowslot.arbiter.config import ArbiterConfig
from flowslot.arbiter.flow_table import FlowTable
from flowslot.arbiter.issuer import Issuer


def table(*rows: tuple[float, float, float]) -> FlowTable:
    """Flows on one link: (remaining, granted, goal)."""
    flows = FlowTable(1)
    for i, (remaining, grant, goal) in enumerate(rows):
        row = flows.add(1, i, 1)
        flows.set_path(row, (0,))
        flows.set_job(row, "job")
        flows.remaining[row], flows.grant[row], flows.goal[row] = remaining, grant, goal
    return flows


def raised(flows: FlowTable, free: float) -> dict[int, float]:
    issuer = Issuer(flows, np.array([100.0]), ArbiterConfig())
    nothing = np.zeros(flows.n)
    raises = issuer.raises(np.zeros(flows.n, np.bool_), np.array([free]), nothing, pressing=False)
    return dict(zip(raises.rows.tolist(), raises.rates.tolist(), strict=True))


def test_who_has_nothing_comes_first() -> None:
    flows = table((9, 40.0, 60.0), (9, 0.0, 0.4), (9, 0.0, 0.4))
    assert raised(flows, 1.0) == {1: 0.4, 2: 0.4}, "0.2 more are not worth a message to the first"
    assert raised(flows, 10.8) == pytest.approx({0: 50.0, 1: 0.4, 2: 0.4})
    assert raised(flows, 30.0) == {0: 60.0, 1: 0.4, 2: 0.4}


def test_who_is_idle_with_nothing_does_not() -> None:
    flows = table((9, 40.0, 60.0), (0, 0.0, 20.0))
    assert raised(flows, 20.0) == pytest.approx({0: 50.0, 1: 10.0})


def test_what_is_raised_always_fits() -> None:
    flows = table((9, 0.0, 30.0), (9, 0.0, 10.0), (9, 10.0, 50.0))
    rates = raised(flows, 20.0)
    assert rates == pytest.approx({0: 15.0, 1: 5.0})
    assert sum(rates.values()) == pytest.approx(20.0)
