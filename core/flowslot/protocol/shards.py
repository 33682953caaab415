# SPDX-License-Identifier: Apache-2.0
"""What several arbiters, each of some of the links, grant together: the least of it.

A flow is paced at the smallest rate that any arbiter of its path grants, so that a raise takes
effect once all agree to it and a lower at once, and none is ever sent more than it has granted:
each can be acknowledged by itself. An arbiter counts while it is live: until it has answered for
the flow, nothing of its links is the flow's, so the least is nothing (and the top-up, in the
kernel). When it is gone, its links are on their own, as they are without it, and what the others
say holds; with none left, or when one refuses the flow, nobody has a say.
"""

import math
from collections.abc import Iterable, Sequence

from flowslot.model.units import Nanos
from flowslot.protocol.grantbook import Granted, nothing_said
from flowslot.protocol.messages import Demand, Done
from flowslot.protocol.negotiator import Negotiator, aged


def combined(flow: int, said: Sequence[Granted]) -> Granted:
    """The least of what live arbiters say about a flow; a rate of NaN: that one has not answered.
    When none has, the flow is left alone; when some have not, it has nothing yet.

    It is standing when it is for all of them, as otherwise one has to hear of its phases.
    """
    answers = [grant for grant in said if not math.isnan(grant.rate)]
    if not answers:
        return nothing_said(flow)
    if len(said) == 1:
        return said[0]
    least, most = (pick(grant.rate for grant in answers) for pick in (min, max))
    if len(answers) < len(said):
        least = 0.0
    return Granted(
        flow,
        least,
        min(grant.ceiling for grant in answers),
        all(grant.standing for grant in said),
        min(grant.share for grant in answers),
        most if most > least else 0.0,
    )


class Shards:
    """The arbiters that a daemon negotiates with, as one. Pure; `now` is monotonic nanoseconds.

    Streams, and what is said on them, remain each Negotiator's own business. After an arbiter has
    begun or lost its life (`News.began`, `Negotiator.check`), put the grants of its flows into
    force anew; after any other news, those of the flows in it, and only then acknowledge them.
    """

    def __init__(self, arbiters: Sequence[Negotiator]) -> None:
        """`arbiters`: no two hold the same link."""
        self.arbiters = tuple(arbiters)
        self._known: dict[int, tuple[Demand, Nanos]] = {}
        self._asked: dict[tuple[int, ...], tuple[Negotiator, ...]] = {}

    # --- what the daemon says

    def demand(self, now: Nanos, demands: Sequence[Demand]) -> None:
        """These flows are new or have changed; each arbiter is asked for those that cross its
        links."""
        self._known.update((demand.flow, (demand, now)) for demand in demands)
        for arbiter in self.arbiters:
            arbiter.demand(now, demands)

    def done(self, dones: Sequence[Done]) -> None:
        """These flows are gone."""
        for done in dones:
            self._known.pop(done.flow, None)
        for arbiter in self.arbiters:
            arbiter.done(dones)

    def give_back(self, flows: Iterable[int]) -> list[Granted]:
        """Stop using these grants. Returns what is left of them, see Negotiator.give_back."""
        wanted = list(flows)
        given = {g.flow: None for arbiter in self.arbiters for g in arbiter.give_back(wanted)}
        left = [self.grant(flow) for flow in given]
        return [grant for grant in left if not math.isnan(grant.rate)]

    def beat(self, now: Nanos) -> bool:
        """Once per slot: whether small news may be said to any arbiter, see Negotiator.beat."""
        return any([arbiter.beat(now) for arbiter in self.arbiters])  # all of them

    # --- what may be asked

    @property
    def live(self) -> bool:
        """Some arbiter is; the grants of these are to be enforced."""
        return any(arbiter.live for arbiter in self.arbiters)

    @property
    def lease_end(self) -> Nanos | None:
        """The first moment at which grants become void; None: there are none."""
        leases = (a.lease_end for a in self.arbiters if a.live and a.busy)
        return min((end for end in leases if end is not None), default=None)

    def grant(self, flow: int) -> Granted:
        """What a flow may send; NaN: no live arbiter has a say (yet)."""
        known = self._known.get(flow)
        if known is None:
            return nothing_said(flow)
        live = [arbiter for arbiter in self._arbiters_of(known[0].links) if arbiter.live]
        if any(arbiter.refuses(flow) for arbiter in live):
            return nothing_said(flow)
        return combined(flow, [arbiter.grant(flow) for arbiter in live])

    def covers(self, links: tuple[int, ...]) -> bool:
        """Live arbiters hold every one of these links."""
        held = sum(len(a.links.intersection(links)) for a in self._arbiters_of(links) if a.live)
        return bool(links) and held == len(set(links))

    def flows(self) -> list[int]:
        """All flows that were asked for."""
        return list(self._known)

    def picture(self, now: Nanos) -> list[Demand]:
        """Their demands, as they would be put now."""
        return [aged(demand, now - at) for demand, at in self._known.values()]

    def _arbiters_of(self, links: tuple[int, ...]) -> tuple[Negotiator, ...]:
        asked = self._asked.get(links)
        if asked is None:
            asked = tuple(a for a in self.arbiters if a.is_asked_for(links))
            self._asked[links] = asked
        return asked
