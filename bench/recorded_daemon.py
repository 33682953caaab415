# SPDX-License-Identifier: Apache-2.0
"""flowslotd, which at its end writes down how long its passes at slots took.

`python -m bench.recorded_daemon FILE ...`: all other arguments are flowslotd's. The daemon itself
tells percentiles only.
"""

import json
import sys
from pathlib import Path

from flowslotd import daemon
from flowslotd.main import main as run_daemon
from flowslotd.metrics import Durations, Metrics


class Kept(Durations):
    """Durations, all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.samples_ns: list[int] = []

    def add(self, duration_ns: int) -> None:
        super().add(duration_ns)
        self.samples_ns.append(duration_ns)


def main() -> None:
    file = Path(sys.argv.pop(1))
    passes = Kept()

    def metrics() -> Metrics:
        made = Metrics()
        made.decision = passes
        return made

    daemon.Metrics = metrics  # type: ignore[assignment, attr-defined]
    try:
        run_daemon()
    finally:
        file.write_text(json.dumps(passes.samples_ns))


if __name__ == "__main__":
    main()
