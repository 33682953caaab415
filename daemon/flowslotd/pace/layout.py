# SPDX-License-Identifier: Apache-2.0
"""The tables of bpf/flowslot.h as NumPy types."""

from enum import IntEnum

import numpy as np

from flowslotd.pace.pacer import Kind

SLOTS = 16384


class Mode(IntEnum):
    """What a flow does at the moment."""

    OPEN = 0
    CAPPED = 1
    RESERVED = 2


KINDS: dict[int, Kind] = {1: "new", 2: "closed", 3: "drained"}
"""Of `EVENT`."""

CTL = np.dtype(
    [
        ("cookie", "u8"),
        ("deadline_ns", "u8"),
        ("reserved", "u8"),
        ("ceiling", "u8"),
        ("drain_at", "u8"),
        ("growth", "u4"),
        ("queue_us", "u4"),
        ("base_rtt_us", "u4"),
        ("guaranteed", "u4"),
        ("lender", "u4"),
        ("lender_cookie", "u4"),
        ("burst", "u4"),
        ("least", "u4"),
        ("line", "u8"),
        ("uplink", "u4"),
        ("pad0", "u4"),
    ]
)

STAT = np.dtype(
    [
        ("cookie", "u8"),
        ("sent", "u8"),
        ("rate", "u8"),
        ("extra", "u8"),
        ("active_ns", "u8"),
        ("unsent", "u4"),
        ("srtt_us", "u4"),
        ("min_rtt_us", "u4"),
        ("rtt_us", "u4"),
        ("retrans", "u4"),
        ("cwnd", "u4"),
        ("mode", "u4"),
        ("high", "u4"),
        ("family", "u2"),
        ("sport", "u2"),
        ("dport", "u2"),
        ("pad0", "u2"),
        ("src", "u1", 16),
        ("dst", "u1", 16),
        ("drained", "u8"),
        ("acked", "u8"),
    ]
)

EVENT = np.dtype(
    [
        ("cookie", "u8"),
        ("sent", "u8"),
        ("kind", "u4"),
        ("slot", "u4"),
    ]
)
