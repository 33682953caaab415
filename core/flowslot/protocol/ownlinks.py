# SPDX-License-Identifier: Apache-2.0
"""An arbiter and the only daemon it serves, in one: shares out this host's own links."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.units import Nanos
from flowslot.policy.base import Allocator, Floats
from flowslot.protocol.grantbook import GrantBook, Granted, nothing_said
from flowslot.protocol.messages import Demand, Done, Refusal

FOREVER = Nanos(2**60)
"""A lease that does not end: the daemon cannot lose touch with itself."""
_SESSION = 1
_ROUNDS = 8  # lower, acknowledge, raise what that frees: two settle nearly everything


class Settled(NamedTuple):
    """What deciding has changed, and by how many raises and lowers on the way."""

    changed: list[Granted]
    raised: int
    lowered: int


class OwnLinks:
    """Pure; `now` is monotonic nanoseconds. `load` and `done` only take in; `settle` decides."""

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
        self._index = {link: i for i, link in enumerate(links)}
        self._paths: dict[tuple[int, ...], tuple[int, ...]] = {}
        config = replace(config, lease_ns=FOREVER, ack_timeout_ns=FOREVER, recovery=False)
        self._arbiter = Arbiter([goodput[link] for link in links], config, allocator)
        self._book = GrantBook("local", FOREVER)
        self._arbiter.hello(now, self._book.connect(now, _SESSION))

    def load(self, now: Nanos, demands: Iterable[Demand]) -> list[Refusal]:
        """Take demands in; those that cross none of these links are left out. Returns those that
        are not accepted."""
        mine = [replace(d, links=path) for d in demands if (path := self._path(d.links))]
        return self._arbiter.demand(now, _SESSION, mine)

    def done(self, now: Nanos, dones: Iterable[Done]) -> None:
        """These flows are gone."""
        self._arbiter.done(now, _SESSION, [self._book.drop(d.flow, d.inc) for d in dones])

    def settle(self, now: Nanos) -> Settled:
        """Decide until nothing moves; returns what is to be put into force, all in one batch.

        A lower is acknowledged before the kernel knows of it, which only this arbiter may do: it
        and whatever is raised in exchange go down together.
        """
        before: dict[int, Granted] = {}
        raised = lowered = 0
        for _ in range(_ROUNDS):
            grants = self._arbiter.step(now).get(_SESSION)
            if not grants:
                break
            for grant in grants:
                before.setdefault(grant.flow, self._book.grant(grant.flow))
            changes = self._book.receive(now, _SESSION, grants)
            raised += len(changes.raised)
            lowered += len(changes.lowered)
            self._arbiter.ack(now, _SESSION, changes.acks)
        after = [self._book.grant(flow) for flow in before]
        changed = [grant for grant in after if grant != before[grant.flow]]
        return Settled(changed, raised, lowered)

    def next_wakeup(self, now: Nanos) -> Nanos:
        """When to `settle` next, if nothing is taken in before."""
        return self._arbiter.next_wakeup(now)

    def grant(self, flow: int) -> Granted:
        """What the flow may send; NaN: it crosses none of these links, or has no grant yet."""
        return self._book.grant(flow) if flow in self._book else nothing_said(flow)

    def covers(self, links: tuple[int, ...]) -> bool:
        """All of the path is ours: one that goes on beyond this host is not ours to guarantee."""
        return bool(links) and all(link in self._index for link in links)

    def load_table(self, now: Nanos) -> Floats:
        """Reserved rates of the next K slots, float64[len(links), K]."""
        return self._arbiter.load_table(now)

    def _path(self, links: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a path that is ours, as the arbiter numbers it."""
        path = self._paths.get(links)
        if path is None:
            path = tuple(self._index[link] for link in links if link in self._index)
            self._paths[links] = path
        return path
