# SPDX-License-Identifier: Apache-2.0
"""Where a daemon's rates come from: its own arbiter of its own NICs, or a real switch process."""

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from switchproc import LINKS, Switch, free_port, topology
from waiting import until

from flowslot.model.units import SECOND, Nanos
from flowslot.protocol.messages import Ack, FromArbiter, Grant, HeartbeatEcho
from flowslot_proto import flowslot_pb2 as pb
from flowslotd.clock import monotonic
from flowslotd.negotiate.switch_client import SwitchClient

from .hosts import SLOT_MS, Host, negotiating
from .lying import Liar


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    with Switch(tmp_path, slot_ms=SLOT_MS) as process:
        yield process


# --- the source around its streams


class Client(SwitchClient):
    """Opens no stream: the test says what has come on it."""

    dialled = lost = 0

    def dial(self) -> None:
        self.dialled += 1

    def lose(self) -> None:
        self.lost += 1

    def begin(self) -> None:
        self.session = self.source.greet(monotonic(), self.k).hello.session
        self.said()
        self.hear(HeartbeatEcho(1))

    def said(self) -> list[Ack]:
        message = self.source.take_message(monotonic(), self.k)
        return list(message.acks) if message else []

    def hear(self, echo: HeartbeatEcho | None = None, *grants: Grant, now: int = 0) -> None:
        message = FromArbiter(self.session, grants, echo=echo)
        self.source.received(Nanos(now or monotonic()), self.k, message)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr("flowslotd.negotiate.switch_client.SwitchClient", Client)
    return Host(tmp_path, "h1", topology(1))


@pytest.fixture
def client(host: Host) -> Any:
    return host.source._clients[0]


async def test_a_lower_is_in_force_before_it_is_acknowledged(host: Host, client: Client) -> None:
    said: list[object] = []
    async with negotiating(host):
        client.begin()
        host.demand(1, *LINKS[:1])
        client.said()
        client.hear(None, Grant(1, 1, 1, 5e6, 9e6, must_ack=False))
        host.on_rates = lambda: said.append((host.rate(1), client.said()))
        client.hear(None, Grant(1, 1, 2, 4e6, 9e6, must_ack=True))
        assert said == [(4e6, [])]
        assert client.said() == [Ack(1, 1, 2)]


async def test_a_stream_is_opened_again_whatever_its_end_has_brought(
    host: Host, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(grants: object) -> None:
        raise RuntimeError("a bug")

    async with negotiating(host):
        assert client.dialled == 1
        client.source.closed(monotonic(), client.k, "cannot be reached")
        assert (client.dialled, host.error) == (1, "cannot be reached"), "not at once"
        await until(lambda: client.dialled == 2, "again")
        client.begin()
        with monkeypatch.context() as patch:
            patch.setattr(host.flows, "grant", fail)
            with pytest.raises(RuntimeError):
                client.source.closed(monotonic(), client.k, "")
        await until(lambda: client.dialled == 3, "and again")


@pytest.mark.parametrize("live", [True, False])
async def test_a_stream_without_a_lease_is_left(host: Host, client: Client, live: bool) -> None:
    async with negotiating(host):
        host.demand(1, *LINKS[:1])
        client.begin()
        if live:
            client.hear(None, Grant(1, 1, 1, 5e6, 9e6, must_ack=False))
        assert (client.lost, host.state) == (0, "switch" if live else "fallback")
        client.hear(None, Grant(1, 1, 2, 4e6, 9e6, False), now=monotonic() + 60 * SECOND)
        assert client.lost == 1
        await until(lambda: host.state == "fallback", "nothing of it counts")


async def test_once_it_is_closed_nothing_is_decided_any_more(host: Host, client: Client) -> None:
    async with negotiating(host):
        client.begin()
        host.demand(1, *LINKS[:1])
        await host.source.close()
        calls, alarm = host.calls, host.source._alarm
        assert alarm is not None and alarm.cancelled()
        client.hear(None, Grant(1, 1, 1, 5e6, 9e6, must_ack=False))
        client.source.closed(monotonic(), client.k, "")
        assert (host.calls, host.source._alarm) == (calls, alarm)


# --- without a switch process


@pytest.mark.parametrize(
    ("network", "settings"),
    [(topology(1, switch=None), {}), (topology(1), {"use_switch": "false"})],
)
def test_without_a_switch_no_grpc_is_loaded(
    tmp_path: Path, network: str, settings: dict[str, str]
) -> None:
    Host(tmp_path, "h1", network, **settings)
    (tmp_path / "test.py").write_text(f"""
import asyncio, sys
from pathlib import Path
from flowslot.policy import registry
from flowslotd import config
from flowslotd.engine import open_source
from flowslotd.flows.flow_table import FlowTable
async def main():
    read = config.load(Path({str(tmp_path / "h1.toml")!r}))
    source = open_source(read, registry.get("stagger"), FlowTable(read.topology, "h1"),
                         on_rates=None, on_bug=None)
    await source.start()
    assert source.describe()["domain"]["state"] == "local"
    await source.close()
    assert not [m for m in sys.modules if m.split(".")[0] in ("grpc", "cryptography")]
asyncio.run(main())
""")
    subprocess.run([sys.executable, tmp_path / "test.py"], check=True, timeout=60)


# --- with one


@pytest.mark.parametrize("killed", [True, False])
async def test_fail_open_a_switch_that_is_killed_or_stalled_leaves_the_host_with_its_own_nics(
    tmp_path: Path, switch: Switch, killed: bool
) -> None:
    switch.start().wait_recovered()
    host = Host(tmp_path, "h1")
    sessions = host.source.host

    async with negotiating(host):
        host.demand(1, "h1->s1", "s1->h2")
        host.demand(2, "h2->s1", "s1->h1")
        await until(lambda: host.state == "switch" and host.rate(2) > 0, "live and granted")
        lease_end, calls = sessions.lease_end, host.calls
        assert lease_end is not None
        if killed:
            switch.kill()
            # Nothing renews grants whose stream has ended: they do not last as long as the lease.
            await until(lambda: (sessions.lease_end or lease_end) < lease_end, "the lease is cut")
        else:
            switch.signal(signal.SIGSTOP)
        await until(lambda: host.state == "fallback", "the lease has ended")
        assert killed or monotonic() >= lease_end, "given up before the lease has ended"
        assert host.is_about(1, "h1->s1"), "our own NIC is still ours to share"
        assert math.isnan(host.rate(2)), "nobody has a say in this one"
        assert not host.source.covers(host.path("h1->s1", "s1->h2"))
        assert sessions.lease_end is None
        assert host.said["reservations"]["expired"] >= 1
        assert host.calls > calls, "what is void is not in force any more"
        calls = host.calls
        if killed:  # a new process, on the same port, rebuilds its table from Hello
            switch.start()
        else:
            switch.signal(signal.SIGCONT)
        await until(lambda: host.state == "switch" and host.rate(2) > 0, "taken over again")
        assert host.calls > calls
        assert host.source.covers(host.path("h1->s1", "s1->h2"))
        assert host.said["domain"]["switch_pid"] in (None, switch.pid)
        load = await asyncio.to_thread(switch.load, "s1->h1")
        assert load == pytest.approx(host.rate(2))
        host.demand(3, "h2->s1")
        await until(lambda: host.rate(3) > 0, "granted")
        assert host.said["negotiation"]["count"] >= 1, "it had nothing before"


@pytest.mark.parametrize(
    ("said", "slot_ms", "extra"),
    [
        ("cannot be reached", SLOT_MS, None),  # nobody listens there
        ("slot_ms", 2 * SLOT_MS, ""),
        (
            'link "more" is held by this switch process; compare the topologies',
            SLOT_MS,
            '[[links]]\nname = "more"\ncapacity_gbps = 1.0\nswitch = "s1"\n'
            '[[paths]]\nsrc = "10.78.0.1"\ndst = "10.78.9.8"\nlinks = ["more"]\n',
        ),
    ],
)
async def test_without_an_answer_the_fallback_works_from_the_start_and_the_reason_is_told(
    tmp_path: Path, switch: Switch, said: str, slot_ms: int, extra: str | None
) -> None:
    if extra is not None:
        switch.start()
    (tmp_path / "d").mkdir()
    text = topology(switch.port) + (extra or "")
    host = Host(tmp_path / "d", "h1", text, slot_ms=slot_ms)

    async with negotiating(host):
        host.demand(1, "h1->s1", "s1->h2")
        assert (host.state, host.is_about(1, "h1->s1")) == ("fallback", True)
        await until(lambda: said in host.error, said)
        assert host.state == "fallback"


async def test_load_tables_that_make_no_sense_are_no_answer(tmp_path: Path) -> None:
    port, liar = free_port(), Liar(SLOT_MS)
    host = Host(tmp_path, "h1", topology(port))
    (remote,) = host.source._clients

    async with negotiating(host), liar.at(port):
        await until(lambda: remote.connected, "connected")
        truth = [pb.LinkLoad(link=name, load=[1.0, 2.0], reservable=9.0) for name in LINKS]
        short = pb.LinkLoad(link=LINKS[3], load=[1.0], reservable=9.0)
        for liar.rows in ([], truth[:2], [*truth[:3], short]):
            assert await remote.load_table() is None
        liar.rows = truth
        answer = await remote.load_table()
        assert answer is not None and answer[1].tolist() == [[1.0, 2.0]] * len(LINKS)
