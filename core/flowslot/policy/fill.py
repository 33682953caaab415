# SPDX-License-Identifier: Apache-2.0
"""Sharing links out: sums over paths, and max-min fairness by progressive filling."""

import numpy as np

from flowslot.policy import filling
from flowslot.policy.base import Floats, Paths


def link_sum(paths: Paths, rates: Floats, n_links: int) -> Floats:
    """Sum of `rates` float64[F] over each link, float64[n_links + 1]; the last one is padding."""
    sums = np.zeros(n_links + 1)
    filling.link_sum(paths, rates, sums)
    return sums


def max_min(paths: Paths, capacity: Floats, limit: Floats) -> Floats:
    """Max-min fair rates, float64[F], under `limit` float64[F] and `capacity` float64[L + 1].

    Each round fixes the flows that meet their limit below every share on their path, and all
    flows of links that are the tightest for everyone who crosses them. Shares only grow from
    round to round, so both are final; that takes far fewer rounds than one link at a time.
    """
    rate = np.zeros(len(limit))
    filling.max_min(paths, capacity, limit, rate)
    return rate
