# SPDX-License-Identifier: Apache-2.0
"""A job that hangs with megabytes to send, beside one that goes on (see bench/hangs.py)."""

import pytest
from bench.hangs import BACKENDS, measure

from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError

from .conftest import LEAVES_NOTHING

MOST, SLOTS = 1.25, 4.0
"""On a busy machine; `python -m bench.hangs` has the bounds, 1.10 and 2. That the grant was taken
back does not depend on time."""

pytestmark = [pytest.mark.root, pytest.mark.timeout(180), LEAVES_NOTHING]


@pytest.mark.parametrize(
    ("backend", "way", "moment"),
    [
        *((backend, "stops to read", "first") for backend in BACKENDS),
        ("bpf", "vanishes", "later"),
    ],
)
def test_what_a_job_that_hangs_had_is_given_to_others_until_it_moves(
    state: RunState, backend: str, way: str, moment: str
) -> None:
    try:
        found = measure(state, backend, way, moment)
    except LabError as error:
        if "cannot pace: this kernel has no" not in str(error):
            raise
        pytest.skip(str(error))
    assert found.goes <= MOST
    assert found.took_back < 0.01
    assert found.back_slots <= SLOTS
