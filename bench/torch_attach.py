# SPDX-License-Identifier: Apache-2.0
"""What `flowslot_torch.attach` costs a job, and that it changes nothing: `python -m
bench.torch_attach [--curves] [--ranks N]`. Needs torch.

Two ranks train a ResNet-like model on Gloo over the loopback interface, with one thread each, plain
attached and plain again, in turns of an iteration. Nothing else is on the network: a registration
server takes the records and asks for silence, as a daemon does then. Printed per repeat: the median
iterations, and the medians of each turn's ratios, attached to plain, and plain to plain.
`--curves`: losses of 200 iterations, plain and attached, of all three models; any bit of difference
is an error.
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

import flowslot_torch
from flowslot_lab import models
from flowslot_shm.layout import Quiet

from .registrar import registration_server

TURNS, ROTATED, REPEATS = 300, 50, 5
PUBLISHED = "published: within 1.2 % (SDCC, Fig. 5), at worst 4.7 % (Fig. 8)"


class Trainer:
    """One rank's copy of a model."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank, self.iteration = name, rank, 0
        self.model = DistributedDataParallel(models.make(name, 1), bucket_cap_mb=0.2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self) -> float:
        loss = models.loss_of(self.model, self.name, 1, self.rank, self.iteration)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.iteration += 1
        return float(loss.detach())


def _rank(rank: int, ranks: int, port: int, files: tuple[str, str], curves: bool) -> None:
    path, out = files
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = _curves(rank, path) if curves else _times(rank, path)
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch 2.13 aborts some that end otherwise, attached or not


def _curves(rank: int, path: str) -> list[str]:
    different = []
    for name in os.environ["MODELS"].split():
        plain, attached = Trainer(name, rank), Trainer(name, rank)
        flowslot_torch.attach(attached.model, daemon=path)
        if [plain.step() for _ in range(200)] != [attached.step() for _ in range(200)]:
            different.append(name)
    return different


def _times(rank: int, path: str) -> tuple[list[list[list[float]]], int, list[int]]:
    """Seconds by repeat and turn: plain, attached, plain again."""
    trainers = [Trainer("resnet", rank) for _ in range(3)]
    attachment = flowslot_torch.attach(trainers[1].model, daemon=path)
    found = []
    for _ in range(REPEATS + 1):
        times = []
        for turn in range(TURNS):
            seconds = [0.0] * 3
            # Nobody is always the first; who is changes rarely, as the attached one sees what all
            # send on their common connections.
            for which in ((turn // ROTATED + place) % 3 for place in range(3)):
                start = time.perf_counter()
                trainers[which].step()
                seconds[which] = time.perf_counter() - start
            times.append(seconds)
        found.append(times)
    assert attachment.registered, attachment.error or "the server has not answered"
    return found[1:], attachment.bytes, attachment.peers  # the first repeat is warm-up


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(ranks: int, curves: bool) -> Any:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "register.sock", str(Path(folder) / "out")
        arguments = ranks, _free_port(), (str(path), out), curves
        with registration_server(path, Quiet.ALL):
            multiprocessing.spawn(_rank, arguments, ranks)
        return torch.load(out)


def main() -> int:
    """Exit status 1: it costs more than 2 %, or a curve is another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=models.NAMES)
    options = parser.parse_args()
    os.environ["MODELS"] = " ".join(options.models)
    if options.curves:
        different = run(options.ranks, curves=True)
        print(f"{options.ranks} ranks, 200 iterations, different losses: {different or 'none'}")
        return int(bool(different))
    found, size, peers = run(options.ranks, curves=False)
    costs = []
    for times in found:
        plain, attached, again = (statistics.median(own) * 1e3 for own in zip(*times, strict=True))
        costs.append(statistics.median(2 * b / (a + c) - 1 for a, b, c in times))
        chance = statistics.median(c / a - 1 for a, _, c in times)
        text = f"plain {plain:.2f} ms, attached {attached:.2f} ms, plain again {again:.2f} ms"
        print(f"{text}: attached {costs[-1]:+.2%}; chance {chance:+.2%}")
    cost = statistics.median(costs)
    print(f"{size} bytes of gradients to ranks {peers}: median {cost:+.2%}; {PUBLISHED}")
    return int(cost > 0.02)


if __name__ == "__main__":
    sys.exit(main())
