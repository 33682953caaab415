# SPDX-License-Identifier: Apache-2.0
"""A small training job for tests: sends iterations over real TCP and reports them.

    python training.py receive PORT
    python training.py send ADDRESS PORT REGISTER_SOCKET FLOWS BYTES

The sender prints a JSON line per iteration: iteration, registered, and of each socket its
congestion control and pacing rate (bytes/s). It ends when its standard input does.
"""

import json
import select
import socket
import struct
import sys
import threading
import time

from flowslot_shm.client import JobClient
from flowslot_shm.layout import Role

PACING_RATE_AT = 104  # tcpi_pacing_rate in struct tcp_info
COMPUTE_S = 0.05


def receive(port: int) -> None:
    """Accept connections and read them to their ends."""
    listener = socket.create_server(("", port))
    print("ready", flush=True)
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_drain, args=(peer,), daemon=True).start()


def _drain(peer: socket.socket) -> None:
    with peer:
        while peer.recv(1 << 20):
            pass


def describe(sock: socket.socket) -> tuple[str, int]:
    """Congestion control and pacing rate."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode(), struct.unpack_from("=Q", info, PACING_RATE_AT)[0]


def send(address: str, port: int, path: str, flows: int, size: int) -> None:
    """Iterate until standard input ends."""
    socks = [socket.create_connection((address, port)) for _ in range(flows)]
    job = JobClient(path, "train", rank=0)
    writers = [job.flow(sock, 1, i, Role.PUSH) for i, sock in enumerate(socks)]
    data = bytes(size)
    iteration = 0
    while not select.select([sys.stdin], [], [], COMPUTE_S)[0]:
        iteration += 1
        for writer in writers:
            writer.begin(iteration, size)
            writer.ready(size)
        threads = [threading.Thread(target=sock.sendall, args=(data,)) for sock in socks]
        for thread in threads:
            thread.start()
        for thread, writer in zip(threads, writers, strict=True):
            thread.join()
            writer.done(size)
        told = {"iteration": iteration, "registered": job.registered, "at": time.monotonic()}
        print(json.dumps({**told, "sockets": [describe(sock) for sock in socks]}), flush=True)
    for writer in writers:
        writer.close()
    job.close()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
