# SPDX-License-Identifier: Apache-2.0
"""The control socket: one JSON line in, one JSON line out, over a unix stream socket.

`{"cmd": "status"}` -> `{"ok": true, "result": ...}` or `{"ok": false, "kind": ..., "error": ...}`,
where `kind` is `request`, `permission`, `config` or `internal`. Anyone on the host may read; what
changes the process is for root and for its own user or group (SO_PEERCRED). Some commands take
more: `{"cmd": "set-policy", "name": "adadual"}`.
"""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from flowslot.model.errors import ConfigError
from flowslot_proto.unix_socket import Listener, peer_of

Json = dict[str, object]
Answer = Json | Awaitable[Json]
Handler = Callable[[], Answer]
Taker = Callable[[Json], Answer]
"""Of a command that takes more: the whole request. Raises ConfigError."""
MAX_CLIENTS = 64
MAX_REQUEST_BYTES = 4096
IDLE_S = 30.0
MAX_NAME = 64


class Control:
    """Serves `readers` to everyone, `writers` and `takers` to those who may change the process."""

    def __init__(
        self,
        path: Path,
        readers: Mapping[str, Handler],
        writers: Mapping[str, Handler],
        on_bug: Callable[[str, BaseException], None],
        takers: Mapping[str, Taker] | None = None,
    ) -> None:
        self._path = path
        self._handlers = {**readers, **writers}
        self._takers = dict(takers or {})
        self._writers = {*writers, *self._takers}
        self._on_bug = on_bug
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises AlreadyRunning, or OSError when the directory cannot be written."""
        self._listener = Listener(self._path, socket.SOCK_STREAM)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=self._listener.socket, limit=MAX_REQUEST_BYTES
        )

    async def stop(self) -> None:
        """Close the socket, and all connections."""
        self._server.close()
        for task in self._clients:
            task.cancel()
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._clients) >= MAX_CLIENTS:
            writer.close()
            return
        self._clients.add(task)
        try:
            peer = writer.get_extra_info("socket")
            while line := await asyncio.wait_for(reader.readline(), IDLE_S):
                answer = await self._answer(line, may_change=_may_change(peer))
                writer.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, TimeoutError, asyncio.CancelledError):
            pass  # gone, silent, or a line beyond the limit: all this client's own affair
        finally:
            self._clients.discard(task)
            writer.close()

    async def _answer(self, line: bytes, may_change: bool) -> Json:
        try:
            request = json.loads(line)
            command = str(request["cmd"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return _refuse("request", 'must be a JSON line such as {"cmd": "status"}')
        if command in self._writers and not may_change:
            return _refuse("permission", f"`{command}` is for root and our own user or group")
        handler = self._handlers.get(command)
        if command in self._takers:
            handler = partial(self._takers[command], request)
        return await self._call(command, handler)

    async def _call(self, command: str, handler: Handler | None) -> Json:
        if handler is None:
            known = ", ".join((*self._handlers, *self._takers))
            return _refuse("request", f"unknown command {command[:40]!r}; known: {known}")
        try:
            result = handler()
            return {"ok": True, "result": result if isinstance(result, dict) else await result}
        except ConfigError as error:
            return _refuse("config", str(error))
        except Exception as error:  # a bug in a report must not end the daemon
            self._on_bug(f"control command {command}", error)
            return _refuse("internal", f"{type(error).__name__}: {error}")


def named(take: Callable[[str], Answer]) -> Taker:
    """Of a command that takes a `name`."""

    def handler(request: Json) -> Answer:
        name = request.get("name")
        if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()):
            problem = f"must have 1 to {MAX_NAME} printable characters"
            raise ConfigError(str(request["cmd"]), "name", problem)
        return take(name)

    return handler


def _may_change(sock: socket.socket) -> bool:
    peer = peer_of(sock)
    return peer.uid in (0, os.getuid()) or peer.gid == os.getgid()


def _refuse(kind: str, error: str) -> Json:
    return {"ok": False, "kind": kind, "error": error}
