# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Which flows depend on each other. Compiled (types: connected.pxd); interpreted, it does the same.

Links and jobs are joined by flows (Galler and Fischer, An improved equivalence algorithm).
"""

from typing import Any

import numpy as np

from flowslot.policy.base import Ints, Paths, Rows

COMPILED = not __file__.endswith(".py")

FREE = -1
"""In place of a session: the slot belongs to no flow."""
_free = FREE  # the same as a C variable: connected.pxd declares it


def parts(  # noqa: PLR0917
    session: Ints, job: Ints, paths: Paths, n_links: int, n_jobs: int, label: Rows
) -> int:
    """Sets of flows that share no link or job with any flow outside, directly or through others.

    By slot: `session` and `job`, int64[F]; `paths`, int32[F, H], padded with `n_links`; `label`,
    intp[F], gets the part of each flow, counted up in the order of their first flows, -1 for free
    slots. Returns how many parts there are. A flow whose path is not known (only padding) counts on
    all links: while there is one, there is one part.
    """
    n, everywhere = 0, False
    root, number = np.arange(n_links + n_jobs), np.full(n_links + n_jobs, -1)
    for i in range(len(session)):
        if session[i] != _free:
            everywhere = everywhere or paths[i, 0] == n_links
            for h in range(paths.shape[1]):
                if paths[i, h] < n_links:
                    join(root, paths[i, h], n_links + job[i])
    for i in range(len(session)):
        label[i] = -1
        if session[i] != _free:
            at = 0 if everywhere else find(root, n_links + job[i])
            if number[at] < 0:
                number[at] = n
                n += 1
            label[i] = number[at]
    return n


def find(root: Any, i: int) -> int:
    """The one that stands for all that `i` is joined to."""
    while root[i] != i:
        root[i] = root[root[i]]
        i = root[i]
    return i


def join(root: Any, i: int, j: int) -> None:
    """From now on, the same one stands for both."""
    root[find(root, i)] = find(root, j)
