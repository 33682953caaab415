# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads: the NumPy engine over TCP sockets, and torch's on Gloo where torch is there."""

import socket
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from flowslot_torch.engines import NumpyEngine
from flowslot_torch.transport import TcpTransport

KEY = b"only the members know"
NO_TORCH = "torch is missing: its engine and Gloo were not tested"


class Listeners:
    """One per rank, on this host."""

    def __init__(self, ranks: int) -> None:
        self.sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
        self.addresses = {rank: sock.getsockname() for rank, sock in enumerate(self.sockets)}

    def tcp(self, rank: int, **more: Any) -> TcpTransport:
        more = {"key": KEY, "timeout_s": 10.0, **more}
        return TcpTransport(rank, self.sockets[rank], self.addresses, **more)


def numpy_tcp(ranks: int) -> Callable[[int], tuple[Any, Any]]:
    listeners = Listeners(ranks)
    return lambda rank: (NumpyEngine(), listeners.tcp(rank))


def torch_gloo(ranks: int) -> Callable[[int], tuple[Any, Any]]:
    import torch.distributed as dist

    from flowslot_torch.torch_engine import GlooTransport, TorchEngine

    store = dist.HashStore()
    return lambda rank: (TorchEngine(), GlooTransport(store, rank, range(ranks), timeout_s=10))


def torch_tcp(ranks: int) -> Callable[[int], tuple[Any, Any]]:
    from flowslot_torch.torch_engine import TorchEngine

    listeners = Listeners(ranks)
    return lambda rank: (TorchEngine(), listeners.tcp(rank))


MAKERS = [numpy_tcp, *([torch_gloo, torch_tcp] if find_spec("torch") else [])]


def in_threads(ranks: int, body: Callable[[int], Any], limit_s: float = 30.0) -> list[Any]:
    """What `body(rank)` returned on each; an exception is returned as well."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), f"a rank hangs; results so far: {results}"
    return results


def together(
    ranks: int, make: Callable[[int], tuple[Any, Any]], body: Callable[..., Any]
) -> list[Any]:
    """`body(rank, engine, transport)` on all ranks; raises what one raises."""

    def one(rank: int) -> Any:
        engine, transport = make(rank)
        try:
            return body(rank, engine, transport)
        finally:
            done.wait(20)  # nobody leaves while others still read
            transport.close()

    done = threading.Barrier(ranks)
    results = in_threads(ranks, one)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
