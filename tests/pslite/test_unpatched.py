# SPDX-License-Identifier: Apache-2.0
"""Unpatched ps-lite, seen from outside: its data connections, and what an iteration sends there."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import until

from flowslot_shm.layout import Role, address
from flowslotd.observe.passive.service import PassiveSources

from .conftest import NODE_KEYS, NODE_VALUE, pairs, training, used

EACH = NODE_KEYS * NODE_VALUE // 2
"""Bytes of values in an iteration from each worker to each of two servers, and back."""
WORKERS_AT, SERVERS_AT = "127.0.0.1", "127.0.0.2"

pytestmark = pytest.mark.root


def watch(
    check: Callable[[PassiveSources, PassiveSources], Awaitable[None]], name: str = ""
) -> None:
    """With the hosts of the workers and of the servers, both here."""
    bugs: list[BaseException] = []

    async def run() -> None:
        def nothing(*_: object) -> None:
            pass

        both = [
            PassiveSources(nothing, nothing, nothing, {}, lambda _, bug: bugs.append(bug))
            for _ in range(2)
        ]
        try:
            for one, at in zip(both, (WORKERS_AT, SERVERS_AT), strict=True):
                one.use(True, [at], name)
            await check(*both)
        finally:
            for one in both:
                one.close()

    asyncio.run(run())
    assert bugs == []


@pytest.mark.parametrize("variant", ["upstream", "calm"])
def test_all_data_connections_are_found_and_enlisted_and_the_schedulers_are_not(
    variant: str,
) -> None:
    async def check(workers: PassiveSources, servers: PassiveSources) -> None:
        def all_there() -> bool:
            return (len(used(workers)), len(used(servers))) == (4, 4)

        await until(all_there, seconds=60)
        pushes, pulls = used(workers), used(servers)
        assert {(bytes(s["job"]), int(s["role"])) for s in pushes} == {(name, Role.PUSH)}
        assert {(bytes(s["job"]), int(s["role"])) for s in pulls} == {(name, Role.PULL)}
        assert {address(2, bytes(slot["dst"])) for slot in pushes} == {SERVERS_AT}
        # Each is reported from both ends.
        assert {(there, here) for here, there in pairs(pulls)} == pairs(pushes)
        mine = pairs(pushes + pulls)
        await until(lambda: job.sockets("reno") == mine, seconds=60)
        await asyncio.sleep(3)  # what is found later would be wrong
        assert all_there()
        assert job.sockets("reno") == mine
        assert any(job.port in both for both in job.sockets())
        assert not any(job.port in both for both in mine)

    with training(variant, 0.15) as job:
        name = f"pslite-{WORKERS_AT}-{job.port}".encode()
        watch(check, "reno")


def test_bytes_per_iteration_are_learnt_within_a_percent() -> None:
    async def check(workers: PassiveSources, servers: PassiveSources) -> None:
        def close(slot: Any) -> bool:
            return EACH <= int(slot["iteration_total"]) <= EACH * 1.01

        seen: dict[int, dict[int, int]] = {}
        known: set[int] = set()

        def right(done: dict[int, int]) -> bool:
            whole = list(done.values())[1:-1]  # seen from beginning to end
            return any(EACH <= one <= EACH * 1.01 for one in whole)

        def learnt() -> bool:
            """Each flow has announced it, and done it; when is a matter of the machine's load."""
            for slot in used(workers) + used(servers):
                cookie = int(slot["sock_cookie"])
                seen.setdefault(cookie, {})[int(slot["iteration"])] = int(slot["done"])
                if close(slot):
                    known.add(cookie)
            return len(known) == len(seen) == 8 and all(map(right, seen.values()))

        await until(learnt, seconds=120)

    with training("calm", 0.3):
        watch(check)


def test_a_node_that_dies_is_forgotten() -> None:
    async def check(workers: PassiveSources, servers: PassiveSources) -> None:
        await until(lambda: len(used(workers)) == 4, seconds=60)
        worker = next(iter(workers.records.values())).pid
        os.kill(worker, 9)
        await until(lambda: worker not in {s.pid for s in workers.records.values()}, seconds=5)

    with training("calm", 0.1):
        watch(check)


def test_patched_ones_speak_for_themselves() -> None:
    async def check(workers: PassiveSources, servers: PassiveSources) -> None:
        await until(lambda: len(job.sockets()) >= 16, seconds=60)
        await asyncio.sleep(4)
        assert not workers.records and not servers.records

    with training("flowslot-calm", 0.1) as job:
        watch(check)
