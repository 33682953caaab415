# SPDX-License-Identifier: Apache-2.0
"""Traffic of no job: what it leaves to flows, and whether MLCC's hosts leave it its part."""

from dataclasses import replace

import pytest

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import Nanos
from flowslot.policy.base import Floats
from flowslot.policy.mlcc.bandwidth import WINDOW
from flowslot_sim.network import FlowSpec
from flowslot_sim.plane.messages import Plant
from flowslot_sim.plane.mlcc import VARIANTS, Mlcc, Variant
from flowslot_sim.simulation import Control, Simulation
from flowslot_sim.world import Background, SimJob, World

MB, S = 1e6, 10**9
C = 100 * MB
"""Of every link."""
ALWAYS = 1e12
"""Bytes: more than are sent in a test."""
MLCC = VARIANTS["mlcc"]
NO_TOP_UP = replace(MLCC.options, top_up=False)
"""What flows send is what their hosts have planned."""


def world(*flows: FlowSpec, background: tuple[Background, ...], compute_ns: int = 1) -> World:
    """One job, two links."""
    job = SimJob("a", flows, lambda _: compute_ns, Nanos(0), 1.0)
    return World(("l0", "l1"), (C, C), ("h0", "h1"), (job,), background=background)


class Run:
    """MLCC on a world, seen shortly before slots end."""

    def __init__(self, made: World, variant: Variant = MLCC) -> None:
        self.sim = Simulation(made, lambda sim: Mlcc(sim, variant, Plant(), seed=0))

    def reserved(self, slot: int) -> list[float]:
        """Of each link in `slot`, in parts of its capacity."""
        self.sim.run(until_ns=(slot + 1) * DEFAULT_SLOT - DEFAULT_SLOT // 10)
        load: Floats = self.sim.control.switch.fetch(self.sim.now, (0, 1)).load
        parts: list[float] = (load[:, 0] / C).tolist()
        return parts


def test_flows_have_what_other_traffic_leaves_and_a_port_counts_both() -> None:
    always, twice = Background(0, 0.4 * C), Background(0, 0.4 * C, round(1.1 * S), round(1.6 * S))
    flow, background = FlowSpec("h0", (0,), 60 * MB), (always, twice, twice)
    made = world(flow, background=background, compute_ns=S // 10)
    sim = Simulation(made, lambda _: Control())
    sim.run(until_ns=2 * S)
    # Computes for 0.1 s; sends at 60 MB/s from 0.1 to 1.1 s, which is all of it; from 1.2 to 1.6 s
    # nothing is left for it, and from then on there are 60 MB/s again.
    assert [end / S for end in sim.progress[0].ends] == pytest.approx([1.1])
    assert sim.network.carried[0] == pytest.approx(60 * MB + 0.4 * 60 * MB)
    assert sim.network.other[0] == pytest.approx(1.5 * 40 * MB + 0.5 * 100 * MB)


def test_reservations_leave_steady_other_traffic_its_room() -> None:
    made = world(FlowSpec("h0", (0,), ALWAYS), background=(Background(0, 0.4 * C),))
    run = Run(made)
    for slot in range(5, 60):
        assert run.reserved(slot) == pytest.approx([0.6, 0.0], abs=1e-3)
    blind = Run(made, replace(MLCC, count_links=False))
    assert blind.reserved(5) == pytest.approx([1.0, 0.0]), "who does not look believes to be alone"


def test_room_is_there_again_when_other_traffic_has_gone() -> None:
    """Every time, also if it has taken all for longer than anybody looks back."""
    waves = tuple(
        Background(0, C, begins * DEFAULT_SLOT, (begins + 3 * WINDOW) * DEFAULT_SLOT)
        for begins in (20, 60)
    )
    made = world(FlowSpec("h0", (0,), ALWAYS), background=waves)
    run = Run(made, Variant(NO_TOP_UP, count_links=True))
    for begins in (20, 60):
        ends = begins + 3 * WINDOW
        assert run.reserved(begins - 1)[0] == pytest.approx(1.0)
        assert run.reserved(ends - 1)[0] == pytest.approx(0.0, abs=1e-9)
        assert run.reserved(ends + WINDOW)[0] == pytest.approx(1.0)
    # As published nobody ever sends again, after a window in which nothing was sent.
    paper = Run(made, Variant(replace(NO_TOP_UP, bound="paper"), count_links=True))
    assert paper.reserved(19)[0] > 0.9
    assert paper.reserved(59)[0] == pytest.approx(0.0, abs=1e-9)


def test_what_a_flow_does_not_use_is_not_taken_for_other_traffic() -> None:
    """One that can send only what another one brings, over a link of which others have most."""
    slow, waits = FlowSpec("h0", (1,), ALWAYS), FlowSpec("h1", (0,), ALWAYS, preds=(0,))
    made = world(slow, waits, background=(Background(1, 0.8 * C),))
    run = Run(made, Variant(NO_TOP_UP, count_links=True))
    for slot in range(8, 50):
        assert run.reserved(slot) == pytest.approx([1.0, 0.2], abs=1e-3)
    assert run.sim.network.rows["rate"][1] == pytest.approx(0.2 * C, rel=1e-3)
