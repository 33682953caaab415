# SPDX-License-Identifier: Apache-2.0
"""Daemons that plan against the load tables of real switch processes."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlcc_hosts import view_of
from switchproc import Switch
from waiting import until

from flowslot.policy import registry
from flowslot.policy.mlcc import Update
from flowslot_proto import flowslot_pb2 as pb
from flowslotd.clock import monotonic, wall
from flowslotd.negotiate.load_tables import PlannedRates

from .hosts import SLOT_MS, Opened, negotiating
from .lying import Liar
from .test_several_switches import CROSS, switches, text

__all__ = ["switches"]  # the fixture

BUSY = 10**9  # more than the horizon carries


class Host(Opened):
    """It plans: decides as slots begin, and as its plans have changed."""

    source: PlannedRates

    def __init__(
        self, folder: Path, name: str, policy: str = "mlcc", text: str | None = None, **more: object
    ) -> None:
        super().__init__(folder, name, text, policy=f'"{policy}"', **more)
        spec = registry.get(policy)
        assert spec.feedback and not spec.needs_arbiter
        self.slot, self.slot_ns = 0, self.config.grid.slot_ns
        self.on_rates = self.decide
        self.flows: dict[int, tuple[tuple[str, ...], float]] = {}
        self.rates: dict[int, float] = {}

    def decide(self) -> None:
        topology, self.slot = self.config.topology, wall() // self.slot_ns
        flows = {flow: (self.path(*names), left) for flow, (names, left) in self.flows.items()}
        view = view_of(self.slot, flows, None, len(topology.links))
        view = replace(view, horizon=self.config.grid.horizon, capacity=topology.capacity())
        pace = self.source.rates(monotonic(), view)
        rates = pace.schedule.at(self.slot).tolist() if pace else []
        self.rates = dict(zip(pace.flows.tolist(), rates, strict=True)) if pace else {}

    async def slots(self) -> None:
        """The timer of the daemon."""
        while True:
            self.decide()
            await asyncio.sleep((self.slot_ns - wall() % self.slot_ns) / 1e9 + 0.001)


@asynccontextmanager
async def planning(*hosts: Host) -> AsyncIterator[None]:
    """These hosts plan meanwhile."""
    async with negotiating(*hosts):
        ticking = [asyncio.create_task(host.slots()) for host in hosts]
        yield
        for task in ticking:
            task.cancel()
    assert [host.bugs for host in hosts] == [[] for _ in hosts]


async def test_what_one_daemon_has_reserved_is_refused_to_others_until_it_gives_it_back(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    one, two = Host(tmp_path, "h1"), Host(tmp_path, "h2", "mlcc-literal")
    limit, link = one.limit("s2->h2"), one.path("s2->h2")

    async with planning(one, two):
        one.flows = {1: (CROSS, BUSY)}
        await until(lambda: one.rates.get(1, 0.0) > 0.9 * limit, "it has all of the link")
        load = await asyncio.to_thread(switches["s2"].load, "s2->h2")
        assert one.rates[1] == pytest.approx(load) and load <= limit * (1 + 1e-6)
        assert one.said["reservations"]["scheduled"] > 0
        assert one.said["grpc_connections"] == 2, "s3 has nothing to do with h1"
        more = Update(9, link, wall() // two.slot_ns, np.full(5, 0.5 * limit), np.zeros(5))
        (held,) = (remote for remote in one.source._remotes if set(link) <= remote.held)
        assert await held.update(more, 5.0) is False
        one.flows = {}
        two.flows = {2: (("s2->h2",), BUSY)}
        await until(lambda: two.rates.get(2, 0.0) > 0.9 * limit, "given back, and reserved anew")
    assert switches["s1"].load("h1->s1") == switches["s2"].load("s2->h2") == 0.0, "at the end"


@pytest.mark.parametrize("policy", ["mlcc", "mlcc-literal"])
async def test_two_daemons_share_a_link_and_never_over_commit_it(
    tmp_path: Path, switches: dict[str, Switch], policy: str
) -> None:
    one, two = hosts = Host(tmp_path, "h1", policy), Host(tmp_path, "h2", policy)
    limit, loads, turns = one.limit("s2->h2"), [0.0], [0]

    def take_turns() -> None:
        """Who comes first has it all for as long as it wants; so nobody wants it for long."""
        for host, flow, path in ((one, 1, CROSS), (two, 2, ("s2->h2",))):
            wants = (wall() // host.slot_ns + flow) % 4 < 3
            host.flows = {flow: (path, 10**7 if wants else 0)}
            if host.rates.get(flow, 0.0) > 0.1 * limit and turns[-1] != flow:
                turns.append(flow)
        if one.slot == two.slot:
            loads.append(sum(rate for host in hosts for rate in host.rates.values()))

    async with planning(*hosts):
        await until(lambda: len(turns) > 6, "each has had it three times", again=take_turns)
    assert 0.1 * limit < max(loads) <= limit * (1 + 1e-6)


def row(load: list[float], reservable: float = 1e7) -> pb.LinkLoad:
    return pb.LinkLoad(link="s2->h2", load=load, reservable=reservable)


async def test_a_switch_that_is_dead_or_answers_nonsense_lets_its_flows_go_and_the_others_go_on(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    lies = [
        ("links", [row([0.0]), row([])]),
        ("links.reservable", [row([0.0], math.nan)]),
        ("links[0].load", [row([math.nan])]),
    ]
    liar, host = Liar(SLOT_MS), Host(tmp_path, "h1")

    async with planning(host):
        host.flows = {1: (CROSS, BUSY), 2: (("h1->s1",), BUSY), 3: (("h1->s1",), 0)}
        await until(lambda: len(host.rates) == 3, "all are paced")
        assert host.rates[3] == 0.0, "it waits for its turn"
        switches["s2"].kill()
        await until(lambda: host.rates.keys() == {2, 3}, "only its own flows go")
        await until(lambda: host.rates[2] > 0.9 * host.limit("h1->s1"), "s1 goes on")
        host.flows[1] = ("s2->h2",), BUSY
        async with liar.at(switches["s2"].port):
            for field, liar.rows in lies:
                said = f"s2: answered something else: field `{field}`"
                await until(lambda said=said: said in host.source.last_error, said)
                await until(lambda: host.rates.keys() == {2, 3}, "only s1 counts")
            liar.rows = [row([0.0] * 10)]
            await until(lambda: host.rates.keys() == {1, 2, 3}, "who makes sense has a say")
        switches["s1"].kill()
        await until(lambda: not host.rates, "nobody is left at rate 0")
        for switch in switches.values():
            switch.start()
        await until(lambda: host.rates.keys() == {1, 2, 3}, "back")
        await until(lambda: host.rates[1] > 0.0 and host.rates[2] > 0.0, "reserved")


async def test_without_a_switch_process_a_host_plans_for_itself(tmp_path: Path) -> None:
    alone = text({"s1": 1, "s2": 2, "s3": 3})
    host = Host(tmp_path, "h1", text=alone, use_switch="false")

    async with planning(host):
        host.flows = {1: (("h1->s1",), BUSY)}
        await until(lambda: host.rates.get(1, 0.0) > 0.0, "planned")
        assert host.said["grpc_connections"] == 0
