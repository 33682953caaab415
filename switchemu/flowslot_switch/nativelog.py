# SPDX-License-Identifier: Apache-2.0
"""What gRPC's C core writes to standard error: why a TLS handshake failed is told nowhere else.

It does so for every handshake, without saying whose, as often as anybody likes. So its lines come
through a pipe; the failed handshakes are matched with connections that came and went at that moment
and never made a call.
"""

import asyncio
import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from flowslot_switch.connections import Connections
from flowslot_switch.limits import TokenBucket

LOOKS_PER_S = 20.0
"""Handshakes whose connection is looked up; of more nobody would want to know."""
LINES, LINES_S = 10, 10.0
"""Other lines that are passed on in so long."""
FAILED = re.compile(r"Handshake failed with error .*?:OPENSSL_internal:(.*?)(?:: OK)?$")
REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not accepted",
    "HTTP_REQUEST": "it does not speak TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
}
IGNORED = ("File descriptor limit reached", "No match found for server name")


class NativeLog:
    """Takes standard error's file over, in the event loop. What Python writes and logs goes where
    it went before."""

    def __init__(self, on_failed: Callable[[str], None]) -> None:
        """`on_failed`: a handshake has failed; why."""
        self._on_failed = on_failed
        self._before = sys.stderr
        self._stderr = os.dup(2)
        self._pipe, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.dup2(end, 2)
        os.close(end)
        sys.stderr = os.fdopen(os.dup(self._stderr), "w", buffering=1, errors="backslashreplace")
        _redirect(self._before, sys.stderr)
        self._rest = b""
        self._passed, self._since = 0, 0.0

        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def close(self) -> None:
        """Standard error is as it was; what is still in the pipe goes there."""
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.dup2(self._stderr, 2)
        _redirect(sys.stderr, self._before)
        sys.stderr = self._before
        with contextlib.suppress(BlockingIOError):
            while rest := os.read(self._pipe, 1 << 16):
                os.write(2, rest)

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
        elif not any(text in line for text in IGNORED):
            now = time.monotonic()
            if now - self._since > LINES_S:
                self._passed, self._since = 0, now
            self._passed += 1
            if self._passed <= LINES:
                os.write(self._stderr, line.encode() + b"\n")


def _redirect(old: TextIO, new: TextIO) -> None:
    """Logging keeps the stream that it began with."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


class Strangers:
    """Connections that have not made a call: whose handshake it was that failed."""

    def __init__(self, port: int) -> None:
        self._connections = Connections(port)
        self._lock = threading.Lock()
        self._looks = TokenBucket(LOOKS_PER_S, LOOKS_PER_S)
        self._seen: dict[str, float] = {}
        self._callers: set[str] = set()

    def called(self, peer: str) -> None:
        """This one is none."""
        self._callers.add(peer)

    def look(self) -> None:
        """A handshake begins. In any thread."""
        with self._lock, contextlib.suppress(OSError):
            if self._looks.take(time.monotonic_ns()):
                self._seen |= dict.fromkeys(self._connections.peers(), time.monotonic())

    def gone(self) -> str:
        """Those that came, made no call, and are no more; most often it is one."""
        with self._lock, contextlib.suppress(OSError):
            now, there = time.monotonic(), set(self._connections.peers())
            self._callers &= self._seen.keys() | there
            gone = [peer for peer in self._seen if peer not in there | self._callers]
            self._seen = {p: at for p, at in self._seen.items() if p in there and now - at < 1.0}
            if gone:
                return gone[0] if len(gone) == 1 else f"one of {', '.join(gone[:3])}"
        return "somebody"
