# SPDX-License-Identifier: Apache-2.0
"""Configurations that pass all checks, and yet no engine can be had for them."""

import asyncio

import pytest

from flowslot.model.errors import ConfigError
from flowslotd import config
from flowslotd.daemon import Daemon
from flowslotd.engine import Engine
from flowslotd.negotiate.source import FixedRates
from flowslotd.pace.pacer import Pacer
from flowslotd.slotloop import SlotLoop


def fail_to_build(*_, **__):
    raise ValueError("no such number")


def listened_to(monkeypatch, file):
    """A daemon, and what it tells systemd."""
    daemon, told = Daemon(config.load(file)), []
    monkeypatch.setattr(daemon._notifier, "_send", lambda *lines: told.append(lines[0]))
    return daemon, told


async def begin(daemon, told):
    running = asyncio.create_task(daemon.run())
    while "READY=1" not in told:
        assert not running.done(), running.exception()
        await asyncio.sleep(0.005)
    told.clear()
    return running


async def end(daemon, running):
    slots = daemon.metrics.slots
    while daemon.metrics.slots < slots + 3:  # it goes on
        assert not running.done()
        await asyncio.sleep(0.005)
    daemon._stop.set()
    await asyncio.wait_for(running, 10)


async def fail_to_start(source):
    raise ValueError("no such number")


@pytest.mark.parametrize("at", ["build", "start"])
def test_an_engine_that_cannot_be_had_leaves_the_last_good_one(write, tmp_path, monkeypatch, at):
    monkeypatch.setattr("flowslotd.engine.make_pacer", lambda *_, **__: Pacer())
    text = f'host = "h1"\nmode = "enforce"\nslot_ms = 5\nruntime_dir = "{tmp_path}"'
    daemon, told = listened_to(monkeypatch, write(text))
    good = daemon.config

    async def reload():
        running = await begin(daemon, told)
        engine = daemon.engine
        file = write(f'{text}\npolicy = "static"')
        with monkeypatch.context() as patch:
            if at == "build":
                patch.setattr("flowslotd.daemon.Engine", fail_to_build)
            else:
                patch.setattr(FixedRates, "start", fail_to_start)
            with pytest.raises(ConfigError) as caught:
                await daemon.reload()
        assert str(caught.value) == f"{file}: cannot be used: no such number"
        assert daemon.config_error == str(caught.value)
        assert daemon.config is good
        assert (daemon.engine is engine) == (at == "build")
        assert daemon.engine.config is good
        assert [word.partition("=")[0] for word in told if "WATCHDOG" not in word] == [
            "RELOADING", "READY",
        ]  # fmt: skip
        assert (await daemon.reload())["changed"] == "policy"
        await end(daemon, running)

    asyncio.run(reload())


def test_an_engine_that_does_not_end_well_is_replaced_all_the_same(write, tmp_path, monkeypatch):
    monkeypatch.setattr("flowslotd.engine.make_pacer", lambda *_, **__: Pacer())
    text = f'host = "h1"\nmode = "enforce"\nslot_ms = 5\nruntime_dir = "{tmp_path}"'
    daemon, told = listened_to(monkeypatch, write(text))
    started = []

    async def note(source):
        started.append(source)

    def fail_to_release(loop):
        raise RuntimeError("a bug")

    async def reload():
        running = await begin(daemon, told)
        write(f'{text}\npolicy = "static"')
        with monkeypatch.context() as patch:
            patch.setattr(FixedRates, "start", note)
            patch.setattr(SlotLoop, "release", fail_to_release)
            arbiter = daemon.engine.source
            assert not arbiter._alarm.cancelled()
            assert (await daemon.reload())["changed"] == "policy"
        assert daemon.config.settings.policy == "static"
        assert started == [daemon.engine.source]
        assert arbiter._alarm.cancelled(), "it would grant rates to flows that are not its own"
        assert daemon.metrics.errors == {"reload": 1}
        await end(daemon, running)

    asyncio.run(reload())


def test_a_second_signal_during_a_reload_is_not_lost(write, tmp_path, monkeypatch):
    text = f'host = "h1"\nslot_ms = 5\nruntime_dir = "{tmp_path}"'
    daemon, told = listened_to(monkeypatch, write(text))
    stop = Engine.stop

    async def slow_stop(engine, keep_pacer=False):
        if daemon.config.settings.policy == "stagger":
            write(f'{text}\npolicy = "fair"')
            daemon._hung_up.set()
        await stop(engine, keep_pacer)

    async def reload():
        running = await begin(daemon, told)
        write(f'{text}\npolicy = "static"')
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "stop", slow_stop)
            daemon._hung_up.set()
            async with asyncio.timeout(10):
                while daemon.config.settings.policy != "fair":
                    await asyncio.sleep(0.005)
        await end(daemon, running)

    asyncio.run(reload())


def test_an_engine_that_cannot_be_had_at_start_is_a_configuration_error(
    write, tmp_path, monkeypatch
):
    monkeypatch.setattr("flowslotd.daemon.Engine", fail_to_build)
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    with pytest.raises(ConfigError, match="cannot be used: no such number"):
        asyncio.run(daemon.run())
