# SPDX-License-Identifier: Apache-2.0
"""When the switch process decides: at once, with what comes a moment later, or never again."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from switchproc import topology

from flowslot.arbiter import Arbiter
from flowslot.model.errors import SessionEnded
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Demand, FromArbiter, FromDaemon, Hello, Opening
from flowslot.protocol.switch import REST_NS, SPACING_NS
from flowslot_switch.config import load
from flowslot_switch.runner import Runner
from flowslot_switch.server import Closing

HELLO = Opening(Hello("d1", 1), ("h1->s1",), 10**6)


class Daemon:
    """A stream that keeps what it is sent."""

    def __init__(self, runner: Runner) -> None:
        self.messages: list[FromArbiter] = []
        self.ended: list[Exception] = []
        self._runner = runner

    def wake(self) -> None:
        message = self._runner.switch.take(self)
        self.messages += [message] if message else []

    def end(self, error: Exception) -> None:
        self.ended.append(error)


def begun(flow: int) -> FromDaemon:
    return FromDaemon(1, demands=[Demand(flow, 1, "job", (0,), 10**6)])


class Loop:
    """No timer fires by itself; `timers` has the delays in s, 0: as soon as what has come is
    read."""

    def __init__(self) -> None:
        self.timers: list[float] = []

    def call_soon(self, work: Callable[[], None]) -> Mock:
        return self.call_later(0.0, work)

    def call_later(self, delay: float, work: Callable[[], None]) -> Mock:
        self.timers.append(delay)
        return Mock()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, Daemon, list[float]]:
    """A runner past its recovery and in the middle of a slot, one daemon, and the runner's timers.
    No slot starts while a test's clock advances by less than half of one."""
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    monkeypatch.setattr(Arbiter, "recovered", lambda *_: True)
    (tmp_path / "topology.toml").write_text(topology(port=7400))
    config = load(None, "s1", tmp_path / "topology.toml")
    runner = Runner(config, Mock())
    daemon = Daemon(runner)
    runner.join(daemon, HELLO)
    slots = runner.slot(runner.now()) + 1
    stand_still(runner, Nanos(runner._origin + slots * config.slot_ns + config.slot_ns // 2))
    runner._step()
    return runner, daemon, loop.timers


def stand_still(runner: Runner, now: Nanos) -> None:
    """The runner's clock stays there."""
    runner.now = lambda: now  # type: ignore[method-assign]


def rested(runner: Runner) -> None:
    """Its last decision is long enough ago."""
    stand_still(runner, Nanos(runner.now() + REST_NS))


def test_what_has_come_is_decided_on_together_as_soon_as_it_is_read_or_there_is_time(
    made: Any,
) -> None:
    runner, daemon, timers = made
    runner.take(daemon, begun(7))
    runner.take(daemon, begun(8))
    assert timers[-1] == SPACING_NS / SECOND, "there is time for other things"
    rested(runner)
    runner.take(daemon, begun(9))
    assert (timers[-1], daemon.messages) == (0.0, []), "brought forward"
    runner._step()
    (message,) = daemon.messages
    assert {grant.flow for grant in message.grants} == {7, 8, 9}
    runner._on_failure.assert_not_called()
    runner.leave(daemon)
    with pytest.raises(SessionEnded):
        runner.take(daemon, begun(10))


def test_no_delay_is_too_short_for_the_loop() -> None:
    async def wait() -> bool:
        handle = asyncio.get_running_loop().call_later(SPACING_NS / SECOND, lambda: None)
        handle.cancel()
        return isinstance(handle, uvloop.loop.TimerHandle)

    assert uvloop.run(wait())


def test_a_bug_in_a_decision_is_told_and_nothing_is_decided_after_it(made: Any) -> None:
    runner, _, timers = made
    runner.switch.decide = lambda now: 1 / 0
    before = list(timers)
    runner._step()
    assert timers == before
    runner._on_failure.assert_called_once_with()


def test_a_runner_that_is_closed_decides_nothing_any_more(made: Any) -> None:
    runner, daemon, timers = made
    rested(runner)
    before = list(timers)
    runner.close(Closing("another configuration"))
    for late in (runner.take, runner.join):  # was read already; was opened before
        with pytest.raises(Closing):
            late(daemon, begun(7) if late == runner.take else HELLO)
    runner.leave(daemon)
    assert (timers, daemon.messages) == (before, [])
    assert len(daemon.ended) == 1
    runner._on_failure.assert_not_called()


@pytest.mark.parametrize("alone", [True, False])
def test_an_arbiter_knows_whether_others_hold_other_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    text = topology(port=7400)
    if not alone:
        text += '[[switches]]\nname = "s2"\naddress = "127.0.0.1:7401"\n'
        text = text.replace('switch = "s1"', 'switch = "s2"', 1)
    (tmp_path / "topology.toml").write_text(text)
    config = load(None, "s1", tmp_path / "topology.toml")
    allocator = Runner(config, Mock()).arbiter._allocator
    assert isinstance(allocator, StaggerAllocator)
    assert config.partial == allocator._partial == (not alone)
