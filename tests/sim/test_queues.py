# SPDX-License-Identifier: Apache-2.0
"""Links with queues, and kernels that pace above what is reserved."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from interpreted import plain

import flowslot_sim.fluid
import flowslot_sim.network
import flowslot_sim.queues
from flowslot.model import top_up
from flowslot.model.units import Nanos
from flowslot_sim.network import STEP, FlowSpec, Network

CONSTS = Path(__file__).parents[2] / "bpf" / "consts.h"
MB = 1e6


def network(flows: list[FlowSpec], buffer: float) -> Network:
    """One link, number 0, of 10 MB/s, and others of 100."""
    made = Network(flows, [10 * MB, 100 * MB, 100 * MB])
    kernel = made.use_queues(np.full(3, buffer))
    kernel["limited"], kernel["most"], kernel["buffer"] = True, 10 * MB, buffer / (10 * MB)
    kernel["longest"] = top_up.QUEUE_PART * kernel["buffer"]
    made.begin(range(len(flows)))
    return made


def ends(made: Network, until_s: float) -> dict[int, float]:
    """When flows end, s."""
    found: dict[int, float] = {}
    for k in range(1, round(until_s * 1e9 / STEP) + 1):
        for i in made.advance(Nanos(STEP)):
            found[i] = k * STEP / 1e9
    return found


def test_the_constants_are_the_kernels() -> None:
    text = CONSTS.read_text()

    def number(name: str) -> float:
        found = re.search(rf"#define {name} \(?(\d+)(ULL)?( \* FS_MS| << (\d+))?", text)
        assert found, name
        shift = int(found[4]) if found[4] else 0
        return float(int(found[1]) << shift) * (1e-3 if "FS_MS" in (found[3] or "") else 1)

    assert number("FS_QUEUE_PERCENT") == pytest.approx(100 * top_up.QUEUE_PART)
    assert number("FS_BURST_PERCENT") == pytest.approx(100 * top_up.BURST_PART)
    assert number("FS_QUEUE_US") == top_up.LATE_US
    assert number("FS_SPARE_US") == top_up.SPARE_US
    assert number("FS_EPOCH_US") == pytest.approx(1e6 * top_up.EPOCH_S)
    assert number("FS_GAP_NS") == top_up.GAP_S
    assert number("FS_REFILL_NS") == top_up.REFILL_S
    assert number("FS_AHEAD") == top_up.AHEAD_BYTES
    assert number("FS_MIN_RTT_US") == pytest.approx(1e6 * top_up.LEAST_RTT_S)
    assert number("FS_MIN_CWND") == top_up.LEAST_WINDOW
    assert number("FS_LEAST_RATE") == top_up.LEAST_RATE


def test_what_comes_first_leaves_first() -> None:
    """A small flow waits behind what a large one has in the buffer."""
    made = network([FlowSpec("a", (1, 0), 2 * MB), FlowSpec("b", (2, 0), 10_000.0)], 1 * MB)
    made.rows["reserved"] = [50 * MB, 0.0]
    made.rows["active"][1], made.live = False, np.array([0], np.intp)
    ends(made, 0.01)  # 500 kB have come, 100 kB have gone
    made.rows["reserved"][1] = 10 * MB
    made.begin([1])
    assert ends(made, 0.1)[1] == pytest.approx(0.05, rel=0.2)


def test_a_full_buffer_loses_and_everything_arrives() -> None:
    made = network([FlowSpec("a", (1, 0), 1 * MB), FlowSpec("b", (2, 0), 1 * MB)], 20_000.0)
    made.rows["reserved"] = 10 * MB
    found = ends(made, 0.5)
    assert max(found.values()) == pytest.approx(0.2, rel=0.02)


def test_top_up_grows_as_the_daemon_says_and_stops_at_a_queue() -> None:
    made = network([FlowSpec("a", (1, 0), 10 * MB), FlowSpec("b", (2, 0), 10 * MB)], 100_000.0)
    kernel, grows = made.kernel, top_up.growth(0.0, 10 * MB, 0.0, 2_000)
    kernel["growth"][0] = 1e3 * grows
    made.rows["reserved"] = [0.0, 5 * MB]
    ends(made, 0.001)
    assert kernel["extra"][0] == pytest.approx(grows, rel=0.01)
    ends(made, 0.1)
    # It has had what the other flow left, but for the ramps, and the buffer was never full.
    sent = made.rows["sent"]
    assert 0.2 * MB < sent[0] < 0.55 * MB and sent[1] == pytest.approx(0.505 * MB, rel=0.1)
    assert float(kernel["way"].sum()) < 80_000


def test_top_up_takes_what_others_leave_of_the_hosts_own_link() -> None:
    flows = [FlowSpec("a", (0, 1), 0.4 * MB), FlowSpec("a", (0, 2), 10 * MB)]
    made = network(flows, 100_000.0)
    made.kernel["growth"] = 1e12
    made.kernel["burst"][1] = made.kernel["credit"][1] = 50_000.0
    made.rows["reserved"] = [8 * MB, 0.0]
    made.kernel["most"][0] = 8 * MB
    assert ends(made, 0.055)[0] == pytest.approx(0.05, rel=0.02)
    sent = float(made.rows["sent"][1])
    assert sent == pytest.approx(2 * MB * 0.05 + 10 * MB * 0.005, rel=0.1)
    ends(made, 0.05)
    assert made.rows["sent"][1] - sent == pytest.approx(10 * MB * 0.05, rel=0.02), "at once"


def test_top_up_grows_more_slowly_behind_a_queue() -> None:
    """And not at all behind one that is too long."""
    grown = []
    for queue_ms in 0.0, 1.0, 2.5:
        made = network([FlowSpec("a", (1, 0), 10 * MB), FlowSpec("b", (2, 0), 10 * MB)], 100_000.0)
        kernel = made.kernel
        # What b sends at once stands as a queue, as b goes on at what the link carries.
        kernel["credit"][1] = kernel["burst"][1] = queue_ms * 10_000
        kernel["most"] = 100 * MB
        made.rows["reserved"] = [0.0, 10 * MB]
        ends(made, 0.004)
        kernel["extra"][0], kernel["growth"][0] = 0.0, 1 * MB
        ends(made, 0.005)
        grown.append(float(kernel["extra"][0]))
    part = 1.0 - 0.001 / (top_up.QUEUE_PART * 0.01)
    assert grown == pytest.approx([5000.0, part * 5000.0, 0.0], rel=0.05)


def test_a_deep_buffer_bears_a_longer_queue() -> None:
    found = [top_up.longest(us) for us in (0.0, 1000.0, 4000.0, 5000.0, 20_000.0)]
    assert found == [1.0, 200.0, 1000.0, 2000.0, 4000.0]


def test_only_flows_that_wait_or_take_turns_top_up_fast() -> None:
    fast = top_up.growth(8 * MB, 10 * MB, 10 * MB, 2_000)
    assert top_up.growth(0.0, 10 * MB, 0.0, 2_000) == fast
    assert top_up.growth(8 * MB, 10 * MB, 0.0, 2_000) == pytest.approx(top_up.ALONE * fast)


def test_a_burst_goes_at_once_and_fills_again() -> None:
    made = network([FlowSpec("a", (1, 0), 100_000.0)], 1 * MB)
    made.kernel["burst"] = 50_000.0
    made.kernel["credit"] = 0.0
    made.kernel["least"] = 256_000.0
    found = ends(made, 1.0)
    # 50 kB at the link's rate, and the rest at the least rate there is.
    expected = 0.005 + 50_000 / 256_000
    assert found[0] == pytest.approx(expected, rel=0.1)


def test_slices_go_on_whole() -> None:
    """Nothing of a slice leaves before all of it has come."""
    flows = [
        FlowSpec("a", (1, 0), 100_000.0),
        FlowSpec("b", (2,), 100_000.0, own=0.0, head=-50_000.0, preds=(0,)),
    ]
    made = network(flows, 1 * MB)
    made.rows["reserved"] = 10 * MB
    ends(made, 0.004)
    assert made.rows["sent"][1] == 0.0 and made.rows["sent"][0] > 0
    assert ends(made, 0.1)[1] == pytest.approx(0.015 - 0.004, abs=0.002)


def test_the_compiled_loops_do_what_their_source_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flowslot_sim.queues.COMPILED, "make setup compiles them"

    def run() -> list[tuple[float, ...]]:
        flows = [FlowSpec("a", (1, 0), 0.3 * MB), FlowSpec("b", (2, 0), 0.2 * MB)]
        made = network(flows, 60_000.0)
        made.kernel["growth"], made.rows["reserved"] = 1e9, [2 * MB, 5 * MB]
        made.kernel["burst"] = 10_000.0
        found = ends(made, 0.1)
        state = made.kernel[["extra", "credit", "way"]].tolist()
        return [tuple(found.get(i, math.nan) for i in range(2)), *state]

    compiled = run()
    monkeypatch.setattr(flowslot_sim.network, "queues", plain(flowslot_sim.queues))
    monkeypatch.setattr(flowslot_sim.network, "fluid", plain(flowslot_sim.fluid))
    assert run() == compiled
