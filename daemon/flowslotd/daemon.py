# SPDX-License-Identifier: Apache-2.0
"""The running daemon: sockets, timers and signals around the slot loop.

The only place where clocks are read. A bug in one pass is counted and logged, flows are let go,
and the daemon goes on: training never stops because of us.
"""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import ParamSpec

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot.model.slot import SlotClock
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.protocol.grantbook import Granted
from flowslot_shm.layout import Message
from flowslotd import report
from flowslotd.clock import monotonic, own_moment, read_slot, thread_cpu
from flowslotd.config import Config, changed, load
from flowslotd.control import Control, Json, claim
from flowslotd.engine import Engine
from flowslotd.flows.flow_info import Source
from flowslotd.flows.flow_table import FlowTable
from flowslotd.metrics import Metrics
from flowslotd.observe.observer import Ended, Observer
from flowslotd.observe.ownership import holds_socket
from flowslotd.observe.passive.service import PassiveSources
from flowslotd.observe.registration import Record, RegistrationServer
from flowslotd.systemd import Notifier

_log = logging.getLogger(__name__)
P = ParamSpec("P")

GATHER_NS = MILLISECOND
"""Events this close together share a pass: a job's sockets start one right after the other."""
LAZY_NS = 10 * MILLISECOND
"""What a flow leaves free can wait so long while its job goes on: top-up uses it meanwhile. With 30
ms (and fewer empty messages) the daemon took 28 instead of 38 % of a core in one run each, but
two-equal had three runs of ten with a p99 of 1.27 to 1.60 instead of one of 24."""
BUSY, LAZY_BUSY = 2, 10
"""After a pass at events at least so many times the processor time it took before the next one, and
before one that can wait: many flows end one by one, and must not cost more than a few ends do."""
MUTE_S = 0.004
"""After events of the kernel, further ones wait so long, to be heard of together."""
LOG_EVERY_NS = 10 * SECOND


class Daemon:
    """One daemon of one host."""

    def __init__(self, config: Config) -> None:
        """Touches nothing outside this process."""
        self.config = config
        self.config_error = ""
        self.metrics = Metrics()
        self.table = FlowTable(config.topology, config.settings.host)
        self.observer = Observer(self.table, holds_socket)
        self.started_ns = monotonic()
        self.slot = 0
        self.registration = RegistrationServer(
            str(config.runtime_dir / "register.sock"), "", self._registered, self._rang, self._left
        )
        records = self.registration.records
        self.passive = PassiveSources(self._joined, self._rang, self._left, records, self.bug)
        self.engine: Engine
        self._clock = SlotClock(config.grid)
        self._notifier = Notifier()
        self._touched: dict[int, Source] = {}
        self._gathering: asyncio.TimerHandle | None = None
        self._gathering_until, self._is_lazy = Nanos(0), False
        self._replan_cpu_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._muted: asyncio.TimerHandle | None = None
        self._logged_ns: dict[str, Nanos] = {}
        self._reloading: asyncio.Task[None] | None = None
        self._hung_up = False
        self._reload_lock = asyncio.Lock()
        self._paused = False
        """Between two engines: nothing may be decided."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; everything is restored then.

        Raises OSError or FlowslotError when the daemon cannot start.
        """
        directory = self.config.runtime_dir
        directory.mkdir(parents=True, exist_ok=True)
        claim(directory / "control.sock")
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        control = Control(
            directory / "control.sock",
            {name: partial(show, self) for name, show in report.COMMANDS.items()},
            {"reload": self.reload},
            self.bug,
        )
        self.engine = self._build(self.config)
        async with AsyncExitStack() as stack:  # undone in the opposite order
            stack.push_async_callback(self._end)
            await self._begin()
            stack.callback(self.passive.close)
            await self.registration.start()
            stack.push_async_callback(self.registration.close)
            await control.start()
            stack.push_async_callback(control.stop)
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
            # What lives now lives on: keeps the collector's pauses out of the slots.
            gc.collect()
            gc.freeze()
            self._next_slot()
            self._notifier.ready(self._describe())
            _log.info("ready: %s", self._describe())
            await self._stop.wait()
            self._notifier.stopping()
            self._paused = True

    def bug(self, kind: str, error: BaseException) -> None:
        """Count an error that should not be; log each kind now and then."""
        self.metrics.error(kind, f"{type(error).__name__}: {error}")
        now = monotonic()
        if now - self._logged_ns.get(kind, -LOG_EVERY_NS) >= LOG_EVERY_NS:
            self._logged_ns[kind] = now
            count = self.metrics.errors[kind]
            _log.error("%s failed (%d times so far)", kind, count, exc_info=error)

    # -- slots and events -------------------------------------------------------------------

    def _next_slot(self) -> None:
        """Set the timer: the end of this slot, or this host's own moment where any will do."""
        now, tick = read_slot(self._clock)
        self.slot = tick.slot
        slot_ns = self._clock.grid.slot_ns
        moment = tick.boundary_ns
        if self.engine.loop.by_grant:
            moment = Nanos(moment - slot_ns + own_moment(self._number, slot_ns))
            if moment <= now:
                moment = Nanos(moment + slot_ns)
        self._timer = self._at(moment, self._at_slot, moment)

    def _at_slot(self, moment: Nanos) -> None:
        now, tick = read_slot(self._clock)
        if now < moment:  # the loop's own clock lags a little
            self._timer = self._at(moment, self._at_slot, moment)
            return
        metrics = self.metrics
        metrics.lateness.add(now - moment)
        metrics.slots += 1
        metrics.slots_missed += (now - moment) // self._clock.grid.slot_ns
        self._guard("slot", self.engine.loop.on_slot, now, tick.slot, self._take_touched())
        self._guard("kernel events", self._on_kernel)
        metrics.decision.add(monotonic() - now)
        self._guard("peers", self.engine.tell, now)
        self._notifier.watchdog()
        self._next_slot()

    @property
    def _number(self) -> int:
        """Of this host in the topology."""
        config = self.config
        return next(
            (i for i, h in enumerate(config.topology.hosts) if h == config.settings.host), 0
        )

    def _soon(self, lazy: bool = False) -> None:
        """Run a pass for what was touched, together with what is touched until then."""
        within, busy = (LAZY_NS, LAZY_BUSY) if lazy else (GATHER_NS, BUSY)
        due = Nanos(monotonic() + max(within, busy * self._replan_cpu_ns))
        if self._gathering is not None:
            if self._gathering_until <= due:
                return
            self._gathering.cancel()
        self._gathering_until, self._is_lazy = due, lazy
        self._gathering = self._at(due, self._at_events)

    def _at(
        self, when_ns: Nanos, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.TimerHandle:
        """A timer; they count in ms here, so this rounds up: rather a bit late than early."""
        delay_ms = max(-(-(when_ns - monotonic()) // MILLISECOND), 1)
        return self._loop.call_later(delay_ms / 1e3, partial(work, *args, **kwargs))

    def _take_touched(self) -> Collection[Source]:
        """Those that something has happened to: their pass is now."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        touched, self._touched = self._touched, {}
        return touched.values()

    def _at_events(self) -> None:
        now, cpu = monotonic(), thread_cpu()
        self._guard("events", self.engine.loop.on_events, now, self._take_touched())
        self._guard("kernel events", self._on_kernel)  # what had ended before it was watched
        self._replan_cpu_ns = thread_cpu() - cpu
        self.metrics.replan.add(monotonic() - now)

    def _guard(self, kind: str, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """A bug ends neither the daemon nor a job: let the flows go, and go on."""
        if self._paused:
            return
        try:
            work(*args, **kwargs)
        except Exception as error:
            self.bug(kind, error)
            try:
                self.engine.loop.release()
            except Exception as again:  # the entries lapse by themselves
                self.bug("release", again)

    def _on_grants(self, now: Nanos, grants: Sequence[Granted]) -> None:
        self._guard("grants", self.engine.loop.on_grants, now, grants)
        self._guard("kernel events", self._on_kernel)

    def _on_planned(self, now: Nanos) -> None:
        self._guard("plan", self.engine.loop.on_planned, now)
        self._guard("peers", self.engine.tell, now)

    def _on_readable(self, fd: int) -> None:
        """Flows of a job end within milliseconds: hear of the first at once, then of many."""
        self._guard("kernel events", self._on_kernel)
        self._loop.remove_reader(fd)
        self._muted = self._loop.call_later(
            MUTE_S, self._loop.add_reader, fd, self._on_readable, fd
        )

    def _on_kernel(self) -> None:
        if self.engine.pacer is None:
            return
        drained = []
        for event in self.engine.pacer.events():
            if event.kind == "drained":
                drained.append(event.cookie)
            elif event.kind == "closed":
                self.observer.closed(event.cookie)
                self._soon()
            else:
                if event.cookie not in self.table:
                    self.observer.stir()
                self.engine.loop.on_new(event.cookie)
                self._touch([event.cookie])
        if drained:
            ended = self.observer.drained(drained)
            if ended == Ended.FLOWS:
                self.engine.loop.on_drained()
                self._soon(lazy=True)
            else:
                # Also those that ended before, and were not looked at for that.
                rows = self.table.rows
                self._touch(rows["cookie"][rows["drained"]].tolist(), lazy=ended != Ended.JOB)

    def _touch(self, cookies: Iterable[int], lazy: bool = False) -> None:
        """Something happened to these flows: look at their jobs' records soon."""
        infos, records = self.table.infos, self.passive.sources()
        rows = {row for cookie in cookies if (row := self.table.find(cookie)) is not None}
        touched = {infos[row].source for row in rows} & records.keys()
        if touched:
            self._touched.update((source, records[source]) for source in touched)
            self._soon(lazy)

    def _registered(self, record: Record) -> None:
        self.passive.give_way(record.pid)
        self._joined(record)

    def _joined(self, record: Source) -> None:
        self._touched[record.id] = record
        self._soon()

    def _rang(self, record: Source, slot: int, message: Message) -> None:
        # END: the last bytes are in the socket. The phase goes on until they are acknowledged.
        lazy = message != Message.BEGIN
        if record.id in self._touched and (lazy or not self._is_lazy):
            return  # as its other flows just before: the pass that this calls for is due
        self._touched[record.id] = record
        self._soon(lazy)

    def _left(self, record: Source) -> None:
        self._touched.pop(record.id, None)
        self.observer.forget(record.id)
        self._soon()

    # -- engines ----------------------------------------------------------------------------

    def _build(self, config: Config, old: Engine | None = None) -> Engine:
        """Raises ConfigError, or FlowslotError when this host lacks something."""
        try:
            return Engine(
                config,
                observer=self.observer,
                records=lambda: self.passive.sources().values(),
                on_grants=self._on_grants,
                on_planned=self._on_planned,
                on_bug=self.bug,
                pacer=old.pacer if old else None,
            )
        except ValueError as error:
            raise _unusable(config, error) from error
        except ImportError as error:  # of gRPC, which is loaded only where there are switches
            problem = f"no negotiation with switch processes: {error}; see `flowslot doctor`"
            raise FlowslotError(problem) from error

    async def _begin(self) -> None:
        engine = self.engine
        await engine.start()
        name, config = engine.congestion_control, engine.config
        self.registration.set_congestion_control(name)
        self.passive.use(config.settings.unpatched.pslite, config.addresses, name)
        fd = engine.pacer.event_fd() if engine.pacer else None
        if fd is not None:
            self._loop.add_reader(fd, self._on_readable, fd)

    async def _end(self, keep_pacer: bool = False) -> None:
        engine = self.engine
        fd = engine.pacer.event_fd() if engine.pacer else None
        if self._muted is not None:
            self._muted.cancel()
        if fd is not None:
            self._loop.remove_reader(fd)
        await engine.stop(keep_pacer)

    def _hang_up(self) -> None:
        """SIGHUP."""
        self._hung_up = True
        if self._reloading is None or self._reloading.done():
            self._reloading = self._loop.create_task(self._reload_quietly())

    async def _reload_quietly(self) -> None:
        while self._hung_up:  # also while a reload was under way, which may have read too early
            self._hung_up = False
            try:
                await self.reload()
            except FlowslotError as error:
                _log.error("not reloaded: %s", error)
            except Exception as error:
                self.bug("reload", error)

    async def reload(self) -> Json:
        """Read the configuration again; a bad one changes nothing. Raises ConfigError."""
        async with self._reload_lock:
            return await self._reload()

    async def _reload(self) -> Json:
        self._notifier.reloading(monotonic())
        try:
            config = load(self.config.file)
            names = changed(self.config, config)
            if names:
                await self._replace(config)
        except FlowslotError as error:
            self.config_error = str(error)
            raise
        finally:
            self._notifier.ready(self._describe())
        self.config_error = ""
        _log.info("reloaded: %s", ", ".join(names) or "nothing changed")
        return {"file": str(config.file), "changed": ", ".join(names)}

    async def _replace(self, config: Config) -> None:
        """Go on with `config`, or with the old one if that cannot be. Raises ConfigError."""
        old = self.config
        try:
            await self._change_to(config)
        except ConfigError:
            raise
        except FlowslotError as error:
            raise ConfigError(str(config.file), "", str(error)) from None
        try:
            await self._begin()
        except Exception as error:
            self.bug("reload", error)
            await self._change_to(old)
            await self._begin()
            raise _unusable(config, error) from error

    async def _change_to(self, config: Config) -> None:
        """Put another engine in place. What cannot be built is found out before any change."""
        engine = self._build(config, self.engine)
        self._paused = True
        try:
            await self._end(keep_pacer=engine.pacer is self.engine.pacer)
        except Exception as error:  # of what is done with: nothing to go back to
            self.bug("reload", error)
        finally:
            self.observer.remap(config.topology, config.settings.host)
            self.table.take_gone()  # the old arbiter was told by the end of its engine
            self.config, self.engine = config, engine
            self._paused = False

    def _describe(self) -> str:
        settings, engine = self.config.settings, self.engine
        name = f" as {engine.congestion_control}" if engine.congestion_control else ""
        return f"{settings.host}: {settings.mode}, {settings.policy}, pacing {engine.backend}{name}"


def _unusable(config: Config, error: Exception) -> ConfigError:
    return ConfigError(str(config.file), "", f"cannot be used: {error}")
