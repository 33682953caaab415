# SPDX-License-Identifier: Apache-2.0
"""Real sockets between two network namespaces, and a real pacer."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from flowslotd.pace.bpf import BpfPacer

from .conformance import BACKENDS, Bench
from .traffic import HERE, THERE, Flow, Net, change, inside


@pytest.fixture
def net() -> Iterator[Net]:
    spaces = [f"fs-test-{os.getpid()}-{role}" for role in ("here", "switch", "there")]
    made = Net(*spaces)
    ends = ((made.here, "here", HERE), (made.there, "there", THERE))
    try:
        change("ip", *(f"netns add {space}" for space in spaces))
        lines = ["link add br0 type bridge", "link set br0 up"]
        for space, port, _ in ends:
            lines.append(f"link add {port} type veth peer name eth0 netns {space}")
            lines.append(f"link set {port} master br0 up")
        change(f"ip -n {made.switch}", *lines)
        for space, _, address in ends:
            change(
                f"ip -n {space}",
                f"address add {address}/24 dev eth0",
                f"address add fd79::{address[-1]}/64 dev eth0 nodad",
                "link set eth0 up",
            )
        yield made
    finally:
        with suppress(AssertionError):  # not all were made
            change("ip -force", *(f"netns del {space}" for space in spaces))


@pytest.fixture
def pacer() -> Iterator[BpfPacer]:
    pacer = BpfPacer("test", slots=64)
    pacer.open()
    yield pacer
    pacer.close()


@pytest.fixture
def flows(net: Net) -> Iterator[Callable[..., Flow]]:
    with ExitStack() as stack:

        def make(**how: Any) -> Flow:
            flow = Flow(net, **how)
            stack.callback(flow.stop)
            return flow

        yield make


@pytest.fixture
def enlisted(pacer: BpfPacer, flows: Callable[..., Flow]) -> Callable[..., Flow]:
    """Makes flows that have selected the congestion control of `pacer`."""

    def make(**how: Any) -> Flow:
        flow = flows(**how)
        flow.enlist(pacer.congestion_control)
        return flow

    return make


@pytest.fixture(params=BACKENDS)
def on(request: pytest.FixtureRequest, net: Net) -> Iterator[Bench]:
    """Each back end in turn; some only: `parametrize("on", [...], indirect=True)`."""
    with inside(net.here):
        bench = Bench(request.param, net)
        yield bench
        bench.close()
