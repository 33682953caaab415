# SPDX-License-Identifier: Apache-2.0
"""What is learnt of recorded jobs: `python -m bench.enlisted_replay FILE ..`.

The files are those of `python -m bench.enlisted --record FOLDER`. Each job is enlisted in each of
its iterations in turn, its sockets are looked at when the daemon would, and what the busiest of
them is said to do is compared with what it did. Printed: the most iterations after which bytes and
period were known within 3 %, and the largest errors at the end.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.enlisted import WITHIN
from flowslot.model.units import MILLISECOND, SECOND
from flowslot_shm.writer import FlowWriter
from flowslotd.observe.passive.shadow import Watched
from flowslotd.sockets import Info

LEFT = 8
"""Iterations that a job goes on at least after it was enlisted."""


class Said(FlowWriter):
    """What was announced last: bytes and ns."""

    def __init__(self) -> None:
        self.total = self.period = self.index = 0

    def begin(
        self, iteration: int, total: int = 0, start_ns: int | None = None, period_ns: int = 0
    ) -> None:
        self.total, self.period = total, period_ns or self.period

    def advance(self, *, ready: int = 0, posted: int = 0, done: int = 0) -> None: ...


class Recording(NamedTuple):
    """`looks`: (ns, info) of the busiest socket. `begins`: of iterations, ns. `sockets`: how many
    there are."""

    looks: list[tuple[int, Info]]
    begins: list[int]
    sockets: int

    @classmethod
    def load(cls, path: Path) -> "Recording":
        *lines, told = map(json.loads, path.read_text().splitlines())
        looks: dict[int, list[tuple[int, Info]]] = {}
        for now, cookie, *info in lines:
            looks.setdefault(cookie, []).append((now, Info(*info)))
        busiest = max(looks.values(), key=lambda one: one[-1][1].sent - one[0][1].sent)
        begins = [round(at * SECOND) for at, _ in told["iterations"]]
        return cls(busiest, begins, len(looks))

    def truth(self) -> tuple[float, float]:
        """Bytes of an iteration, and ns from one to the next."""
        first, last = self.begins[1], self.begins[-1]
        sent = [info.sent - info.resent for now, info in self.looks if first <= now <= last]
        number = len(self.begins) - 2
        return (sent[-1] - sent[0]) / number, (last - first) / number


def learn(recording: Recording, at: int) -> Iterator[tuple[int, int, int]]:
    """Enlisted at some time: at each look, when it was, and what is said of bytes and period."""
    looks = [look for look in recording.looks if look[0] >= at]
    said = Said()
    watched = Watched(0, 0, said, *looks[0])
    for now, info in looks:
        if now >= watched.next_ns:
            watched.see(now, info)
            watched.rest(now, recording.sockets)
            yield now, said.total, said.period


def judge(recording: Recording, at: int) -> tuple[list[int], list[float]]:
    """Of bytes, and of the period: iterations until each was known, and errors at the end."""
    never = len(recording.begins)
    truth, after, errors = recording.truth(), [never, never], [1.0, 1.0]
    for now, *said in learn(recording, at):
        begun = sum(at < begin <= now for begin in recording.begins)
        errors = [abs(one / true - 1) for one, true in zip(said, truth, strict=True)]
        after = [
            min(known, begun) if error <= WITHIN else known
            for known, error in zip(after, errors, strict=True)
        ]
    return after, errors


def main(files: Sequence[str]) -> int:
    """All recordings."""
    print("| recording | bytes known after | period | bytes wrong by | period | typical |")
    print("| --- | --- | --- | --- | --- | --- |")
    for file in files:
        recording = Recording.load(Path(file))
        begins = recording.begins[: max(len(recording.begins) - LEFT, 1)]
        found = [judge(recording, begin + MILLISECOND) for begin in begins]
        sizes, periods = zip(*(after for after, _ in found), strict=True)
        errors = [max(column) for column in zip(*(error for _, error in found), strict=True)]
        name, usual = Path(file).stem, statistics.median(periods)
        worst = f"{max(sizes)} | {max(periods)} | {errors[0]:.1%} | {errors[1]:.1%} | {usual:.0f}"
        print(f"| {name} | {worst} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
