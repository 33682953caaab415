# SPDX-License-Identifier: Apache-2.0
"""Daemons that plan against the load tables of real switch processes."""

import asyncio
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from flowslot.model.errors import ConfigError
from flowslot.model.units import Nanos
from flowslot.policy import registry
from flowslot.policy.base import Pace, View
from flowslot.policy.mlcc.planner import Reserving
from flowslot.policy.registry import PolicyOptions
from flowslot_proto import flowslot_pb2 as pb
from flowslotd import config
from flowslotd.clock import monotonic, wall
from flowslotd.daemon import Daemon
from flowslotd.negotiate.load_tables import held_by_switches, open_feedback

from .lying import Liar

sys.path.insert(0, str(Path(__file__).parents[1] / "switchemu"))
from switchproc import Switch, free_port
from test_several_switches import CROSS, text, until

SLOT_MS = 500
BUSY = 10**9  # more than the horizon carries


class Host:
    """What a daemon of that host has of a planning policy, without sockets and kernel."""

    def __init__(self, folder: Path, name: str, policy: str = "mlcc") -> None:
        file = folder / f"{name}.toml"
        file.write_text(
            f'host = "{name}"\nslot_ms = {SLOT_MS}\nmode = "enforce"\npolicy = "{policy}"\n'
        )
        self.config = config.load(file)
        self.slot_ns = self.config.grid.slot_ns
        spec = registry.get(policy)
        assert spec.feedback and spec.planner is not None and not spec.needs_arbiter
        topology = self.config.topology
        self.policy = Reserving(
            spec.planner(PolicyOptions(slot_ns=self.slot_ns)),
            held_by_switches(topology, True),
            self.slot_ns,
        )
        self.bugs: list[BaseException] = []
        self.client = open_feedback(
            self.config,
            self.policy,
            on_planned=self.decide,
            on_bug=lambda kind, error: self.bugs.append(error),
        )
        self.flows: dict[int, tuple[tuple[str, ...], float]] = {}
        self.rates: dict[int, float] = {}

    def limit(self, link: str) -> float:
        topology = self.config.topology
        return 0.96 * topology.links[topology.link_index[link]].goodput

    def decide(self, now: Nanos) -> None:
        """As the slot loop does, when a slot begins and when plans have changed."""
        topology, n = self.config.topology, len(self.flows)
        paths = np.full((n, 3), len(topology.links), np.int32)
        for row, (names, _) in enumerate(self.flows.values()):
            paths[row, : len(names)] = [topology.link_index[name] for name in names]
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
        nothing = np.full(n, np.nan)
        self.rates = {}
        for pace in self.policy.decide(now, view, nothing, nothing):
            assert isinstance(pace, Pace)
            rates = pace.schedule.at(view.slot).tolist()
            self.rates |= dict(zip(pace.flows.tolist(), rates, strict=True))

    async def slots(self) -> None:
        """The timer of the daemon."""
        while True:
            self.decide(monotonic())
            await asyncio.sleep((self.slot_ns - wall() % self.slot_ns) / 1e9 + 0.001)

    async def __aenter__(self) -> "Host":
        await self.client.start()
        self.ticking = asyncio.create_task(self.slots())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ticking.cancel()
        await self.client.close()
        assert self.bugs == []


@pytest.fixture
def switches(tmp_path: Path) -> Iterator[dict[str, Switch]]:
    """s1 and s2, which have recovered; s3 is not there."""
    with ExitStack() as stack:
        each = {
            name: stack.enter_context(Switch(tmp_path, slot_ms=SLOT_MS, name=name))
            for name in ("s1", "s2")
        }
        ports = {name: switch.port for name, switch in each.items()} | {"s3": free_port()}
        (tmp_path / "topology.toml").write_text(text(ports))
        for switch in each.values():
            switch.start()
        for switch in each.values():
            switch.wait_recovered()
        yield each


@pytest.mark.parametrize("policy", ["mlcc", "mlcc-literal"])
def test_two_daemons_share_a_link_and_never_over_commit_it(
    tmp_path: Path, switches: dict[str, Switch], policy: str
) -> None:
    async def main() -> None:
        async with Host(tmp_path, "h1", policy) as one, Host(tmp_path, "h2", policy) as two:
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
            assert one.client.reservations()["scheduled"] > 0
            assert one.client.grpc_connections == 2, "s3 has nothing to do with h1"

    asyncio.run(main())
    # What was reserved is given back at the end.
    assert switches["s1"].load("h1->s1") == switches["s2"].load("s2->h2") == 0.0


def test_what_one_switch_refuses_is_undone_at_the_other(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    async def main() -> None:
        async with Host(tmp_path, "h1") as host:
            host.flows = {1: (CROSS, BUSY)}
            await until(lambda: host.rates.get(1, 0.0) > 0.0, "planned")
            update = host.client._held[1]
            # The first one has all of s2 already, and half of s1.
            links = tuple(host.config.topology.link_index[name] for name in CROSS)
            rates = np.full(2, 0.5 * host.limit("s2->h2"))
            greedy = type(update)(9, links, wall() // host.slot_ns, rates, 1.0)
            loop = asyncio.get_running_loop()
            assert not await host.client._send(greedy, loop.time() + 10)
            assert host.client.stats.undone == 1 and host.client.stats.refused >= 1
            load = await asyncio.to_thread(switches["s1"].load, "h1->s1")
            assert load <= host.limit("s2->h2") * (1 + 1e-6)

    asyncio.run(main())


def test_a_dead_switch_lets_its_flows_go_and_has_them_again_when_it_is_back(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    async def main() -> None:
        async with Host(tmp_path, "h1") as host:
            host.flows = {1: (CROSS, BUSY), 2: (("h1->s1",), BUSY), 3: (("h1->s1",), 0)}
            await until(lambda: len(host.rates) == 3, "all are paced")
            assert host.rates[3] == 0.0, "it waits for its turn"
            switches["s2"].kill()
            await until(lambda: host.rates.keys() == {2, 3}, "only its own flows go")
            await until(lambda: host.rates[2] > 0.9 * host.limit("h1->s1"), "s1 goes on")
            assert "s2" in str(host.client.describe()["error"])
            switches["s1"].kill()
            await until(lambda: not host.rates, "nobody is left at rate 0")
            for switch in switches.values():
                switch.start()
            await until(lambda: host.rates.keys() == {1, 2, 3}, "back")
            await until(lambda: host.rates[1] + host.rates[2] > 0.0, "reserved")

    asyncio.run(main())


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

    async def main() -> None:
        liar = Liar(SLOT_MS)
        async with liar.at(switches["s2"].port), Host(tmp_path, "h1") as host:
            host.flows = {1: (("s2->h2",), BUSY), 2: (("h1->s1",), BUSY)}
            for field, liar.rows in lies:
                said = f"s2: answered something else: field `{field}`"
                await until(lambda said=said: said in host.client.stats.last_error, said)
                await until(lambda: host.rates.keys() == {2}, "only s1 counts")
            await until(lambda: host.rates[2] > 0.9 * host.limit("h1->s1"), "all of s1's link")
            liar.rows = [row([0.0] * 10)]
            await until(lambda: host.rates.keys() == {1, 2}, "who makes sense has a say")

    asyncio.run(main())


def test_without_a_switch_process_a_host_plans_for_itself(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text(text({"s1": 1, "s2": 2, "s3": 3}))
    host = Host(tmp_path, "h1")
    host.policy = Reserving(
        registry.get("mlcc").planner(PolicyOptions(slot_ns=host.slot_ns)),
        held_by_switches(host.config.topology, False),
        host.slot_ns,
    )
    host.client._policy, host.client._remotes = host.policy, []
    host.policy.on_wanted = host.client._wake.set

    async def main() -> None:
        async with host:
            host.flows = {1: (("h1->s1",), BUSY)}
            await until(lambda: host.rates.get(1, 0.0) > 0.0, "planned")
            assert host.client.grpc_connections == 0

    asyncio.run(main())


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
                feedback = daemon.engine.feedback
                assert (feedback is None) == (policy == "stagger")
                assert feedback is None or feedback.stats.rounds == 0, "there are no flows"
        finally:
            daemon._stop.set()
            await running
        assert daemon.metrics.errors == {}

    asyncio.run(main())


def test_a_policy_that_is_misspelt(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text(text({"s1": 1, "s2": 2, "s3": 3}))
    file = tmp_path / "flowslotd.toml"
    file.write_text('host = "h1"\npolicy = "mlcc-litteral"\n')
    with pytest.raises(ConfigError, match="did you mean `mlcc-literal`"):
        config.load(file)
