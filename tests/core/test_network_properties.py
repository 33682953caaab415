# SPDX-License-Identifier: Apache-2.0
"""Safety under any interleaving, and what must come about once the network behaves."""

import math
from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from network import CAPACITY, CONFIG, World

from flowslot.arbiter import LEASE_SLOTS


def demand(world: World, host: int, number: int) -> None:
    cap = (math.inf, math.inf, 0.0, 5e6)[number // 4 % 4]
    world.demand(host, number % 4, 1 + number * 100, idle=number % 3 == 0, cap=cap)


# What may happen, to one host; `k` decides about the details.
HAPPENINGS: dict[str, Callable[[World, int, int], object]] = {
    "up": lambda w, h, k: w.deliver_up(h),
    "down": lambda w, h, k: w.deliver_down(h),
    "step": lambda w, h, k: w.step(),
    "time": lambda w, h, k: w.advance((0.1, 1, 5, 30, 130, 260)[k % 6]),
    "beat": lambda w, h, k: w.beat(h),
    "demand": demand,
    "old up": lambda w, h, k: w.deliver_up(h, which=k),
    "old down": lambda w, h, k: w.deliver_down(h, which=k),
    "again up": lambda w, h, k: w.deliver_up(h, which=k, again=k // 7),
    "again down": lambda w, h, k: w.deliver_down(h, which=k, again=k // 7),
    "give back": lambda w, h, k: w.give_back(h, k % 4),
    "end": lambda w, h, k: w.end(h, k % 4),
    "reconnect": lambda w, h, k: w.reconnect(h),
    "crash": lambda w, h, k: w.crash(h),
    "amnesia": lambda w, h, k: w.amnesia(),
    "schedule": lambda w, h, k: w.schedule(k % 4, float(k % 11) * 1e7, k // 16 % 8),
    # So that grants exist by the time something goes wrong.
    "calm": lambda w, h, k: w.exchange(4 + k % 12),
}
FREQUENT = ("up", "up", "down", "down", "step", "demand", "give back")
EVENTS = st.lists(
    st.tuples(st.sampled_from((*HAPPENINGS, *FREQUENT)), st.integers(0, 2), st.integers(0, 2**16)),
    max_size=90,
)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
@given(EVENTS, st.booleans(), st.booleans())
@example([("demand", 0, 1), ("demand", 0, 3)], False, False)
def test_never_over_commits_and_recovers(
    events: list[tuple[str, int, int]], warm: bool, gathers: bool
) -> None:
    world = World(gathers=gathers)
    if warm:
        world.exchange(LEASE_SLOTS + 1, 60)  # past the arbiter's recovery
    for event, host, detail in events:
        HAPPENINGS[event](world, host, detail)
        world.check()
    # Whatever happened: once messages arrive again, everything is put right.
    world.exchange(LEASE_SLOTS + 3, 60)
    world.report()
    world.exchange(90, 20)  # until all estimates of what is left have run down
    assert world.exchange(60) == 0, "fixed demands must come to rest"
    check_rest(world)


def check_rest(world: World) -> None:
    """After coming to rest: nothing stale is committed, and nothing is left unused."""
    commitments = world.arbiter.commitments()
    assert np.allclose(world.enforced(), commitments), "both sides agree"
    free = CONFIG.target * CAPACITY - (world.arbiter.load_table(world.now).max(axis=1))
    flows = sum(len(host.demands) for host in world.hosts)
    slack = (0.001 + CONFIG.min_change_link * flows) * CAPACITY
    for host in world.hosts:
        for flow, demand in host.demands.items():
            rate = host.book.grant(flow).rate
            if demand.remaining and demand.cap > 0:
                assert rate > 0, "every active flow makes progress"
            if demand.remaining and demand.cap == math.inf:
                links = list(demand.links)
                assert np.any(free[links] <= slack[links]), "unused capacity is given out"
    for i, host in enumerate(world.hosts):
        for flow in list(host.demands):
            world.end(i, flow)
    world.exchange(3)
    assert not world.arbiter.commitments().any(), "Done leaves nothing behind"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), min_size=1, max_size=60))
def test_the_lease_ends_at_the_daemon_first(events: list[tuple[int, int]]) -> None:
    """Heartbeats and echoes with any delay, also lost for good."""
    world = World(hosts=1)
    world.exchange(LEASE_SLOTS + 1, 60)
    world.demand(0, 0, 10**9, idle=False, cap=math.inf)
    world.exchange(10)
    for kind, number in events:
        if kind == 0:
            world.beat(0)
        elif kind == 1:
            world.deliver_up(0)
            world.deliver_down(0)
        else:
            world.advance(number)
        # Make the arbiter look at its leases at this very moment.
        world.arbiter.heartbeat(world.now, -1)
        if not world.hosts[0].book.expired(world.now):
            rate = world.hosts[0].book.grant(0).rate
            assert world.arbiter.commitments()[0] >= rate > 0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 40)),
        min_size=2,
        max_size=10,
        unique_by=lambda t: t[:2],
    ),
    st.booleans(),
)
def test_finite_jobs_all_finish(work: list[tuple[int, int, int]], gathers: bool) -> None:
    """Flows of 1 to 40 units of 100 kB; in the end all bytes were sent in bounded time."""
    world = World(gathers=gathers)
    world.exchange(LEASE_SLOTS + 1, 60)
    left = {(i, flow): units * 1e5 for i, flow, units in work}
    for (i, flow), size in left.items():
        world.demand(i, flow, int(size), idle=False, cap=math.inf)
    # Twice what the links would need one after the other, for half of the target.
    bound_ms = 50 + 4000 * sum(left.values()) / CAPACITY.min()
    start = world.now
    while left:
        assert (world.now - start) / 1e6 < bound_ms, f"not finished: {left}"
        world.exchange(1, 2)
        for i, flow in list(left):
            left[i, flow] -= world.hosts[i].book.grant(flow).rate * 2e-3
            if left[i, flow] <= 0:
                world.demand(i, flow, 0, idle=True, cap=math.inf)
                del left[i, flow]
