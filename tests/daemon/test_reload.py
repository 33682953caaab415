# SPDX-License-Identifier: Apache-2.0
"""Configurations that pass all checks, and yet no engine can be had for them."""

import asyncio

import pytest

from flowslot.errors import ConfigError
from flowslotd import config
from flowslotd.daemon import Daemon
from flowslotd.engine import Engine

from .conftest import TOPOLOGY


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "topology.toml").write_text(TOPOLOGY)
        (tmp_path / "flowslotd.toml").write_text(text)
        return tmp_path / "flowslotd.toml"

    return write


def fail_to_build(*_, **__):
    raise ValueError("no such number")


async def fail_to_start(engine):
    if engine.config.settings.policy == "static":
        raise ValueError("no such number")


@pytest.mark.parametrize("at", ["build", "start"])
def test_an_engine_that_cannot_be_had_leaves_the_last_good_one(write, tmp_path, monkeypatch, at):
    text = f'host = "h1"\nslot_ms = 5\nruntime_dir = "{tmp_path}"'
    daemon = Daemon(config.load(write(text)))
    good, told = daemon.config, []
    monkeypatch.setattr(daemon._notifier, "_send", lambda *lines: told.append(lines[0]))

    async def reload():
        running = asyncio.create_task(daemon.run())
        while "READY=1" not in told:
            await asyncio.sleep(0.005)
        told.clear()
        engine = daemon.engine
        file = write(f'{text}\npolicy = "static"')
        with monkeypatch.context() as patch:
            if at == "build":
                patch.setattr("flowslotd.daemon.Engine", fail_to_build)
            else:
                patch.setattr(Engine, "start", fail_to_start)
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
        slots = daemon.metrics.slots
        while daemon.metrics.slots < slots + 3:  # it goes on
            assert not running.done()
            await asyncio.sleep(0.005)
        assert (await daemon.reload())["changed"] == "policy"
        daemon._stop.set()
        await asyncio.wait_for(running, 10)

    asyncio.run(reload())


def test_an_engine_that_cannot_be_had_at_start_is_a_configuration_error(
    write, tmp_path, monkeypatch
):
    monkeypatch.setattr("flowslotd.daemon.Engine", fail_to_build)
    daemon = Daemon(config.load(write(f'host = "h1"\nruntime_dir = "{tmp_path}"')))
    with pytest.raises(ConfigError, match="cannot be used: no such number"):
        asyncio.run(daemon.run())
