# SPDX-License-Identifier: Apache-2.0
"""What every back end promises: rates."""

import time

import numpy as np
import pytest
from waiting import settle

from flowslotd.sockets import look

from .conformance import EACH_PROTOCOL, MB, PACED, SPEED, Bench, set_rate, slots
from .traffic import HERE, THERE_6, change

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@EACH_PROTOCOL
def test_a_slot_carries_what_its_rate_says(on: Bench, protocol: str) -> None:
    pacer, flow = on.pair(protocol)
    for rate in (max(5 * SPEED, 1.5) * MB, MB, max(3 * SPEED, 1.2) * MB):
        assert set_rate(pacer, {flow: rate}) == 1
        assert set_rate(pacer, {flow: rate}) == 0  # nothing to change

        def holds(rate: float = rate) -> bool:
            # A busy machine stops everything for a slot's time now and then.
            errors = np.sort(np.abs(slots(flow) / rate - 1))
            return bool(errors[-4] <= 0.10)

        settle(holds, 30)


def test_over_ipv6(on: Bench) -> None:
    pacer, flow = on.pair(address=THERE_6)
    assert set_rate(pacer, {flow: 2 * MB}) == 1
    settle(lambda: abs(flow.rate(0.6) / (2 * MB) - 1) <= 0.05)


@pytest.mark.parametrize(
    "on", [name for name, protocol in PACED if protocol == "udp"], indirect=True
)
def test_large_datagrams_are_paced_too(on: Bench) -> None:
    pacer, flow = on.pair("udp")
    flow.size = 30_000
    set_rate(pacer, {flow: 4 * MB})

    def holds() -> bool:
        pacer.counters()  # what a packet carries is learnt
        return abs(flow.rate(1.0) / (4 * MB) - 1) <= 0.05

    settle(holds, 30)


def test_steps_and_resuming_from_a_floor(on: Bench) -> None:
    pacer, flow = on.pair()
    waits = []
    for _ in range(6):
        set_rate(pacer, {flow: 0.3 * MB})
        settle(lambda: flow.rate(0.2) < 0.6 * MB)
        before, start = flow.received(), time.monotonic()
        set_rate(pacer, {flow: 5 * MB})
        settle(lambda before=before: flow.received() > before + 100_000)
        waits.append(time.monotonic() - start)
    # 20 ms at the new rate; a burst of 64 kB at the old one would last 200 ms.
    assert min(waits) < 0.12, waits


def test_a_slow_flow_leaves_in_small_pieces(on: Bench) -> None:
    """Or a raised rate would wait for as long as a super-packet takes at the old one."""
    pacer, flow = on.pair()
    set_rate(pacer, {flow: 0.3 * MB})

    def largest() -> int:
        """Bytes that arrived within about a millisecond."""
        seen, end = [flow.received()], time.monotonic() + 0.6
        while time.monotonic() < end:
            time.sleep(0.001)
            seen.append(flow.received())
        return int(np.diff(seen).max()) if seen[-1] - seen[0] > 50_000 else 10**9

    settle(lambda: largest() < 32_000)


def test_many_flows_each_at_its_rate(on: Bench) -> None:
    pacer = on.pacer()
    # Small pieces, each acknowledged, cost more than what `speed` measures.
    flows = [on.flow(pacer) for _ in range(max(round(24 * SPEED**2), 4))]
    wanted = {flow: (0.3 + 0.02 * k) * MB for k, flow in enumerate(flows)}
    assert set_rate(pacer, wanted) == len(flows)

    def holds() -> bool:
        before, start = [flow.received() for flow in flows], time.monotonic()
        time.sleep(1.0)
        took = time.monotonic() - start
        got = [
            (flow.received() - then) / took / wanted[flow]
            for flow, then in zip(flows, before, strict=True)
        ]
        return max(abs(one - 1) for one in got) <= 0.10

    settle(holds, 40)
    cookies = sorted(flow.cookie for flow in flows)
    settle(lambda: pacer.counters().cookie.tolist() == cookies)


@EACH_PROTOCOL
def test_counters_tell_what_was_delivered(on: Bench, protocol: str) -> None:
    pacer, flow = on.pair(protocol)
    set_rate(pacer, {flow: 2 * MB})
    time.sleep(0.3)

    def agree() -> bool:
        sent, arrived = int(pacer.counters().sent[0]), flow.received()
        time.sleep(0.6)
        sent, arrived = int(pacer.counters().sent[0]) - sent, flow.received() - arrived
        return arrived > 0 and abs(sent / arrived - 1) <= 0.1

    settle(agree)


def test_a_target_is_reported_once(on: Bench) -> None:
    pacer, flow = on.pair(busy=False)
    base = int(pacer.counters().sent[0])

    def reported(after: int) -> list[tuple[str, int]]:
        """As soon as so many bytes are sent."""
        settle(lambda: int(pacer.counters().sent[0]) >= base + after)
        time.sleep(0.05)
        return [(event.kind, event.cookie) for event in pacer.events() if event.kind != "new"]

    pacer.watch(flow.cookie, base + 100_000)
    flow.sock.sendall(bytes(60_000))
    assert reported(after=60_000) == []
    flow.sock.sendall(bytes(60_000))
    assert reported(after=120_000) == [("drained", flow.cookie)]
    pacer.watch(flow.cookie, base + 110_000)  # has been reached already
    assert reported(after=120_000) == [("drained", flow.cookie)]
    flow.sock.sendall(bytes(60_000))  # now `bpf`'s program sees it, too
    assert reported(after=180_000) == []


def test_all_is_sent_before_anything_is_acknowledged(on: Bench) -> None:
    """What is on its way needs no rate. A receiver may take 40 ms to acknowledge it."""
    if on.backend != "bpf":
        pytest.skip("it counts acknowledged bytes")
    pacer, flow = on.pair(busy=False)
    set_rate(pacer, {flow: MB})
    flow.sock.sendall(bytes(10_000))
    settle(lambda: flow.received() == 10_000 and not look(flow.sock).in_flight)
    base = int(pacer.counters().sent[0])
    pacer.watch(flow.cookie, base + 1000)
    answers = f"route {{}} blackhole {HERE}/32"
    change(f"ip -n {on.net.there}", answers.format("add"))
    try:
        flow.sock.sendall(bytes(1000))
        settle(lambda: int(pacer.counters().sent[0]) == base + 1000)
        settle(lambda: ("drained", flow.cookie) in [(e.kind, e.cookie) for e in pacer.events()])
        assert look(flow.sock).in_flight
        assert int(pacer.counters().acked[0]) == base
    finally:
        change(f"ip -n {on.net.there}", answers.format("del"))


def test_a_fast_flow(on: Bench) -> None:
    """Super-packets pass whole at such rates."""
    pacer, flow = on.pair(most=float("inf"))
    if all(flow.rate(0.4) < 400 * MB for _ in range(2)):
        pytest.skip("this machine is too slow for it")
    for rate in (100 * MB, MB, 80 * MB):  # what waits at the step must not be stuck
        assert set_rate(pacer, {flow: rate}) == 1
        settle(lambda rate=rate: abs(flow.rate(0.5) / rate - 1) <= 0.05)
