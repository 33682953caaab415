# SPDX-License-Identifier: Apache-2.0
"""Jobs on GPUs and networks: the engine's loops, placement, queueing."""

from dataclasses import replace

import numpy as np
import pytest
from interpreted import plain

import flowslot_sim.cluster.engine
import flowslot_sim.cluster.sharing
from flowslot.model.errors import FlowslotError
from flowslot.policy import fill
from flowslot.policy.adadual import AdaDual
from flowslot.policy.gate import Gate, Transfers
from flowslot.policy.srsf import Srsf
from flowslot.policy.srsf_chunked import ChunkedSrsf
from flowslot_sim.cluster.engine import NEVER, Engine
from flowslot_sim.cluster.jobs import JobSpec, Phase, Table
from flowslot_sim.cluster.networks import Network, Racks, Servers
from flowslot_sim.cluster.placement import Question, at_random, first_fit, list_scheduling, lwf
from flowslot_sim.cluster.run import Cluster, Load, Outcome, Rules, Run, Stuck, counted
from flowslot_sim.cluster.sharing import MaxMin

MS, MB, S = 10**6, 1e6, 10**9
B, ETA = 0.856e-9, 0.235e-9


def job(name: str, workers: int = 2, iterations: int = 3, mb: float = 100.0, **more) -> JobSpec:
    phases = more.pop("phases", (Phase(30 * MS), Phase(40 * MS, mb * MB)))
    return JobSpec(name, workers, iterations, phases, **more)


def test_what_can_never_be_sent_is_an_error() -> None:
    with pytest.raises(Stuck, match="1 jobs wait for ever"):
        run([job("a", 3)], network=Racks(2, 2, 0.0, 0.0))


def drawn(seed: int, jobs: int = 12, most: int = 8) -> list[JobSpec]:
    draw = np.random.default_rng(seed)
    return [
        job(
            f"j{k}",
            int(draw.integers(1, most + 1)),
            int(draw.integers(1, 30)),
            phases=(
                Phase(int(draw.integers(1, 60)) * MS),
                Phase(int(draw.integers(1, 60)) * MS, draw.uniform(1, 400) * MB),
            ),
            arrival_ns=int(draw.integers(2000)) * MS,
            memory_mb=4000.0,
        )
        for k in range(jobs)
    ]


SMALL = Cluster(servers=4, gpus_per_server=2, memory_mb=12000.0)
RULES = Rules(lwf(1), Srsf(1), Load(B))


def run(jobs, rules: Rules = RULES, network: Network | None = None) -> Outcome:
    return Run(jobs, SMALL, network or Servers(SMALL.servers, B, ETA), rules).go()


def jct(outcome: Outcome) -> dict[str, float]:
    return {j.name: float(t) for j, t in zip(outcome.jobs, outcome.jct_s, strict=True)}


def placed(jobs, gpus, servers, network: Network, gate: Gate | None = None, **more) -> Engine:
    """Each job on these GPUs and servers, all from the start."""
    table = Table(jobs)
    order = [next(k for k, j in enumerate(jobs) if j.name == each.name) for each in table.jobs]
    width = max(network.width(len(places)) for places in servers)
    paths = np.full((len(jobs), width), network.links, np.int32)
    count = 1 + max(max(each) for each in gpus)
    sharing = network.sharing(paths, np.zeros_like(paths))
    engine = Engine(table, count, Transfers(paths, network.links), sharing, gate, **more)
    for i, k in enumerate(order):
        table.volume[i] *= network.bytes_per_flow(len(servers[k]))
        engine.place(i, np.array(gpus[k], np.intp), *counted(network.path(servers[k])))
    return engine


def all_ends(engine: Engine, jobs) -> dict[str, int]:
    ends, names = {}, [j.name for j in Table(jobs).jobs]
    while len(ends) < len(names):
        n = engine.run(NEVER)
        assert n, "stuck"
        ends |= {names[i]: engine.now for i in np.asarray(engine.finished)[:n].tolist()}
    return ends


def test_a_job_alone_lasts_as_long_as_its_phases() -> None:
    one = job("a", workers=4, iterations=5, arrival_ns=S)
    times = jct(run([one]))
    assert times["a"] == pytest.approx(5 * (0.070 + 100 * MB * B))
    assert run([one]).utilisation == pytest.approx(4 * 5 * 0.070 / 8 / (1 + times["a"]))


def test_a_job_on_one_server_sends_nothing() -> None:
    outcome = run([job("a", workers=2)])
    assert outcome.jct_s[0] == pytest.approx(3 * 0.070) and not outcome.carried.any()


def test_latency_comes_before_every_transfer() -> None:
    times = jct(run([job("a", workers=4)], replace(RULES, latency_ns=2 * MS)))
    assert times["a"] == pytest.approx(3 * (0.072 + 100 * MB * B))


def test_two_jobs_on_a_gpu_take_turns_the_shorter_one_first() -> None:
    """A phase is not interrupted: b waits for the phase of a that runs when it comes."""
    cluster = Cluster(1, 1, 10000)
    a, b = job("a", 1, 2), job("b", 1, 1, arrival_ns=5 * MS)
    outcome = Run([a, b], cluster, Servers(1, B, ETA), RULES).go()
    assert jct(outcome) == pytest.approx({"b": 0.030 + 0.070 - 0.005, "a": 0.210})


def test_jobs_wait_for_memory_shortest_service_first() -> None:
    cluster = Cluster(1, 1, 5000)
    jobs = [
        job("a", 1, 10, memory_mb=4000.0),
        job("long", 1, 5, memory_mb=4000.0, arrival_ns=MS),
        job("short", 1, 2, memory_mb=4000.0, arrival_ns=2 * MS),
    ]
    times = jct(Run(jobs, cluster, Servers(1, B, ETA), RULES).go())
    assert times["short"] == pytest.approx(0.7 + 0.14 - 0.002)
    assert times["long"] == pytest.approx(0.7 + 0.14 + 0.35 - 0.001)


def test_a_job_that_never_fits_is_refused_by_name() -> None:
    for bad in (job("big", workers=9), job("big", memory_mb=12001.0)):
        with pytest.raises(FlowslotError, match=r'job "big": .* the cluster has 8 with 12000 MB'):
            run([bad])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ([job("a"), job("a")], "a name of its own"),
        ([job("a", iterations=0)], "job a: needs"),
        ([job("a", phases=())], "job a: needs"),
        ([job("a", mb=float("nan"))], "job a: .* at least 0"),
        ([job("a", mb=float("inf"))], "job a: .* finite"),
        ([job("a", memory_mb=float("nan"))], "job a: .* finite"),
        ([job("a", arrival_ns=-1)], "job a: .* at least 0"),
        ([job("a", phases=(Phase(0),))], "job a: must compute or send"),
    ],
)
def test_bad_jobs_are_refused(bad, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        run(bad)


def gates() -> list[Gate | None]:
    return [None, Srsf(1), Srsf(2), AdaDual(B, ETA), ChunkedSrsf()]


@pytest.mark.parametrize("seed", range(6))
def test_no_byte_is_lost_or_sent_twice(seed: int) -> None:
    jobs = drawn(seed)
    for network in (Servers(4, B, ETA), Racks(2, 2, 1.25e9, 1.25e9)):
        for gate in gates():
            whole = Run(jobs, SMALL, network, replace(RULES, gate=gate))
            outcome = whole.go()
            expected = np.zeros(network.links + 1)
            for i, each in enumerate(outcome.jobs):  # paths stay when jobs have gone
                volume = whole.table.volume[i].sum() * each.iterations
                flows = np.asarray(whole.engine.flows)[i]
                np.add.at(expected, np.asarray(whole.engine.paths)[i], flows * volume)
            expected = expected[:-1]
            assert expected.any()
            assert outcome.carried == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_the_jobs_in_a_file_does_not_matter(seed: int) -> None:
    jobs = drawn(seed)
    for network in (Servers(4, B, ETA), Racks(2, 2, 1.25e9, 1.25e9)):
        for gate in gates():
            for placement in (lwf(2), at_random(seed), first_fit, list_scheduling):
                rules = replace(RULES, gate=gate, placement=placement)
                assert jct(run(jobs, rules, network)) == jct(run(jobs[::-1], rules, network))


def private(n: int) -> tuple[list[list[int]], list[list[int]]]:
    """n jobs, of which every pair shares a server, on GPUs of their own."""
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    servers = [[s for s, pair in enumerate(pairs) if k in pair] for k in range(n)]
    gpus = [list(range(k * (n - 1), (k + 1) * (n - 1))) for k in range(n)]
    return servers, gpus


@pytest.mark.parametrize("n", [4, 5, 6])
def test_where_every_pair_has_a_private_server_contention_wins(n: int) -> None:
    """All at once: n (2 b + eta) M; one after the other: n (n + 1) / 2 b M."""
    servers, gpus = private(n)
    jobs = [job(f"j{k}", n - 1, 1, phases=(Phase(MS, 100 * MB),)) for k in range(n)]
    network = Servers(n * (n - 1) // 2, B, ETA)
    total = {}
    for name, gate in (("all", None), ("serial", Srsf(1)), ("adadual", AdaDual(B, ETA))):
        engine = placed(jobs, gpus, servers, network, gate)
        total[name] = sum(end / S - 0.001 for end in all_ends(engine, jobs).values())
    assert total["all"] == pytest.approx(n * (2 * B + ETA) * 100 * MB, rel=1e-6)
    assert total["serial"] == pytest.approx(n * (n + 1) / 2 * B * 100 * MB, rel=1e-6)
    assert total["all"] < total["serial"] == pytest.approx(total["adadual"])


def by_the_millisecond(jobs, gpus, servers, ways: int) -> dict[str, int]:  # noqa: C901
    """SRSF(ways) in steps of 1 ms, written anew: when each job ends, ms. Whole ms only."""
    order = sorted(range(len(jobs)), key=lambda k: jobs[k].name)
    service = {k: jobs[k].compute_ns * jobs[k].workers for k in order}
    phase = {(k, w): 0 for k in order for w in range(jobs[k].workers)}
    waiting, running, on_gpu = set(), {}, {}  # workers at the barrier; job: bytes; gpu: worker, end
    done, ends, now = dict.fromkeys(order, 0), {}, 0

    def forward(k: int) -> None:
        done[k] += 1
        if done[k] == jobs[k].iterations:
            ends[jobs[k].name] = now
        for w in range(jobs[k].workers):
            waiting.discard((k, w))
            phase[k, w] = 0

    while len(ends) < len(jobs):
        for k in [k for k in running if running[k] <= 1e-6]:
            del running[k]
            forward(k)
        for g, (k, w, end) in list(on_gpu.items()):
            if end == now:
                del on_gpu[g]
                service[k] -= jobs[k].phases[phase[k, w]].compute_ns
                phase[k, w] += 1
                if phase[k, w] == len(jobs[k].phases):
                    waiting.add((k, w))
        ready = [
            k
            for k in order
            if k not in running and all((k, w) in waiting for w in range(jobs[k].workers))
        ]
        for k in sorted(ready, key=lambda k: (service[k], jobs[k].name)):
            if len(servers[k]) == 1:
                forward(k)
            elif max(sum(s in servers[j] for j in running) for s in servers[k]) < ways:
                running[k] = jobs[k].phases[-1].volume
        for g in {g for each in gpus for g in each} - set(on_gpu):
            wants = [
                (service[k], jobs[k].name, k, gpus[k].index(g))
                for k in order
                if g in gpus[k] and jobs[k].name not in ends
                if (k, gpus[k].index(g)) not in waiting
            ]
            if wants:
                _, _, k, w = min(wants)
                length = jobs[k].phases[phase[k, w]].compute_ns // MS
                on_gpu[g] = (k, w, now + length)
        now += 1
        for k in running:
            n = max(sum(s in servers[j] for j in running) for s in servers[k])
            rate = 1 / (n * B + (n - 1) * ETA)
            running[k] -= rate * 1e-3
    return ends


@pytest.mark.parametrize("seed", range(8))
def test_the_engine_does_what_a_loop_over_milliseconds_does(seed: int) -> None:
    draw = np.random.default_rng(seed)
    jobs = [replace(each, arrival_ns=0) for each in drawn(seed, jobs=6, most=5)]
    gpus = [draw.choice(8, each.workers, replace=False).tolist() for each in jobs]
    servers = [list(dict.fromkeys(g // 2 for g in each)) for each in gpus]
    for ways in (1, 2, 3):
        engine = placed(jobs, gpus, servers, Servers(4, B, ETA), Srsf(ways), tick_ns=MS)
        found = {name: end // MS for name, end in all_ends(engine, jobs).items()}
        assert found == by_the_millisecond(jobs, gpus, servers, ways)


def random_paths(draw, n: int, links: int) -> tuple[np.ndarray, ...]:
    """With a link as often as flows cross it; each once; and how often."""
    repeated, once = np.full((n, 5), links, np.int32), np.full((n, 5), links, np.int32)
    flows = np.zeros((n, 5), np.int32)
    for i in range(n):
        path = draw.integers(0, links, int(draw.integers(1, 6)))
        repeated[i, : len(path)] = path
        each, counts = counted(path)
        once[i, : len(each)], flows[i, : len(each)] = each, counts
    return repeated, once, flows


@pytest.mark.parametrize("seed", range(10))
def test_rates_found_where_something_changed_are_those_found_anew(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n, links = 30, 12
    paths, once, flows = random_paths(draw, n, links)
    capacity = np.append(draw.uniform(1, 10, links), np.inf)
    sharing, live = MaxMin(once, flows, capacity), set()
    for _ in range(150):
        for i in draw.choice(n, int(draw.integers(1, 4)), replace=False).tolist():
            (sharing.leave if i in live else sharing.enter)(i)
            live ^= {i}
        sharing.share()
        rows = np.array(sorted(live), np.intp)
        fresh = np.zeros(len(rows))
        fill.max_min(paths[rows], capacity, np.full(len(rows), np.inf), fresh)
        rates = np.asarray(sharing.rate)[rows]
        assert rates == pytest.approx(fresh, rel=1e-6)
        load = np.zeros(links + 1)
        fill.link_sum(paths[rows], rates, load)
        assert (load[:-1] <= capacity[:-1] * (1 + 1e-9)).all()


@pytest.mark.parametrize("seed", range(3))
def test_compiled_loops_do_what_their_source_says(seed: int, monkeypatch) -> None:
    modules = flowslot_sim.cluster.engine, flowslot_sim.cluster.sharing
    assert all(module.COMPILED for module in modules)
    engine, sharing = (plain(module) for module in modules)
    jobs = drawn(seed, jobs=8)
    for name, network in (
        ("Contended", Servers(4, B, ETA)),
        ("MaxMin", Racks(2, 2, 1.25e9, 1.25e9)),
    ):
        for gate in gates():
            rules = replace(RULES, gate=gate, recount=True)
            compiled = run(jobs, rules, network)
            with monkeypatch.context() as patched:
                patched.setattr("flowslot_sim.cluster.run.Engine", engine.Engine)
                patched.setattr(f"flowslot_sim.cluster.networks.{name}", getattr(sharing, name))
                interpreted = run(jobs, rules, network)
            assert jct(interpreted) == jct(compiled)
            assert interpreted.carried.tolist() == compiled.carried.tolist()


def question(workers: int, load, fits=None):
    load = np.array(load, float)
    fits = np.ones(len(load), np.bool_) if fits is None else np.array(fits, np.bool_)
    return Question("j", workers, fits, load, 2)


def test_placement_policies_choose_as_they_say() -> None:
    load = [5, 1, 0, 3, 4, 4]
    assert first_fit(question(2, load, [0, 1, 1, 1, 1, 1])).tolist() == [1, 2]
    assert list_scheduling(question(3, load)).tolist() == [2, 1, 3]
    assert lwf(1)(question(1, load)).tolist() == [2]
    assert lwf(1)(question(3, load)).tolist() == [2, 3, 1]
    assert lwf(1, by_load=False)(question(3, load)).tolist() == [2, 3, 0]
    assert lwf(4)(question(3, load)).tolist() == [2, 1, 3]
    full = [1, 1, 1, 0, 0, 1]
    assert lwf(1)(question(3, load, full)).tolist() == [2, 1, 0]
    full = [1, 0, 1, 0, 1, 1]
    assert lwf(1)(question(3, load, full)) is None
    assert lwf(1, all_servers=True)(question(3, load, full)).tolist() == [2, 0, 4]
    assert first_fit(question(7, load)) is None
    draws = {tuple(at_random(seed)(question(3, load)).tolist()) for seed in range(50)}
    assert len(draws) > 20 and at_random(3)(question(9, load)) is None


def test_a_path_keeps_the_order_of_its_servers() -> None:
    links, flows = counted([7, 2, 7, 5, 2, 7])
    assert links.tolist() == [7, 2, 5] and flows.tolist() == [3, 2, 1]
    assert [each.tolist() for each in counted([])] == [[], []]
