# SPDX-License-Identifier: Apache-2.0
"""Which policy has the best mean and 99th percentile of job completion times at 1000 servers, under
four placements: `python -m bench.contest FILE [--seeds N]`.

World and jobs: `sim/flowslot_sim/cluster/contest.py`. FILE keeps the runs, as `flowslot sim sweep`
does: what is in it is not run again. Means over seeds, with the standard deviation; then each
policy's ratio to `fair` of the same seed, which says more: seeds differ by their jobs.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowslot_sim.cluster.contest import PLACEMENTS, POLICIES, Contest, Figures
from flowslot_sim.journal import Journal, Line, here

SHOWN = tuple(name for name in POLICIES if not name.startswith("mlcc"))
"""MLCC's variants take minutes a run: `flowslot sim paper mlcc`."""
PLACES = tuple(name for name in PLACEMENTS if name != "cassini")
"""CASSINI's scores of so many jobs take hours."""


def wanted(seeds: int, servers: int) -> list[Contest]:
    """All runs, seed by seed."""
    return [
        Contest(policy, placement, servers, servers, seed)
        for seed in range(1, seeds + 1)
        for placement in PLACES
        for policy in SHOWN
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    some = np.array(values)
    deviation = some.std(ddof=1) if len(some) > 1 else 0.0
    return f"{some.mean():.{digits}f} ± {deviation:.{digits}f}"


def complete(lines: Sequence[Line]) -> tuple[list[Line], list[int]]:
    """Those of seeds that every row of the table has, and these: rows are compared."""
    by_row: dict[tuple[str, str], set[int]] = {}
    for x in lines:
        by_row.setdefault((x["policy"], x["placement"]), set()).add(x["seed"])
    seeds = set.intersection(*by_row.values()) if by_row else set()
    return [x for x in lines if x["seed"] in seeds], sorted(seeds)


def table(lines: Sequence[Line]) -> list[tuple[str, str, str, str, str, str]]:
    """Policy, placement; mean and p99, s; both as a part of fair's. The best mean comes first."""
    at = {(x["policy"], x["placement"], x["seed"]): x for x in lines}
    rows = []
    for policy in SHOWN:
        for placement in PLACES:
            mine = [x for x in lines if (x["policy"], x["placement"]) == (policy, placement)]
            both = [(x, at.get(("fair", placement, x["seed"]))) for x in mine]
            pairs = [(x, fair) for x, fair in both if fair is not None]
            if not pairs:
                continue
            cells = [spread([x[key] for x in mine], 1) for key in ("mean_s", "p99_s")]
            ratios = [spread([x[k] / f[k] for x, f in pairs], 3) for k in ("mean_s", "p99_s")]
            stalled = sum(bool(x["stalled"]) for x in mine)
            name = f"{policy} ({stalled} of {len(mine)} given up)" if stalled else policy
            key = float(np.mean([x["mean_s"] for x in mine]))
            rows.append((key, (placement, name, *cells, *ratios)))
    return [row for _, row in sorted(rows)]  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--servers", type=int, default=1000, help="and as many jobs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--print", action="store_true", help="only what the file has")
    args = parser.parse_args()
    journal = Journal(args.file, Contest, Figures)
    asked = wanted(args.seeds, args.servers)
    if not args.print:
        todo = [x for x in asked if x not in journal.done]
        for line in journal.recorded(here(todo, args.processes)):
            print(line["placement"], line["policy"], line["seed"], line.get("mean_s", "failed"))
    lines, seeds = complete([journal.done[x] for x in asked if x in journal.done])
    print(f"seeds that all rows have: {seeds}")
    print("placement, policy: mean JCT (s), p99 (s); ratios to fair: mean, p99")
    for placement, policy, *figures in table(lines):
        print(f"{placement:10} {policy:14} " + "  ".join(figures))


if __name__ == "__main__":
    main()
