# SPDX-License-Identifier: Apache-2.0
"""A slot loop with nothing around it: what would go to the kernel and to the arbiter is kept."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from seen import Seen

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Changes
from flowslotd import engine
from flowslotd.config import Config, DaemonSettings
from flowslotd.daemon import Daemon
from flowslotd.flows.counters import FlowCounters
from flowslotd.pace.pacer import PaceEntry, Pacer
from flowslotd.passes import Passes

SLOT = 60 * MILLISECOND


@dataclass
class MemoryPacer(Pacer):
    """Keeps entries in a dict, as the kernel would; writes down what it hears."""

    name = "memory"
    lends: bool = True
    entries: dict = field(default_factory=dict)
    writes: list = field(default_factory=list)
    released: list = field(default_factory=list)
    attached: list = field(default_factory=list)
    watched: dict = field(default_factory=dict)
    sent: dict = field(default_factory=dict)
    lenders: dict = field(default_factory=dict)
    deadline: int = 0
    lent: int = 0
    in_force: bool = True

    def attach(self, cookie, pid, fd):
        self.attached.append((cookie, pid, fd))

    def apply(self, entries, deadline_ns):
        self.writes.append(entries["cookie"].tolist())
        self.entries.update({e[0]: PaceEntry(*e) for e in entries.tolist()})
        self.deadline = deadline_ns
        return len(entries)

    def refresh(self, deadline_ns):
        self.deadline = deadline_ns
        in_force, self.in_force = self.in_force, True
        return in_force

    def release(self, cookie):
        self.released.append(cookie)
        self.entries.pop(cookie, None)

    def counters(self):
        known = sorted(self.sent)
        sent = [self.sent[cookie] for cookie in known]
        return FlowCounters(np.array(known, np.uint64), *np.array([sent, sent], np.int64))

    def lend(self, lenders):
        self.lenders = dict(lenders)
        self.lent += 1

    def watch(self, cookie, target):
        self.watched[cookie] = target


@dataclass
class Desk:
    """In the place of the host's sessions: collects what is said; answers on request, or at once
    (`answer`: grants for demands)."""

    demands: list = field(default_factory=list)
    dones: list = field(default_factory=list)
    gave_back: list = field(default_factory=list)
    beats: int = 0
    held: bool = True
    answer: object = None
    lease_end: int | None = None
    sessions, live = (), True

    def demand(self, now, demands):
        self.demands.append(list(demands))
        return self.answer(demands) if self.answer else []

    def done(self, now, dones):
        self.dones += dones
        return []

    def beat(self, now):
        self.beats += 1
        return self.beats % 2 == 1

    def give_back(self, flows):
        self.gave_back += flows
        return [Granted(flow, 0.0, 2e6) for flow in flows]

    def covers(self, links):
        return self.held

    def deadline(self, now):
        return min(now + 2 * SLOT, self.lease_end or now + 2 * SLOT)

    def enforced(self, session, changes):
        pass

    def next_wakeup(self, now):
        return None


def at_once(demands):
    """An answer: 1 MB/s, and at most 2, for each."""
    return [Granted(demand.flow, 1e6, 2e6) for demand in demands]


class Passing:
    """The daemon's passes, without its timers."""

    _pass, _slot_pass, _paced = Daemon._pass, Daemon._slot_pass, Daemon._paced

    def __init__(self, observer, engine, jobs):
        self.observer, self.engine = observer, engine
        self.slot = 0
        self._passes = Passes(SLOT, 0)
        self._jobs = jobs

    def _records(self):
        return self._jobs


class Setup:
    """The engine that ships, on a pacer that notes what it hears."""

    def __init__(self, topology, policy="stagger", hard=False, desk=None, paces=True):
        """`policy`: a name, or a source of rates. `paces` False: nothing is changed."""
        self.jobs = []
        self.pacer = MemoryPacer()
        self.desk = desk or Desk()
        self.observer = Seen(topology).observer
        self.table = self.observer.table
        settings = {"mode": "enforce" if paces else "observe", "pacing": {"hard": hard}}
        named = policy if isinstance(policy, str) else "static"
        settings = DaemonSettings(host="h1", policy=named, use_switch=False, **settings)
        with pytest.MonkeyPatch.context() as patch:
            if named is not policy:
                patch.setattr(engine, "open_source", lambda *_, **__: policy)
            made = engine.Engine(
                Config(Path(), Path(), settings, topology),
                observer=self.observer,
                on_rates=self.on_rates,
                on_bug=None,
                pacer=self.pacer,
            )
        self.loop, self.source, self.enforcer = made.loop, made.source, made.enforcer
        if policy == "stagger":
            self.source.host = self.desk
        self._passing = Passing(self.observer, made, self.jobs)

    def on_rates(self, now):
        self._passing._paced(now)

    def slot(self, n, touched=()):
        now, self._passing.slot = slot_start(n), n
        for job in touched:
            self._passing._passes.touch(now, job)
        self._passing._slot_pass(now)

    def events(self, now, jobs):
        """Something has happened to flows of these jobs."""
        self._passing._pass(now, jobs)

    def grant(self, now, *grants):
        """These have come."""
        self.source.take(now, 0, Changes(list(grants)))


def slot_start(n):
    return Nanos(10**12 + n * SLOT)


def start(flow, iteration=1, total=1_000_000):
    flow.begin(iteration, total)
    flow.ready(total)
