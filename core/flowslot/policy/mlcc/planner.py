# SPDX-License-Identifier: Apache-2.0
"""A host's end of MLCC: runs the policy against load tables that come when they come.

Theory of operation. The host's flows are shown to `rates`, which says what they may send at
present; rates never wait for a switch process. When a plan is `wanted` (a slot has begun, or flows
have, if the policy minds), a transport runs a round, one at a time:

    calls = begin(now)             Fetch: load tables of the links on the flows' paths
    calls = plan(now, answers)     Reserve: what is given back, then what is asked for
    calls = reserved(now, answers) Reserve, and so on, until there are none

The transport makes all calls of a batch at the same time, and hands their answers over in the
calls' order; None: there was none before the call's `until`. An update that not all switch
processes of its path accept is undone where it was accepted, and planned anew in another round.
Until a round has ended, flows have the least of what they had and of what is planned: a switch may
give to others what was taken back as soon as it is told.

Pure: the daemon's transport is gRPC, the simulator's is simulated.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowslot.model.schedule import Schedule
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import Bools, Floats, Pace, View
from flowslot.policy.mlcc.bandwidth import Observed
from flowslot.policy.mlcc.depend import Dependency
from flowslot.policy.mlcc.livelock import LivelockDetector, Stall
from flowslot.policy.mlcc.policy import MlccPolicy, Update

PATIENCE_SLOTS = 2
"""A switch process that has not answered for longer has no say: its flows are let go."""
FETCH_PART = 0.4
"""Of a slot: load tables that take longer are too old to plan with."""
ROUND_PART = 0.8
"""Of a slot: a round that takes longer gives up what it has not sent yet. What it undoes has until
a slot has passed."""
EARLY_PART = 1 / 512
"""Of a slot. Plans count on so much less of it: what is to end with it must not miss it by a
rounding error, and wait for the next one with its last byte."""
AGAIN = 3
"""Plans in a slot that are made anew when they are refused; then the next slot is waited for."""
_NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Ask switch process `switch`, by number, for the Feedback of these links of its own."""

    switch: int
    links: tuple[int, ...]
    until: Nanos


@dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """Send `update`, with those links that switch process `switch` holds. Answers: whether it was
    accepted; if not, nothing has changed there."""

    switch: int
    update: Update
    until: Nanos


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """What a switch process said of N links. `load`: float64[N, K], payload bytes/s in the slots
    from `slot` on; `reservable`: float64[N], what may be given out in each slot."""

    slot: int
    links: tuple[int, ...]
    load: Floats
    reservable: Floats


@dataclass(slots=True)
class Counts:
    """What the rounds have brought."""

    rounds: int = 0
    late: int = 0
    """Rounds without a plan: a load table did not come in time."""
    accepted: int = 0
    """Updates, by all switch processes of their path."""
    refused: int = 0
    undone: int = 0
    """Calls that took back what one switch process had accepted, and another one had not."""


class Reserving:
    """See above. `now` is monotonic nanoseconds."""

    def __init__(
        self,
        policy: MlccPolicy,
        held: Sequence[bool],
        switches: Sequence[Container[int]],
        slot_ns: Nanos,
        *,
        target: float = 1.0,
        at_once: bool = False,
    ) -> None:
        """`held`: by link, whether a switch process holds it. Of the others, the policy may give
        `target` of their goodput to this host's flows, whatever other hosts do. `switches`: the
        links of each switch process that can be asked. `at_once`: plans hold before a switch has
        answered, as in the paper; only for switches that refuse nothing."""
        self.stalls: list[Stall] = []
        """What the detector has found since somebody emptied this."""
        self.wanted = False
        """A round is due."""
        self.counts = Counts()
        self._policy = policy
        self._held: Bools = np.array(held, dtype=np.bool_)
        self._switches = switches
        self._slot_ns = slot_ns
        self._target = target
        self._at_once = at_once
        self._detector = LivelockDetector()
        self._heard = np.full(len(held), _NEVER, dtype=np.int64)
        """When each link's switch process last answered for all of a round."""
        self._known: Bools = np.zeros(len(held), np.bool_)
        """Links of which the last round brought usable feedback; and those that nobody holds."""
        self._began = Nanos(0)
        """When the slot of the view did; what has passed of it when the tables come, has passed."""
        self._view: View | None = None
        self._flows: Mapping[int, float] = {}
        self._sent: tuple[int, Mapping[int, float]] = (_NEVER, {})
        self._observed: list[Observed] = []
        self._pace: Pace | None = None
        self._again = 0  # so often plans of this slot were refused
        # Of the round under way:
        self._round = Nanos(0)  # when it began
        self._fetches: tuple[Fetch, ...] = ()
        self._silent: set[int] = set()
        self._planned: Pace | None = None
        self._batches: list[list[Update]] = []  # not sent yet
        self._batch: list[Update] = []
        self._calls: tuple[Reserve, ...] = ()
        self._refused: list[Update] = []

    def rates(
        self, now: Nanos, view: View, loads: tuple[Floats, Floats] | None = None
    ) -> Pace | None:
        """What is in force at present; None: no flow is paced. A round may be `wanted` by then.

        `loads`: when a slot begins, if links are counted, what each carried in the last one, of
        controlled flows and in all, float64[L] each; see Observed."""
        begins = self._view is None or view.slot != self._view.slot
        self._view = view
        if begins:
            self._began = now
            self._begin(view, loads)
        flows = dict(zip(view.flow.tolist(), view.remaining.tolist(), strict=True))
        if begins or (self._policy.replans and _differ(self._flows, flows)):
            self.wanted = True
        self._flows = flows
        return self._in_force(now, view)

    def ask(self) -> None:
        """What this host's flows depend on has changed: a round is due if the planner minds."""
        self.wanted |= self._policy.replans and self._view is not None

    def in_force(self, now: Nanos) -> tuple[Mapping[int, float], float]:
        """Rate of each flow, payload bytes/s, and for how many seconds more: till the slot ends."""
        if self._view is None:
            return {}, 0.0
        left_s = max(self._began + self._slot_ns - now, 0) / SECOND
        pace = self._in_force(now, self._view)
        if pace is None:
            return {}, left_s
        at = pace.schedule.at(self._view.slot).tolist()
        return dict(zip(pace.flows.tolist(), at, strict=True)), left_s

    # --- rounds

    def begin(self, now: Nanos) -> tuple[Fetch, ...]:
        """A round begins. Of one that was broken off, nothing counts as accepted."""
        if self._planned is not None:
            self._refused += [*self._batch, *(u for batch in self._batches for u in batch)]
            self._settle()
        self.wanted = False
        self.counts.rounds += 1
        self._round, self._silent = now, set()
        links: list[int] = [] if self._view is None else np.unique(self._view.paths).tolist()
        until = Nanos(now + int(FETCH_PART * self._slot_ns))
        self._fetches = tuple(Fetch(k, its, until) for k, its in self._by_switch(links))
        return self._fetches

    def plan(
        self,
        now: Nanos,
        answers: Sequence[Feedback | None],
        dependencies: Mapping[int, Dependency],
    ) -> tuple[Reserve, ...] | None:
        """None: nothing is planned. `dependencies`: of this host's flows.

        Flows of links without feedback are left out, and so let go, once their switch process has
        been silent for PATIENCE_SLOTS. Before that, what was planned last goes on for all.
        """
        view = self._view
        assert view is not None, "nobody has asked for rates yet"
        self._note_silence(self._fetches, answers)
        feedback = [f for f in answers if f is not None and _columns(f, view.slot) > 0]
        known = ~self._held
        for one in feedback:
            known[list(one.links)] = True
        self._known = known
        unknown = np.unique(view.paths[~np.append(known, True)[view.paths]])
        if np.any(self._is_fresh(now)[unknown]):
            self.counts.late += 1
            self._answered(now)
            return None
        # The answers to updates will take as long as those to this round's first calls did.
        wait = 0 if self._at_once or self._silent else now - self._round
        passed = (now + wait - self._began) / self._slot_ns + EARLY_PART
        view = replace(self._with_load(view, feedback, _on(view, known)), passed=passed)
        for observed in self._observed:
            self._policy.observe(observed)
        self._observed = []
        self._policy.dependencies = dependencies
        self._planned = planned = self._policy.decide(now, view)
        self._pace = planned if self._at_once else _lower(self._pace, planned, view.slot)
        # What is given back goes first. What is asked for is not sent one by one, which would take
        # as many round trips: should updates overtake each other, only a preference is lost.
        back = [update for update in self._policy.updates if update.before is None]
        more = [update for update in self._policy.updates if update.before is not None]
        self._batches, self._refused = [back, more], []
        return self._next(now)

    def reserved(self, now: Nanos, answers: Sequence[bool | None]) -> tuple[Reserve, ...]:
        """The last calls were accepted or not; what to call now. (): the round has ended."""
        self._note_silence(self._calls, answers)
        undo: list[Reserve] = []
        for update in self._batch:
            its = [
                (call, ok)
                for call, ok in zip(self._calls, answers, strict=True)
                if call.update.flow == update.flow
            ]
            if all(ok for _, ok in its):
                self.counts.accepted += bool(its)
                continue
            self.counts.refused += 1
            self._refused.append(update)
            if update.before is not None:
                # Less than was just accepted, unless the policy does not give back first: then it
                # may be refused, and what is too much there ends with the next update.
                until = Nanos(self._round + self._slot_ns)
                undo += [
                    replace(c, update=replace(c.update, rates=update.before), until=until)
                    for c, ok in its
                    if ok
                ]
        self.counts.undone += len(undo)
        self._batch, self._calls = [], tuple(undo)
        return self._calls or self._next(now)

    def end(self, now: Nanos) -> tuple[Reserve, ...]:
        """Nobody plans any more: what takes all reservations back."""
        self._batches = [list(self._policy.give_back())]
        return self._send(Nanos(now + self._slot_ns))

    def _next(self, now: Nanos) -> tuple[Reserve, ...]:
        """The next batch that has calls; without one the round has ended."""
        if self._batches:
            until = Nanos(self._round + int(ROUND_PART * self._slot_ns))
            return self._send(until) or self.reserved(now, ())
        self._settle()
        self._answered(now)
        return ()

    def _send(self, until: Nanos) -> tuple[Reserve, ...]:
        self._batch = self._batches.pop(0)
        self._calls = tuple(
            Reserve(k, replace(update, links=its), until)
            for update in self._batch
            for k, its in self._by_switch(update.links)
        )
        return self._calls

    def _settle(self) -> None:
        """What was not refused is in force; if anything was, another round is due."""
        assert self._planned is not None
        self._pace = self._policy.refused(self._refused) if self._refused else self._planned
        self._planned, self._batch, self._batches = None, [], []
        if self._refused:
            self._again += 1
            self.wanted |= self._again < AGAIN

    def _note_silence(self, calls: Sequence[Fetch | Reserve], answers: Sequence[object]) -> None:
        pairs = zip(calls, answers, strict=True)
        self._silent |= {call.switch for call, answer in pairs if answer is None}

    def _answered(self, now: Nanos) -> None:
        """A switch process that has answered all that it was asked in this round is there, if its
        feedback was of use."""
        for fetch in self._fetches:
            if fetch.switch not in self._silent:
                self._heard[[link for link in fetch.links if self._known[link]]] = now

    def _by_switch(self, links: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Which of these links each switch process holds, if any."""
        parts = [tuple(x for x in links if x in its) for its in self._switches]
        return [(k, its) for k, its in enumerate(parts) if its]

    # --- how

    def _begin(self, view: View, loads: tuple[Floats, Floats] | None) -> None:
        """A slot begins: what the last one was like."""
        self._again = 0
        ready = view.remaining > 0
        self.stalls += self._detector.feed(view.slot - 1, view.flow.tolist(), view.remaining, ready)
        so_far: dict[int, float] = {}
        if view.sent is not None:
            counted = ~np.isnan(view.sent)
            flows, values = view.flow[counted].tolist(), view.sent[counted].tolist()
            so_far = dict(zip(flows, values, strict=True))
        slot, before = self._sent
        self._sent = view.slot, so_far
        if slot == view.slot - 1:
            sent = {f: max(so_far[f] - before[f], 0.0) for f in so_far if f in before}
            # Planned against only when load tables come again; who waits long needs the last few.
            self._observed = [*self._observed[-3:], Observed(slot, sent, loads)]

    def _in_force(self, now: Nanos, view: View) -> Pace | None:
        pace = self._pace
        if pace is None:
            return None
        heard = view.flow[_on(view, ~self._held | self._is_fresh(now))]
        keep = np.isin(pace.flows, heard)
        rates = pace.schedule.rates[keep]
        schedule = Schedule(pace.schedule.base_slot, rates)
        # Who may top up how far was worked out for the first slot only.
        ahead = view.slot > schedule.base_slot
        tops = schedule.at(view.slot) if ahead else pace.ceilings[keep]
        return Pace(pace.flows[keep], schedule, tops, pace.guaranteed[keep])

    def _is_fresh(self, now: Nanos) -> Bools:
        """By link, of those that are held."""
        fresh: Bools = now - self._heard <= PATIENCE_SLOTS * self._slot_ns
        return fresh

    def _with_load(self, view: View, feedback: Sequence[Feedback], rows: Bools) -> View:
        """Of these rows, with the load tables; links of which nothing is known are never full."""
        horizon = min([view.horizon, *(_columns(f, view.slot) for f in feedback)])
        capacity = self._target * view.capacity
        load = np.zeros((len(capacity), horizon))
        for one in feedback:
            links, skip = list(one.links), view.slot - one.slot
            capacity[links] = one.reservable
            # A switch process whose clock is ahead: the slots before are as its first one.
            columns = np.maximum(np.arange(horizon) + skip, 0)
            load[links] = one.load[:, columns]
        return replace(
            view,
            horizon=horizon,
            capacity=capacity,
            flow=view.flow[rows],
            paths=view.paths[rows],
            job=view.job[rows],
            remaining=view.remaining[rows],
            guaranteed=view.guaranteed[rows],
            load=load,
            sent=None,
        )


def _on(view: View, links: Bools) -> Bools:
    """By flow, whether all links of its path are among these."""
    rows: Bools = np.all(np.append(links, True)[view.paths], axis=1)
    return rows


def _columns(feedback: Feedback, slot: int) -> int:
    """How many slots it covers from `slot` on; 0 when the clocks are more than a slot apart."""
    behind = slot - feedback.slot
    return feedback.load.shape[1] - max(behind, 0) if abs(behind) <= 1 else 0


def _differ(old: Mapping[int, float], new: Mapping[int, float]) -> bool:
    """Whether flows have come, gone, begun or ended."""
    return old.keys() != new.keys() or any(
        left > old[flow] or (left > 0) != (old[flow] > 0) for flow, left in new.items()
    )


def _lower(old: Pace | None, new: Pace, slot: int) -> Pace:
    """`new`, but in `slot` nobody above what `old` had: nothing is reserved yet."""
    rates = new.schedule.rates.copy()
    if old is not None:
        had = dict(zip(old.flows.tolist(), old.schedule.at(slot).tolist(), strict=True))
        most = np.array([had.get(flow, np.inf) for flow in new.flows.tolist()])
        rates[:, 0] = np.minimum(rates[:, 0], most)
    return Pace(new.flows, Schedule(slot, rates), rates[:, 0], new.guaranteed)
