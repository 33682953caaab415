# SPDX-License-Identifier: Apache-2.0
"""Units used inside flowslot: payload bytes, payload bytes per second, nanoseconds.

Gbit/s and ms appear only in configuration files and on the command line.
"""

from typing import NewType

Rate = NewType("Rate", float)
"""Payload bytes per second (what `sk_pacing_rate` counts)."""
Nanos = NewType("Nanos", int)

SECOND = Nanos(10**9)
MICROSECOND = Nanos(10**3)
MILLISECOND = Nanos(10**6)

MSS_BYTES = 1448
"""TCP payload of a full packet at MTU 1500 with timestamps."""
WIRE_BYTES = 1514
"""The same packet on the wire, Ethernet header included (what a shaper counts)."""


def goodput(capacity_bps: float) -> Rate:
    """Payload bytes/s that a link of `capacity_bps` (bits/s on the wire) carries."""
    return Rate(capacity_bps / 8.0 * MSS_BYTES / WIRE_BYTES)


def wire_bps(rate: float) -> float:
    """Bits/s on the wire for `rate` payload bytes/s; the inverse of `goodput`."""
    return rate * 8.0 * WIRE_BYTES / MSS_BYTES
