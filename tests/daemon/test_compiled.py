# SPDX-License-Identifier: Apache-2.0
"""The compiled loops do what their source says: both are run on the same random data."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from interpreted import plain

from flowslot_shm import slot_check
from flowslot_shm.layout import State, offset
from flowslotd.flows import rows
from flowslotd.flows.rows import FREE
from flowslotd.negotiate import shares
from flowslotd.observe import learning
from flowslotd.pace import handover, rate_table
from flowslotd.pace.layout import CTL, STAT
from flowslotd.pace.pacer import ENTRY

RNG = np.random.Generator
NOW = 10**15


PLAIN_ROWS = plain(rows)
SEEDS = pytest.mark.parametrize("seed", range(30))


def both(module: ModuleType) -> list[tuple[Any, Callable[[np.ndarray], Any]]]:
    """A module compiled and interpreted, and what makes of an array what each of them takes."""
    interpreted = plain(module, ("flowslotd.flows.rows", PLAIN_ROWS))
    return [(module, rows.as_structs), (interpreted, PLAIN_ROWS.as_structs)]


def test_the_loops_are_compiled_here() -> None:
    for module in (rows, learning, shares, handover, rate_table, slot_check):
        assert str(module.__file__).endswith(".so"), "make setup compiles them"
    assert rows.COMPILED and not PLAIN_ROWS.COMPILED


def check_same(*results: tuple[Any, ...]) -> None:
    """Of both."""
    for compiled, interpreted in zip(*results, strict=True):
        np.testing.assert_array_equal(compiled, interpreted)


def some_rows(rng: RNG, n: int) -> np.ndarray:
    rows = np.repeat(FREE, n)
    rows["cookie"] = rng.choice(4 * n, n, replace=False) + 1
    rows["job"] = rng.integers(0, 4, n)
    for flag in ("seen", "active", "drained", "kernel", "announced", "suppressed"):
        rows[flag] = rng.integers(0, 2, n)
    rows["queue_us"] = rng.choice([0, 300, 2560, 5000], n)
    rows["iteration"] = rng.integers(0, 4, n)
    rows["inc"] = rng.integers(1, 4, n)
    rows["onset_inc"] = rows["inc"] - rng.integers(0, 2, n)
    rows["phases"] = rng.integers(0, 4, n) * rng.integers(0, 2, n)
    rows["onset_phases"] = rng.integers(0, 4, n)
    for size in ("counter", "origin", "target", "remaining", "expected", "ready", "unreported"):
        rows[size] = rng.integers(0, 1_000_000, n) * rng.integers(0, 2, n)
    rows["unreported_last"] = rng.integers(0, 100_000, n)
    rows["onset"] = (NOW - rng.integers(1, 10**9, n)) * rng.integers(0, 2, n)
    rows["looked"] = NOW - rng.integers(0, 10**8, n)
    rows["supplied"] = rows["looked"] - rng.integers(0, 2, n) * rng.integers(0, 10**8, n)
    rows["moved"] = rows["looked"] - rng.integers(0, 2, n) * rng.integers(0, 2 * 10**9, n)
    rows["period"] = rng.integers(0, 10**9, n) * rng.integers(0, 2, n)
    rows["rate"] = np.where(rng.integers(0, 4, n) > 0, rng.uniform(0, 1e8, n), np.nan)
    rows["ceiling"] = rows["share"] = rows["rate"]
    rows["usable"] = rng.choice([0.0, 1e6, np.inf], n)
    rows["window_at"] = rows["looked"] - rng.integers(0, 10**8, n)
    rows["window_from"] = np.maximum(rows["counter"] - rng.integers(0, 100_000, n), 0)
    rows["window_left"] = rng.integers(0, 200_000, n)
    rows["window_rate"] = rng.uniform(0, 2e6, n) * rng.integers(0, 2, n)
    rows["wastes"] = rng.integers(0, 3, n)
    return rows


def some_words(rng: RNG, n: int) -> np.ndarray:
    words = np.zeros((n, 32), np.int64)
    words[:, 0] = rng.choice([State.IDLE.value, State.ACTIVE.value], n) << 32
    sizes = np.sort(rng.integers(0, 1_000_000, (n, 4)), axis=1)
    for field, column in zip(("done", "posted", "ready", "iteration_total"), sizes.T, strict=True):
        words[:, offset(field) // 8] = column
    words[:, offset("iteration_total") // 8] *= rng.integers(0, 2, n)
    words[:, offset("iteration") // 8] = rng.integers(0, 1200, n) ** rng.integers(0, 2, n)
    words[:, offset("phases") // 8] = rng.integers(0, 1200, n) ** rng.integers(0, 2, n)
    words[:, offset("period_ns") // 8] = rng.integers(0, 10**8, n) ** rng.integers(0, 2, n)
    words[:, offset("t_iteration_start_ns") // 8] = NOW - rng.integers(0, 10**8, n)
    return words


@SEEDS
def test_looks_at_flows_are_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    before, words = some_rows(rng, n), some_words(rng, n)
    at = rng.permutation(n)[: rng.integers(0, n + 1)].astype(np.intp)
    slots = rng.permutation(n)[: len(at)].astype(np.intp)
    cookies = np.unique(np.append(before["cookie"][: n // 2], np.uint64(3)))
    counters = rng.integers(0, 2_000_000, (2, len(cookies)))
    ended = rng.permutation(n)[: rng.integers(1, n + 1)].astype(np.intp)
    results = []
    for loops, structs in both(learning):
        after = before.copy()
        table = structs(after)
        loops.advance(NOW, table, at, words, slots, cookies, counters, bool(seed % 3 == 0))
        signs = loops.signs(table, at, bool(seed % 2), bool(seed % 5))
        working = np.zeros((4, 1), np.int64)
        loops.drain(table, ended, working)
        watched = np.zeros(n, np.intp)
        count = loops.watch(table, False, watched)
        results.append((after.view(np.uint8), signs, working, count, watched))
    check_same(*results)


@SEEDS
def test_borrowers_get_the_same_lenders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    rows = some_rows(rng, n)
    rows["path"] = rng.integers(0, 3, n)
    rows["rate"] *= rng.integers(0, 2, n)
    rows["lender"] = rng.integers(-1, n, n)
    results = []
    for loops, structs in both(handover):
        after = rows.copy()
        table = structs(after)
        parts = loops.candidates(table, seed % 7 == 0, 0.25, 3)
        kept = after["lender"].copy()
        order = [part[np.argsort(rows["path"][part], kind="stable")] for part in parts]
        loops.pair(table, *order, np.zeros(4, np.intp))
        results.append((kept, *parts, after["lender"]))
    check_same(*results)
    new = np.flatnonzero(after["lender"] != kept)
    pairs = list(zip(new, after["lender"][new], strict=True))
    assert len({lender for _, lender in pairs}) == len(pairs)
    assert all(rows["path"][borrower] == rows["path"][lender] for borrower, lender in pairs)
    assert all(rows["job"][borrower] != rows["job"][lender] for borrower, lender in pairs)


@SEEDS
def test_bytes_are_read_in_the_same_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    flows = some_rows(rng, 20)
    at, results = rng.permutation(20)[:7].astype(np.intp), []
    for loops, table in ((rows, rows.as_structs), (PLAIN_ROWS, PLAIN_ROWS.as_structs)):
        left, sent = np.empty((2, 7))
        loops.bytes_of(table(flows), at, left, sent)
        results.append((left, sent))
    check_same(*results)
    left, sent = results[0]
    assert (np.isnan(sent) == ~flows["kernel"][at]).all()
    assert (left >= flows["remaining"][at]).all()


@SEEDS
def test_the_kernels_tables_are_written_and_read_in_the_same_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    ctl, stat = np.zeros(n, CTL), np.zeros(n, STAT)
    ctl["cookie"], stat["cookie"] = rng.integers(1, 3, (2, n))
    stat["sent"], stat["acked"], stat["min_rtt_us"] = rng.integers(0, 2**31, (3, n))
    ctl["deadline_ns"] = rng.integers(0, 2, n)
    entries = np.zeros(n - 1, ENTRY)
    for name in ("reserved", "ceiling", "growth", "burst", "least", "line"):
        entries[name] = rng.choice([-1.0, 0.0, 1e6, 2.0**61, math.inf], n - 1)
    entries["queue_us"], entries["guaranteed"] = rng.integers(0, 2, (2, n - 1))
    entries["uplink"] = rng.integers(-1, 2, n - 1)
    slots = (1 + rng.permutation(n - 1)).astype(np.intp)
    at, flows = slots[::2] - 1, some_rows(rng, n - 1)
    rates, ceilings = rng.choice([0.0, 1e6, math.inf], (2, len(at)))
    columns = rates, ceilings, rng.integers(0, 2, len(at)).astype(np.uint8)
    names = flows["cookie"][at]
    names[seed % 3 : 1] += 1  # in two of three cases, others
    path = rng.integers(0, 3, n).astype(np.intp)
    known = stat["cookie"].copy() if seed % 2 else rng.integers(1, 3, n).astype(np.uint64)
    theirs = ctl["cookie"][slots] + np.uint64(seed % 3 == 0)
    results = []
    for loops, table in both(rate_table):
        after, base = ctl.copy(), np.full(3, 2**32 - 1, np.uint32)
        changed = loops.write(table(after), slots, table(entries))
        again = loops.write(table(after), slots, table(entries))
        ours = loops.refresh(table(after), table(stat), slots, path, base, 77)
        held, put = entries.copy(), np.zeros(n - 1, np.intp)
        puts = loops.put(table(held), table(flows), at, columns, seed % 5 == 0, put)
        lives = loops.lives(table(stat), slots, known[slots])
        holds = loops.holds(table(ctl), slots, theirs)
        same = [loops.are(table(flows), at, names), lives, holds]
        counters = np.zeros((2, n), np.int64)
        right = loops.read(table(stat), known, counters)
        kept = after.view(np.uint8), held.view(np.uint8)
        results.append((*kept, changed, again, base, ours, right, counters, puts, put, same))
    check_same(*results)
    assert lives >= seed % 2 and holds == (seed % 3 > 0)
    assert results[0][2] >= results[0][3] == np.sum(ctl["deadline_ns"][slots] == 0)


@SEEDS
def test_aggregates_are_shared_out_in_the_same_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, b = int(rng.integers(1, 60)), int(rng.integers(1, 6))
    rows = some_rows(rng, n)
    rows["aggregate"] = rng.integers(0, b + 1, n)
    terms = rng.uniform(0, 1e9, (b + 1, 7))
    terms[rng.integers(0, 5, b + 1) == 0, 0] = np.nan
    terms[:, [1, 5, 6]] = rng.integers(0, 2, (b + 1, 3))
    results = []
    for loops, structs in both(shares):
        mine = rows.copy()
        table = structs(mine)
        times, sizes = np.zeros((b + 1, 5), np.int64), np.zeros((b + 1, 4))
        changed, granted = np.zeros((2, n), np.uint8)
        loops.add_up(NOW, table, seed % 2 == 0, times, sizes)
        loops.share_out(NOW, table, terms, changed)
        loops.hand_out(table, terms, granted)
        results.append((times, sizes, changed, granted, mine.view(np.uint8)))
    check_same(*results)


@SEEDS
def test_slots_of_a_record_are_judged_in_the_same_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 20))
    good = some_words(rng, n)
    good[:, offset("sock_cookie") // 8] = rng.integers(0, 3, n)
    live = good.copy()
    live[:, 0] += rng.integers(0, 3, n)
    for _ in range(2 * n):  # some of them in a way that cannot be
        at_word = rng.integers(1, 32) if rng.integers(0, 2) else rng.integers(13, 20)
        live[rng.integers(0, n), at_word] += rng.integers(-(2**40), 2**60)
    results = []
    for loops, _ in both(slot_check):
        taken, seen, faults = good.copy(), good[:, 0] & 0xFFFFFFFF, np.zeros(n, np.int64)
        at, seqs, verdicts = np.zeros(n, np.intp), np.zeros(n, np.int64), np.zeros(n, np.int64)
        count = loops.changed(live, seen, at, seqs)
        torn = live.copy()
        torn[at[: count // 2], 0] += 1
        found = (at[:count], seqs[:count], verdicts[:count])
        left = loops.settle(torn, live[at[:count]], taken, seen, faults, found)
        results.append((count, left, at, seqs, verdicts, taken, seen, faults))
    check_same(*results)
