# SPDX-License-Identifier: Apache-2.0
"""What the NCCL plugin's reports cost: `python -m bench.nccl_reporting`.

The harness streams as in `bench.nccl_throughput`: without a daemon, reporting to a registration
server that wants every doorbell, and without a daemon again, in turns. Printed are the ratios of
the second to the mean of the first and third, and of the third to the first, which says what chance
does: median, least and most. Exit status 1 when reporting's median costs more than 1 % of the
throughput, or of the CPU time per byte.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from flowslot_shm.layout import Quiet

from .nccl_ranks import HARNESS, PLUGIN, build
from .nccl_throughput import Load, Turn, messages, spread
from .registrar import registration_server

MOST = 0.01


def measure(load: Load, turns: int) -> list[tuple[Turn, Turn, Turn]]:
    """Of each turn: silent, reporting, silent again."""
    folder = build(HARNESS)
    build(PLUGIN)
    found = []
    with tempfile.TemporaryDirectory() as at:
        path = Path(at) / "register.sock"
        registered: set[int] = set()
        with registration_server(path, Quiet.NONE, registered.add):
            for k in range(turns):
                print(f"{k + 1}/{turns}", file=sys.stderr, flush=True)
                silent = messages(folder, "flowslot", load)
                reporting = messages(folder, "flowslot", load, FLOWSLOT_SOCKET=str(path))
                found.append((silent, reporting, messages(folder, "flowslot", load)))
        if len(registered) < 2 * turns:
            raise RuntimeError(f"{len(registered)} records in {turns} turns: not all reported")
    return found


def main() -> int:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--sockets", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="helpers of each side")
    parser.add_argument("--bytes", type=int, default=1 << 28, help="of an iteration")
    parser.add_argument("--repeat", type=int, default=8, help="iterations, after one left out")
    options = parser.parse_args()
    load = Load(options.bytes, options.repeat, options.sockets, options.threads)
    found = measure(load, options.turns)
    print(f"{load.sockets} sockets, {load.threads} threads: reporting / silent; chance")
    good = True
    for field in Turn._fields:
        each = [tuple(getattr(turn, field) for turn in turns) for turns in found]
        costs = [2 * reporting / (first + last) for first, reporting, last in each]
        chance = [last / first for first, _, last in each]
        print(f"{field:<4} {spread(costs)}; {spread(chance)}")
        middle = statistics.median(costs)
        good &= middle >= 1 - MOST if field == "rate" else middle <= 1 + MOST
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
