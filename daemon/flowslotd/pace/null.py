# SPDX-License-Identifier: Apache-2.0
"""No pacing: mode `observe`, and hosts that offer nothing else."""

from collections.abc import Collection, Mapping

from flowslotd.pace.pacer import Entries, FlowCounters, KernelEvent, Traits


class NullPacer:
    """See `Pacer`. Changes nothing, knows nothing."""

    name = "none"
    lends = False
    congestion_control = ""
    traits = Traits("no pacing", (), "", "", ())

    def open(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def leave_by(self, addresses: Collection[str]) -> None:
        """Nothing."""

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """Nothing."""

    def apply(self, entries: Entries, deadline_ns: int) -> int:
        """Nothing is written."""
        return 0

    def refresh(self, deadline_ns: int) -> bool:
        """Nothing."""
        return True

    def release(self, cookie: int) -> None:
        """Nothing."""

    def refusal(self, cookie: int) -> str:
        """See `Pacer`: none."""
        return ""

    def counters(self) -> FlowCounters:
        """Of no flow."""
        return FlowCounters.none()

    def event_fd(self) -> int | None:
        """No events."""
        return None

    def events(self) -> list[KernelEvent]:
        """No events."""
        return []

    def lend(self, lenders: Mapping[int, int]) -> None:
        """See `Pacer`: nothing is paced."""

    def watch(self, cookie: int, acked_target: int) -> None:
        """Nothing."""
