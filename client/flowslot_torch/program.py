# SPDX-License-Identifier: Apache-2.0
"""What users program (SDCC, Table 2), and the control plane's modules that events hand to them."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowslot_torch.engines import Array
from flowslot_torch.operations import Operations
from flowslot_torch.transport import Pending

if TYPE_CHECKING:
    from flowslot_torch.tasks import TaskManager
    from flowslot_torch.tensors import Tensor

_KEPT = 1024
_ANSWERS_S, _REST_S = 0.5, 60.0  # a daemon that stands still must not slow training
ITERATIONS, BYTES = "iteration_s", "iteration_bytes"


class Statistics:
    """Runtime values by name: a recorded one is appended to the older ones, of which the last 1024
    are kept."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {}

    def record(self, key: str, value: float) -> None:
        """Append."""
        self._values.setdefault(key, deque(maxlen=_KEPT)).append(value)

    def get(self, key: str) -> list[float]:
        """All values, oldest first; none of an unknown name."""
        return list(self._values.get(key, ()))

    def get_avg_iter_time(self, last: int = 0) -> float:
        """Mean of the last so many iterations (0: of all that are kept), seconds; 0.0 before the
        second. The first gradient of a backward pass begins one."""
        times = self.get(ITERATIONS)[-last:]
        return sum(times) / len(times) if times else 0.0


class Connection:
    """Who is there. `ranks`: members, in the order of the ring; `epoch`: changes of membership."""

    def __init__(self, rank: int, ranks: Sequence[int], epoch: int = 0) -> None:
        self.rank, self.ranks, self.epoch = rank, tuple(ranks), epoch

    def next(self, rank: int | None = None) -> int:
        """The rank after one (None: after this one)."""
        return self._beside(rank, 1)

    def previous(self, rank: int | None = None) -> int:
        """The rank before one."""
        return self._beside(rank, -1)

    def _beside(self, rank: int | None, step: int) -> int:
        place = self.ranks.index(self.rank if rank is None else rank)
        return self.ranks[(place + step) % len(self.ranks)]


class Links:
    """How fast the way from rank to rank is, payload bytes/s, and how much of it is taken.

    `rates`: as far as it is known beforehand. What is not, the daemon of this host is asked, which
    knows the topology and, where a switch process is there, the load; of hosts by `addresses`, by
    rank; several ranks may have one. Without a daemon nothing more is known, and nothing fails.
    A daemon knows its own host's ways: `share` tells all ranks of them.
    """

    def __init__(
        self,
        rates: Mapping[tuple[int, int], float] | None = None,
        addresses: Mapping[int, str] | None = None,
        control: str = "",
    ) -> None:
        """`control`: the daemon's control socket; $FLOWSLOT_CONTROL without one."""
        self._own = dict(rates or {}), dict[tuple[int, int], float]()
        """Rates and loads that this rank knows of."""
        self._shown = self._own
        self._addresses = dict(addresses or {})
        self._asks_at = 0.0
        self._control = control or os.environ.get("FLOWSLOT_CONTROL", "/run/flowslot/control.sock")

    def rate(self, source: int, to: int) -> float | None:
        """Of the slowest link between them; None: not known."""
        return self._shown[0].get((source, to))

    def load(self, source: int, to: int) -> float | None:
        """Reserved on the fullest of them in the next slots, 0 to 1; None: not known."""
        return self._shown[1].get((source, to))

    def is_slow(self, source: int, to: int, below: float = 0.5) -> bool:
        """Whether it has less than `below` of the fastest known rate."""
        rate = self.rate(source, to)
        return rate is not None and rate < below * max(self._shown[0].values())

    def refresh(self) -> bool:
        """Ask the daemon; takes milliseconds. Once ranks have shared, they show it when they do
        again. False: it does not answer; for a minute it is not asked again."""
        if not self._addresses or time.monotonic() < self._asks_at:
            return False
        ranks = defaultdict[str, list[int]](list)
        for rank, address in self._addresses.items():
            ranks[address].append(rank)
        try:
            flows, links = (self._ask(command) for command in ("flows", "links"))
            named = {link["name"]: link for link in links["links"]}
            for flow in flows["flows"]:
                if path := [named[name] for name in flow["path"]]:
                    ends = itertools.product(ranks[flow["src"]], ranks[flow["dst"]])
                    self._learn(list(ends), path)
        except (OSError, ValueError, KeyError, TypeError):
            self._asks_at = time.monotonic() + _REST_S
            return False
        return True

    def share(self, ops: Operations) -> None:
        """What each rank knows of its ways to the others: from then on all show that, and nothing
        else. All ranks must call it. ValueError: a rank tells of something impossible."""
        ranks, unknown = ops.ranks, -1.0
        row = ops.alloc(2 * len(ranks), "float64")
        for i, (to, own) in enumerate(itertools.product(ranks, self._own)):
            row[i] = own.get((ops.rank, to), unknown)
        told = iter(float(value) for value in ops.allgather(row))
        self._shown = {}, {}
        for ends in itertools.product(ranks, ranks):
            for kept in self._shown:
                value = next(told)
                if value != unknown and not 0 <= value < math.inf:
                    raise ValueError(f"links: rank {ends[0]} tells of {value} to rank {ends[1]}")
                if value != unknown:
                    kept[ends] = value

    def _learn(self, ways: Sequence[tuple[int, int]], path: list[Any]) -> None:
        rate = min(float(link["goodput"]) for link in path)
        if not 0 < rate < math.inf:
            raise ValueError(f"links: goodput must be above 0, is {rate}")
        loads = [max(link["load"]) / float(link["goodput"]) for link in path if link["load"]]
        for ends in ways:
            self._own[0][ends] = rate
            if loads:
                self._own[1][ends] = max(loads)

    def _ask(self, command: str) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
            daemon.settimeout(_ANSWERS_S)
            daemon.connect(self._control)
            daemon.sendall(json.dumps({"cmd": command}).encode() + b"\n")
            with daemon.makefile("rb") as stream:
                answer = json.loads(stream.readline(1 << 24))
        if not answer["ok"]:
            raise ValueError(answer["error"])
        return answer["result"]


class Program:
    """Subclass this. Events are called on the thread that communicates; of a program that repeats,
    on the one that trains, too, in a backward pass as well; but one at a time. `on_buffer_ready`
    and `on_timer_expired` on all ranks in the same order, so that both may communicate. What they
    raise ends training with that error.

    Set before the first event: `ops`, `tasks`, `statistics`, `connection`, `links`.
    """

    timer_iterations = 10
    """How often the timer expires; $FLOWSLOT_TIMER_ITERATIONS goes before it."""
    repeats = False
    """Buffers are those of the iteration before, and ranks agree on new ones in the iteration after
    a timer only; not even then where `on_timer_expired` returns True and the membership is fixed.
    For programs without priorities; each gradient must come in each iteration, and
    `on_tensor_ready` is called when all of a buffer have come. Who wants to join waits for that,
    too."""
    ops: Operations
    tasks: TaskManager
    statistics: Statistics
    connection: Connection
    links: Links

    def on_tensor_ready(self, tensor: Tensor) -> Sequence[Tensor] | None:
        """A gradient is about to be scheduled. May set its priority, and return parts of it
        (`Tensor.split`) that are to be scheduled in its place."""

    def on_buffer_ready(self, buffer: Array) -> Pending | None:
        """Tensors that all ranks have are in the buffer: leave their sum there. Or return what
        leaves it there once waited for: a program that repeats gets its next buffers meanwhile,
        and should do so with all of them or with none. Afterwards the buffer is used again."""
        self.ops.allreduce(buffer)
        return None

    def on_timer_expired(self, statistics: Statistics) -> bool | None:
        """So many iterations have passed. True: a program that repeats keeps its buffers; alike on
        all ranks."""
        return None

    def on_worker_added(self, connection: Connection) -> None:
        """The membership has grown."""

    def on_worker_removed(self, connection: Connection) -> None:
        """The membership has shrunk."""
