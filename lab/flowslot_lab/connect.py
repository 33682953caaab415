# SPDX-License-Identifier: Apache-2.0
"""How the processes of a job find each other: TCP connections that begin with a short hello."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib

from flowslot_lab.jobspec import JobSpec

_HELLO = struct.Struct("!8sIHH")  # magic, crc32 of the job's name, rank, channel
_MAGIC = b"fs-lab-1"
_TIMEOUT_S = 20.0
Links = dict[tuple[int, int], socket.socket]  # by peer rank and channel


def establish(spec: JobSpec, connect_to: list[int], accept_from: list[int]) -> tuple[Links, Links]:
    """Open `spec.sockets` connections to each rank of the first list, accept as many from the
    second; returns both, non-blocking. Raises OSError when the peers do not come in time.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((spec.addresses[spec.rank], spec.port))
        listener.listen(1024)
        job = zlib.crc32(spec.job.encode())
        out: Links = {}
        for peer in connect_to:
            for channel in range(spec.sockets):
                sock = _connect(spec, spec.addresses[peer], deadline)
                sock.sendall(_HELLO.pack(_MAGIC, job, spec.rank, channel))
                out[peer, channel] = sock
        into: Links = {}
        while len(into) < len(accept_from) * spec.sockets:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            sock, address = listener.accept()
            sock.settimeout(5.0)
            magic, from_job, rank, channel = _HELLO.unpack(_exactly(sock, _HELLO.size))
            if (magic, from_job) != (_MAGIC, job) or rank not in accept_from:
                raise OSError(f"unexpected hello from {address[0]}")
            into[rank, channel] = sock
    for sock in (*out.values(), *into.values()):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, spec.tos)
        sock.setblocking(False)
    return out, into


def _connect(spec: JobSpec, address: str, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(ConnectionRefusedError):  # the peer does not listen yet
            sock.connect((address, spec.port))
            return sock
        sock.close()
        if time.monotonic() > deadline:
            raise OSError(f"nobody listens on {address}:{spec.port}")
        time.sleep(0.01)


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise OSError("connection closed before its hello")
        data += part
    return data
