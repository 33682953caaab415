# SPDX-License-Identifier: Apache-2.0
"""Ways of pacing flows in the kernel."""

from flowslotd.pacing.base import (
    UNPACED,
    FlowCounters,
    KernelEvent,
    PaceEntry,
    Pacer,
    PacingError,
)
from flowslotd.pacing.select import make_pacer

__all__ = [
    "UNPACED",
    "FlowCounters",
    "KernelEvent",
    "PaceEntry",
    "Pacer",
    "PacingError",
    "make_pacer",
]
