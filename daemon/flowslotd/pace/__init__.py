# SPDX-License-Identifier: Apache-2.0
"""Ways of pacing flows in the kernel."""

from flowslotd.pace.pacer import (
    UNPACED,
    Entries,
    KernelEvent,
    PaceEntry,
    Pacer,
    PacingError,
    Traits,
    pack,
)
from flowslotd.pace.select import make_pacer

__all__ = [
    "UNPACED",
    "Entries",
    "KernelEvent",
    "PaceEntry",
    "Pacer",
    "PacingError",
    "Traits",
    "make_pacer",
    "pack",
]
