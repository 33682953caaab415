# SPDX-License-Identifier: Apache-2.0
"""Transfers that have the rates that somebody gave them, and no more. Compiled (planned.pxd)."""

import numpy as np

from flowslot.policy.base import Paths
from flowslot_sim.cluster.sharing import Sharing

COMPILED = not __file__.endswith(".py")


class Planned(Sharing):
    """See Sharing. One that begins has no rate before the next `reserve`."""

    def __init__(self, paths: Paths, flows: Paths, links: int) -> None:
        super().__init__(paths, flows, links)
        self.base = np.zeros(len(paths))

    def enter(self, i: int) -> None:
        """See Sharing."""
        Sharing.enter(self, i)
        self.base[i] = 0.0

    def reserve(self, i: int, rate: float) -> None:
        """So much is transfer i's. The sum on each link must fit."""
        self.base[i] = rate

    def refresh(self) -> None:
        """Nothing has to be found."""

    def share(self) -> int:
        """See Sharing: all that send are touched."""
        for at in range(self.n):
            self.touched[at] = self.live[at]
            self.rate[self.live[at]] = self.base[self.live[at]]
        return self.n
