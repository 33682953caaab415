# SPDX-License-Identifier: Apache-2.0
"""Datagrams from daemon to daemon: what core's Peers want to say and to know.

Each says all there is to say, so none is sent again and nobody waits for one: who hears nothing
plans as if no flow depended on another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable

from flowslot.model.errors import ProtocolError
from flowslot.model.topology_file import split_endpoint
from flowslot.model.units import SECOND
from flowslot.policy.mlcc.peers import LocalFlow, Peers, letters
from flowslot_proto.endpoints import why_only_here
from flowslot_proto.peers import read_peer, write_peer
from flowslotd.clock import monotonic
from flowslotd.config import Config

RETRY_S = 1.0
"""Between attempts to listen."""
LOG_EVERY_S = 10.0
RESOLVE_S = 60.0
"""Names of hosts are looked up again after so long."""

Address = tuple[str, int]
_log = logging.getLogger(__name__)


class PeerEndpoint(asyncio.DatagramProtocol):
    """Bound to this host's `daemon` address. What does not come from another host's is ignored."""

    def __init__(self, config: Config, peers: Peers, on_news: Callable[[], None]) -> None:
        """`on_news`: other hosts' flows have done something that calls for a new decision."""
        self.told = self.heard = self.rejected = 0
        """Datagrams sent, taken in, and not taken in."""
        self.last_error = ""
        self._host = config.settings.host
        self._endpoints = {
            host.name: host.daemon for host in config.topology.hosts.values() if host.daemon
        }
        self._peers = peers
        self._on_news = on_news
        self._address: dict[str, Address] = {}
        self._host_at: dict[Address, str] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._task: asyncio.Task[None] | None = None
        self._logged_at = -LOG_EVERY_S

    async def start(self) -> None:
        """Begin to listen, as soon as the address can be had; nobody is kept waiting."""
        own = self._endpoints.get(self._host)
        if own is None:
            self.last_error = f"hosts: {self._host} has no `daemon` address in the topology"
        else:
            self._task = asyncio.create_task(self._run(own))

    def close(self) -> None:
        """Hear and say nothing any more."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    @property
    def listening(self) -> bool:
        """Whether anything can be said and heard."""
        return self._transport is not None

    def tell(self, flows: Iterable[LocalFlow], left_s: float) -> None:
        """See `letters`; never waits, and never fails: it is advice."""
        if self._transport is None:
            return
        # Also after a restart later than what was said before, unless the clock was set back:
        # then others have forgotten that after a few slots.
        n = time.time_ns()
        for host, said in letters(flows, left_s).items():
            address = self._address.get(host)
            if host == self._host or address is None:
                continue
            try:
                self._transport.sendto(write_peer(self._host, n, said), address)
                self.told += 1
            except (OSError, ValueError) as error:
                self._failed(f"cannot tell {host}: {error}")

    def describe(self) -> dict[str, object]:
        """For `flowslot status`."""
        counts = {"told": self.told, "heard": self.heard, "rejected": self.rejected}
        return {**counts, "error": self.last_error}

    # --- asyncio.DatagramProtocol

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """See DatagramProtocol."""
        host = self._host_at.get((addr[0], addr[1]))
        if host is None:
            self.rejected += 1  # it may be anybody, as often as they like: nothing is logged
            return
        try:
            name, n, said = read_peer(data)
            if name != host:
                raise ProtocolError(f"field `host`: is {name!r}, but {host} is at this address")
        except ProtocolError as error:
            self.rejected += 1
            self._failed(f"datagram of {host}: {error}")
            return
        self.heard += 1
        now = monotonic()
        due = self._peers.hear(now, host, n, said)
        if due is not None:
            asyncio.get_running_loop().call_later((due - now) / SECOND, self._pass_on)

    def _pass_on(self) -> None:
        if self.listening:
            self._on_news()

    def error_received(self, exc: Exception) -> None:
        """See DatagramProtocol."""
        self._failed(str(exc))

    # --- addresses

    async def _run(self, own: str) -> None:
        loop, at = asyncio.get_running_loop(), split_endpoint(own)
        while True:
            try:
                made = await loop.create_datagram_endpoint(lambda: self, local_addr=at)
                break
            except (OSError, ValueError) as error:  # a name that cannot be one is a ValueError
                self._failed(f"cannot listen at {own}: {error}")
                await asyncio.sleep(RETRY_S)
        self._transport, self.last_error = made[0], ""
        here = made[0].get_extra_info("socket")
        family = here.family
        if problem := why_only_here(own, [str(here.getsockname()[0])]):
            self._failed(f"no other daemon will be heard: {problem}")
        while True:
            found = {
                host: address
                for host, endpoint in self._endpoints.items()
                if host != self._host
                and (address := await self._look_up(endpoint, family)) is not None
            }
            self._address = found
            self._host_at = {address: host for host, address in found.items()}
            await asyncio.sleep(RESOLVE_S)

    async def _look_up(self, endpoint: str, family: int) -> Address | None:
        """Of the socket's own family: it can send to no other."""
        loop, (name, port) = asyncio.get_running_loop(), split_endpoint(endpoint)
        try:
            found = await loop.getaddrinfo(name, port, family=family, type=socket.SOCK_DGRAM)
        except (OSError, ValueError) as error:
            self._failed(f"no address for {name}: {error}")
            return None
        address = str(found[0][4][0])
        if problem := why_only_here(endpoint, [address]):
            self._failed(problem)
            return None
        return address, port

    def _failed(self, error: str) -> None:
        """Anybody can provoke these, each time in other words."""
        self.last_error = error
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            _log.warning("peers: %s", error)
