# SPDX-License-Identifier: Apache-2.0
"""What the protocol promises, under random delays, duplicates, crashes and amnesia."""

import hypothesis.strategies as st
import numpy as np
import pytest
from chaos import FAULTS, RARELY_MS, Chaos, Fault, plant, star
from hypothesis import example, given, settings

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import MILLISECOND, SECOND

faults = st.lists(
    st.builds(
        Fault,
        at_s=st.floats(0.1, 3.0),
        kind=st.sampled_from(FAULTS),
        who=st.integers(0, 4),
        lasts_s=st.floats(0.01, 0.8),
    ),
    max_size=8,
)
SLOT = DEFAULT_SLOT
HORIZON_S = 10 * SLOT / SECOND


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), faults, st.sampled_from([1.0, 10.0, 50.0]), st.booleans())
def test_no_link_is_ever_over_committed_and_all_heals(
    seed: int, faults: list[Fault], slowest_ms: float, per_rack: bool
) -> None:
    chaos = Chaos(star(seed, per_rack=per_rack), plant(slowest_ms), faults, seed)
    chaos.run(4.5, chaos.never_too_much)
    # The last fault may have ended at 3.8 s. From then on every job gets on, in bounded time.
    before = [len(progress.ends) for progress in chaos.sim.progress]
    chaos.run(7.5, chaos.never_too_much)
    after = [len(progress.ends) for progress in chaos.sim.progress]
    assert all(a > b for a, b in zip(after, before, strict=True)), "no deadlock"
    assert chaos.negotiating()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 50.0]), st.booleans())
@example(5058, 50.0, True)  # a flow waited on two links, and others took what either got: 328 ms
def test_every_ready_job_sends_within_a_bound(seed: int, slowest_ms: float, per_rack: bool) -> None:
    chaos = Chaos(star(seed, per_rack=per_rack), plant(slowest_ms), [], seed)
    # Demand, lower, acknowledgement, raise, some of which take RARELY_MS; and what is put off on
    # the way: news in a burst for a quarter of a slot, changes to be gathered twice for 4 ms.
    bound = min(4 * max(slowest_ms, RARELY_MS) * MILLISECOND + SLOT / 2, 0.2 * SECOND)
    moved = [0.0] * len(chaos.sim.rows_of)
    since = [0] * len(chaos.sim.rows_of)

    def check() -> None:
        chaos.never_too_much()
        rows, now = chaos.sim.network.rows, chaos.sim.now
        for j, its in enumerate(chaos.sim.rows_of):
            at = slice(its.start, its.stop)
            sent = float(rows["sent"][at].sum())
            if sent != moved[j] or not rows["active"][at].any():
                moved[j], since[j] = sent, now
            assert now - since[j] <= bound, f"job {j} stands still since {since[j]}"

    chaos.run(3.0, check)


@pytest.mark.parametrize("per_rack", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_amnesia_heals_within_one_horizon(seed: int, per_rack: bool) -> None:
    """A switch process that has forgotten everything: nobody is over-committed meanwhile."""
    forgets = Fault(2.0, "restart switch", seed, 0.0)
    chaos = Chaos(star(seed, per_rack=per_rack), plant(1.0, twice=0.0), [forgets], seed)
    chaos.run(2.0, chaos.never_too_much)
    assert chaos.negotiating()
    chaos.run(2.0 + HORIZON_S, chaos.never_too_much)
    assert chaos.negotiating()
    # Whoever sends then, or begins later, has a rate from it after a round trip and a decision.
    late = chaos.sim.now
    waiting: dict[int, int] = {}

    def check() -> None:
        chaos.never_too_much()
        for b in np.flatnonzero(chaos.plane.observer.active).tolist():
            if chaos.plane.kernel.in_force(b):
                waiting[b] = chaos.sim.now
            onset = max(late, int(chaos.plane.observer.onset[b]))
            assert chaos.sim.now - max(onset, waiting.get(b, 0)) < 0.05 * SECOND

    chaos.run(2.0 + HORIZON_S + 1.0, check)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_vanished_daemon_held_is_free_after_its_lease(seed: int) -> None:
    """And what it had put into force is void before that."""
    vanishes = Fault(2.0, "vanish", 0, 10.0)
    chaos = Chaos(star(seed), plant(1.0, twice=0.0), [vanishes], seed)
    chaos.run(2.001, chaos.never_too_much)
    host = sorted(chaos.plane.daemons)[0]
    lost = [b for b, bunch in enumerate(chaos.plane.observer.bunches) if bunch.host == host]
    switch = chaos.plane.switches["s0"]
    assert sorted(switch.arbiter.daemons())[0].startswith(f"{host}-")
    chaos.run(2.0 + 2 * 0.06 + 0.005, chaos.never_too_much)
    assert not any(chaos.plane.kernel.in_force(b) for b in lost)
    chaos.run(2.0 + chaos.lease / SECOND + 0.07, chaos.never_too_much)
    assert not any(name.startswith(f"{host}-") for name in switch.arbiter.daemons())
