# SPDX-License-Identifier: Apache-2.0
"""Equal fixed shares without any negotiation: shows what scheduling adds to mere pacing."""

from collections.abc import Mapping

import numpy as np

from flowslot.model.schedule import constant
from flowslot.model.units import Nanos
from flowslot.policy.base import Pace, View


class StaticPolicy:
    """Every mapped flow is capped at goodput / number of flows, on the tightest link of its path.

    `flows_on_link`: how many flows can use a link, by index; where it is not given, those that
    this host knows of are counted.
    """

    def __init__(self, flows_on_link: Mapping[int, int] | None = None) -> None:
        self._flows_on_link = dict(flows_on_link or {})

    def decide(self, now: Nanos, view: View) -> Pace:
        """See HostPolicy."""
        n_links = len(view.capacity)
        users = np.maximum(np.bincount(view.paths.ravel(), minlength=n_links + 1), 1)
        for link, flows in self._flows_on_link.items():
            users[link] = flows
        share = np.append(view.capacity, np.inf) / users
        rates = share[view.paths].min(axis=1, initial=np.inf)
        mapped = rates != np.inf
        rates = rates[mapped]
        no = np.zeros(len(rates), np.bool_)
        return Pace(view.flow[mapped], constant(view.slot, rates), ceilings=rates, guaranteed=no)
