# SPDX-License-Identifier: Apache-2.0
"""What `flowslot_torch.attach` costs a job, and that it changes nothing: `python -m
bench.torch_attach [--curves]`. Needs torch.

Two ranks train a ResNet-like model on Gloo over the loopback interface, with one thread each, plain
attached and plain again, in turns of 10 iterations. Nothing else is on the network: a registration
server takes the records and asks for silence, as a daemon does then. Printed: the median iteration
of each per repeat, and the ratios; the last one says what chance does.
`--curves`: losses of 200 iterations on 2 and 4 ranks, plain and attached, of all three models; any
bit of difference is an error.
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

TURN, TURNS, REPEATS = 10, 8, 5


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


def _curves(rank: int, path: str) -> list[str]:
    different = []
    for name in os.environ["MODELS"].split():
        plain, attached = Trainer(name, rank), Trainer(name, rank)
        flowslot_torch.attach(attached.model, daemon=path)
        if [plain.step() for _ in range(200)] != [attached.step() for _ in range(200)]:
            different.append(name)
    return different


def _times(rank: int, path: str) -> tuple[list[list[float]], int, list[int]]:
    """Medians by repeat: plain, attached, plain again."""
    trainers = [Trainer("resnet", rank) for _ in range(3)]
    attachment = flowslot_torch.attach(trainers[1].model, daemon=path)
    medians = []
    for repeat in range(-1, REPEATS):
        times: list[list[float]] = [[], [], []]
        for _ in range(TURNS):
            for trainer, own in zip(trainers, times, strict=True):
                for _ in range(TURN):
                    start = time.perf_counter()
                    trainer.step()
                    own.append(time.perf_counter() - start)
        if repeat >= 0:  # the first one is warm-up
            medians.append([statistics.median(own) for own in times])
    assert attachment.registered, attachment.error or "the server has not answered"
    return medians, attachment.bytes, attachment.peers


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
    medians, size, peers = run(options.ranks, curves=False)
    for plain, attached, again in medians:
        text = f"plain {plain * 1e3:.2f} ms, attached {attached * 1e3:.2f} ms"
        print(f"{text}: {attached / plain - 1:+.2%}; plain again {again / plain - 1:+.2%}")
    costs = [2 * attached / (plain + again) - 1 for plain, attached, again in medians]
    cost = statistics.median(costs)
    print(f"{size} bytes of gradients to ranks {peers}: median {cost:+.2%}")
    return int(cost > 0.02)


if __name__ == "__main__":
    sys.exit(main())
