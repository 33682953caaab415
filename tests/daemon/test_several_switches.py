# SPDX-License-Identifier: Apache-2.0
"""Links held by several real switch processes: one daemon talks to all that matter to it."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from switchproc import Switch, free_port
from waiting import until

from flowslotd.clock import monotonic

from .hosts import SLOT_MS, Host, negotiating

HELD = {
    "s1": ("h1->s1", "s1->h1"),
    "s2": ("h2->s2", "s2->h2", "spine"),
    "s3": ("h3->s3", "s3->h3"),
}
GBPS = {"s2->h2": 0.2, "spine": 4.0}  # the others: 0.4
CROSS = ("h1->s1", "spine", "s2->h2")


def text(ports: dict[str, int]) -> str:
    """Three racks of one host each; h3 has no route to the others."""
    blocks = [
        f'[[switches]]\nname = "{name}"\naddress = "127.0.0.1:{ports[name]}"' for name in ports
    ]
    blocks += [
        f'[[hosts]]\nname = "h{i}"\n[[hosts.nics]]\nname = "eth0"\nrack = "r{i}"\n'
        f'addresses = ["10.78.0.{i}"]\nup = "h{i}->s{i}"\ndown = "s{i}->h{i}"'
        for i in (1, 2, 3)
    ]
    blocks += [
        f'[[links]]\nname = "{link}"\ncapacity_gbps = {GBPS.get(link, 0.4)}\nswitch = "{switch}"'
        for switch, links in HELD.items()
        for link in links
    ]
    blocks += [
        f'[[routes]]\nfrom_rack = "r{a}"\nto_rack = "r{3 - a}"\nlinks = ["spine"]' for a in (1, 2)
    ]
    blocks.append('[[paths]]\nsrc = "10.78.0.2"\ndst = "10.78.9.9"\nlinks = ["s2->h2"]')
    return "\n".join(blocks)


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


async def test_a_flow_has_the_least_of_what_its_switches_grant_and_outlives_each(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    host = Host(tmp_path, "h1")
    source, left = host.source, list[int]()

    async with negotiating(host):
        host.demand(1, *CROSS)
        host.demand(2, "s2->h2")
        await until(lambda: host.live() == ["s1", "s2"], "both are live")
        assert len(host.said["domain"]["switches"]) == 2, "s3 has nothing to do with h1"
        await until(lambda: host.rate(1) > 0 and host.rate(2) > 0, "granted")
        host.demand(2, "s2->h2", remaining=0)
        assert [grant.rate for grant in source.host.give_back([2])] == [0.0]
        await until(lambda: host.is_about(1, "s2->h2"), "all of the narrower link")
        assert host.flows.grants[1].most == pytest.approx(host.limit("h1->s1"), rel=0.01)
        assert source.covers(host.path(*CROSS)) and host.said["grpc_connections"] == 2
        table = await source.load_table(monotonic())
        assert table is not None
        known = {link for names in (HELD["s1"], HELD["s2"]) for link in names}
        for i, link in enumerate(host.config.topology.links):
            assert math.isnan(table[i][0]) == (link.name not in known)
        host.on_rates = lambda: left.append((source.host.lease_end or 0) - monotonic())
        switches["s2"].kill()
        await until(lambda: host.is_about(1, "h1->s1"), "only s1 has a say any more")
        assert left and left[-1] > 0, "what was to end with the lease of s2 goes on"
        assert host.live() == ["s1"] and host.state == "switch"
        assert host.said["domain"]["switch"] == "s1"
        assert math.isnan(host.rate(2)), "nobody has a say in this one"
        assert not source.covers(host.path(*CROSS))
        assert source.covers(host.path("h1->s1"))
        switches["s2"].start()
        await until(lambda: host.live() == ["s1", "s2"] and host.is_about(1, "s2->h2"), "back")
        for switch in switches.values():
            switch.kill()
        await until(lambda: host.state == "fallback", "all leases have ended")
        assert host.is_about(1, "h1->s1"), "our own NIC is still ours to share"
        assert source.host.lease_end is None
        assert host.said["reservations"]["expired"] >= 3
        host.demand(3, "h1->s1")
        assert host.rate(3) > 0, "new demands are answered"


async def test_two_daemons_never_over_commit_a_link_that_another_switch_holds(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    hosts, loads = [Host(tmp_path, "h1"), Host(tmp_path, "h2")], list[float]()
    paths, limit = (CROSS, ("h2->s2", "spine", "s1->h1", "s2->h2")), hosts[0].limit("s2->h2")

    def add_up() -> None:
        loads.append(sum(g.rate for host in hosts for g in host.flows.grants.values()))

    async with negotiating(*hosts):
        await until(lambda: all(len(host.live()) == 2 for host in hosts), "live")
        for host in hosts:
            host.on_rates = add_up
        for inc in count(1):
            for flow in range(8):
                busy = (inc + flow + flow // 4) % 3
                hosts[flow // 4].demand(flow, *paths[flow // 4], remaining=10**7 * busy, inc=inc)
            await asyncio.sleep(0.02)
            if inc >= 40 and max(loads) > 0.5 * limit:
                break
        assert all(host.state == "switch" and len(host.live()) == 2 for host in hosts)
    assert max(loads) <= limit * (1 + 1e-9)


async def test_the_others_do_without_one_that_was_never_there(
    tmp_path: Path, switches: dict[str, Switch]
) -> None:
    switches["s2"].kill()
    host = Host(tmp_path, "h1")

    async with negotiating(host):
        host.demand(1, *CROSS)
        assert host.state == "fallback" and host.rate(1) > 0
        await until(lambda: host.live() == ["s1"] and host.is_about(1, "h1->s1"), "live")
        assert host.state == "switch" and host.said["domain"]["switch"] == "s1"
