# SPDX-License-Identifier: Apache-2.0
"""The affinity graph: jobs on one side, links that several of them share on the other (thesis,
section 4.4.1). Without loops, every job has one time shift that is right on all of its links."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping


def loop_free(jobs_of: Mapping[int, Collection[str]]) -> list[int]:
    """Links, in the order given, each unless it closes a loop with those before it. All of them:
    the graph has no loop. `jobs_of`: the jobs on each link, each once."""
    parent: dict[str, str] = {}

    def root(job: str) -> str:
        while parent.setdefault(job, job) != job:
            parent[job] = job = parent[parent[job]]
        return job

    kept = []
    for link, jobs in jobs_of.items():
        roots = {root(job) for job in jobs}
        if len(roots) == len(jobs):
            kept.append(link)
            into = min(roots)
            parent.update(dict.fromkeys(roots, into))
    return kept


def traverse(weights: Mapping[int, Mapping[str, int]], period: Mapping[str, int]) -> dict[str, int]:
    """One time shift for each job (Algorithm 1). `weights`: for each link, of each of its jobs, the
    shift that suits this link, ns; without loops. The reference of each connected part, with shift
    0, is the job whose name comes first: the thesis draws it.

    On every link the jobs' shifts then differ as `weights` do, up to whole iterations of these jobs
    (Theorem 1; as printed, without iterations, it does not hold: line 17 takes them off).
    """
    links_of: dict[str, list[int]] = {}
    for link, jobs in weights.items():
        for job in jobs:
            links_of.setdefault(job, []).append(link)
    shift: dict[str, int] = {}
    for reference in sorted(links_of):
        if reference in shift:
            continue
        shift[reference] = 0
        queue = deque([reference])
        while queue:
            j = queue.popleft()
            for link in links_of[j]:
                for k, weight in weights[link].items():
                    if k not in shift:
                        shift[k] = (shift[j] - weights[link][j] + weight) % period[k]
                        queue.append(k)
    return shift
