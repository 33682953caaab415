# SPDX-License-Identifier: Apache-2.0
"""A process that sends over real TCP. Its environment makes it a node of ps-lite.

    python training.py receive PORT
    python training.py FLOWS ADDRESS PORT [ADDRESS PORT...]

The first one accepts connections and reads them to their ends. The second one makes so many to each
address, from $FROM if that is set, and says nothing to anybody until it registers. It does what its
standard input says, line by line, and then prints `done` and the time (monotonic ns, before it did
it):

    send BYTES        on each connection, and waits until all is acknowledged: an iteration
    begin BYTES       the same, but does not wait
    close             closes all connections
    linger            fills them and closes them, to wait an hour for all to be acknowledged
    open N            opens so many more sockets, which are not connected
    fork              has a child with the same sockets, which lives as long as it does
    register SOCKET   reports itself to a daemon from now on
    use NAME          has its last connection use another congestion control
"""

import fcntl
import itertools
import os
import resource
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from flowslot_shm.client import JobClient
from flowslot_shm.layout import Role
from flowslot_shm.writer import FlowWriter

_SIOCOUTQ = 0x5411
_iterations = itertools.count(1)


def receive(port: int) -> None:
    """Until it is killed."""
    listener = socket.create_server(("", port))
    print("ready", flush=True)
    while True:
        threading.Thread(target=_drain, args=listener.accept()[:1], daemon=True).start()


def _drain(peer: socket.socket) -> None:
    with peer:
        while peer.recv(1 << 20):
            pass


def queued(sock: socket.socket) -> int:
    """Bytes that are not acknowledged."""
    return int(struct.unpack("=i", fcntl.ioctl(sock, _SIOCOUTQ, b"\0" * 4))[0])


def send(size: int, socks: list[socket.socket], writers: list[FlowWriter], wait: bool) -> None:
    """On all connections at once; `writers` report it."""
    iteration = next(_iterations)
    for writer in writers:
        writer.begin(iteration, size)
        writer.ready(size)
    data = bytes(size)
    with ThreadPoolExecutor(len(socks)) as pool:
        list(pool.map(lambda sock: sock.sendall(data), socks))
    while wait and any(map(queued, socks)):
        time.sleep(0.0005)
    for writer in writers:
        writer.done(size)


def leave(socks: list[socket.socket]) -> None:
    """Fill and close them. Full: nothing more goes in after a while, in which what was on its way
    has arrived; so what is left waits for the other end to read."""
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 3600))
        sock.setblocking(False)
        full_for = 0
        while full_for < 10:
            full_for += 1
            time.sleep(0.03)
            with suppress(BlockingIOError):
                while sock.send(bytes(1 << 16)):
                    full_for = 0
        sock.close()


def do(what: str, argument: str, socks: list[socket.socket], kept: list[object]) -> None:
    """One line. `kept`: what is to live on."""
    if what in {"send", "begin"}:
        writers = [one for one in kept if isinstance(one, FlowWriter)]
        send(int(argument), socks, writers, what == "send")
    elif what == "close":
        for sock in socks:
            sock.close()
    elif what == "linger":
        leave(socks)
    elif what == "use":
        socks[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, argument.encode())
    elif what == "open":
        kept.append([socket.socket() for _ in range(int(argument))])
    elif what == "fork":
        alive, ours = os.pipe()
        if os.fork() == 0:
            os.close(ours)
            os.read(alive, 1)
            os._exit(0)
    elif what == "register":
        client = JobClient(argument, "patched", rank=3)
        kept += [client, *(client.flow(sock, 1, i, Role.PUSH) for i, sock in enumerate(socks))]


def main(flows: int, ends: list[tuple[str, int]]) -> None:
    """Until standard input ends."""
    here = (os.environ["FROM"], 0) if os.environ.get("FROM") else None
    socks = [socket.create_connection(end, None, here) for end in ends for _ in range(flows)]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("ready", os.getpid(), flush=True)
    kept: list[object] = []
    for line in sys.stdin:
        what, _, argument = line.strip().partition(" ")
        at = time.monotonic_ns()
        do(what, argument, socks, kept)
        print("done", at, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    ends = zip(sys.argv[2::2], map(int, sys.argv[3::2]), strict=True)
    main(int(sys.argv[1]), list(ends))
