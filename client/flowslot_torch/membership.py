# SPDX-License-Identifier: Apache-2.0
"""Who takes part, and how that changes while a job trains (SDCC, section 4).

A worker keeps its number for life; a membership is a list of them, with an epoch. Whoever notices
that a worker is gone, or is told to let others in, raises its flag for the next epoch, which stops
its communication. When all flags are up, or the grace period is over, the workers with flags are
the next members: the first proposal that reaches the store counts. Then connections are made anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from flowslot_torch.transport import PeerLost, Transport

_log = logging.getLogger(__name__)
_POLL_S = 0.02
_TRIES = 5
_MOST = 4096
_DIGITS = 9
_ADMIT = "admit"
_T = TypeVar("_T")


class LeftOut(ConnectionError):
    """The others go on without this worker: it has not raised its flag in time."""


class Store(Protocol):
    """As much of torch's as is used."""

    def set(self, key: str, value: str, /) -> object:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read what is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write unless there is something else than expected ("": than nothing); what is there."""


Make = Callable[[int, Mapping[int, str]], Transport]


def _nothing(_: Transport) -> None:
    return None


class Membership:
    """One worker's part in it. `transport`: that of the epoch; `members`: in ascending order."""

    def __init__(
        self,
        store: Store,
        worker: int,
        make: Make,
        *,
        members: Sequence[int] | None,
        about: str = "",
        grace_s: float = 1.5,
        timeout_s: float = 60.0,
    ) -> None:
        """`make(epoch, about)` connects the members, whose `about` (an address, say) it gets.

        `members`: of the first epoch; None: join a job that runs. `grace_s`: how long those who are
        there wait for the others' flags. Raises PeerLost, LeftOut; ConnectionError: the store is
        gone."""
        self.worker, self._store, self._make, self._about = worker, store, make, about
        self._grace_s, self._timeout_s = grace_s, timeout_s
        self.epoch = 0
        self.members: tuple[int, ...] = tuple(sorted(members or ()))
        self.joined = members is None
        """This worker has come to a job that runs: it needs the others' state."""
        self.transport = self._join() if members is None else self._begin()

    def changing(self) -> bool:
        """Somebody has raised a flag for the next epoch."""
        return self._ask(lambda: self._store.check([_key(self.epoch + 1, "change")]))

    def waiting(self) -> list[int]:
        """Workers that want to join."""
        key = _key(self.epoch + 1, "join")

        def read() -> list[int]:
            there = self._store.check([key])
            return _wish(self._store.get(key), key) if there else []

        return self._ask(read)

    def change(
        self, *, admit: bool = False, enter: Callable[[Transport], None] = _nothing
    ) -> Transport:
        """Agree on the next membership, and connect. All of the old one that live must call it.
        `admit`: those who wait, this worker being between two iterations; the first one's word
        counts for all. `enter`: what they do first, for which all are needed. Raises PeerLost when
        every try has lost another one."""
        for _ in range(_TRIES):
            self.transport.close()
            decided = self._ask(lambda: self._agree(admit))
            try:
                enter(self._enter(self.epoch + 1, decided))
            except PeerLost:  # another one, meanwhile
                continue
            return self.transport
        raise PeerLost(self.members, f"no membership came about in {_TRIES} tries")

    def _begin(self) -> Transport:
        self._raise_flag(0)
        return self._enter(0, self.members)

    def _join(self) -> Transport:
        """Ask to be let in, epoch by epoch."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            last = self._ask(self._last)
            if last is not None:
                self.epoch = last
                if self._ask(lambda: self._knock(deadline)):
                    decided = self._ask(self._decided)
                    return self._enter(self.epoch + 1, decided)
            time.sleep(_POLL_S)
        raise LeftOut(f"worker {self.worker}: nobody let it in within {self._timeout_s:g} s")

    def _last(self) -> int | None:
        key = "flowslot/epoch"
        if not self._store.check([key]):
            return None
        raw = self._store.get(key)
        if not raw.isdigit() or len(raw) > _DIGITS:
            raise ValueError(f"{key}: must be a number below 10^{_DIGITS}, is {raw[:40]!r}")
        return int(raw)

    def _knock(self, deadline: float) -> bool:
        """Whether the next epoch has this worker."""
        key = _key(self.epoch + 1, "join")
        self._raise_flag(self.epoch + 1)
        said = ""
        while time.monotonic() < deadline:
            names = sorted({*(_wish(said.encode(), key) if said else ()), self.worker})
            wish = json.dumps(names)
            found = self._store.compare_set(key, said, wish).decode()
            if found == wish:
                break
            said = found
        while time.monotonic() < deadline:
            if self._store.check([_key(self.epoch + 1, "members")]):
                return self.worker in self._decided()
            time.sleep(_POLL_S)
        return False

    def _agree(self, admit: bool) -> tuple[int, ...]:
        """The members of the next epoch."""
        epoch = self.epoch + 1
        self._raise_flag(epoch)
        word = self._store.compare_set(_key(epoch, "change"), "", _ADMIT if admit else "lost")
        admit = word.decode() == _ADMIT
        candidates = {*self.members, *(self.waiting() if admit else ())}
        deadline = time.monotonic() + self._grace_s
        there: list[int] = []
        while not self._store.check([_key(epoch, "members")]):
            there = [w for w in sorted(candidates) if self._store.check([_flag(epoch, w)])]
            if len(there) == len(candidates) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._store.compare_set(_key(epoch, "members"), "", json.dumps(there))
        decided = self._decided()
        if set(decided) - candidates - set(self.waiting() if admit else ()):
            raise ValueError(f"members of epoch {epoch}: strangers among {decided}")
        return decided

    def _decided(self) -> tuple[int, ...]:
        key = _key(self.epoch + 1, "members")
        return tuple(sorted(_numbers(self._store.get(key), key)))

    def _enter(self, epoch: int, members: tuple[int, ...]) -> Transport:
        self.epoch, self.members = epoch, members
        if self.worker not in members:
            raise LeftOut(f"worker {self.worker}: epoch {epoch} is {members}")
        about = self._ask(lambda: {w: self._get(_flag(epoch, w)) for w in members})
        self.transport = self._make(epoch, about)
        self._ask(lambda: self._store.set("flowslot/epoch", str(epoch)))
        return self.transport

    def _get(self, key: str) -> str:
        """Waits for it."""
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise PeerLost(self.members, f"{key} did not appear within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        return self._store.get(key).decode()

    def _raise_flag(self, epoch: int) -> None:
        self._ask(lambda: self._store.set(_flag(epoch, self.worker), self._about or "-"))

    def _ask(self, question: Callable[[], _T]) -> _T:
        try:
            return question()
        except (ConnectionError, ValueError):
            raise
        except (RuntimeError, OSError) as error:
            text = str(error).partition("\n")[0]
            raise ConnectionError(f"the store of the membership is gone: {text}") from None


def _key(epoch: int, name: str) -> str:
    return f"flowslot/{epoch}/{name}"


def _flag(epoch: int, worker: int) -> str:
    return _key(epoch, f"flag/{worker}")


def _wish(raw: bytes, what: str) -> list[int]:
    """What is no list of workers names none: nobody's training ends because of it."""
    try:
        return _numbers(raw, what)
    except ValueError as error:
        _log.warning("flowslot: %s", error)
        return []


def _numbers(raw: bytes, what: str) -> list[int]:
    """ValueError: it is no list of workers."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    good = isinstance(found, list) and len(found) <= _MOST
    if not good or not all(type(one) is int and one >= 0 for one in found):
        raise ValueError(f"{what}: must be a list of workers, is {raw[:40]!r}")
    return list(found)
