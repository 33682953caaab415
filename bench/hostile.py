# SPDX-License-Identifier: Apache-2.0
"""What honest daemons notice while somebody attacks their switch process. Exit status 1: too much.

A real `flowslot-switch`; a daemon's stream at one address, which beats its heart 100 times a second
and makes unary calls beside it; and at other addresses, in processes of their own, one attack after
the other (tests/switchemu/attacks.py). Prints for each: what the attacker achieved per second, the
daemon's p50 and p99 (stream and calls), whether its stream lived on, and the most memory that the
process had.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "switchemu"))
from attacks import ATTACKS, Attack, Result, Victim
from switchproc import Switch
from tlsfiles import TlsSwitch

MOST = {"stream_p99_ms": 50, "calls_p99_ms": 50, "errors": 0, "rss_mb": 256}


def measure(name: str, seconds: float, tls: bool = False) -> dict[str, Any]:
    """`tls`: the attacker has another host's certificate."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        switch = stack.enter_context(TlsSwitch(folder, 60, 5) if tls else Switch(folder))
        switch.start().wait_recovered()
        with Victim(switch) as victim, Attack(switch, name, folder if tls else None) as attack:
            result = victim.result = Result()
            time.sleep(seconds)
            achieved = attack.stop()
            victim.stop()
        stream, calls = (np.percentile(times, (50, 99)) * 1e3 for times in result.times)
        return {
            "attack": name,
            "achieved_per_s": " ".join(f"{k} {v / seconds:.0f}" for k, v in achieved.items()),
            "stream_p50_ms": round(float(stream[0]), 2),
            "stream_p99_ms": round(float(stream[1]), 2),
            "calls_p50_ms": round(float(calls[0]), 2),
            "calls_p99_ms": round(float(calls[1]), 2),
            "lost": result.lost,
            "errors": len(result.errors),
            "rss_mb": round(result.most_rss / 1e6),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--attack", choices=["none", *ATTACKS], action="append")
    parser.add_argument("--tls", action="store_true", help="all have certificates")
    args = parser.parse_args()
    rows = [measure(name, args.seconds, args.tls) for name in args.attack or ["none", *ATTACKS]]
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    print(*(f"{key:{width}}" for key, width in widths.items()), sep="  ")
    for row in rows:
        print(*(f"{row[key]!s:{width}}" for key, width in widths.items()), sep="  ")
    over = [
        row["attack"]
        for row in rows
        if row["lost"] or any(row[key] > most for key, most in MOST.items())
    ]
    if over:
        sys.exit(f"beyond {MOST}: {', '.join(over)}")


if __name__ == "__main__":
    main()
