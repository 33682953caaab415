# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 by hand, for clients that do as they please."""

import socket
import ssl
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4)
    return head + payload


def fields(path: str) -> bytes:
    """Those of a request, packed without compression (RFC 7541, 6.2.2)."""
    named = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in named.items())


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def message(payload: bytes, announced: int | None = None) -> bytes:
    """As gRPC frames one; `announced` instead of its true length."""
    return b"\0" + (len(payload) if announced is None else announced).to_bytes(4) + payload


class RawClient:
    """One connection, from any of this machine's addresses; says what it is told to."""

    def __init__(
        self,
        port: int,
        source: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        window: int = 65535,
    ) -> None:
        """`window`: bytes that the server may send on a stream."""
        self.sock = socket.create_connection(("127.0.0.1", port), 10.0, (source, 0))
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="s1")
        self.sock.sendall(PREFACE + frame(SETTINGS, 0, 0, b"\0\4" + window.to_bytes(4)))
        self.windows = {0: 65535}
        self.ended: dict[int, bytes] = {}
        """Streams that the server has ended, and the frame that did it; 0: all of them."""
        self.failed: set[int] = set()
        """Those of them that had no answer."""
        self._answered: set[int] = set()
        self._initial = 65535
        self._stream = -1
        self._heard = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def begin(self, path: str) -> int:
        """A call; returns its number."""
        self._stream += 2
        self.windows[self._stream] = self._initial
        self.sock.sendall(frame(HEADERS, END_HEADERS, self._stream, fields(path)))
        return self._stream

    def send(self, stream: int, data: bytes, end: bool = False) -> None:
        """As it is, however small the window may be."""
        self.sock.sendall(frame(DATA, END_STREAM if end else 0, stream, data))

    def fill(self, stream: int, limit: int) -> int:
        """Send as much as the windows allow, and at most `limit`; returns how much that was."""
        n = max(0, min(self.windows[0], self.windows.get(stream, 0), limit, 16384))
        if n:
            self.windows[0] -= n
            self.windows[stream] -= n
            self.send(stream, bytes(n))
        return n

    def pending(self) -> set[int]:
        """Calls that the server has not ended."""
        return self.windows.keys() - self.ended.keys() - {0}

    def reset(self, stream: int) -> None:
        self.sock.sendall(frame(RST, 0, stream, (8).to_bytes(4)))

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Take what has come, wait so long for it; False: the connection is closed."""
        self.sock.settimeout(timeout_s or 1e-4)
        try:
            heard = self.sock.recv(1 << 18)
        except TimeoutError:
            return True
        except OSError:
            return False
        finally:
            self.sock.settimeout(10.0)
        self._heard += heard
        while len(self._heard) >= 9 and len(self._heard) >= 9 + int.from_bytes(self._heard[:3]):
            end = 9 + int.from_bytes(self._heard[:3])
            one, self._heard = self._heard[:end], self._heard[end:]
            try:
                self._take(one[3], one[4], int.from_bytes(one[5:9]), one[9:])
            except OSError:  # what is answered to does not arrive
                return False
        return bool(heard)

    def answer(self, path: str, data: bytes) -> bool:
        """A whole unary call; returns whether it failed."""
        call = self.begin(path)
        self.send(call, data, end=True)
        self.wait(call)
        return call in self.failed or 0 in self.ended

    def wait(self, stream: int) -> bytes:
        """Until the server has ended that stream; returns what did it."""
        while stream not in self.ended and 0 not in self.ended:
            if not self.hear(10.0):
                self.ended[0] = b"closed"
        return self.ended.get(stream, self.ended.get(0, b""))

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.sock.sendall(frame(SETTINGS, ACK, 0, b""))
            for at in range(0, len(payload), 6):
                if payload[at : at + 2] == b"\0\4":
                    grown = int.from_bytes(payload[at + 2 : at + 6]) - self._initial
                    self._initial += grown
                    for each in self.windows:
                        self.windows[each] += grown if each else 0
        elif kind == PING and not flags & ACK:
            self.sock.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW and stream in self.windows:
            self.windows[stream] += int.from_bytes(payload)
        elif kind in {RST, GOAWAY} or (kind == HEADERS and flags & END_STREAM):
            self.ended[stream] = payload
            if stream not in self._answered:
                self.failed.add(stream)
        elif kind == DATA:
            self._answered.add(stream)
