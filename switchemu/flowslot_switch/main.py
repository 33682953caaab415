# SPDX-License-Identifier: Apache-2.0
"""`flowslot-switch`: start, reload (SIGHUP), stop (SIGTERM)."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot_proto.control import Control, named
from flowslot_proto.systemd import Notifier, watchdog_s
from flowslot_switch.config import SwitchConfig, load
from flowslot_switch.nativelog import NativeLog
from flowslot_switch.runner import Runner
from flowslot_switch.server import Server
from flowslot_switch.service import SwitchService

GRACE_S = 1.0
SWITCH_S = 0.0005
"""So long a thread of gRPC waits for Python at most. With TLS it does at each handshake, and what
came for all others waits with it; 5 ms, which is usual, would be too long."""
log = logging.getLogger("flowslot-switch")


class SwitchProcess:
    """The process while it runs."""

    def __init__(self, source: Path | None, read: Callable[[], SwitchConfig]) -> None:
        """`read`: reads the configuration, from `source` if that is a file. Raises ConfigError."""
        self._source = str(source or "command line")
        self._read = read
        self._config = read()
        self._notifier = Notifier()

    async def run(self) -> int:
        """Serve until a signal or a failure; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[int] = loop.create_future()
        service = SwitchService(self._runner(self._config))
        server = Server(service.handlers(), tls=self._config.tls, on_rejected=service.rejected)
        NativeLog(server.guard.handshake_failed)
        try:
            control = await self._control(service)
        except (OSError, FlowslotError) as error:
            log.error("no control socket: %s", error)
            return 1
        try:
            server.guard.start(await server.listen(self._config.listen))
        except OSError as error:
            log.error("cannot listen on %s: %s", self._config.listen, error.strerror or error)
            if control is not None:
                await control.stop()
            return 1
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._finish, 0)
        loop.add_signal_handler(signal.SIGHUP, self._reload, service)
        watchdog = asyncio.create_task(self._feed_watchdog())
        sys.setswitchinterval(SWITCH_S)
        gc.freeze()
        self._ready()
        if server.only_here:
            log.warning("no daemon of another host will come: %s", server.only_here)
        status = await self._stop
        self._notifier.stopping()
        watchdog.cancel()
        service.close()
        await server.stop(GRACE_S)
        if control is not None:
            await control.stop()
        return status

    def _runner(self, config: SwitchConfig) -> Runner:
        # After a bug, better start anew from the daemons' Hello than go on.
        return Runner(config, lambda: self._finish(1))

    async def _control(self, service: SwitchService) -> Control | None:
        """Listens, if the configuration names a folder for it. Raises OSError, FlowslotError."""
        folder = self._config.runtime_dir
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        control = Control(
            folder / "control.sock",
            {"policy": service.policy},
            {},
            lambda kind, error: log.error("%s failed", kind, exc_info=error),
            {"set-policy": named(service.set_policy)},
        )
        await control.start()
        return control

    def _ready(self) -> None:
        config, tls = self._config, self._config.settings.tls.mode()
        text = f"{config.settings.name}: {len(config.links)} links, listening on {config.listen}"
        text += {"mutual": ", TLS", "insecure": ", insecure: no TLS"}.get(tls, "")
        self._notifier.ready(text)
        log.info(text)

    async def _feed_watchdog(self) -> None:
        period = watchdog_s()
        while period is not None:
            self._notifier.watchdog()
            await asyncio.sleep(period)

    def _finish(self, status: int) -> None:
        if not self._stop.done():
            self._stop.set_result(status)

    def _reload(self, service: SwitchService) -> None:
        """Take a changed configuration over; a bad one changes nothing, nor does a failure."""
        self._notifier.reloading(time.monotonic_ns())
        try:
            self._take_over(self._read(), service)
            log.info("reloaded")
        except Exception as error:  # of ours, perhaps: those that are served go on
            why = error if isinstance(error, ConfigError) else repr(error)
            log.error("not reloaded, going on as before: %s", why)
        finally:
            self._ready()

    def _take_over(self, config: SwitchConfig, service: SwitchService) -> None:
        """Raises before anything has changed; ConfigError: that needs a restart."""
        old, new = _fixed(self._config), _fixed(config)
        for field in old:
            if new[field] != old[field]:
                problem = f"is {old[field]} and cannot change while running; restart"
                raise ConfigError(self._source, field, problem)
        if _decides_by(config) != _decides_by(self._config):
            service.replace(self._runner(config), "the configuration has changed")
        elif _policy(config) != (service.runner.switch.policy, self._config.settings.classes):
            service.runner.use(config, config.settings.policy)
        else:
            service.runner.config = config  # other hosts, perhaps
        self._config = config


def _decides_by(config: SwitchConfig) -> tuple[object, ...]:
    """What a change of ends all streams for; the topology's other hosts and its path do not."""
    return config.links, config.partial, config.settings.arbiter


def _policy(config: SwitchConfig) -> tuple[object, ...]:
    """What a change of ends no stream for."""
    return config.settings.policy, config.settings.classes


def _fixed(config: SwitchConfig) -> dict[str, object]:
    """What only a restart changes. Grants of long leases would outlive a short recovery."""
    settings = config.settings
    return {
        "name": settings.name,
        "listen": config.listen,
        "runtime_dir": config.runtime_dir,
        "tls": settings.tls,
        "arbiter.slot_ms": settings.arbiter.slot_ms,
        "arbiter.lease_slots": settings.arbiter.lease_slots,
    }


def main() -> None:
    """Entry point. Exit status: 0 stopped, 1 failure, 2 bad configuration or usage."""
    parser = argparse.ArgumentParser(
        prog="flowslot-switch",
        description="Emulates the switches of one contention domain and arbitrates their links.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (TOML)")
    parser.add_argument("--name", help="which switch process of the topology this is")
    parser.add_argument("--topology", type=Path, metavar="FILE", help="instead of the file's")
    parser.add_argument("--listen", metavar="HOST:PORT", help="instead of the topology's address")
    args = parser.parse_args()
    logging.basicConfig(format="flowslot-switch: %(message)s", level=logging.INFO)
    try:
        process = SwitchProcess(
            args.config, partial(load, args.config, args.name, args.topology, args.listen)
        )
    except ConfigError as error:
        print(f"flowslot-switch: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(uvloop.run(process.run()))


if __name__ == "__main__":
    main()
