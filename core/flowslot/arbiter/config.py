# SPDX-License-Identifier: Apache-2.0
"""Settings of an arbiter."""

from dataclasses import dataclass

from flowslot.model.slot import DEFAULT_SLOT
from flowslot.model.units import MILLISECOND, Nanos

TARGET = 0.985
"""Of a link's goodput that may be given out."""
LEASE_SLOTS = 5
"""With a heartbeat in every other slot, a lease survives three slots in which the machine, or the
network, stands still. A daemon that loses its lease begins anew, and so do all that share links
with it. The death of a daemon or a switch process is noticed sooner, by the end of its stream."""
_LEASE = Nanos(LEASE_SLOTS * DEFAULT_SLOT)
COALESCE_NS = Nanos(4 * MILLISECOND)
"""For switch processes: longer than the ranks of a job take to say that they begin."""
GUARD_NS = MILLISECOND
"""Added to the lease here, against clocks that do not run equally fast."""
ACK_LEASES = 2
"""A session that does not acknowledge a lower for so many leases loses its own."""
_ZERO = Nanos(0)


@dataclass(frozen=True, slots=True)
class ArbiterConfig:
    """Times in ns. Daemons must use the same `lease_ns`, or a shorter one.

    `target`: share of each link's goodput that may be given out. `recovery`: False only where no
    daemon can hold grants of a predecessor of this process, that is, for an arbiter inside the
    daemon.
    `coalesce_ns`: changes that no flow is waiting for are made so long after the first of them, all
    together; 0: at once.
    `max_sessions_per_owner`: of one host or address, see Hello. A host has one daemon, and its
    predecessor's lease after a restart; laboratories have more daemons at an address.
    `slot_origin_ns`: a time at which a slot begins, on the clock that `now` is taken from.
    """

    target: float = TARGET
    lease_ns: Nanos = _LEASE
    slot_ns: Nanos = DEFAULT_SLOT
    slot_origin_ns: Nanos = _ZERO
    horizon: int = 10
    coalesce_ns: Nanos = _ZERO
    recovery: bool = True
    max_sessions: int = 1024
    max_sessions_per_owner: int = 32
    max_flows_per_session: int = 2048

    def __post_init__(self) -> None:
        if not 0.0 < self.target <= 1.0:
            raise ValueError("target must be greater than 0 and at most 1")
        if min(self.lease_ns, self.slot_ns, self.horizon) <= 0:
            raise ValueError("lease_ns, slot_ns and horizon must be greater than 0")
