# SPDX-License-Identifier: Apache-2.0
"""The arbiter: takes in what daemons say, and decides which grants to send.

Its inputs only change tables; `step` does all the deciding. `now` is monotonic nanoseconds and
never goes back. The rules are those of the negotiation protocol: lower first and raise only from
capacity that no commitment holds (4 to 6), leases (9), recovery from amnesia (10).
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from flowslot.arbiter.batch import Batch
from flowslot.arbiter.config import ACK_LEASES, GUARD_NS, ArbiterConfig
from flowslot.arbiter.ledger import FOREVER, Ledger
from flowslot.arbiter.sessions import Session, Sessions
from flowslot.arbiter.validate import check_hello, clamp_demand, refuse_demand
from flowslot.model.errors import ScheduleRefused, SessionEnded
from flowslot.model.loadtable import LoadTable
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator, Bools, Floats, Rows
from flowslot.protocol.messages import Ack, Demand, Done, Grant, Hello, Refusal


class Arbiter:
    """Arbiter of one contention domain. Needs no lock: one caller at a time."""

    def __init__(self, capacity: ArrayLike, config: ArbiterConfig, allocator: Allocator) -> None:
        """`capacity`: goodput of each link, payload bytes/s, float64[L]."""
        goodput = np.array(capacity, dtype=np.float64)
        if goodput.ndim != 1 or not goodput.size or not np.all(np.isfinite(goodput)):
            raise ValueError("capacity must be a list of finite numbers")
        if np.any(goodput <= 0):
            raise ValueError("capacity must be greater than 0")
        self.config = config
        self.granted = 0
        """Raises sent."""
        self.refused = 0
        """Demands and explicit schedules that were not accepted."""
        self.scheduled = 0
        """Explicit schedules that were accepted, also those that take something back."""
        self.preempted = 0
        """Lowers sent to flows that were active."""
        self.expired = 0
        """Sessions whose lease ended."""
        self._allocator = allocator
        self._limit: Floats = config.target * goodput
        self._table = LoadTable(len(goodput), config.horizon, self._limit)
        self._flows = Ledger(goodput)
        self._batch = Batch(self._flows)
        self._sessions = Sessions(config)
        self._seq = 0
        self._recovered_at: Nanos | None = None if config.recovery else Nanos(0)
        self._coalesced_at: Nanos | None = None
        """When to make the changes that no flow is waiting for; None: there are none."""
        self._raises = False  # the last step was made after the recovery

    def use(self, allocator: Allocator) -> None:
        """Decide by this one from now on. What is granted stays so until the next decision, which
        changes it as any other does: lower first."""
        self._allocator = allocator
        self._flows.look_at_all()

    # --- what daemons say

    def hello(self, now: Nanos, hello: Hello) -> None:
        """A daemon's stream has begun; what it holds replaces all that was known of it.

        Repeated and outdated Hellos have no effect. Raises ProtocolError when it makes no sense,
        SessionEnded when it claims what was not granted here: by now, or before this arbiter began,
        that lease is over. Nothing changes then, and the stream should be closed.
        """
        self._begin(now)
        check_hello(hello, self.config)
        older = self._sessions.newest(hello)
        if self.recovered(now) and hello.session > older:
            flow = self._flows.overstated(older, hello.held)
            if flow is not None:
                problem = "holds more than was granted here; its lease has to end first"
                raise SessionEnded(f"flow {flow} {problem}")
        opened = self._sessions.open(now, hello)
        if opened is None:
            return
        session, replaced = opened
        flows = self._flows
        before = set() if replaced is None else set(flows.of_session(replaced))
        most = float(self._limit.max()) / self.config.target
        for held in hello.held:
            if held.flow in before:
                before.discard(held.flow)
                slot = flows.slots[replaced or 0, held.flow]
                flows.move(slot, session.id)
            else:
                slot = flows.add(session.id, held.flow, held.inc)
                flows.rows["held_since"][slot] = now
            # The daemon drops whatever is still on its way in its older streams, so this is all
            # that it can be sending at.
            flows.restate(now, slot, held.inc, min(held.rate, most))
        session.flows = len(hello.held)
        for flow in sorted(before):
            flows.remove(replaced or 0, flow)

    def demand(self, now: Nanos, session: int, demands: Sequence[Demand]) -> list[Refusal]:
        """Flows of a session report their state; returns the demands that are not accepted."""
        self._begin(now)
        owner = self._sessions.live(session)
        if owner is None:
            return []
        refusals: list[Refusal] = []
        accepted: dict[int, Demand] = {}
        for demand in demands:
            reason = refuse_demand(demand, self._flows.n_links)
            slot = None if reason else self._slot_for(owner, demand)
            if isinstance(slot, int):
                earlier = accepted.get(slot)
                if earlier is None or demand.inc >= earlier.inc:
                    accepted[slot] = clamp_demand(demand)
            elif reason or slot:
                refusals.append(Refusal(demand.flow, demand.inc, reason or slot or ""))
        if accepted:
            self._flows.report(now, list(accepted), list(accepted.values()))
            for slot, demand in accepted.items():
                if demand.gave_back:
                    self._flows.give_back(now, slot, demand.gave_back)
        self.refused += len(refusals)
        return refusals

    def _slot_for(self, owner: Session, demand: Demand) -> int | str | None:
        """Slot of the flow, new if need be; why it is refused; or None: the demand is outdated."""
        flows = self._flows
        slot = flows.slots.get((owner.id, demand.flow))
        if slot is None:
            if demand.inc <= owner.ended.get(demand.flow, -1):
                return None
            if owner.flows >= self.config.max_flows_per_session:
                return f"the session already has {owner.flows} flows"
            slot = flows.add(owner.id, demand.flow, demand.inc)
            owner.flows += 1
        elif demand.inc < flows.rows["inc"][slot]:
            return None
        if flows.path(slot) not in {(), demand.links}:
            return "a flow's path cannot change; send Done, then a higher incarnation"
        flows.place(slot, demand.job, demand.links)
        return slot

    def done(self, now: Nanos, session: int, dones: Sequence[Done]) -> None:
        """Flows have ended: their commitments end with them."""
        self._begin(now)
        owner = self._sessions.live(session)
        if owner is None:
            return
        for done in dones:
            slot = self._flows.slots.get((session, done.flow))
            if slot is not None and done.inc >= self._flows.rows["inc"][slot]:
                self._flows.remove(session, done.flow)
                owner.flows -= 1
                owner.end(done.flow, done.inc)

    def ack(self, now: Nanos, session: int, acks: Sequence[Ack]) -> None:
        """Grants have been applied: the commitments that they lowered end."""
        self._begin(now)
        if self._sessions.live(session) is None:
            return
        newest: dict[int, int] = {}
        for ack in acks:
            slot = self._flows.slots.get((session, ack.flow))
            if slot is not None:
                newest[slot] = max(ack.seq, newest.get(slot, 0))
        if newest:
            self._flows.acknowledge(now, newest)

    def heartbeat(self, now: Nanos, session: int) -> bool:
        """A heartbeat came: the session's lease starts anew. Echo it only when this is True.

        False: the session is not honoured any more; close its stream, its daemon must start a
        new one. An echo would make it enforce grants that nothing is committed for.
        """
        self._begin(now)
        owner = self._sessions.live(session)
        if owner is None:
            return False
        owner.heard = now
        return True

    def goodbye(self, now: Nanos, session: int) -> None:
        """A stream has closed. What its daemon holds stays committed until the lease ends."""
        self._begin(now)
        owner = self._sessions.live(session)
        if owner is not None:
            owner.closed = True
            self._flows.look_at_session(session)

    def honours(self, session: int) -> bool:
        """The session's stream is open and its lease has not ended."""
        return self._sessions.live(session) is not None

    def take_over(self) -> list[int]:
        """See Sessions.take_over."""
        return self._sessions.take_over()

    def daemons(self) -> list[str]:
        """Names of those that may still enforce something."""
        return [session.daemon for session in self._sessions]

    # --- what the arbiter answers

    def step(self, now: Nanos) -> dict[int, list[Grant]]:
        """Decide: returns the grants to send, by session, each list in order."""
        self._begin(now)
        self._table.advance(self._slot(now))
        if self._raises != self.recovered(now):
            self._raises = self.recovered(now)
            self._flows.look_at_all()
        slots = self._due(now)
        if not slots.size:
            if self._coalesced_at is not None and now >= self._coalesced_at:
                self._coalesced_at = None
            return {}
        batch = self._batch
        batch.open(slots, now)
        # Explicit schedules are never taken back.
        limit = self._limit - self._table.peak() if len(self._table) else self._limit
        edges = self._plan(now, batch, limit)
        grants: dict[int, list[Grant]] = {}
        # In a burst every demand changes what all flows are to have, by a little.
        at, coalesce = self._coalesced_at, self.config.coalesce_ns
        pressing = coalesce > 0 and (at is None or now < at)
        mute = self._mute(batch)
        lowered = self._lower(batch, mute, limit if pressing else None, grants)
        if self._raises:
            self._raise(batch, mute, lowered, limit, pressing, grants)
        if not pressing:
            self._coalesced_at = None
        elif at is None and batch.unsettled():
            self._coalesced_at = Nanos(now + coalesce)
        slot = self._next_slot(now)
        latest = slot if len(self._table) else FOREVER
        patience = ACK_LEASES * self.config.lease_ns
        later = self._coalesced_at or (Nanos(now + coalesce) if coalesce else slot)
        batch.close(edges, slot, later, patience, latest)
        return {session: grants[session] for session in sorted(grants)}

    def next_wakeup(self, now: Nanos) -> Nanos:
        """When to call `step` next, if nothing is received before."""
        others = self._sessions.next_expiry(), self._coalesced_at, self._recovered_at
        times = [time for time in others if time is not None and time > now]
        return Nanos(min(self._next_slot(now), self._flows.next_due(now), *times))

    def recovered(self, now: Nanos) -> bool:
        """A full lease has passed: every grant that a daemon still holds is known from a Hello
        (ADR 1, 9). Recovery cannot end earlier: how many daemons held grants of a predecessor of
        this process is not known.
        """
        return self._recovered_at is not None and now >= self._recovered_at

    def commitments(self) -> Floats:
        """What may be sent on each link by flows that hold grants, float64[L]."""
        return self._flows.commitments()

    def load_table(self, now: Nanos) -> Floats:
        """Load in the next K slots, explicit schedules and commitments, float64[L, K].

        Grants have no end, so commitments count in every slot.
        """
        self._table.advance(self._slot(now))
        return self._table.load(range(self._flows.n_links)) + self.commitments()[:, None]

    def update_schedule(
        self,
        now: Nanos,
        flow: Hashable,
        links: Sequence[int],
        rates: Sequence[float],
        offset: int = 0,
    ) -> None:
        """Reserve rates for the slots from `offset` (0: the current one) on, or none if all zero.

        Raises ScheduleRefused when it does not fit beside all commitments, in any slot; those
        are never taken back for it, nor are raises made into what it has reserved.
        """
        self._begin(now)
        self._table.advance(self._slot(now))
        try:
            if not self.recovered(now):
                raise ScheduleRefused("the switch process has just started; try again in a lease")
            self._table.update(flow, links, rates, offset, self.commitments())
        except ScheduleRefused:
            self.refused += 1
            raise
        self.scheduled += 1
        self._flows.look_at_all()

    # --- how

    def _begin(self, now: Nanos) -> None:
        """Common to all events: the recovery clock starts, and leases end in time."""
        if self._recovered_at is None:
            self._recovered_at = Nanos(now + self.config.lease_ns + GUARD_NS)
        for session in self._sessions.expire(now):
            self.expired += 1
            for flow in self._flows.of_session(session.id):
                self._flows.remove(session.id, flow)

    def _slot(self, now: Nanos) -> int:
        return (now - self.config.slot_origin_ns) // self.config.slot_ns

    def _next_slot(self, now: Nanos) -> Nanos:
        slot = self.config.slot_ns
        return Nanos(now + slot - (now - self.config.slot_origin_ns) % slot)

    def _due(self, now: Nanos) -> Rows:
        """Flows to decide on; sessions that have not acknowledged a lower in time are given up."""
        before = Nanos(now - ACK_LEASES * self.config.lease_ns)
        slots = self._flows.due(now)
        late = [s for s in self._flows.overdue(slots, before) if self._sessions.give_up(s)]
        for session in late:
            self._flows.look_at_session(session)  # in other parts, too
        return self._flows.due(now) if late else slots

    def _plan(self, now: Nanos, batch: Batch, limit: Floats) -> Floats:
        """Set every flow's goal; `limit`: float64[L]. Returns Allocator.next_change."""
        # A goal that fits but for a rounding error would wait for room for ever.
        capacity = np.maximum(limit, 0.0) * (1 - 1e-8)
        state = batch.state(capacity)
        target = self._allocator.allocate(state, now)
        terms = self._allocator.terms()
        batch.settle(target, terms, capacity, now - self.config.lease_ns)
        return self._allocator.next_change(state)

    def _mute(self, batch: Batch) -> Bools:
        """Flows of sessions that cannot be talked to, bool[F]."""
        closed = [session.id for session in self._sessions if session.closed]
        if not closed:
            return np.zeros(len(batch.slots), np.bool_)
        return np.isin(batch.rows["session"], closed)

    def _lower(
        self, batch: Batch, mute: Bools, limit: Floats | None, grants: dict[int, list[Grant]]
    ) -> Rows:
        """`limit`: float64[L], make room there for those that wait; None: wherever it is due."""
        may = ~mute if limit is None else ~mute & batch.in_the_way(mute, limit)
        lowered = batch.lower(may, self._seq + 1)
        if lowered.size:
            self._seq += len(lowered)
            self.preempted += int((batch.rows["remaining"][lowered] > 0).sum())
            self._write(batch, lowered, True, grants)
        return lowered

    def _raise(  # noqa: PLR0917
        self,
        batch: Batch,
        mute: Bools,
        lowered: Rows,
        limit: Floats,
        pressing: bool,
        grants: dict[int, list[Grant]],
    ) -> None:
        raised, rates = batch.raises(mute, limit, batch.borrow(lowered), pressing=pressing)
        if raised.size:
            self.granted += batch.set_grants(raised, rates, self._seq + 1)
            self._seq += len(raised)
            self._write(batch, raised, False, grants)

    def _write(
        self, batch: Batch, flows: Rows, must_ack: bool, grants: dict[int, list[Grant]]
    ) -> None:
        rows, now = batch.tell(flows), batch.now
        columns = ("session", "flow", "inc", "seq", "grant", "tightest", "standing", "hold", "most")
        for session, flow, inc, seq, rate, tightest, standing, hold, each, share in zip(
            *(rows[column].tolist() for column in columns),
            self._flows.shares(batch.slots[flows]).tolist(),
            strict=True,
        ):
            ceiling, part = (min(tightest, each), share) if tightest < math.inf else (0.0, 0.0)
            held = max(hold - now, 0)
            grant = Grant(flow, inc, seq, rate, ceiling, must_ack, standing, part, held)
            grants.setdefault(session, []).append(grant)
