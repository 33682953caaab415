# SPDX-License-Identifier: Apache-2.0
"""Which rank is at the other end of a connection.

Every process publishes its connections in the store through which the ranks met. One whose ends
are another rank's, turned round, leads there. This is done beside training, on a thread of its own
that ends when all is known: a store may be slow, and ranks that have no flowslot never publish.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from flowslot_torch.sockets import Borrowed, End

_log = logging.getLogger(__name__)
_FIRST_S, _LONGEST_S, _TRIES = 0.05, 2.0, 12
_MOST_BYTES = 1 << 20


class Store(Protocol):
    """As much of torch's as is used: none of it waits for another rank."""

    def set(self, key: str, value: str, /) -> object:
        """Publish."""

    def get(self, key: str, /) -> bytes:
        """What was published; only of keys that are there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""


class Peers:
    """Looks ranks up for one process. Ask from one thread."""

    def __init__(self, rank: int, world: int, store: Callable[[], Store] | None) -> None:
        """`store`: opens one, on the thread that then uses it; None: no rank is ever known."""
        self._rank, self._world, self._open = rank, world, store
        self._ranks: dict[tuple[End, End], int] = {}
        self._asked: frozenset[tuple[End, End]] = frozenset()
        self._thread: threading.Thread | None = None
        self._news = False
        self._closed = threading.Event()

    def rank_of(self, sock: Borrowed) -> int | None:
        """None: not known (yet), or no rank's."""
        return self._ranks.get((sock.local, sock.remote))

    def news(self) -> bool:
        """Whether more has become known since the last call."""
        news, self._news = self._news, False
        return news

    def looking(self) -> bool:
        """Whether more may become known."""
        return self._thread is not None and self._thread.is_alive()

    def look_up(self, socks: Sequence[Borrowed]) -> None:
        """Have these found out, unless that is done or under way."""
        ends = frozenset((sock.local, sock.remote) for sock in socks)
        if self._open is None or ends == self._asked or self.looking() or self._closed.is_set():
            return
        self._asked = ends
        self._thread = threading.Thread(target=self._run, name="flowslot-peers", daemon=True)
        self._thread.start()
        atexit.unregister(self._end)
        atexit.register(self._end)

    def close(self) -> None:
        """Find out no more. Does not wait."""
        self._closed.set()

    def _end(self) -> None:
        """The process ends. A thread that Python ends in a library's code would abort the process:
        a script that has done its work would have failed."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_LONGEST_S)

    def _run(self) -> None:
        try:
            assert self._open is not None
            store = self._open()
            store.set(_key(self._rank), json.dumps(sorted(self._asked)))
            waiting = set(range(self._world)) - {self._rank}
            wait_s = _FIRST_S
            for _ in range(_TRIES):
                waiting -= {rank for rank in waiting if self._learn(store, rank)}
                if not waiting or self._closed.wait(wait_s):
                    return
                wait_s = min(2 * wait_s, _LONGEST_S)
        except Exception as error:
            _log.info("flowslot: ranks of peers are not to be had: %s", error)

    def _learn(self, store: Store, rank: int) -> bool:
        if not store.check([_key(rank)]):
            return False
        try:
            ends = parse(store.get(_key(rank)), f"connections of rank {rank}")
        except ValueError as error:
            _log.warning("flowslot: %s", error)
            return True
        mine = {(local, remote): rank for remote, local in ends if (local, remote) in self._asked}
        if mine:
            self._ranks = {**self._ranks, **mine}
            self._news = True
        return bool(mine) or rank not in self._expected()

    def _expected(self) -> set[int]:
        """Ranks whose connections to us are still to be found: those never met are asked again."""
        return set(range(self._world)) - set(self._ranks.values()) - {self._rank}


def parse(raw: bytes, what: str) -> list[tuple[End, End]]:
    """Pairs of ends, as another rank published them. ValueError: it is something else."""
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{what}: must have at most {_MOST_BYTES} bytes, has {len(raw)}")
    try:
        found = json.loads(raw)
        pairs = [((str(a), int(p)), (str(b), int(q))) for (a, p), (b, q) in found]
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ValueError(f"{what}: must be [[[address, port], [address, port]], ..]") from None
    return pairs


def _key(rank: int) -> str:
    return f"flowslot/connections/{rank}"
