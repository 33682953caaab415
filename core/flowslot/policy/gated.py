# SPDX-License-Identifier: Apache-2.0
"""A gate (gate.py) at an arbiter: transfers that it admits get max-min fair rates, others wait.

What waits is held (Terms.hold): it does not even top up. Nothing waits for ever: after an iteration
time of its job it is admitted whatever the gate says, and the hold itself ends a little later, in
case nobody is there to say so. A job that has a goal already sends, whoever gave that: a gate that
is set under load, or begins after a restart, stops nobody.

SRSF orders jobs by how long they will go on training, which no arbiter knows. Known is what is left
of the transfer; that is the service here. Bytes are counted as seconds on the bottleneck, so links
may be of different speeds.
"""

import numpy as np

from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot.policy.base import AllocationState, Allocator, Bools, Floats, Terms
from flowslot.policy.fair import share_fairly
from flowslot.policy.gate import Gate, Transfers
from flowslot.policy.transfers import TransferView, look, patience_ns

HOLD_SLACK_NS = 20 * MILLISECOND
"""A hold outlives the decision that would end it by so much."""


class GatedAllocator(Allocator):
    """`gate`: which may begin. `partial`: other arbiters decide about other links of the same jobs;
    two gates that do not know of each other would let two jobs wait for each other. So none waits
    then, and all share."""

    def __init__(self, gate: Gate, *, partial: bool = False) -> None:
        self._gate, self._partial = gate, partial
        self._change = np.zeros(0)
        self._terms = Terms()

    def allocate(self, state: AllocationState, now: Nanos) -> Floats:
        """See Allocator."""
        view = look(state)
        patience = patience_ns(view)
        sends = view.ready if self._partial else self._admit(state, view, patience)
        waits = view.ready & ~sends
        self._change = np.where(waits, np.maximum(patience - view.wait_ns, 1.0), np.inf)[state.job]
        self._terms = Terms()
        if waits.any():
            # From when it became ready on: the same moment whenever this is asked.
            ends = now - view.wait_ns.astype(np.int64) + patience.astype(np.int64) + HOLD_SLACK_NS
            held = waits[state.job] & (state.remaining > 0)
            self._terms = Terms(hold=np.where(held, ends[state.job], 0))
        return share_fairly(state, sends)

    def next_change(self, state: AllocationState) -> Floats:
        """See Allocator: patience ends. What those that send have left only falls, and lets nobody
        begin before one of them ends."""
        return self._change

    def terms(self) -> Terms:
        """See Allocator."""
        return self._terms

    def _admit(self, state: AllocationState, view: TransferView, patience: Floats) -> Bools:
        """Which jobs send, bool[J]."""
        impatient = view.ready & (view.wait_ns >= patience)
        sent = np.zeros(len(state.job_names), np.bool_)
        sent[state.job[(state.remaining > 0) & (state.goal > 0)]] = True
        transfers = Transfers(view.paths, len(state.capacity) - 1)
        ready = np.flatnonzero(view.ready)
        n = len(ready)
        np.asarray(transfers.ready)[:n] = ready
        np.asarray(transfers.size)[:] = view.whole_s
        # Those that begin in any case, and take room: a gate that interrupts serves them first.
        np.asarray(transfers.left)[:] = np.where(impatient, 0.0, view.left_s)
        np.asarray(transfers.service)[:] = (view.left_s * SECOND).astype(np.int64)
        np.asarray(transfers.sends)[:] = (sent | impatient) & view.ready
        self._gate.decide(transfers, n)
        sends: Bools = view.ready & (impatient | (np.asarray(transfers.sends) != 0))
        return sends
