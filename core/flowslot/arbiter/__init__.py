# SPDX-License-Identifier: Apache-2.0
"""The arbiter of one contention domain: shares its links out among all daemons."""

from flowslot.arbiter.arbiter import Arbiter
from flowslot.arbiter.config import COALESCE_NS, LEASE_SLOTS, TARGET, ArbiterConfig

__all__ = ["COALESCE_NS", "LEASE_SLOTS", "TARGET", "Arbiter", "ArbiterConfig"]
