# SPDX-License-Identifier: Apache-2.0
"""What ranks know of the links between them, and tell each other."""

import json
import math
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from collectives import MAKERS, numpy_tcp, together

from flowslot_torch import program
from flowslot_torch.cases.partial_compression import PartialCompression
from flowslot_torch.operations import Operations
from flowslot_torch.program import Links
from flowslot_torch.tasks import TaskManager

RANKS = 4


class Daemon(threading.Thread):
    """Answers as one whose host sends to one other, at a rate."""

    def __init__(self, path: Path, source: int, to: int, rate: float) -> None:
        super().__init__(daemon=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.flow = {"src": f"10.0.0.{source}", "dst": f"10.0.0.{to}", "path": ["up"]}
        self.link = {"name": "up", "goodput": rate, "load": [0.0, rate / 4]}
        self.start()

    def run(self) -> None:
        while True:
            with self.listener.accept()[0] as asked:
                command = json.loads(asked.recv(4096))["cmd"]
                result = {command: [self.flow if command == "flows" else self.link]}
                asked.sendall(json.dumps({"ok": True, "result": result}).encode() + b"\n")


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_ranks_tell_each_other_what_their_daemons_know(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each daemon knows what its own host sends to the next; rank 3 has none."""
    monkeypatch.setattr(program, "_ANSWERS_S", 30.0)
    rates, addresses = [1e7, 1e7, 1e6], {rank: f"10.0.0.{rank}" for rank in range(RANKS)}
    for rank, rate in enumerate(rates):
        Daemon(tmp_path / str(rank), rank, rank + 1, rate)

    def body(rank: int, engine: Any, transport: Any) -> Any:
        links = Links(addresses=addresses, control=str(tmp_path / str(rank)))
        ours = PartialCompression()
        tasks = TaskManager(ours, engine, transport, links=links)
        mine = engine.alloc(1000, "float32")
        mine[:] = rank
        tasks.enqueue(0, mine)
        tasks.wait_all()
        known = [links.rate(a, (a + 1) % RANKS) for a in range(RANKS)]
        assert known == [*rates, None] and links.load(1, 2) == 0.25 and links.load(3, 0) is None
        sent_as = [ours.sent_as(a, (a + 1) % RANKS) for a in range(RANKS)]
        assert sent_as == ["float32", "float32", "float16", "float32"]
        return mine

    for mean in together(RANKS, maker(RANKS), body):
        assert (mean == sum(range(RANKS)) / RANKS).all()  # small numbers: exact in float16


def test_a_daemon_that_does_not_answer_is_left_alone_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: now[0])
    links = Links(addresses={0: "10.0.0.0", 1: "10.0.0.1"}, control=str(tmp_path / "d"))
    assert not links.refresh()
    Daemon(tmp_path / "d", 0, 1, 5e6)
    assert not links.refresh() and links.rate(0, 1) is None
    now[0] += 61
    assert links.refresh() and links.rate(0, 1) == 5e6


def test_who_comes_back_is_still_known() -> None:
    """Ranks know beforehand that rank 1 is slow; it leaves, and another one comes as rank 1."""
    rates = {(a, b): 1.0 if 1 in (a, b) else 9.0 for a in range(3) for b in range(3) if a != b}
    all_links = [Links(rates) for _ in range(3)]

    def share(rank: int, ranks: tuple[int, ...], engine: Any, transport: Any) -> None:
        if rank in ranks:
            ops = Operations(engine, transport)
            ops.ranks = ranks
            all_links[rank].share(ops)

    for ranks in ((0, 1, 2), (0, 2), (0, 1, 2)):
        together(3, numpy_tcp(3), lambda rank, *two, there=ranks: share(rank, there, *two))
        for rank in ranks:
            assert all_links[rank].is_slow(0, 1) == all_links[rank].is_slow(1, 2) == (1 in ranks)
            assert not all_links[rank].is_slow(0, 2)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_what_a_daemon_says_wrongly_ends_nothing(rate: float, tmp_path: Path) -> None:
    Daemon(tmp_path / "d", 0, 1, rate)
    links = Links(addresses={0: "10.0.0.0", 1: "10.0.0.1"}, control=str(tmp_path / "d"))
    assert not links.refresh() and links.rate(0, 1) is None


@pytest.mark.parametrize("lie", [-2.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(lie: float) -> None:
    def body(rank: int, engine: Any, transport: Any) -> None:
        Links({(1, 0): lie} if rank else None).share(Operations(engine, transport))

    with pytest.raises(ValueError, match=rf"links: rank 1 tells of {lie} to rank 0"):
        together(2, numpy_tcp(2), body)
