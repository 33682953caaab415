# SPDX-License-Identifier: Apache-2.0
"""What gRPC's C core writes to standard error: why a TLS handshake failed is told nowhere else.

It does so for every handshake, without saying whose, as often as anybody likes. So its lines come
through a pipe.
"""

import asyncio
import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable

from flowslot_switch.limits import TokenBucket

LINES_PER_S, LINE_BURST = 1.0, 10.0
"""Other lines that are passed on."""
FAILED = re.compile(r"Handshake failed with error .*?:OPENSSL_internal:(.*?)(?:: OK)?$")
REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not accepted",
    "HTTP_REQUEST": "it does not speak TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
}
IGNORED = ("File descriptor limit reached", "No match found for server name")


class NativeLog:
    """Takes standard error's file over, for as long as the process lives. What Python writes and
    logs goes where it went before."""

    def __init__(self, on_failed: Callable[[str], None]) -> None:
        """`on_failed`: a handshake has failed; why. Called in this event loop."""
        self._on_failed = on_failed
        self._lines = TokenBucket(LINES_PER_S, LINE_BURST)
        self._rest = b""
        before, kept = sys.stderr, os.dup(2)
        self._pipe, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(end, 2)
        os.close(end)
        sys.stderr = os.fdopen(kept, "w", buffering=1, errors="backslashreplace")
        for handler in logging.getLogger().handlers:  # they keep the stream they began with
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stderr)
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if found := FAILED.search(line):
            kind, _, more = found[1].partition(": ")
            reason = REASONS.get(kind, kind.lower().replace("_", " "))
            verified = kind == "CERTIFICATE_VERIFY_FAILED" and more
            self._on_failed(f"{reason}: {more}" if verified else reason)
        elif not any(text in line for text in IGNORED) and self._lines.take(time.monotonic_ns()):
            print(line, file=sys.stderr)
