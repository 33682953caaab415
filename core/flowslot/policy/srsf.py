# SPDX-License-Identifier: Apache-2.0
"""SRSF(n): shortest remaining service first, at most n transfers at a time on any link.

Source: Q. Wang et al., Communication Contention Aware Scheduling of Multiple Deep Learning Training
Jobs, section V. SRSF(1) avoids all contention. Compiled (srsf.pxd).
"""

from flowslot.policy.gate import Gate, Transfers

COMPILED = not __file__.endswith(".py")


class Srsf(Gate):
    """`ways`: so many at most. ValueError: fewer than 1."""

    def __init__(self, ways: int = 1) -> None:
        if ways < 1:
            raise ValueError(f"ways: at least 1, not {ways}")
        self.ways = ways

    def admits(self, transfers: Transfers, i: int, n: int) -> bool:
        """See Gate."""
        return transfers.most(i) < self.ways
