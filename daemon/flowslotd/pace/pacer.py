# SPDX-License-Identifier: Apache-2.0
"""What every way of pacing flows offers to the daemon."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowslot.model.top_up import LEAST_RATE
from flowslotd.flows.counters import FlowCounters

Kind = Literal["new", "closed", "drained"]
Where = Literal["device", "kernel", "sockets", "sysctl"]


class PacingError(Exception):
    """A back end cannot work on this host; the message says why and what to do."""


class PaceEntry(NamedTuple):
    """What one flow shall do. Rates in payload bytes/s."""

    cookie: int
    reserved: float
    ceiling: float
    """Bounds the reserved rate plus its top-up."""
    guaranteed: bool
    """A live arbiter holds every link of the path: losses need not lower the rate."""
    growth: float
    """Bytes/s of top-up per ms while the path has no queue; 0: no top-up."""
    queue_us: int = 1000
    """How long the smallest buffer of the path lasts at its link's rate; more than
    `model.top_up.LONGEST_QUEUE_US` does not count."""
    burst: float = 0.0
    """Bytes that may be sent at the ceiling after they were not sent at the reserved rate."""
    least: float = LEAST_RATE
    """A lower rate becomes this one."""
    line: float = 0.0
    """What the host's own link of the path carries."""
    uplink: int = 0
    """Number of that link among the host's, from 1; 0: not known. Top-up and burst take what other
    flows leave of it while they have something to send."""


_KINDS = ("u8", "f8", "f8", "?", "f8", "i8", "f8", "f8", "f8", "i8")
ENTRY = np.dtype(list(zip(PaceEntry._fields, _KINDS, strict=True)))
Entries = NDArray[np.void]
"""ENTRY[N]: the same, packed."""


def pack(entries: Iterable[PaceEntry]) -> Entries:
    """Entries as `Pacer.apply` wants them."""
    return np.array(list(entries), ENTRY)


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """Something that happened to a socket that uses our congestion control."""

    kind: Kind
    cookie: int
    sent: int = 0
    """Bytes sent by then, as FlowCounters has them."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a way of pacing can do and what it does to the host, for people who choose one."""

    how: str
    protocols: tuple[str, ...]
    """Of `tcp`, `udp`."""
    granularity: str
    """What leaves at once, and so how far a slot can be off."""
    resume: str
    """How soon a flow at its floor follows a raised rate."""
    changes: tuple[tuple[Where, str], ...]
    """On the host, one sentence each; undone when the daemon ends, even when it is killed."""


class Pacer:
    """A way of pacing flows; this one paces nothing, and what it does is every other one's default.

    Not thread-safe: one caller at a time.
    """

    name = "none"
    """`bpf`, `edt`, `htb`, `socket` or `none`."""
    traits = Traits("no pacing", (), "", "", ())
    congestion_control = ""
    """What jobs select with TCP_CONGESTION; empty: nothing."""
    lends = False
    """`lend` has an effect."""
    noticed: Sequence[KernelEvent] = ()
    """What `events()` has to tell and `event_fd` does not."""

    def open(self) -> None:
        """Take what is needed from the kernel. Raises PacingError."""

    def close(self) -> None:
        """Free all flows and leave nothing behind. Harmless when not open."""

    def leave_by(self, addresses: Collection[str]) -> None:
        """This host's addresses, as the topology says: devices that have none of them are left
        alone unless they are named."""

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """Descriptor `fd` of process `pid` is this flow's socket (`bpf` does not need to know)."""

    def apply(self, entries: Entries, deadline_ns: int) -> int:
        """Set the entries of these flows; valid until `deadline_ns` (CLOCK_MONOTONIC).

        Unknown flows are passed over. Returns how many entries really changed. At most one entry
        per flow.
        """
        return 0

    def refresh(self, deadline_ns: int) -> bool:
        """Extend all entries that are set. False: not all are in force, because they were undone
        meanwhile, or could not be set before: they are to be applied again."""
        return True

    def release(self, cookie: int) -> None:
        """Let go of one flow: from now on it is ordinary TCP."""

    def refusal(self, cookie: int) -> str:
        """Why a flow is not paced though it was asked for; empty: nothing is known against it."""
        return ""

    def counters(self) -> FlowCounters:
        """What the kernel knows of the flows."""
        return FlowCounters.none()

    def event_fd(self) -> int | None:
        """Readable when `events()` has something; None: never."""
        return None

    def events(self) -> list[KernelEvent]:
        """What has happened since the last call."""
        return []

    def lend(self, lenders: Mapping[int, int]) -> None:
        """From now on, the flow `lenders[borrower]` lends its rate to the flow `borrower` of the
        same path, which uses it on top of its own. It does so while the lender has sent all of its
        iteration (see `watch`) and nothing more. Others lend to nobody."""

    def watch(self, cookie: int, target: int) -> None:
        """Ask for one `drained` event when the bytes that the flow has sent reach the target."""
