# SPDX-License-Identifier: Apache-2.0
"""Rates by grants of arbiters: core's Host, its streams to switch processes, and its timer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Floats, HostPolicy, Pace, View
from flowslot.protocol.host import Changes, Host
from flowslot.protocol.messages import FromArbiter, FromDaemon, Opening
from flowslotd.clock import monotonic, wall
from flowslotd.flows.flow_info import FlowInfo
from flowslotd.metrics import Durations
from flowslotd.negotiate.aggregates import Aggregates, Lent
from flowslotd.negotiate.source import NO_RESERVATIONS, RateSource

if TYPE_CHECKING:  # without switch processes a daemon does without gRPC
    from flowslotd.negotiate.switch_client import SwitchClient

OnRates = Callable[[Nanos], None]


_log = logging.getLogger(__name__)


class ArbiterRates(RateSource):
    """What `host` is granted. Its `sessions[k]` speaks through `clients[k]`."""

    reports = True
    why_unpaced = "no grant"

    def __init__(
        self,
        host: Host,
        aggregates: Aggregates,
        policy: HostPolicy,
        clients: Sequence[SwitchClient],
        *,
        n_links: int,
        on_rates: OnRates,
        lent: Lent,
    ) -> None:
        """`on_rates`: arbiters have changed their minds; what `due` and `rates` say has to be in
        force when it returns. `lent`: rows of flows whose rate another one uses."""
        self.host = host
        self._aggregates = aggregates
        self._policy = policy
        self._clients = clients
        self._n_links = n_links
        self._on_rates = on_rates
        self._lent = lent
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: Nanos | None = None
        self._messages_in = self._messages_out = 0
        self._error = ""
        self._negotiation, self._round_trip = Durations(), Durations()
        self._closing = False
        for k, client in enumerate(clients):
            client.source, client.k = self, k

    # --- what the slot loop asks

    def beat(self, now: Nanos) -> bool:
        """See RateSource."""
        return self.host.beat(now)

    def follow(self, now: Nanos, new: Sequence[FlowInfo], gone: Sequence[FlowInfo]) -> None:
        """See RateSource."""
        self._aggregates.follow(now, new, gone)

    def negotiate(self, now: Nanos, slot: int, *, moved: bool, small: bool) -> None:
        """See RateSource."""
        self._aggregates.report(now, self.host, small=small, lent=self._lent, tops_up=self.tops_up)
        self._speak(now)

    @property
    def waiting(self) -> bool:
        """See RateSource."""
        return self._aggregates.waiting()

    def due(self, now: Nanos) -> set[int] | None:
        """See RateSource."""
        return self._aggregates.share_out(now)

    def rates(self, now: Nanos, view: View) -> Pace | None:
        """See RateSource."""
        return self._policy.decide(now, view)

    def covers(self, links: tuple[int, ...]) -> bool:
        """See RateSource."""
        return self.host.covers(links)

    def deadline(self, now: Nanos) -> Nanos:
        """See RateSource."""
        return self.host.deadline(now)

    # --- streams and time

    async def start(self) -> None:
        """See RateSource."""
        self.host.start(monotonic())
        self._wake()

    async def close(self) -> None:
        """See RateSource."""
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()
        for client in self._clients:
            await client.close()

    def greet(self, now: Nanos, k: int) -> Opening:
        """A stream is open: what its first message starts with."""
        opening, changes = self.host.connect(now, k)
        self.take(now, k, changes)
        return opening

    def take_message(self, now: Nanos, k: int) -> FromDaemon | None:
        """What is to be written now."""
        message = self.host.take_message(now, k, wall())
        self._messages_out += message is not None
        self._rearm(now)
        return message

    def received(self, now: Nanos, k: int, message: FromArbiter) -> None:
        """A message has come."""
        self.take(now, k, self.host.received(now, k, message))

    def closed(self, now: Nanos, k: int, error: str) -> None:
        """The stream has ended, or could not be opened."""
        client = self._clients[k]
        if error and error != self._error:
            _log.warning("switch process %s at %s: %s", client.switch, client.address, error)
        self._error = error or self._error
        self.take(now, k, self.host.closed(now, k, random.uniform(0.75, 1.25)))

    def take(self, now: Nanos, k: int, changes: Changes) -> None:
        """First into force, then acknowledged."""
        if self._closing:
            return
        self._note(k, changes)
        self._aggregates.grant(changes.grants)
        if changes.grants or changes.lost:
            self._on_rates(now)
        self.host.enforced(k, changes)
        self._speak(now)

    def _note(self, k: int, changes: Changes) -> None:
        news = changes.news
        if news is not None:
            self._messages_in += 1
            if news.refused:
                self._error = news.refused[-1]
            if news.round_trip_ns is not None:
                self._round_trip.add(news.round_trip_ns)
            if news.waited_ns is not None:
                self._negotiation.add(news.waited_ns)
            if news.began:
                _log.info("negotiating with switch process %s", self._clients[k].switch)
        for lost in changes.lost if self.host.live else ():
            name = self._clients[lost].switch
            _log.warning("no switch process %s: its links are on their own", name)
        if changes.lost and not self.host.live and self.host.flows():
            _log.warning("no switch process: sharing out this host's own NICs")

    def _speak(self, now: Nanos) -> None:
        """Sessions may have something to say, or no lease any more; and look again in time."""
        for session, client in zip(self.host.sessions, self._clients, strict=True):
            if session.lost:
                client.lose()
            elif session.has_news:
                client.wake()
        self._rearm(now)

    def _rearm(self, now: Nanos) -> None:
        """Look again when the host says so."""
        at = self.host.next_wakeup(now)
        if at == self._alarm_at or self._closing:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, at
        if at is not None:
            # Timers of the loop may be early by almost a millisecond.
            delay = max(at - now, 0) + MILLISECOND
            self._alarm = asyncio.get_running_loop().call_later(delay / 1e9, self._wake)

    def _wake(self) -> None:
        """The time has come: a stream is to be opened, a heartbeat is overdue, a lease has ended,
        or the own arbiter decides."""
        self._alarm = self._alarm_at = None
        now = monotonic()
        try:
            self.take(now, 0, self.host.wake(now))
            for session, client in zip(self.host.sessions, self._clients, strict=True):
                if session.dial(now):
                    client.dial()
                else:
                    client.wake()
        finally:
            self._rearm(now)

    # --- for `flowslot status` and `links`

    def describe(self) -> dict[str, Any]:
        """See RateSource. Of clocks, the one that is furthest off."""
        counts = (self.host.counts, self.host.own_counts)
        kinds = ("granted", "refused", "preempted", "expired")
        offsets = [session.offset_us for session in self.host.sessions]
        return super().describe() | {
            "domain": self._domain(),
            "grpc_connections": sum(client.connected for client in self._clients),
            "reservations": NO_RESERVATIONS
            | {kind: sum(getattr(c, kind) for c in counts) for kind in kinds},
            "negotiation": self._negotiation.summary(),
            "clock_offset_us": max((x for x in offsets if x is not None), key=abs, default=None),
        }

    def _domain(self) -> dict[str, object]:
        """`state`: `switch`, `fallback` while no switch process is there, or `local` where there is
        none to ask. `switch`: those that are live, or all, by name; `switches`: each of several."""
        error = self._error or self.host.own_counts.error
        if not self._clients:
            return {"state": "local", "switch": None, "error": error}
        streams = [
            {
                **client.describe(),
                "session": session.session,
                "live": session.live,
                "policy": session.policy,
            }
            for client, session in zip(self._clients, self.host.sessions, strict=True)
        ]
        live = [stream for stream in streams if stream["live"]] or streams
        names = ", ".join(str(stream["switch"]) for stream in live)
        return {
            **(streams[0] if len(streams) == 1 else {"switch": names, "switches": streams}),
            "messages_in": self._messages_in,
            "messages_out": self._messages_out,
            "round_trip": self._round_trip.summary(),
            "error": error,
            "state": "switch" if self.host.own is None else "fallback",
        }

    async def load_table(self, now: Nanos) -> Floats | None:
        """See RateSource."""
        own = self.host.own
        if own is not None:
            load = own.load_table(now)
            tables = [(own.links, load)]
        else:
            answers = await asyncio.gather(*(client.load_table() for client in self._clients))
            tables = [answer for answer in answers if answer is not None]
        if not tables:
            return None
        horizon = min(load.shape[1] for _, load in tables)
        whole = np.full((self._n_links, horizon), np.nan)
        for links, load in tables:
            whole[list(links)] = load[:, :horizon]
        return whole
