# SPDX-License-Identifier: Apache-2.0
"""When the switch process decides: at once, with what comes a moment later, or never again."""

import asyncio
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from flowslot_switch.engine import SPACING_S, Engine
from switchproc import topology

from flowslot.arbiter import Arbiter
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.messages import Demand, FromDaemon, Grant, Hello, Opening
from flowslot_switch.caller import Caller
from flowslot_switch.config import Overrides, load
from flowslot_switch.stream import Closing, Stream


class Daemon:
    """A stream that has said Hello, and keeps what it is sent."""

    session = 1

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.ended: list[Exception] = []

    def post(self, grants: Sequence[Grant] = (), **_: Any) -> None:
        self.grants += grants

    def flush(self) -> None:
        pass

    def end(self, error: Exception) -> None:
        self.ended.append(error)


def begun(flow: int, remaining: int = 10**6) -> FromDaemon:
    return FromDaemon(1, demands=[Demand(flow, 1, "job", (0,), remaining)])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Runs a test with an engine past its recovery and one daemon, in an event loop."""
    monkeypatch.setattr(Arbiter, "recovered", lambda *_: True)
    (tmp_path / "topology.toml").write_text(topology(port=7400))
    config = load(None, Overrides(name="s1", topology=tmp_path / "topology.toml"))

    def start(test: Callable[[Engine, Daemon], Any]) -> None:
        async def main() -> None:
            failures: list[Exception] = []
            engine, daemon = Engine(config, failures.append), Daemon()
            engine.join(daemon, Opening(Hello("d1", 1), ("h1->s1",), 10**6))
            await test(engine, daemon)
            engine.close(Closing("over"))
            assert failures == []

        asyncio.run(main())

    return start


def test_what_has_come_is_decided_on_together_as_soon_as_it_is_read(run: Any) -> None:
    async def test(engine: Engine, daemon: Daemon) -> None:
        armed: list[float] = []
        engine._arm = armed.append  # type: ignore[method-assign]
        engine._step()
        armed.clear()
        engine._decided_at = 0
        engine.take(daemon, begun(7))
        engine.take(daemon, begun(8))
        assert armed == [0.0]
        engine._step()
        assert {grant.flow for grant in daemon.grants} == {7, 8}

    run(test)


@pytest.mark.parametrize("alone", [True, False])
def test_an_arbiter_knows_whether_others_hold_other_links(tmp_path: Path, alone: bool) -> None:
    text = topology(port=7400)
    if not alone:
        text += '[[switches]]\nname = "s2"\naddress = "127.0.0.1:7401"\n'
        text = text.replace('switch = "s1"', 'switch = "s2"', 1)
    (tmp_path / "topology.toml").write_text(text)
    config = load(None, Overrides(name="s1", topology=tmp_path / "topology.toml"))
    assert config.partial is not alone

    async def partial() -> bool:
        engine = Engine(config, lambda error: None)
        engine.close(Closing("over"))
        allocator = engine.arbiter._allocator
        assert isinstance(allocator, StaggerAllocator)
        return allocator._partial

    assert asyncio.run(partial()) is not alone


def test_there_is_time_for_other_things_between_two_decisions(run: Any) -> None:
    async def test(engine: Engine, daemon: Daemon) -> None:
        engine._step()
        armed: list[float] = []
        engine._arm = armed.append  # type: ignore[method-assign]
        engine._decided_at = engine.now() + 10**12  # as if it were only now, however slow we are
        engine.take(daemon, begun(7))
        engine.take(daemon, begun(8))
        assert armed == [SPACING_S]
        engine._decided_at = 0
        engine.take(daemon, begun(9))
        assert armed == [SPACING_S, 0.0], "brought forward"

    run(test)


def test_no_delay_is_too_short_for_the_loop() -> None:
    async def wait() -> bool:
        handle = asyncio.get_running_loop().call_later(SPACING_S, lambda: None)
        handle.cancel()
        return isinstance(handle, uvloop.loop.TimerHandle)

    assert uvloop.run(wait())


def test_an_engine_that_is_closed_decides_nothing_any_more(run: Any) -> None:
    async def test(engine: Engine, daemon: Daemon) -> None:
        await asyncio.sleep(0.01)
        engine._decided_at = 0
        engine.close(Closing("another configuration"))
        steps = engine.steps
        engine.take(daemon, begun(7))  # was read already
        engine.leave(daemon)
        await asyncio.sleep(0.02)
        assert (engine.steps, daemon.grants) == (steps, [])
        assert len(daemon.ended) == 1
        with pytest.raises(Closing):
            engine.join(daemon, begun(9))  # its stream was opened before

    run(test)


def test_a_stream_that_is_on_its_way_out_when_it_is_ended_leaves_no_traceback(run: Any) -> None:
    class Context:
        caller = Caller("daemon", "", (), "daemon")

        async def read(self) -> None:
            await asyncio.Event().wait()

    async def test(engine: Engine, daemon: Daemon) -> None:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))
        stream = Stream(engine, cast(Any, Context()))
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(0.01)
        stream.end(Closing("the switch process stops"))
        running.cancel()  # as gRPC does when it is stopped, in the same moment
        await asyncio.gather(running, return_exceptions=True)
        del stream, running
        await asyncio.sleep(0)  # until then the loop itself still holds what it has ended
        gc.collect()
        assert logged == []

    run(test)
