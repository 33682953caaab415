# SPDX-License-Identifier: Apache-2.0
"""A slot loop with nothing around it: what would go to the kernel and to the arbiter is kept."""

from dataclasses import dataclass, field

import numpy as np
from flowslot.protocol.grantbook import Granted

from flowslot.model.slot import SlotGrid
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy import registry
from flowslotd.flows.counters import FlowCounters
from flowslotd.flows.flow_table import FlowTable
from flowslotd.observe.observer import Observer
from flowslotd.pace.enforcer import Enforcer
from flowslotd.pace.pacer import PaceEntry, Pacer
from flowslotd.slotloop import SlotLoop

SLOT = 60 * MILLISECOND


@dataclass
class MemoryPacer(Pacer):
    """Keeps entries in a dict, as the kernel would; writes down what it hears."""

    lends: bool = True
    entries: dict = field(default_factory=dict)
    writes: list = field(default_factory=list)
    released: list = field(default_factory=list)
    attached: list = field(default_factory=list)
    watched: dict = field(default_factory=dict)
    acked: dict = field(default_factory=dict)
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
        known = sorted(self.acked)
        acked = [self.acked[cookie] for cookie in known]
        return FlowCounters(np.array(known, np.uint64), np.array(acked, np.int64))

    def lend(self, lenders):
        self.lenders = dict(lenders)
        self.lent += 1

    def watch(self, cookie, acked_target):
        self.watched[cookie] = acked_target


@dataclass
class Desk:
    """An arbiter's desk: collects what is said; answers on request, or at once."""

    demands: list = field(default_factory=list)
    dones: list = field(default_factory=list)
    gave_back: list = field(default_factory=list)
    beats: int = 0
    held: bool = True
    answer: object = None
    lease_end: int | None = None

    def demand(self, now, demands):
        self.demands.append(list(demands))
        if self.answer:
            self.answer(now, [Granted(d.flow, 1e6, 2e6) for d in demands])

    def done(self, now, dones):
        self.dones += dones

    def beat(self, now):
        self.beats += 1
        return self.beats % 2 == 1

    def give_back(self, flows):
        self.gave_back += flows
        return [Granted(flow, 0.0, 2e6) for flow in flows]

    def covers(self, links):
        return self.held


class Setup:
    def __init__(self, topology, policy="stagger", hard=False, desk=None):
        self.jobs = []
        self.pacer = MemoryPacer()
        self.desk = desk or Desk()
        self.observer = Observer(FlowTable(topology, "h1"), lambda pid, fd, cookie: None)
        self.table = self.observer.table
        self.enforcer = Enforcer(self.pacer, hard)
        host_policy = policy
        if isinstance(policy, str):
            host_policy = registry.get(policy).host_policy(registry.PolicyOptions())
        self.loop = SlotLoop(
            SlotGrid(),
            self.observer,
            records=lambda: self.jobs,
            policy=host_policy,
            domain=self.desk,
            pacer=self.pacer,
            enforcer=self.enforcer,
            by_grant=policy == "stagger",
        )

    def slot(self, n):
        self.loop.on_slot(slot_start(n), n)


def slot_start(n):
    return Nanos(10**12 + n * SLOT)


def start(flow, iteration=1, total=1_000_000):
    flow.begin(iteration, total)
    flow.ready(total)
