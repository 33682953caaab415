# SPDX-License-Identifier: Apache-2.0
"""Real datagrams between two daemons' endpoints, and from those who are none."""

import asyncio
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop
from waiting import until

from flowslot.model.topology_file import split_endpoint
from flowslot.policy.mlcc.peers import Group, LocalFlow
from flowslot_proto.peers import write_peer
from flowslotd.clock import monotonic
from flowslotd.negotiate.load_tables import PlannedRates

from .conftest import TOPOLOGY
from .hosts import Opened, negotiating

run = uvloop.run  # as the daemon does
GROUP = Group("j", "ring", 0, 1)
SENDS = LocalFlow(7, "h2", GROUP, 5, total=600.0, ready=100.0, sent=20.0, rate=0.0)
WAITS = replace(SENDS, flow=8, host="h1", group=Group("j", "ring", 1, 0), sent=0.0)


def free_udp_ports(n: int) -> list[int]:
    with ExitStack() as stack:  # open all at once
        probes = [stack.enter_context(udp_socket()) for _ in range(n)]
        return [probe.getsockname()[1] for probe in probes]


def udp_socket(address: tuple[str, int] = ("127.0.0.1", 0)) -> socket.socket:
    """Bound there."""
    made = socket.socket(type=socket.SOCK_DGRAM)
    made.bind(address)
    return made


class Host(Opened):
    """It plans, but has no flows of its own."""

    source: PlannedRates

    def __init__(self, folder: Path, name: str, addresses: dict[str, str]) -> None:
        text = TOPOLOGY
        for host, address in addresses.items():
            text = text.replace(f'name = "{host}"\n', f'name = "{host}"\ndaemon = "{address}"\n')
        super().__init__(folder, name, text, policy='"mlcc"', slot_ms=60)
        self.name, self.peers = name, self.source._book
        self.news = self.known = 0
        self.endpoint = self.source.peers
        self.endpoint._on_news = self._count

    @property
    def address(self) -> tuple[str, int]:
        return split_endpoint(self.endpoint._endpoints[self.name])

    def _count(self) -> None:
        self.news += 1
        self.known = self.endpoint.heard

    def tell(self) -> None:
        self.endpoint.tell([SENDS], 0.03)

    def depends(self) -> bool:
        return bool(self.peers.dependencies(monotonic(), [WAITS]))


def two_hosts(folder: Path, machine: str = "127.0.0.1", **others: str) -> tuple[Host, Host]:
    """h1 and h2, which know each other; `machine`: what h2's is called; `others`: addresses."""
    a, b = free_udp_ports(2)
    addresses = {"h1": f"127.0.0.1:{a}", "h2": f"{machine}:{b}", **others}
    return Host(folder, "h1", addresses), Host(folder, "h2", addresses)


async def test_the_host_that_receives_a_flow_hears_of_it(tmp_path: Path) -> None:
    h1, h2 = two_hosts(tmp_path, "localhost")
    async with negotiating(h1, h2):
        await until(h2.depends, again=h1.tell)
        await until(lambda: h2.news > 0)
        assert h2.news == 1 and h1.news == 0, "its rank does nothing new"
        assert h2.endpoint.describe()["error"] == ""


async def test_of_news_in_a_burst_the_last_is_not_lost(tmp_path: Path) -> None:
    h1, h2 = two_hosts(tmp_path)
    async with negotiating(h1, h2):
        await until(h2.depends, again=h1.tell)
        await until(lambda: h2.news == 1)
        for iteration in (6, 7, 8):  # each as soon as the one before was passed on, or waits
            heard = h2.endpoint.heard
            h1.endpoint.tell([replace(SENDS, iteration=iteration)], 0.03)
            while h2.endpoint.heard == heard:
                await asyncio.sleep(0)
        await until(lambda: h2.known == h2.endpoint.heard)
        assert h2.news <= 3, "at most four times in a slot"


async def test_who_is_no_daemon_and_what_makes_no_sense_is_not_heard(tmp_path: Path) -> None:
    h1, h2 = two_hosts(tmp_path)
    async with negotiating(h1, h2):
        await until(h2.depends, again=h1.tell)
        before = h2.endpoint.rejected
        heard, known = h2.endpoint.heard, h2.peers.dependencies(monotonic(), [WAITS])
        with udp_socket() as stranger:
            stranger.sendto(write_peer("h1", 2**61, []), h2.address)
        await until(lambda: h2.endpoint.rejected == before + 1)
        transport = h1.endpoint._transport
        assert transport is not None
        for bad in (b"\xff" * 40, write_peer("h3", 2**61, [])):
            transport.sendto(bad, h2.address)
        await until(lambda: h2.endpoint.rejected == before + 3)
        assert "is 'h3', but h1 is at this address" in h2.endpoint.last_error
        assert h2.endpoint.heard == heard
        assert h2.peers.dependencies(monotonic(), [WAITS]) == known


async def test_a_port_that_is_taken_keeps_nobody_waiting(tmp_path: Path) -> None:
    h1, h2 = two_hosts(tmp_path)
    taken = udp_socket(h2.address)
    async with negotiating(h1, h2):
        await until(lambda: h2.endpoint.last_error.startswith("cannot listen at 127.0.0.1"))
        h2.tell()
        assert h2.endpoint.told == 0
        taken.close()
        await until(h2.depends, again=h1.tell)
        assert h2.endpoint.last_error == ""


async def test_what_cannot_be_sent_or_looked_up_does_not_matter(tmp_path: Path) -> None:
    h1, h2 = two_hosts(tmp_path, h3="[::1]:7401")
    async with negotiating(h1, h2):
        await until(h2.depends, again=h1.tell)
        assert "h3" not in h1.endpoint._address, "an address that this socket cannot send to"
        h1.endpoint._address["h3"] = ("::1", 7401)
        flows = [replace(SENDS, host="h3"), replace(SENDS, group=GROUP._replace(rank=5))]
        told = h1.endpoint.told
        h1.endpoint.tell(flows, 0.03)
        assert h1.endpoint.told == told + 1, "h2 is told all the same"
        assert "cannot tell h3" in h1.endpoint.last_error


@pytest.mark.parametrize("name", ["a..b", "h" * 64 + ".invalid", "no-such-host.invalid"])
async def test_a_name_that_cannot_be_one_concerns_its_host_only(tmp_path: Path, name: str) -> None:
    h1, _ = two_hosts(tmp_path, h3=f"{name}:7401")
    async with negotiating(h1):
        await until(lambda: name in h1.endpoint.last_error)
        await until(lambda: h1.endpoint.told > 0, again=h1.tell)


async def test_a_host_without_an_address_says_so(tmp_path: Path) -> None:
    lone = Host(tmp_path, "h1", {"h2": "127.0.0.1:1"})
    async with negotiating(lone):
        lone.tell()
        assert "h1 has no `daemon` address" in lone.endpoint.last_error
