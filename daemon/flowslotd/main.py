# SPDX-License-Identifier: Apache-2.0
"""The program `flowslotd`: arguments, logging, exit status.

Exit status: 0 stopped on request, 1 failure at run time, 2 bad configuration or usage.
"""

import argparse
import logging
import sys
from importlib.metadata import version
from pathlib import Path

import uvloop

from flowslot.model.errors import ConfigError, FlowslotError
from flowslotd.config import load
from flowslotd.daemon import Daemon

DEFAULT_CONFIG = Path("/etc/flowslot/flowslotd.toml")


def main() -> None:
    """Entry point."""
    options = _parse()
    logging.basicConfig(
        level=options.log_level.upper(), format="flowslotd: %(levelname)s: %(message)s"
    )
    try:
        uvloop.run(Daemon(load(options.config)).run())
    except ConfigError as error:
        _die(str(error), 2)
    except FlowslotError as error:
        _die(str(error), 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _die(f"{where}{error.strerror or error}", 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="flowslotd", description="Paces the flows of this host's training jobs."
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.add_argument("--version", action="version", version=f"flowslotd {version('flowslot')}")
    return parser.parse_args()


def _die(text: str, status: int) -> None:
    print(f"flowslotd: {text}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
