# SPDX-License-Identifier: Apache-2.0
"""A host without a switch process: a session and the switch it talks to, in one process.

The transport between them is a function call. The switch holds this host's own links, and has no
other daemon to serve.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flowslot.arbiter import ArbiterConfig
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator, Floats
from flowslot.protocol.grants import Counts, Granted
from flowslot.protocol.messages import Demand, Done
from flowslot.protocol.session import Session
from flowslot.protocol.switch import Switch

FOREVER = Nanos(2**60)
"""A lease that does not end: the daemon cannot lose touch with itself."""
_ROUNDS = 8  # lower, acknowledge, raise what that frees: two settle nearly everything
_STREAM = "own"


class Loopback:
    """`now` is monotonic nanoseconds."""

    def __init__(
        self,
        now: Nanos,
        links: Sequence[int],
        goodput: Sequence[float],
        *,
        allocator: Allocator,
        config: ArbiterConfig,
    ) -> None:
        """`links`: the host's egress links; `goodput`: of all the topology's links, bytes/s."""
        self.links = tuple(links)
        self.counts = Counts()
        config = replace(
            config,
            lease_ns=FOREVER,
            recovery=False,
            max_flows_per_session=FOREVER,  # there is no other daemon to protect from this one
        )
        names = [str(link) for link in links]
        self._switch: Switch[str] = Switch(
            now, names, [goodput[link] for link in links], config, allocator
        )
        self.session = Session(
            _STREAM,
            links,
            names,
            slot_ns=config.slot_ns,
            lease_ns=FOREVER,
            first_session=1,
        )
        self._switch.join(now, _STREAM, self.session.connect(now))

    def settle(
        self, now: Nanos, demands: Iterable[Demand] = (), dones: Iterable[Done] = ()
    ) -> list[Granted]:
        """Take this in, and decide until nothing moves. Flows that cross none of the links are left
        out. Returns what is to be put into force, all in one batch.

        A lower is acknowledged before the kernel knows of it, which only this transport may do: the
        lower and whatever is raised in exchange go down together.
        """
        session, switch = self.session, self._switch
        session.done(dones)
        session.demand(now, demands)
        before: dict[int, Granted] = {}
        for _ in range(_ROUNDS):
            said = session.take_message(now, 0)
            if said is not None:
                switch.received(now, _STREAM, said)
            switch.decide(now)
            answer = switch.take(_STREAM)
            if answer is None:
                break
            for grant in answer.grants:
                before.setdefault(grant.flow, session.grant(grant.flow))
            news = session.received(now, answer)
            self.counts.take(len(news.raised), len(news.lowered), news.refused)
            session.enforced(news)
        after = [session.grant(flow) for flow in before]
        return [grant for grant in after if grant != before[grant.flow]]

    @property
    def next_wakeup(self) -> Nanos:
        """When to `settle` next, if nothing is said before."""
        return self._switch.next_wakeup

    def load_table(self, now: Nanos) -> Floats:
        """Reserved rates of the next K slots, float64[len(links), K]."""
        return self._switch.arbiter.load_table(now)
