# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon of this host over its control socket."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from flowslot.model.errors import FlowslotError

FAILURE, BAD_INPUT, NO_DAEMON = 1, 2, 3
WHY: dict[type[Exception], str] = {
    FileNotFoundError: "there is no such socket: the daemon is not running, or uses another "
    "runtime directory",
    ConnectionRefusedError: "nobody listens there any more: the daemon has ended",
    TimeoutError: "it did not answer in time",
}


class CommandError(FlowslotError):
    """One sentence for the user, and the exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def ask(path: Path, command: str, timeout_s: float = 5.0, **more: Any) -> dict[str, Any]:
    """The daemon's answer. `more`: what the command takes. Raises CommandError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(timeout_s)
            peer.connect(os.fspath(path))
            peer.sendall(json.dumps({"cmd": command, **more}).encode() + b"\n")
            with peer.makefile("rb") as stream:
                line = stream.readline()
        if not line:
            raise OSError("it closed the connection without an answer")
        answer = json.loads(line)
    except (OSError, ValueError) as error:
        raise CommandError(_unreachable(path, error), NO_DAEMON) from None
    if answer["ok"]:
        result: dict[str, Any] = answer["result"]
        return result
    status = BAD_INPUT if answer["kind"] == "config" else FAILURE
    raise CommandError(answer["error"], status)


def _unreachable(path: Path, error: Exception) -> str:
    why = WHY.get(type(error)) or getattr(error, "strerror", None) or str(error)
    return (
        f"no daemon at {path}: {why}. "
        "Try `systemctl status flowslotd`, `flowslot doctor`, or --runtime-dir DIR."
    )
