# SPDX-License-Identifier: Apache-2.0
"""What allocators see, made by hand."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import AllocationState, Floats, Keys

MS = float(MILLISECOND)
NOW = Nanos(10**9)


def keys(names: Sequence[object]) -> Keys:
    """Numbered as they come; another name makes it another one."""
    return Keys(np.arange(len(names)), np.array([crc32(str(name).encode()) for name in names]))


def state(*flows: dict[str, Any], capacity: Sequence[float] = (100.0,)) -> AllocationState:
    """Each flow: job, links, and what differs from an active flow with 100 bytes left."""
    n, n_links = len(flows), len(capacity)
    names = sorted({f["job"] for f in flows})
    paths = np.full((n, 3), n_links, dtype=np.int32)
    for row, flow in enumerate(flows):
        links = flow.get("links", (0,))
        paths[row, : len(links)] = links

    def column(name: str, default: float) -> Floats:
        return np.array([float(f.get(name, default)) for f in flows])

    left = column("left", 100.0)
    return AllocationState(
        paths=paths,
        capacity=np.array([*capacity, np.inf]),
        goodput=np.array([*capacity, np.inf]),
        job=np.array([names.index(f["job"]) for f in flows]),
        job_names=names,
        jobs=keys(names),
        flow=np.arange(n, dtype=np.uint64),
        aggregate=np.arange(n),
        aggregates=Keys.lasting(n),
        remaining=left,
        cap=column("cap", np.inf),
        sockets=column("sockets", 1.0),
        wait_ns=column("wait", 0.0) * MS,
        period_ns=column("period", 1000.0) * MS,
        due_ns=column("due", 0.0) * MS,
        next_bytes=column("next", 0.0),
        idle_ns=np.where(left > 0, 0.0, column("idle", 1000.0) * MS),
        goal=column("goal", 0.0),
    )
