# SPDX-License-Identifier: Apache-2.0
"""A host that negotiates as its daemon does, without sockets and kernel."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from waiting import until

from flowslot.arbiter import TARGET
from flowslot.model.units import Nanos
from flowslot.policy import registry
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Host as Sessions
from flowslot.protocol.messages import Demand, Done
from flowslotd import config
from flowslotd.clock import monotonic
from flowslotd.daemon import Daemon
from flowslotd.engine import open_source
from flowslotd.flows.flow_table import FlowTable
from flowslotd.negotiate.arbiter import ArbiterRates
from flowslotd.negotiate.source import RateSource

Until = Callable[[Callable[[], object]], Awaitable[None]]
SLOT_MS = 500  # leases of 2.5 s, which even a busy machine does not break


class Flows:
    """In the place of Aggregates: says what the test says, and keeps what is granted."""

    def __init__(self) -> None:
        self.news: list[Demand] = []
        self.gone: list[Done] = []
        self.grants: dict[int, Granted] = {}

    def report(self, now: Nanos, host: Sessions, **how: object) -> None:
        gone, news, self.gone, self.news = self.gone, self.news, [], []
        self.grant(host.done(now, gone))
        self.grant(host.demand(now, news))

    def grant(self, grants: Sequence[Granted]) -> None:
        self.grants |= {grant.flow: grant for grant in grants}


class Opened:
    """A host's configuration, and `source`: where its daemon has its rates from.

    `on_rates` is called as that has changed its mind.
    """

    def __init__(
        self, folder: Path, name: str, text: str | None = None, **settings: object
    ) -> None:
        """`text`: the topology, if it is not there already."""
        file = folder / f"{name}.toml"
        if text is not None:
            (folder / "topology.toml").write_text(text)
        lines = {"host": f'"{name}"', "slot_ms": SLOT_MS, "mode": '"enforce"', **settings}
        file.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
        self.config = config.load(file)
        self.link = self.config.topology.link_index
        self.calls = 0
        self.on_rates: Callable[[], None] = lambda: None
        self.bugs: list[BaseException] = []
        self.source: RateSource = open_source(
            self.config,
            registry.get(self.config.settings.policy),
            FlowTable(self.config.topology, name),
            on_rates=self._on_rates,
            on_bug=lambda kind, error: self.bugs.append(error),
        )

    def _on_rates(self, now: Nanos) -> None:
        self.calls += 1
        self.on_rates()

    @property
    def said(self) -> dict[str, Any]:
        """What the status says of the source."""
        return self.source.describe()

    def path(self, *names: str) -> tuple[int, ...]:
        return tuple(self.link[name] for name in names)

    def limit(self, link: str) -> float:
        """What may be given out."""
        return TARGET * self.config.topology.links[self.link[link]].goodput


class Host(Opened):
    """Its rates are granted by arbiters."""

    source: ArbiterRates

    def __init__(self, *which: Any, **settings: object) -> None:
        super().__init__(*which, **settings)
        self.flows = Flows()
        self.source._aggregates = cast(Any, self.flows)

    # --- what it says

    def say(self, demands: Collection[Demand] = (), dones: Collection[Done] = ()) -> None:
        self.flows.news += demands
        self.flows.gone += dones
        self.source.negotiate(monotonic(), 0, moved=True, small=False)

    def demand(self, flow: int, *names: str, remaining: int = 10**8, inc: int = 1) -> None:
        self.say([Demand(flow, inc, f"job{flow}", self.path(*names), remaining)])

    # --- what it has

    def rate(self, flow: int) -> float:
        return self.flows.grants.get(flow, Granted(flow, 0.0, 0.0)).rate

    def is_about(self, flow: int, link: str) -> bool:
        """The flow has all of that link."""
        return abs(self.rate(flow) / self.limit(link) - 1) < 0.01

    def live(self) -> list[str]:
        streams = zip(self.source._clients, self.source.host.sessions, strict=True)
        return [client.switch for client, session in streams if session.live]

    @property
    def state(self) -> object:
        return self.said["domain"]["state"]

    @property
    def error(self) -> str:
        return str(self.said["domain"]["error"])


@asynccontextmanager
async def negotiating(*hosts: Opened) -> AsyncIterator[None]:
    """These hosts negotiate meanwhile."""
    for host in hosts:
        await host.source.start()
    try:
        yield
    finally:
        for host in hosts:
            await host.source.close()


@asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[tuple[Daemon, list[str], Until]]:
    """A daemon that has begun and goes on to the end, and what it tells systemd meanwhile."""
    told: list[str] = []
    daemon._notifier._send = lambda *lines: told.append(lines[0])  # type: ignore[method-assign]
    task = asyncio.create_task(daemon.run())

    async def goes_on(probe: Callable[[], object]) -> None:
        await until(lambda: probe() or task.done())
        assert not task.done(), task.exception()

    await goes_on(lambda: "READY=1" in told)
    told.clear()
    yield daemon, told, goes_on
    slots = daemon.metrics.slots
    await goes_on(lambda: daemon.metrics.slots >= slots + 3)
    daemon._stop.set()
    await asyncio.wait_for(task, 10)
    assert {"WATCHDOG=1", "STOPPING=1"} <= set(told)
