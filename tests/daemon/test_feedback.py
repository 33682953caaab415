# SPDX-License-Identifier: Apache-2.0
"""Daemons that plan against the load tables of real switch processes."""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from flowslot.policy import registry
from flowslot.policy.base import View
from flowslot.policy.mlcc import Update
from flowslot.policy.mlcc.planner import Feedback, Fetch, Reserve
from flowslot_proto import flowslot_pb2 as pb
from flowslotd import config
from flowslotd.clock import monotonic, wall
from flowslotd.daemon import Daemon
from flowslotd.negotiate.load_tables import PlannedRates

from .hosts import SLOT_MS, Opened, negotiating, until
from .lying import Liar
from .test_several_switches import CROSS, switches, text

sys.path.insert(0, str(Path(__file__).parents[1] / "switchemu"))
from switchproc import Switch

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
        self.slot_ns = self.config.grid.slot_ns
        self.on_rates = self.decide
        self.flows: dict[int, tuple[tuple[str, ...], float]] = {}
        self.rates: dict[int, float] = {}

    def decide(self) -> None:
        topology, n = self.config.topology, len(self.flows)
        paths = np.full((n, 3), len(topology.links), np.int32)
        for row, (names, _) in enumerate(self.flows.values()):
            paths[row, : len(names)] = self.path(*names)
        view = View(
            slot=wall() // self.slot_ns,
            horizon=self.config.grid.horizon,
            capacity=topology.capacity(),
            flow=np.array(list(self.flows), np.uint64),
            paths=paths,
            job=np.zeros(n, np.int64),
            job_names=["job"],
            remaining=np.array([left for _, left in self.flows.values()], np.float64),
            guaranteed=np.zeros(n, np.bool_),
        )
        pace = self.source.rates(monotonic(), view)
        rates = pace.schedule.at(view.slot).tolist() if pace else []
        self.rates = dict(zip(pace.flows.tolist(), rates, strict=True)) if pace else {}

    async def slots(self) -> None:
        """The timer of the daemon."""
        while True:
            self.decide()
            await asyncio.sleep((self.slot_ns - wall() % self.slot_ns) / 1e9 + 0.001)


def planning(work: Callable[[], Awaitable[None]], *hosts: Host) -> None:
    """Run `work` while these hosts plan."""

    async def main() -> None:
        ticking = [asyncio.create_task(host.slots()) for host in hosts]
        await work()
        for task in ticking:
            task.cancel()

    negotiating(main, *hosts)
    assert [host.bugs for host in hosts] == [[] for _ in hosts]


@pytest.mark.parametrize("policy", ["mlcc", "mlcc-literal"])
def test_two_daemons_share_a_link_and_never_over_commit_it(
    tmp_path: Path, switches: dict[str, Switch], policy: str
) -> None:
    one, two = Host(tmp_path, "h1", policy), Host(tmp_path, "h2", policy)

    async def work() -> None:
        limit = one.limit("s2->h2") * (1 + 1e-6)
        most, both = 0.0, set()
        for i in range(60):
            # Who comes first has it all for as long as it wants; so nobody wants it for long.
            one.flows = {1: (CROSS, 10**7), 3: (CROSS, 10**7 if i % 8 < 4 else 0)}
            one.flows = {f: (p, n if i % 30 < 15 else 0) for f, (p, n) in one.flows.items()}
            two.flows = {2: (("s2->h2",), 10**7 if i > 10 else 0)}
            await asyncio.sleep(0.1)
            total = sum([*one.rates.values(), *two.rates.values()])
            most = max(most, total)
            assert total <= limit
            both |= {flow for h in (one, two) for flow, rate in h.rates.items() if rate > 0}
            table = await asyncio.to_thread(switches["s2"].load, "s2->h2")
            assert table <= limit
        assert most > 0.3 * limit and both >= {1, 2}
        assert one.said["reservations"]["scheduled"] > 0
        assert one.said["grpc_connections"] == 2, "s3 has nothing to do with h1"

    planning(work, one, two)
    # What was reserved is given back at the end.
    assert switches["s1"].load("h1->s1") == switches["s2"].load("s2->h2") == 0.0


def test_what_one_switch_refuses_is_undone_at_the_other(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    host = Host(tmp_path, "h1")
    counts, fetch = host.source.planner.counts, host.source._fetch
    link, taken = host.path("s2->h2"), list[bool | None]()

    async def fetch_then_take(call: Fetch) -> Feedback | None:
        """Before the host has planned, half of the link that s2 holds is another flow's."""
        said = await fetch(call)
        if set(link) <= set(call.links) and not taken:
            rates = np.full(10, 0.5 * host.limit("s2->h2"))
            other = Update(9, link, wall() // host.slot_ns, rates, 0.0 * rates)
            taken.append(await host.source._reserve(Reserve(call.switch, other, call.until)))
        return said

    host.source._fetch = fetch_then_take  # type: ignore[method-assign]

    async def work() -> None:
        host.flows = {1: (CROSS, BUSY)}
        await until(lambda: counts.undone == 1, "refused by s2, and taken back from s1")
        assert taken == [True] and counts.refused == 1
        await until(lambda: host.rates.get(1, 0.0) > 0.0, "planned beside the other flow")
        assert host.rates[1] <= 0.5 * host.limit("s2->h2") * (1 + 1e-6)

    planning(work, host)
    assert switches["s1"].load("h1->s1") == 0.0


def test_a_dead_switch_lets_its_flows_go_and_has_them_again_when_it_is_back(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    host = Host(tmp_path, "h1")

    async def work() -> None:
        host.flows = {1: (CROSS, BUSY), 2: (("h1->s1",), BUSY), 3: (("h1->s1",), 0)}
        await until(lambda: len(host.rates) == 3, "all are paced")
        assert host.rates[3] == 0.0, "it waits for its turn"
        switches["s2"].kill()
        await until(lambda: host.rates.keys() == {2, 3}, "only its own flows go")
        await until(lambda: host.rates[2] > 0.9 * host.limit("h1->s1"), "s1 goes on")
        assert "s2" in host.source.last_error
        switches["s1"].kill()
        await until(lambda: not host.rates, "nobody is left at rate 0")
        for switch in switches.values():
            switch.start()
        await until(lambda: host.rates.keys() == {1, 2, 3}, "back")
        await until(lambda: host.rates[1] + host.rates[2] > 0.0, "reserved")

    planning(work, host)


def row(load: list[float], reservable: float = 1e7) -> pb.LinkLoad:
    return pb.LinkLoad(link="s2->h2", load=load, reservable=reservable)


def test_a_switch_that_answers_nonsense_counts_as_silent_and_the_others_go_on(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    switches["s2"].kill()
    lies = [
        ("links", [row([0.0]), row([])]),
        ("links[0].load", [row([])]),
        ("links.reservable", [row([0.0], math.nan)]),
        ("links[0].load", [row([math.nan])]),
        ("links.reservable", [row([0.0], 5e-324)]),
        ("links[0].load", [row([1e308])]),
    ]
    liar, host = Liar(SLOT_MS), Host(tmp_path, "h1")

    async def work() -> None:
        async with liar.at(switches["s2"].port):
            host.flows = {1: (("s2->h2",), BUSY), 2: (("h1->s1",), BUSY)}
            for field, liar.rows in lies:
                said = f"s2: answered something else: field `{field}`"
                await until(lambda said=said: said in host.source.last_error, said)
                await until(lambda: host.rates.keys() == {2}, "only s1 counts")
            await until(lambda: host.rates[2] > 0.9 * host.limit("h1->s1"), "all of s1's link")
            liar.rows = [row([0.0] * 10)]
            await until(lambda: host.rates.keys() == {1, 2}, "who makes sense has a say")

    planning(work, host)


def test_without_a_switch_process_a_host_plans_for_itself(tmp_path: Path) -> None:
    alone = text({"s1": 1, "s2": 2, "s3": 3})
    host = Host(tmp_path, "h1", text=alone, use_switch="false")

    async def work() -> None:
        host.flows = {1: (("h1->s1",), BUSY)}
        await until(lambda: host.rates.get(1, 0.0) > 0.0, "planned")
        assert host.said["grpc_connections"] == 0

    planning(work, host)


def test_a_reload_changes_to_it_and_back(tmp_path: Path, switches: dict[str, Switch]) -> None:
    file = tmp_path / "flowslotd.toml"

    def write(policy: str) -> None:
        file.write_text(
            f'host = "h1"\nslot_ms = {SLOT_MS}\nmode = "enforce"\npolicy = "{policy}"\n'
            f'runtime_dir = "{tmp_path}/run"\n[pacing]\nbackend = "socket"\n'
        )

    async def main() -> None:
        write("mlcc")
        daemon = Daemon(config.load(file))
        running = asyncio.create_task(daemon.run())
        try:
            await until(lambda: daemon.metrics.slots > 2, "it runs")
            for policy in ("stagger", "mlcc-literal", "mlcc"):
                write(policy)
                assert (await daemon.reload())["changed"] == "policy"
                slots = daemon.metrics.slots
                await until(lambda slots=slots: daemon.metrics.slots > slots + 2, "it goes on")
                feedback = daemon.engine.source.describe()["feedback"]
                assert (feedback is None) == (policy == "stagger")
                assert feedback is None or feedback["rounds"] == 0, "there are no flows"
        finally:
            daemon._stop.set()
            await running
        assert daemon.metrics.errors == {}

    asyncio.run(main())
