# SPDX-License-Identifier: Apache-2.0
"""The running daemon: sockets, timers and signals around the slot loop.

The only place where clocks are read. A bug in one pass is counted and logged, flows are let go,
and the daemon goes on: training never stops because of us.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import ParamSpec

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot.model.slot import SlotClock, Tick
from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot_proto.control import Control, Json, named
from flowslot_proto.systemd import Notifier
from flowslot_proto.unix_socket import claim
from flowslot_shm.layout import Message
from flowslotd import report
from flowslotd.clock import monotonic, thread_cpu, wall
from flowslotd.config import Config, load_again, with_policy
from flowslotd.engine import Engine
from flowslotd.flows.flow_info import Source
from flowslotd.flows.flow_table import FlowTable
from flowslotd.metrics import Metrics
from flowslotd.observe.binding import holds_socket
from flowslotd.observe.observer import Ended, Observer
from flowslotd.observe.passive import commands
from flowslotd.observe.passive.service import PassiveSources
from flowslotd.observe.registration import Record, RegistrationServer
from flowslotd.passes import Passes
from flowslotd.uplinks import Uplinks

_log = logging.getLogger(__name__)
P = ParamSpec("P")

MUTE_NS = 4 * MILLISECOND
"""Events of the kernel that come so soon after others are followed by silence as long, so that
further ones are heard of together."""
LOG_EVERY_NS = 10 * SECOND
RELOAD_S = 5.0
"""So long a daemon that is told to stop waits for a reload that is under way."""


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
        self.uplinks = Uplinks(config.file, self.observer, self._moved, self.bug)
        self.engine: Engine
        self._clock = SlotClock(config.grid)
        self._notifier = Notifier()
        number = list(config.topology.hosts).index(config.settings.host)
        self._passes = Passes(config.grid.slot_ns, number)
        self._events: asyncio.Handle | None = None
        self._events_at: Nanos | None = None
        self._muted: asyncio.TimerHandle | None = None
        self._heard_ns = Nanos(0)
        self._logged_ns: dict[str, Nanos] = {}
        self._hung_up = asyncio.Event()
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
        claim(directory / "control.sock", socket.SOCK_STREAM)
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        control = Control(
            directory / "control.sock",
            {name: partial(show, self) for name, show in report.COMMANDS.items()},
            {"reload": self.reload},
            self.bug,
            {
                "set-policy": named(self.set_policy),
                "enlist": partial(commands.enlist, self.passive),
                "release": partial(commands.release, self.passive),
            },
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
            self._loop.add_signal_handler(signal.SIGHUP, self._hung_up.set)
            self._reloading = self._loop.create_task(self._reload_on_signal())
            # What lives now lives on: keeps the collector's pauses out of the slots.
            gc.collect()
            gc.freeze()
            self._next_slot()
            self._notifier.ready(self._describe())
            _log.info("ready: %s", self._describe())
            self.config.remark()
            self.uplinks.start()
            stack.callback(self.uplinks.stop)
            await self._stop.wait()
            with suppress(TimeoutError):  # it may read a file that never answers
                await asyncio.wait_for(self._reload_lock.acquire(), RELOAD_S)
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

    def _read_slot(self) -> tuple[Nanos, Tick]:
        """Both clocks, read together; `slot` is the one they are in."""
        now = monotonic()
        tick = self._clock.observe(now, wall())
        self.slot = tick.slot
        return now, tick

    def _next_slot(self) -> None:
        """Set the timer of the next pass over everything."""
        at_boundary = self.engine.source.at_boundary
        moment = self._passes.next_slot(*self._read_slot(), at_boundary=at_boundary)
        self._at(moment, partial(self._at_slot, moment))

    def _at_slot(self, moment: Nanos) -> None:
        now, _ = self._read_slot()
        if now < moment:  # the loop's own clock lags a little
            self._at(moment, partial(self._at_slot, moment))
            return
        metrics = self.metrics
        metrics.lateness.add(now - moment)
        metrics.slots += 1
        metrics.slots_missed += (now - moment) // self._clock.grid.slot_ns
        self._guard("slot", self._slot_pass, now)
        self._rearm()
        self._on_noticed()
        metrics.decision.add(monotonic() - now)
        self._guard("peers", self.engine.source.tell, now)
        self._notifier.watchdog()
        self._next_slot()

    def _slot_pass(self, now: Nanos) -> None:
        """Look at all jobs that are due, and at those that something has happened to."""
        loop, source = self.engine.loop, self.engine.source
        asked = self._passes.next_wakeup is not None
        touched = self._passes.take()
        small = source.beat(now)
        due = self.observer.due(self.slot, self._records(), small=small)
        if not touched and all(self.observer.is_fresh(now, record) for record in due):
            due = []
        records = {record.id: record for record in (*due, *touched)}
        if records or small or asked or source.waiting or loop.has_news:
            self._pass(now, list(records.values()), small=small)
        loop.refresh(now)

    def _pass(self, now: Nanos, sources: Collection[Source], *, small: bool = False) -> None:
        loop, source = self.engine.loop, self.engine.source
        loop.on_slot(now, self.slot, sources, small=small)
        if source.waiting:
            loop.on_slot(now, self.slot, self._records())

    def _at_events(self) -> None:
        self._events = self._events_at = None
        now, cpu = monotonic(), thread_cpu()
        touched: Collection[Source] = self._passes.take()
        if touched and self.engine.source.joint:
            touched = self._records()
        self._guard("events", self._pass, now, touched)
        self._on_noticed()
        self._passes.took(monotonic(), thread_cpu() - cpu)
        self.metrics.replan.add(monotonic() - now)

    def _rearm(self) -> None:
        """Passes at events: look when the next one is due."""
        due = self._passes.next_wakeup
        if due == self._events_at:
            return
        if self._events is not None:
            self._events.cancel()
        self._events_at = due
        self._events = None if due is None else self._at(due, self._at_events)

    def _at(self, when_ns: Nanos, work: Callable[[], None]) -> asyncio.Handle:
        """A timer; they count in ms here, so this rounds up: rather a bit late than early."""
        left = when_ns - monotonic()
        if left <= 0:  # after all that has come is read
            return self._loop.call_soon(work)
        delay_ms = max(-(-left // MILLISECOND), 1)
        return self._loop.call_later(delay_ms / 1e3, work)

    def _records(self) -> Collection[Source]:
        return self.passive.sources().values()

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

    def _on_rates(self, now: Nanos) -> None:
        """What the rate source says has changed."""
        self._guard("rates", self._paced, now)
        self._on_noticed()

    def _paced(self, now: Nanos) -> None:
        loop = self.engine.loop
        loop.pace(now)
        if self.engine.source.waiting:
            self._pass(now, self._records())
        loop.keep(now)

    def _on_readable(self, fd: int) -> None:
        """Flows of a job end within milliseconds: hear of the first two at once, then of many."""
        before, self._heard_ns = self._heard_ns, monotonic()
        self._guard("kernel events", self._on_kernel)
        if self._heard_ns - before < MUTE_NS:
            self._loop.remove_reader(fd)
            listen = partial(self._loop.add_reader, fd, self._on_readable, fd)
            self._muted = self._loop.call_later(MUTE_NS / SECOND, listen)

    def _on_noticed(self) -> None:
        """What a pass has noticed itself, as what had ended before it was watched."""
        if self.engine.pacer.noticed:
            self._guard("kernel events", self._on_kernel)

    def _on_kernel(self) -> None:
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
                self._touch([event.cookie], self._passes.touch)
        if drained:
            ended = self.observer.drained(drained)
            if ended == Ended.FLOWS:
                self._soon(lazy=True)
            else:
                # Also those that ended before, and were not looked at for that.
                rows = self.table.rows
                passes = self._passes
                look = passes.complete if ended == Ended.JOB else partial(passes.touch, lazy=True)
                self._touch(rows["cookie"][rows["drained"]].tolist(), look)

    def _soon(self, *, lazy: bool = False) -> None:
        self._passes.soon(monotonic(), lazy=lazy)
        self._rearm()

    def _touch(self, cookies: Iterable[int], look: Callable[[Nanos, Source], None]) -> None:
        """Something happened to these flows: their jobs' records are to be looked at."""
        infos, records = self.table.infos, self.passive.sources()
        rows = {row for cookie in cookies if (row := self.table.find(cookie)) is not None}
        for source in {infos[row].source for row in rows} & records.keys():
            look(monotonic(), records[source])
        self._rearm()

    def _registered(self, record: Record) -> None:
        self.passive.give_way(record.pid)
        self._joined(record)

    def _joined(self, record: Source) -> None:
        self._passes.touch(monotonic(), record)
        self._rearm()

    def _rang(self, record: Source, slot: int, message: Message) -> None:
        # END: the last bytes are in the socket. The phase goes on until they are sent.
        now, begins = monotonic(), message == Message.BEGIN
        self._passes.rang(now, record, lazy=not begins)
        waits = begins and (self._passes.next_wakeup or now) > now
        if waits and self.observer.all_send(record):
            self._passes.complete(now, record)
        self._rearm()

    def _moved(self, sources: Collection[int]) -> None:
        """Flows of theirs leave by other links than thought."""
        records = self.passive.sources()
        for source in records.keys() & sources:
            self._passes.touch(monotonic(), records[source])
        self._rearm()

    def _left(self, record: Source) -> None:
        self.observer.forget(record.id)
        self._passes.forget(monotonic(), record.id)
        self._rearm()

    # -- engines ----------------------------------------------------------------------------

    def _build(self, config: Config, old: Engine | None = None) -> Engine:
        """Raises ConfigError, or FlowslotError when this host lacks something."""
        try:
            return Engine(
                config,
                observer=self.observer,
                on_rates=self._on_rates,
                on_bug=self.bug,
                pacer=old.pacer if old else None,
                trace=old.trace if old else None,
            )
        except ValueError as error:
            raise _unusable(config, error) from error
        except ImportError as error:  # of gRPC, which is loaded only where there are switches
            problem = f"no negotiation with switch processes: {error}; install grpcio"
            raise FlowslotError(problem) from error

    async def _begin(self) -> None:
        engine = self.engine
        await engine.source.start()
        name, config = engine.pacer.congestion_control, engine.config
        self.registration.set_congestion_control(name)
        self.passive.use(config.settings.unpatched.pslite, config.addresses, name)
        fd = engine.pacer.event_fd()
        if fd is not None:
            self._loop.add_reader(fd, self._on_readable, fd)

    async def _end(self, keep_pacer: bool = False) -> None:
        engine = self.engine
        fd = engine.pacer.event_fd()
        if self._muted is not None:
            self._muted.cancel()
        if fd is not None:
            self._loop.remove_reader(fd)
        await engine.stop(keep_pacer)

    async def _reload_on_signal(self) -> None:
        while await self._hung_up.wait():
            self._hung_up.clear()  # before: what is written from now on calls for another reload
            try:
                await self.reload()
            except FlowslotError as error:
                _log.error("not reloaded: %s", error)
            except Exception as error:
                self.bug("reload", error)

    async def reload(self) -> Json:
        """Read the configuration again; a bad one changes nothing. Raises ConfigError."""
        async with self._reload_lock:
            self._notifier.reloading(monotonic())
            try:
                # On a thread: a large topology takes longer than the slots can wait.
                config, names = await asyncio.to_thread(load_again, self.config)
                if names and not self._stop.is_set():
                    await self._replace(config)
            except FlowslotError as error:
                self.config_error = str(error)
                raise
            finally:
                self._notifier.ready(self._describe())
            self.config_error = ""
            _log.info("reloaded: %s", ", ".join(names) or "nothing changed")
            config.remark()
            return {"file": str(config.file), "changed": ", ".join(names)}

    async def set_policy(self, name: str) -> Json:
        """Go on under another policy, until the next reload or restart: all flows are let go, and
        decided on anew. A bad name changes nothing. Raises ConfigError."""
        async with self._reload_lock:
            config = with_policy(self.config, name)
            if name != self.config.settings.policy and not self._stop.is_set():
                await self._replace(config)
                self._notifier.ready(self._describe())
                _log.info("policy: %s", name)
        return report.policy(self)

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
        settings, pacer = self.config.settings, self.engine.pacer
        name = f" as {pacer.congestion_control}" if pacer.congestion_control else ""
        return f"{settings.host}: {settings.mode}, {settings.policy}, pacing {pacer.name}{name}"


def _unusable(config: Config, error: Exception) -> ConfigError:
    return ConfigError(str(config.file), "", f"cannot be used: {error}")
