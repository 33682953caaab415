# SPDX-License-Identifier: Apache-2.0
"""Configurations that pass all checks, and yet no engine can be had for them."""

import asyncio
import os
import threading

import pytest
from waiting import until

from flowslot.model.errors import ConfigError
from flowslotd import config
from flowslotd.daemon import Daemon
from flowslotd.engine import Engine
from flowslotd.negotiate.source import FixedRates
from flowslotd.pace.pacer import Pacer
from flowslotd.slotloop import SlotLoop

from .conftest import TOPOLOGY
from .hosts import running

FASTER = TOPOLOGY.replace("capacity_gbps = 0.2", "capacity_gbps = 0.4")


def fail_to_build(*_, **__):
    raise ValueError("no such number")


@pytest.fixture
def enforcing(write, tmp_path, monkeypatch):
    """Text of a configuration; nothing is paced, whatever it says."""
    monkeypatch.setattr("flowslotd.engine.make_pacer", lambda *_, **__: Pacer())
    return f'host = "h1"\nmode = "enforce"\nslot_ms = 5\nruntime_dir = "{tmp_path}"'


async def fail_to_start(source):
    raise ValueError("no such number")


@pytest.mark.parametrize("at", ["build", "start"])
async def test_an_engine_that_cannot_be_had_leaves_the_last_good_one(
    write, enforcing, monkeypatch, at
):
    async with running(Daemon(config.load(write(enforcing)))) as (daemon, told, _):
        good, engine = daemon.config, daemon.engine
        file = write(f'{enforcing}\npolicy = "static"')
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


async def test_another_policy_until_the_next_reload(write, enforcing):
    async with running(Daemon(config.load(write(enforcing)))) as (daemon, _, _):
        engine = daemon.engine
        for bad, why in (("nope", "no policy is called"), ("mltcp", "`flowslot mltcp on`")):
            with pytest.raises(ConfigError, match=why):
                await daemon.set_policy(bad)
        assert daemon.engine is engine
        assert (await daemon.set_policy("stagger"))["policy"] == "stagger"
        assert daemon.engine is engine, "nothing has changed"
        for name in ("static", "srsf1", "mlcc", "cassini", "fair"):
            assert (await daemon.set_policy(name))["policy"] == name
            assert daemon.engine.config.settings.policy == name
        assert (await daemon.reload())["changed"] == "policy"
        assert daemon.config.settings.policy == "stagger"


async def test_an_engine_that_does_not_end_well_is_replaced_all_the_same(
    write, enforcing, monkeypatch
):
    started = []

    async def note(source):
        started.append(source)

    def fail_to_release(loop):
        raise RuntimeError("a bug")

    async with running(Daemon(config.load(write(enforcing)))) as (daemon, _, _):
        write(f'{enforcing}\npolicy = "static"')
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


async def test_a_second_signal_during_a_reload_is_not_lost(write, enforcing, monkeypatch):
    stop = Engine.stop

    async def slow_stop(engine, keep_pacer=False):
        if daemon.config.settings.policy == "stagger":
            write(f'{enforcing}\npolicy = "mlcc"')
            daemon._hung_up.set()
        await stop(engine, keep_pacer)

    async with running(Daemon(config.load(write(enforcing)))) as (daemon, _, until):
        write(f'{enforcing}\npolicy = "static"')
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "stop", slow_stop)
            daemon._hung_up.set()
            await until(lambda: daemon.engine.source.describe()["feedback"] is not None)
        assert daemon.config.settings.policy == "mlcc"
        write(enforcing)
        assert (await daemon.reload())["changed"] == "policy", "and back"
        assert daemon.metrics.errors == {}


@pytest.mark.parametrize("text", [FASTER, "nonsense"])
async def test_slots_go_on_while_a_configuration_is_read(write, enforcing, tmp_path, text):
    """However long that takes: here, until slots have gone by."""
    async with running(Daemon(config.load(write(enforcing)))) as (daemon, _, until):
        topology, passed = tmp_path / "topology.toml", threading.Event()
        topology.unlink()
        os.mkfifo(topology)

        def give():
            with topology.open("w") as file:  # from here on somebody reads
                in_time.append(passed.wait(20))
                file.write(text)

        in_time = []
        giver = threading.Thread(target=give)
        giver.start()
        reload = asyncio.ensure_future(daemon.reload())
        slots = daemon.metrics.slots
        await until(lambda: daemon.metrics.slots > slots + 10)
        passed.set()
        if text == FASTER:
            assert (await reload)["changed"] == "topology links"
        else:
            with pytest.raises(ConfigError, match="not valid TOML"):
                await reload
        giver.join()
        assert in_time == [True]


@pytest.mark.parametrize("waits", [True, False])
async def test_no_engine_comes_after_the_last_one_has_gone(write, enforcing, monkeypatch, waits):
    """However long a configuration is read when the daemon is told to stop."""
    started, told = threading.Event(), threading.Event()
    real, stop, ended = config.load_again, Engine.stop, []

    def slowly(old):
        started.set()
        assert told.wait(20)
        return real(old)

    async def note(engine, keep_pacer=False):
        await stop(engine, keep_pacer)
        ended.append(engine)

    monkeypatch.setattr("flowslotd.daemon.load_again", slowly)
    monkeypatch.setattr("flowslotd.daemon.RELOAD_S", 20 if waits else 0.01)
    monkeypatch.setattr(Engine, "stop", note)
    daemon = Daemon(config.load(write(enforcing)))
    task = asyncio.create_task(daemon.run())
    await until(lambda: daemon.metrics.slots)
    write(f'{enforcing}\npolicy = "static"')
    reload = asyncio.create_task(daemon.reload())
    await until(started.is_set)
    daemon._stop.set()
    if not waits:
        await asyncio.wait_for(task, 10)
    told.set()
    await reload
    await asyncio.wait_for(task, 10)
    assert ended == [daemon.engine]


def test_an_engine_that_cannot_be_had_at_start_is_a_configuration_error(
    write, tmp_path, monkeypatch
):
    monkeypatch.setattr("flowslotd.daemon.Engine", fail_to_build)
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    with pytest.raises(ConfigError, match="cannot be used: no such number"):
        asyncio.run(daemon.run())
