# SPDX-License-Identifier: Apache-2.0
"""A channel to one switch process: which address it is reached at, and what went wrong if not."""

import asyncio
import re
import socket
from typing import Any
from urllib.parse import quote

from flowslot.model.topology_file import SwitchSettings, split_endpoint
from flowslot_proto.endpoints import why_only_here
from flowslot_proto.grpcio import grpc
from flowslot_proto.tls import Material, TlsFiles, utc_now

MAX_MESSAGE_BYTES = 4 << 20
CONNECT_S = 2.0
"""All addresses of a switch process together; each has its part of it."""
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # no back-off but ours
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A switch process that says nothing at all for 15 s while calls wait is left.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class RpcFailed(Exception):
    """A call ended otherwise than well, or could not begin."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class Stream:
    """A call with any number of messages both ways."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        """The next message; None: the other side has ended the call well. Raises RpcFailed."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise RpcFailed(error.code(), error.details() or "") from None
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes) -> None:
        """Raises RpcFailed: the call has ended; `read` tells how."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise RpcFailed(grpc.StatusCode.UNAVAILABLE, "the call has ended") from None


class Channel:
    """Connects for the first call, and again for the next one when the connection was lost."""

    def __init__(self, switch: SwitchSettings, tls: TlsFiles | None = None) -> None:
        """`tls` None: plaintext. Else the switch must have a certificate for its name."""
        self._address = switch.address
        self._name = switch.name
        self._tls = tls
        self._used: Material | None = None
        self._streaming = False
        self._worked = ""  # of its addresses, the one that did last
        self._only_here = ""
        self._channel: grpc.aio.Channel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """A connection stands."""
        channel = self._channel
        return channel is not None and channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, timeout_s: float | None = None) -> None:
        """Nothing when connected. None: wait until it is decided. Raises RpcFailed.

        Who gives up waiting does not stop it: the next one finds it further on, or done.
        """
        if self.connected and not self._outdated():
            return
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            # Taken note of, though nobody may wait for it any more.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        done, _ = await asyncio.wait([self._connecting], timeout=timeout_s)
        if not done or self._connecting.cancelled():
            raise _unavailable("cannot be reached in time")
        self._connecting.result()

    def stream(self, path: str) -> Stream:
        """Begin a call; the channel is connected."""
        assert self._channel is not None
        self._streaming = True
        return Stream(self._channel.stream_stream(path)())

    async def unary(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """One message there, one back; connects first. Raises RpcFailed."""
        end = asyncio.get_running_loop().time() + timeout_s
        await self.connect(timeout_s)
        if self._channel is None:
            raise _unavailable("the channel is closed")
        left_s = end - asyncio.get_running_loop().time()
        call: Any = self._channel.unary_unary(path)(request, timeout=max(left_s, 0.0))
        try:
            return bytes(await call)
        except grpc.aio.AioRpcError as error:
            raise RpcFailed(error.code(), error.details() or "") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _unavailable("the channel is closed") from None

    async def close(self) -> None:
        """End all calls and the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
        self._drop()
        await asyncio.gather(*self._closing)

    def _outdated(self) -> bool:
        """Files of TLS have changed. A stream goes on with those that it began with: its lease is
        worth more than the change, which a new stream takes over."""
        return (
            not self._streaming and self._tls is not None and self._tls.current() is not self._used
        )

    def _drop(self, grace_s: float | None = None) -> None:
        self._streaming = False
        channel, self._channel = self._channel, None
        if channel is not None:
            task = asyncio.create_task(channel.close(grace_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _connect(self) -> None:
        """Try one address after the other, the one that worked last first."""
        self._drop(CONNECT_S)
        targets = await self._targets()
        self._used = self._tls.current() if self._tls else None
        problem = "no address"
        for target in targets:
            channel = self._open(target)
            try:
                async with asyncio.timeout(CONNECT_S / len(targets)):
                    problem = await _failure(channel)
            except TimeoutError:
                problem = "no answer in time"
            except BaseException:
                await channel.close()
                raise
            if not problem:
                self._worked, self._channel = target, channel
                return
            await channel.close()
        doubt = f" ({self._only_here})" if self._only_here else ""
        raise _unavailable(f"cannot be reached: {self._explain(problem)}{doubt}")

    def _explain(self, details: str) -> str:
        """What matters of gRPC's account of a connection that failed."""
        last = details.rpartition("last error: ")[2]
        for pattern, text in _REASONS:
            if found := re.search(pattern, last):
                return text.format(*found.groups())
        if not re.search("Socket closed|reset", last):
            return last
        if self._used is None:
            return "it has closed the connection at once: perhaps it wants TLS"
        doubt = self._used.doubt(utc_now()) or "see its log for what it does not like about it"
        return f"it does not accept this host's certificate: {doubt}"

    def _open(self, target: str) -> grpc.aio.Channel:
        if self._used is None:
            return grpc.aio.insecure_channel(target, options=OPTIONS)
        files = self._used
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
        options = (*OPTIONS, ("grpc.ssl_target_name_override", self._name))
        return grpc.aio.secure_channel(target, credentials, options=options)

    async def _targets(self) -> list[str]:
        """As gRPC writes addresses of both families."""
        host, port = split_endpoint(self._address)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:  # a name that cannot be one is a UnicodeError
            problem = getattr(error, "strerror", None) or error
            raise _unavailable(f"cannot be reached: {problem}") from None
        self._only_here = why_only_here(self._address, [str(one[4][0]) for one in found])
        targets = []
        for family, _, _, _, address in found:
            ip = str(address[0])
            six = family == socket.AF_INET6
            targets.append(f"ipv6:{quote(f'[{ip}]:{port}')}" if six else f"ipv4:{ip}:{port}")
        return sorted(targets, key=lambda target: target != self._worked)


def _unavailable(details: str) -> RpcFailed:
    return RpcFailed(grpc.StatusCode.UNAVAILABLE, details)


async def _failure(channel: grpc.aio.Channel) -> str:
    """Connect once; returns why that failed, or ""."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            try:  # what is called now fails at once, and tells why
                await channel.unary_unary("/")(b"")
            except grpc.aio.AioRpcError as error:
                return error.details() or "no reason given"
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return ""


_REASONS = (
    (r"connect: (.*?)(?: \(\d+\))?$", "{}"),
    (r"Hostname Verification", "its certificate is for another name"),
    (r"CERTIFICATE_VERIFY_FAILED: (.*?)(?:: OK)?$", "its certificate is not accepted here: {}"),
    (r"WRONG_VERSION_NUMBER", "it does not speak TLS"),
)
