# SPDX-License-Identifier: Apache-2.0
"""MLCC as its authors' public prototype has it (github.com/JoeyYoung/mlcc), which is not the paper.

What was read there, and is done here:

1. One call computes the rate inside the switch process; hosts only ask and apply. So this is an
   allocator, asked once a slot; slots are 80 ms there, and have the length of ours here.
2. The load of a slot, as a flow sees it, is what one other flow of the same sending host that
   shares a link with it has planned there: the last one that is looked at overwrites the others.
   Flows of other hosts count for nothing.
3. A flow may use the line rate of its path in any slot, whatever others have planned.
4. When it begins, VOLUME times its bytes are laid into up to K - 1 of the next K slots, those with
   the least load first. The cost that is compared adds slot numbers, and the schedule that is kept
   is the last that was tried: that of K - 1 slots.
5. From then on it plans what is left of that volume anew in each slot, for the slots that are left.
   Past K - 1 slots it has the line rate.

A flow that is behind the one that follows it is raised there; here flows are told apart by their
bytes only, and none is. Planning anew fails there with an error where slots are already over: what
was meant is done. Links that too much is planned for are shared equally, as a network would.
"""

from collections.abc import Iterable

import numpy as np

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import SECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Floats
from flowslot.policy.fill import weighted

K = 10
VOLUME = 1.6


def lay(volume: float, bound: float, load: list[float], most: int) -> list[float]:
    """Rates that send `volume` (in bytes/s times slots), at most `bound` in each of at most `most`
    slots, those with the least load first, as many as `load` has."""
    rates = [0.0] * len(load)
    for k in sorted(range(len(load)), key=load.__getitem__)[:most]:
        if volume <= 0.0:
            break
        rates[k] = min(bound, volume)
        volume -= rates[k]
    return rates


class _Plan:
    """Of a flow: rates from slot `since` on."""

    def __init__(self, since: int, remaining: float) -> None:
        self.since, self.given, self.remaining = since, 0.0, remaining
        self.rates = [0.0] * K

    def ahead(self, slot: int) -> list[float]:
        """From this slot on, of K slots."""
        rest = self.rates[min(max(slot - self.since, 0), K) :]
        return rest + [0.0] * (K - len(rest))


class PrototypeAllocator(Allocator):
    """See the module. Idle flows get nothing."""

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = {}
        self._slot = -1
        self._rates: dict[int, float] = {}

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator. Within a slot, flows that have a rate keep it."""
        slot = now // DEFAULT_SLOT
        active = np.flatnonzero((state.remaining > 0) & (state.cap > 0))
        flows: list[int] = state.flow[active].tolist()
        here = set(flows)
        self._plans = {flow: plan for flow, plan in self._plans.items() if flow in here}
        if slot != self._slot:
            self._slot, self._rates = slot, {}
        line = state.goodput[state.paths].min(axis=1).tolist()
        wanted = [0.0] * len(line)
        flow_of, left_of, cap = state.flow.tolist(), state.remaining.tolist(), state.cap.tolist()
        first = state.paths[:, 0].tolist()
        hosts: dict[int, list[int]] = {}
        for row in active[np.argsort(state.flow[active], kind="stable")].tolist():
            hosts.setdefault(first[row], []).append(row)
        for link, rows in hosts.items():
            others = rows[::-1] if link < len(state.capacity) - 1 else []
            for row in rows:
                flow, left = flow_of[row], left_of[row]
                plan = self._plans.get(flow)
                if plan is None or left > plan.remaining:  # another iteration
                    plan = self._plans[flow] = _Plan(slot, left)
                    self._rates.pop(flow, None)
                plan.remaining = left
                if slot - plan.since >= K - 1:
                    self._rates[flow] = line[row]
                elif flow not in self._rates:
                    load = self._load(flow, map(flow_of.__getitem__, others), slot)
                    whole = max(float(state.next_bytes[row]), left)
                    self._rates[flow] = self._next(whole, plan, load, line[row])
                wanted[row] = min(self._rates[flow], cap[row])
        rates = np.zeros(len(wanted))
        weighted(state.paths, state.capacity, np.array(wanted), np.ones(len(wanted)), rates)
        return rates

    def _load(self, flow: int, others: Iterable[int], slot: int) -> list[float]:
        """See 2 of the module, of K slots. `others`: flows that leave by the same link, the last
        one first."""
        for other in others:
            plan = self._plans.get(other)
            if other != flow and plan is not None:
                return plan.ahead(slot)
        return [0.0] * K

    def _next(self, whole: float, plan: _Plan, load: list[float], line: float) -> float:
        """Rate in one of its first K - 1 slots, of a flow that had so many bytes when it began."""
        offset = self._slot - plan.since
        left = VOLUME * (whole / (DEFAULT_SLOT / SECOND)) - plan.given
        plan.rates[offset:] = lay(left, line, load[: K - offset], K - 1)
        rate = plan.rates[offset]
        plan.given += rate
        return rate
