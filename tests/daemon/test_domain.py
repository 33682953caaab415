# SPDX-License-Identifier: Apache-2.0
"""Who negotiates for a daemon: itself over its own NICs, or a real switch process."""

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from flowslot.protocol.grantbook import Granted
from flowslotd.negotiate.domain import Domain, open_domain

from flowslot.arbiter import LEASE_SLOTS
from flowslot.model.units import Nanos
from flowslot.policy import registry
from flowslot.policy.registry import PolicyOptions
from flowslot.protocol.messages import Demand, Done
from flowslot_proto import flowslot_pb2 as pb
from flowslotd import config
from flowslotd.clock import monotonic

from .lying import Liar

sys.path.insert(0, str(Path(__file__).parents[1] / "switchemu"))
from switchproc import LINKS, Switch, free_port, topology

DEADLINE_S = 30.0
SLOT_MS = 500  # leases of 2 s, which even a busy machine does not break


class Host:
    """A domain as a daemon of host `name` opens it, and what it has been granted."""

    def __init__(
        self, folder: Path, name: str, text: str | None = None, **settings: object
    ) -> None:
        file = folder / f"{name}.toml"
        if text is not None:
            (folder / "topology.toml").write_text(text)
        lines = {"host": f'"{name}"', "slot_ms": SLOT_MS, **settings}
        file.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
        self.config = config.load(file)
        spec = registry.get("stagger")
        self.grants: dict[int, Granted] = {}
        self.calls = 0
        self.on_change: Callable[[], None] = lambda: None
        self.domain: Domain = open_domain(self.config, spec, PolicyOptions(), self._on_grants)
        self.link = self.config.topology.link_index

    def _on_grants(self, now: Nanos, grants: Sequence[Granted]) -> None:
        self.calls += 1
        self.grants |= {grant.flow: grant for grant in grants}
        self.on_change()

    def path(self, *names: str) -> tuple[int, ...]:
        return tuple(self.link[name] for name in names)

    def rate(self, flow: int) -> float:
        return self.grants.get(flow, Granted(flow, 0.0, 0.0)).rate

    def goodput(self, link: str) -> float:
        return self.config.topology.links[self.link[link]].goodput

    def demand(self, flow: int, *names: str, remaining: int = 10**8, inc: int = 1) -> None:
        self.domain.demand(
            monotonic(), [Demand(flow, inc, f"job{flow}", self.path(*names), remaining)]
        )

    @property
    def state(self) -> object:
        return self.domain.describe()["state"]

    @property
    def error(self) -> str:
        return str(self.domain.describe()["error"])


async def until(probe: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not probe():
            await asyncio.sleep(0.01)


def same(a: Granted, b: Granted) -> bool:
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    with Switch(tmp_path, slot_ms=SLOT_MS) as process:
        yield process


# --- without a switch process


def test_without_a_switch_no_grpc_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text(topology(1, switch=None))
    (tmp_path / "h1.toml").write_text('host = "h1"\n')
    code = f"""
import asyncio, sys
from pathlib import Path
from flowslot.protocol.messages import Demand
from flowslot.policy import registry
from flowslotd import config
from flowslotd.clock import monotonic
from flowslotd.negotiate.domain import open_domain
async def main():
    got = []
    domain = open_domain(config.load(Path({str(tmp_path / "h1.toml")!r})), registry.get("stagger"),
                         registry.PolicyOptions(), lambda now, grants: got.extend(grants))
    await domain.start()
    domain.demand(monotonic(), [Demand(1, 1, "j", (0, 3), 10**7)])
    await domain.close()
    assert got and domain.grpc_connections == 0, got
    assert not [m for m in sys.modules if m.split(".")[0] in ("grpc", "google")]
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_local_shares_out_its_own_nic_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        host = Host(tmp_path, "h1", topology(1, switch=None))
        await host.domain.start()
        target = 0.96 * host.goodput("h1->s1")
        host.demand(1, "h1->s1", "s1->h2")
        assert host.rate(1) == pytest.approx(target, rel=0.01)
        assert host.domain.grant(1) == host.grants[1]
        host.demand(2, "h1->s1", "s1->h2", remaining=10**6)
        assert host.rate(2) > 0
        assert host.rate(1) + host.rate(2) <= target * (1 + 1e-9)
        host.domain.done(monotonic(), [Done(2, 1)])
        assert host.rate(1) == pytest.approx(target, rel=0.01)
        assert math.isnan(host.domain.grant(2).rate)
        await host.domain.close()

    asyncio.run(main())


def test_local_has_no_say_beyond_its_own_links(tmp_path: Path) -> None:
    async def main() -> None:
        host = Host(tmp_path, "h1", topology(1, switch=None))
        await host.domain.start()
        host.demand(1, "h2->s1", "s1->h1")
        assert host.grants == {}
        assert math.isnan(host.domain.grant(1).rate)
        assert host.domain.covers(host.path("h1->s1"))
        assert not host.domain.covers(host.path("h1->s1", "s1->h2"))
        assert not host.domain.covers(())
        table = await host.domain.load_table(monotonic())
        assert table is not None
        assert table.shape == (4, 10)
        own = host.link["h1->s1"]
        assert (table[own] == 0).all()
        assert all(math.isnan(x) for i in range(4) if i != own for x in table[i])
        await host.domain.close()

    asyncio.run(main())


def test_use_switch_false_keeps_the_daemon_to_itself(tmp_path: Path) -> None:
    host = Host(tmp_path, "h1", topology(1), use_switch="false")
    assert host.state == "local"


# --- with one


def test_a_live_switch_grants_and_covers_whole_paths(tmp_path: Path, switch: Switch) -> None:
    switch.start().wait_recovered()

    async def main() -> None:
        host = Host(tmp_path, "h1")
        await host.domain.start()
        host.demand(1, "h1->s1", "s1->h2")
        await until(lambda: host.state == "switch", "live")
        await until(lambda: host.rate(1) > 0.95 * host.goodput("h1->s1"), "granted")
        assert host.domain.covers(host.path("h1->s1", "s1->h2"))
        assert same(host.domain.grant(1), host.grants[1])
        lease_end = host.domain.lease_end
        assert lease_end is not None
        assert lease_end <= monotonic() + LEASE_SLOTS * SLOT_MS * 10**6
        await until(lambda: host.domain.clock_offset_us() is not None, "clock offset")
        assert abs(host.domain.clock_offset_us() or 0.0) < 1e6  # one clock: only delay is left
        await until(lambda: host.domain.describe()["switch_pid"] == switch.pid, "pid")
        table = await host.domain.load_table(monotonic())
        assert table is not None
        assert table[host.link["s1->h2"]].max() == pytest.approx(host.rate(1))
        host.demand(2, "h2->s1")
        await until(lambda: host.rate(2) > 0, "granted")
        assert host.domain.negotiation()["count"] >= 1
        assert host.domain.reservations()["granted"] >= 1
        assert host.domain.grpc_connections == 1
        await host.domain.close()

    asyncio.run(main())


def test_two_daemons_on_one_link_are_never_over_committed(tmp_path: Path, switch: Switch) -> None:
    switch.start().wait_recovered()

    async def main() -> None:
        hosts = [Host(tmp_path, "h1"), Host(tmp_path, "h2")]
        limit = 0.96 * hosts[0].goodput("s1->h2") * (1 + 1e-9)
        totals = [0.0]

        def add_up() -> None:
            totals.append(sum(g.rate for h in hosts for g in h.grants.values()))

        def demand(inc: int, remaining: Callable[[int], int]) -> None:
            for flow in range(8):
                host = hosts[flow // 4]
                host.demand(flow, "s1->h2", remaining=remaining(inc + flow + flow // 4), inc=inc)

        for host in hosts:
            await host.domain.start()
        await until(lambda: all(h.state == "switch" for h in hosts), "live")
        for host in hosts:
            host.on_change = add_up
        for inc in range(1, 30):
            demand(inc, lambda turn: 10**7 if turn % 3 else 0)
            await asyncio.sleep(0.02)
        demand(40, lambda turn: 10**9)
        await until(lambda: totals[-1] > 0.99 * limit, "all capacity is given out")
        assert max(totals) <= limit
        assert [h.state for h in hosts] == ["switch", "switch"]
        for host in hosts:
            await host.domain.close()

    asyncio.run(main())


def test_fail_open_a_killed_switch_leaves_the_daemon_with_its_own_nics(
    tmp_path: Path, switch: Switch
) -> None:
    switch.start().wait_recovered()

    async def main() -> None:
        host = Host(tmp_path, "h1")
        await host.domain.start()
        host.demand(1, "h1->s1", "s1->h2")
        host.demand(2, "h2->s1", "s1->h1")
        await until(lambda: host.state == "switch" and host.rate(2) > 0, "live and granted")
        lease_end = host.domain.lease_end
        switch.kill()
        # Nothing renews grants whose stream has ended, so they do not last as long as the lease.
        await until(lambda: (host.domain.lease_end or lease_end) < lease_end, "the lease is cut")
        await fallen_back(host)
        # A new process, on the same port, rebuilds its table from Hello.
        calls = host.calls
        switch.start()
        await until(lambda: host.state == "switch" and host.rate(2) > 0, "taken over again")
        assert host.calls > calls
        assert host.domain.covers(host.path("h1->s1", "s1->h2"))
        assert host.domain.describe()["switch_pid"] in (None, switch.pid)
        assert switch.load("s1->h1") == pytest.approx(host.rate(2))
        await host.domain.close()

    asyncio.run(main())


def test_fail_open_a_stalled_switch_is_left_and_taken_back(tmp_path: Path, switch: Switch) -> None:
    switch.start().wait_recovered()

    async def main() -> None:
        host = Host(tmp_path, "h1")
        await host.domain.start()
        host.demand(1, "h1->s1", "s1->h2")
        host.demand(2, "h2->s1", "s1->h1")
        await until(lambda: host.state == "switch" and host.rate(2) > 0, "live and granted")
        lease_end = host.domain.lease_end
        switch.signal(signal.SIGSTOP)
        await fallen_back(host)
        assert lease_end is not None
        assert monotonic() >= lease_end, "given up before the lease has ended"
        switch.signal(signal.SIGCONT)
        await until(lambda: host.state == "switch" and host.rate(2) > 0, "taken over again")
        await host.domain.close()

    asyncio.run(main())


async def fallen_back(host: Host) -> None:
    """The switch is gone; flow 1 starts here, flow 2 does not."""
    await until(lambda: host.state == "fallback", "the lease has ended")
    assert host.rate(1) > 0.9 * host.goodput("h1->s1"), "our own NIC is still ours to share"
    assert math.isnan(host.rate(2)), "nobody has a say in this one"
    assert not host.domain.covers(host.path("h1->s1", "s1->h2"))
    assert host.domain.lease_end is None
    assert host.domain.reservations()["expired"] >= 1
    host.demand(3, "h1->s1", "s1->h2", remaining=10**6)
    assert host.rate(3) > 0, "fallback answers new demands"
    host.domain.done(monotonic(), [Done(3, 1)])


def test_without_an_answer_the_fallback_works_from_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        host = Host(tmp_path, "h1", topology(1))  # nobody listens there
        await host.domain.start()
        host.demand(1, "h1->s1", "s1->h2")
        assert host.state == "fallback"
        assert host.rate(1) > 0
        await until(lambda: "cannot be reached" in host.error, "the reason is told")
        await host.domain.close()

    asyncio.run(main())


def test_different_topologies_are_told_apart(tmp_path: Path, switch: Switch) -> None:
    switch.start()
    extra = '[[links]]\nname = "more"\ncapacity_gbps = 1.0\nswitch = "s1"\n'
    extra += '[[paths]]\nsrc = "10.78.0.1"\ndst = "10.78.9.8"\nlinks = ["more"]\n'
    (tmp_path / "d").mkdir()

    async def main() -> None:
        host = Host(tmp_path / "d", "h1", topology(switch.port) + extra)
        await host.domain.start()
        await until(lambda: '"more"' in host.error, "the error names the link")
        assert "compare the topologies" in host.error
        assert host.state == "fallback"
        await host.domain.close()

    asyncio.run(main())


def test_a_longer_lease_than_the_switchs_is_refused(tmp_path: Path, switch: Switch) -> None:
    switch.start()

    async def main() -> None:
        host = Host(tmp_path, "h1", slot_ms=2 * SLOT_MS)
        await host.domain.start()
        await until(lambda: "slot_ms" in host.error, "the error says what to set")
        assert host.state == "fallback"
        await host.domain.close()

    asyncio.run(main())


def test_load_tables_that_make_no_sense_are_no_answer(tmp_path: Path) -> None:
    port = free_port()

    async def main() -> None:
        liar = Liar(SLOT_MS)
        host = Host(tmp_path, "h1", topology(port))
        async with liar.at(port):
            await host.domain.start()
            (remote,) = host.domain._remotes
            await until(lambda: remote.grpc_connections, "connected")
            truth = [pb.LinkLoad(link=name, load=[1.0, 2.0], reservable=9.0) for name in LINKS]
            short = pb.LinkLoad(link=LINKS[3], load=[1.0], reservable=9.0)
            for liar.rows in ([], truth[:2], [*truth[:3], short]):
                assert await remote.load_table(monotonic()) is None
            liar.rows = truth
            table = await remote.load_table(monotonic())
            assert table is not None and table.tolist() == [[1.0, 2.0]] * len(LINKS)
            await host.domain.close()

    asyncio.run(main())
