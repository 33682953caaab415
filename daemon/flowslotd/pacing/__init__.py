# SPDX-License-Identifier: Apache-2.0
"""Ways of pacing flows in the kernel."""

from flowslotd.pacing.base import (
    UNPACED,
    Entries,
    FlowCounters,
    KernelEvent,
    PaceEntry,
    Pacer,
    PacingError,
    Traits,
    pack,
)
from flowslotd.pacing.select import make_pacer

__all__ = [
    "UNPACED",
    "Entries",
    "FlowCounters",
    "KernelEvent",
    "PaceEntry",
    "Pacer",
    "PacingError",
    "Traits",
    "make_pacer",
    "pack",
]
