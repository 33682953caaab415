# SPDX-License-Identifier: Apache-2.0
"""What is known of each flow: the columns that loops.py works on."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.void]
"""ROW[F]"""
Ints = NDArray[np.int64]

ROW = np.dtype(
    [
        ("cookie", "u8"),  # 0: the row is free
        ("job", "i4"),  # index into jobs
        ("path", "i4"),  # index into paths; 0: not mapped
        ("aggregate", "i4"),  # index into the aggregates; 0: in none
        ("seen", "?"),  # a record was taken in
        ("looked", "i8"),  # when (monotonic)
        ("active", "?"),
        ("drained", "?"),  # the kernel said so since the last look
        ("kernel", "?"),  # the kernel's counter is available
        ("iteration", "i8"),
        ("inc", "i8"),
        ("counter", "i8"),  # the kernel's counter of acknowledged bytes,
        ("origin", "i8"),  # and what it was when the iteration began
        ("target", "i8"),  # bytes of this iteration
        ("remaining", "i8"),
        ("unreported", "i8"),  # headers and the like, which the kernel sends besides the target:
        ("unreported_last", "i8"),  # the least, and the last, of the last two iterations
        ("ready", "i8"),  # bytes of this iteration that may be sent by now, as the record says
        ("supplied", "i8"),  # when it last had something to send, or got it (monotonic)
        ("expected", "i8"),  # bytes of an iteration, learnt; 0 unknown
        ("onset", "i8"),  # when the communication phase began (monotonic), 0 never
        ("onset_inc", "i8"),
        ("onset_iteration", "i8"),
        ("period", "i8"),  # ns, learnt; 0 unknown
        ("watched", "i8"),  # the kernel reports when the counter reaches this
        ("announced", "?"),  # the iteration's bytes are said at its beginning
        ("quiet", "?"),  # its grant stands in all phases: nobody waits for news of it
        ("rate", "f8"),  # granted; nan: no arbiter has a say
        ("ceiling", "f8"),
        ("share", "f8"),  # of its path, if its job had that for itself; 0: unknown
        ("own_share", "f8"),  # the same, as far as this host's flows tell
        ("queue_us", "i8"),  # how long its path's smallest buffer lasts at its link's rate
        ("lender", "i8"),  # the row of the flow whose rate it may borrow; -1: none
    ]
)
FREE = np.zeros(1, ROW)
"""A row that belongs to no flow: idle, on no path, known to nobody."""
FREE["job"], FREE["rate"], FREE["ceiling"], FREE["lender"] = -1, np.nan, np.nan, -1


class Counters(Protocol):
    """The kernel's counters, in the order of the cookies, all of the same length."""

    @property
    def cookie(self) -> NDArray[np.uint64]:
        """Socket cookies."""
        ...

    @property
    def acked(self) -> Ints:
        """Acknowledged payload bytes of each."""
        ...
