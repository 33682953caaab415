# SPDX-License-Identifier: Apache-2.0
"""Sharing links out: sums over paths, and max-min fairness by progressive filling."""

import numpy as np

from flowslot.policy.base import Floats, Paths


def link_sum(paths: Paths, rates: Floats, n_links: int) -> Floats:
    """Sum of `rates` float64[F] over each link, float64[n_links + 1]; the last one is padding."""
    if not len(rates):
        return np.zeros(n_links + 1)
    weights = np.repeat(rates, paths.shape[1])
    sums: Floats = np.bincount(paths.ravel(), weights, n_links + 1).astype(np.float64, copy=False)
    return sums


def max_min(paths: Paths, capacity: Floats, limit: Floats) -> Floats:
    """Max-min fair rates, float64[F], under `limit` float64[F] and `capacity` float64[L + 1].

    Each round fixes the flows that meet their limit below every share on their path, and all
    flows of links that are the tightest for everyone who crosses them. Shares only grow from
    round to round, so both are final; that takes far fewer rounds than one link at a time.
    """
    rate = np.zeros(len(limit))
    left = np.maximum(capacity, 0.0)
    rows = np.flatnonzero(limit > 0)
    width, n_links = paths.shape[1], len(capacity)
    while rows.size:
        path = paths[rows]
        flat = path.ravel()
        users = np.bincount(flat, minlength=n_links)
        share = (left / np.maximum(users, 1))[path]
        bound = limit[rows]
        level = np.minimum(share.min(axis=1), bound)
        # Tight: nobody who crosses the link is held below its share by something else.
        at_share = (level[:, None] >= share * (1 - 1e-12)).ravel()
        tight = np.bincount(flat, at_share, n_links) >= users
        fixed = (level >= bound) | tight[path].any(axis=1)
        final = level[fixed]
        rate[rows[fixed]] = final
        left -= np.bincount(path[fixed].ravel(), np.repeat(final, width), n_links)
        np.maximum(left, 0.0, out=left)
        rows = rows[~fixed]
    return rate
