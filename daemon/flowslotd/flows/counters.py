# SPDX-License-Identifier: Apache-2.0
"""What the kernel counts of flows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class FlowCounters:
    """Counters of all live flows: arrays of one length, in the order of the cookies."""

    cookie: NDArray[np.uint64]
    sent: NDArray[np.int64]
    """Bytes that were sent, each counted once (SYN and FIN count one byte each). A back end that
    does not count them has those that were acknowledged."""
    acked: NDArray[np.int64]
    """Those of them that were acknowledged; of UDP flows, all."""

    @staticmethod
    def none() -> "FlowCounters":
        """Counters of no flow."""
        return FlowCounters(np.zeros(0, np.uint64), *np.zeros((2, 0), np.int64))
