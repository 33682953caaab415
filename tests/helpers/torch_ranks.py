# SPDX-License-Identifier: Apache-2.0
"""Ranks of a training job as processes: forked, so that torch is imported once."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once, here
import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")


@contextmanager
def meeting_point() -> Iterator[int]:
    """The port of a store on loopback. The store is this process's, and has the port from the
    beginning on: a port that was only found free could be somebody else's by then."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store  # a traceback may keep this frame, and a forked child cannot end its threads


def run(ranks: int, work: Callable[..., Any], *args: Any, limit_s: float = 60) -> list[Any]:
    """What `work(rank, ranks, *args)` returned on each, in a process group on Gloo."""
    with meeting_point() as port:
        return processes(ranks, _in_group, port, work, *args, limit_s=limit_s)


def processes(ranks: int, work: Callable[..., Any], *args: Any, limit_s: float = 60) -> list[Any]:
    """The same without a group. AssertionError: a rank raised, or none is done in time."""
    ends: list[Connection] = []
    made = []
    all_forked = _FORK.Event()  # a store's thread, when it is connected to, holds locks of the libc
    for rank in range(ranks):
        mine, theirs = _FORK.Pipe(duplex=False)
        body = partial(work, rank, ranks, *args)
        process = _FORK.Process(target=_child, args=(theirs, all_forked, body, rank), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        made.append(process)
    all_forked.set()
    found: dict[int, Any] = {}
    try:
        while len(found) < ranks:
            ready = wait([end for i, end in enumerate(ends) if i not in found], limit_s)
            if not ready:
                break
            for i, end in enumerate(ends):
                if end in ready:
                    try:
                        found[i] = end.recv()
                    except EOFError:
                        found[i] = ("killed", None)
    finally:
        for process in made:
            process.kill()
            process.join()
    bad = [what for kind, what in found.values() if kind == "raised"]
    late = sorted(set(range(ranks)) - found.keys())
    bad += [f"ranks {late} are not done; killed: {sorted(_killed(found))}"] if late else []
    assert not bad, "\n".join(bad)
    return [found[rank][1] for rank in range(ranks)]


def _killed(found: dict[int, Any]) -> set[int]:
    return {rank for rank, (kind, _) in found.items() if kind == "killed"}


def _child(end: Connection, all_forked: Any, work: Callable[[], Any], rank: int) -> None:
    torch.set_num_threads(1)
    all_forked.wait()
    try:
        end.send(("is", work()))
    except BaseException:
        end.send(("raised", f"rank {rank}: {traceback.format_exc()}"))
    end.close()
    os._exit(0)


def _in_group(rank: int, ranks: int, port: int, work: Callable[..., Any], *args: Any) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    return work(rank, ranks, *args)
