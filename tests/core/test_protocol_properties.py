# SPDX-License-Identifier: Apache-2.0
"""Safety under any interleaving, and what must come about once the network behaves."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lanes import CAPACITY, LIMIT
from scripts import HAPPENINGS, HAPPENS, ONE, TWO, Event, happen
from world import World

from flowslot.arbiter import LEASE_SLOTS
from flowslot.arbiter.rules import SMALL_OF_LINK

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(HAPPENS),
        st.integers(0, 2),
        st.integers(0, 1),
        st.integers(0, 2**16),
    ),
    min_size=60,  # or they are five on average, and hardly ever get as far as an acknowledgement
    max_size=160,
)


@pytest.mark.parametrize("held", [ONE, TWO], ids=["one", "two"])
@pytest.mark.timeout(400)
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
@given(EVENTS, st.sampled_from(["busy", "busy", "warm", "cold"]), st.integers(2, 3), st.booleans())
@example([("demand", 0, 0, 1), ("demand", 0, 0, 3)], "cold", 3, False)
def test_never_over_commits_and_recovers(
    held: Sequence[Sequence[int]],
    events: list[Event],
    start: str,
    hosts: int,
    gathers: bool,
) -> None:
    """Also: no acknowledgement before enforcement, and nothing stale has an effect (see World)."""
    world = World(hosts, held=held, gathers=gathers)
    if start != "cold":
        world.exchange(LEASE_SLOTS + 1, 60)  # past the arbiter's recovery
    if start == "busy":
        for i in range(2 * hosts):
            world.demand(i % hosts, i // hosts, 10**6)
        world.exchange(5)
        assert max(world.enforced(world.processes[-1])) > 0.9 * LIMIT[2]
    for event in events:
        happen(world, event)
    # Whatever happened: once messages arrive again, everything is put right.
    for process in world.processes:
        world.decide_by(process, 0)
    world.exchange(LEASE_SLOTS + 20, 60)
    assert all(lane.session.live for daemon in world.daemons for lane in daemon.lanes)
    world.report()
    world.exchange(90, 20)  # until all estimates of what is left have run down
    # Jobs whose bytes never become fewer change places, but more and more rarely.
    late = [world.exchange(60) for _ in range(3)]
    assert late.count(0) >= 2 and late[-1] == 0, "fixed demands must come to rest"
    check_rest(world)


def check_rest(world: World) -> None:
    """After coming to rest: nothing stale is committed, and nothing is left unused."""
    for process in world.processes:
        commitments = process.switch.arbiter.commitments()
        assert np.allclose(world.granted(process), commitments), "both ends agree"
        if len(world.processes) == 1:
            assert np.allclose(world.enforced(process), commitments), "and so does the kernel"
    full = full_links(world)
    for daemon in world.daemons:
        for flow, demand in daemon.demands.items():
            if demand.remaining and demand.cap > 0:
                assert daemon.kernel.get(flow, 0.0) > 0, "every active flow makes progress"
            if demand.remaining and demand.cap == math.inf:
                assert full.intersection(demand.links), "unused capacity is given out"
    for i, daemon in enumerate(world.daemons):
        for flow in list(daemon.demands):
            world.end(i, flow)
    world.exchange(3)
    for process in world.processes:
        assert not process.switch.arbiter.commitments().any(), "Done leaves nothing behind"


def full_links(world: World) -> set[int]:
    flows = sum(len(daemon.demands) for daemon in world.daemons)
    slack = (0.001 + SMALL_OF_LINK * flows) * CAPACITY
    loads: dict[int, float] = {}
    for process in world.processes:
        load = process.switch.arbiter.load_table(world.now).max(axis=1).tolist()
        loads.update(zip(process.links, load, strict=True))
    return {link for link, load in loads.items() if LIMIT[link] - load <= slack[link]}


@pytest.mark.timeout(400)
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*["beat", "up", "down"] * 3, "reconnect"]),
            st.sampled_from([1, 20, 60, 99, 150]),
            st.booleans(),
        ),
        min_size=12,
        max_size=60,
    )
)
def test_the_lease_ends_at_the_daemon_first(events: list[tuple[str, int, bool]]) -> None:
    """Messages with any delay, also lost for good. Time passes after each event."""
    world = World(hosts=1)
    world.exchange(LEASE_SLOTS + 1, 60)
    world.demand(0, 0, 10**9)
    world.exchange(10)
    session, arbiter = world.daemons[0].lanes[0].session, world.processes[0].switch.arbiter
    link = world.daemons[0].demands[0].links[0]
    for event, milliseconds, asleep in events:
        for what in {"beat": ("beat", "speak"), "up": ("up", "send")}.get(event, (event,)):
            HAPPENINGS[what](world, 0, 0, 0)
        world.advance(milliseconds, asleep=asleep)
        # Make the arbiter look at its leases at this very moment.
        arbiter.heartbeat(world.now, -1)
        if session.live and world.now < (session.lease_end or 0):
            assert arbiter.commitments()[link] >= session.grant(0).rate > 0


@pytest.mark.timeout(400)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 40)),
        min_size=2,
        max_size=10,
        unique_by=lambda t: t[:2],
    ),
    st.booleans(),
    st.sampled_from([ONE, TWO]),
)
def test_finite_jobs_all_finish(
    work: list[tuple[int, int, int]], gathers: bool, held: Sequence[Sequence[int]]
) -> None:
    """Flows of 1 to 40 units of 100 kB; in the end all bytes were sent in bounded time."""
    world = World(held=held, gathers=gathers)
    world.exchange(LEASE_SLOTS + 1, 60)
    left = {(i, flow): units * 1e5 for i, flow, units in work}
    for (i, flow), size in left.items():
        world.demand(i, flow, int(size))
    # Twice what the links would need one after the other, for half of the target.
    bound_ms = 50 + 4000 * sum(left.values()) / CAPACITY.min()
    start = world.now
    while left:
        assert (world.now - start) / 1e6 < bound_ms, f"not finished: {left}"
        world.exchange(1, 2)
        for i, flow in list(left):
            left[i, flow] -= world.daemons[i].kernel.get(flow, 0.0) * 2e-3
            if left[i, flow] <= 0:
                world.demand(i, flow, 0, idle=True)
                del left[i, flow]
