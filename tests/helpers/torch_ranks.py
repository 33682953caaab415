# SPDX-License-Identifier: Apache-2.0
"""Ranks of a training job as processes: forked, so that torch is imported once."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once, here
import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(ranks: int, work: Callable[..., Any], *args: Any, limit_s: float = 60) -> list[Any]:
    """What `work(rank, ranks, *args)` returned on each, in a process group on Gloo."""
    port = free_port()
    return processes(ranks, _in_group, port, work, *args, limit_s=limit_s)


def processes(ranks: int, work: Callable[..., Any], *args: Any, limit_s: float = 60) -> list[Any]:
    """The same without a group. AssertionError: a rank raised, or is not done in time."""
    ends: list[Connection] = []
    made = []
    for rank in range(ranks):
        mine, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_child, args=(theirs, work, rank, ranks, args), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        made.append(process)
    try:
        found: dict[int, Any] = {}
        while len(found) < ranks:
            ready = wait([end for i, end in enumerate(ends) if i not in found], limit_s)
            assert ready, f"ranks {sorted(set(range(ranks)) - set(found))} are not done"
            for i, end in enumerate(ends):
                if end in ready:
                    try:
                        found[i] = end.recv()
                    except EOFError:
                        found[i] = ("killed", None)
        bad = [what for kind, what in found.values() if kind == "raised"]
        assert not bad, "\n".join(bad)
        return [found[rank][1] for rank in range(ranks)]
    finally:
        for process in made:
            process.kill()
            process.join()


def _child(end: Connection, work: Callable[..., Any], rank: int, ranks: int, args: Any) -> None:
    torch.set_num_threads(1)
    try:
        end.send(("is", work(rank, ranks, *args)))
    except BaseException:
        end.send(("raised", f"rank {rank}: {traceback.format_exc()}"))
    end.close()
    os._exit(0)


def _in_group(rank: int, ranks: int, port: int, work: Callable[..., Any], *args: Any) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    return work(rank, ranks, *args)
