# SPDX-License-Identifier: Apache-2.0
"""`flowslot sim`: what a scenario would be like on ideal links, in simulated time.

Exit status: 0 ok, also when a policy came to a halt and its run was given up; 1 a run stalled for
which no policy is to blame; 2 bad scenario or usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowslot.model.errors import ConfigError
from flowslot.model.units import MILLISECOND, Nanos
from flowslot_scenario import scenario as scenarios
from flowslot_scenario.output import OutputOption, chosen, show
from flowslot_sim.papers import cli as papers
from flowslot_sim.plane.messages import Plant
from flowslot_sim.plane.wire import Delays
from flowslot_sim.recording.figures import draw
from flowslot_sim.recording.options import FigureOption, TimelineOption, keep
from flowslot_sim.recording.record import Recording
from flowslot_sim.runner import POLICIES, Options, simulate
from flowslot_sim.sweep import sweep
from flowslot_sim.traces.cli import run_trace

DELAY_MS, LOOK_MS = 1.5, 2.0
"""As measured in the lab (`flowslot lab run --budget`, a phase's steps): daemons ask 2 to 3 ms
after a phase begins, and have the answer 2 to 4 ms later where nobody has to give way."""

app = typer.Typer(
    name="sim",
    help="Scenarios on a fluid network, with the real protocol, in simulated time.",
    no_args_is_help=True,
    add_completion=False,
)


app.add_typer(papers.app)
app.command(name="trace")(run_trace)
app.command()(sweep)


@app.callback()
def main() -> None:
    """Scenarios on a fluid network, with the real protocol, in simulated time."""


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="scenario file (TOML)", metavar="SCENARIO")],
    *,
    policy: Annotated[
        str, typer.Option(help=f"comma-separated, of: {', '.join(POLICIES)}")
    ] = "stagger,static,fair",
    seeds: Annotated[
        int, typer.Option(min=1, max=10_000, help="so many, from the scenario's seed on")
    ] = 1,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="measured per job and seed [default: the scenario's]"),
    ] = None,
    delay_ms: Annotated[
        float, typer.Option(min=0.0, max=1000.0, help="of a message, one way")
    ] = DELAY_MS,
    look_ms: Annotated[
        float, typer.Option(min=0.0, max=1000.0, help="from an event until a daemon says so")
    ] = LOOK_MS,
    switch: Annotated[bool, typer.Option(help="with a switch process, or with none at all")] = True,
    switches: Annotated[
        Literal["one", "per-rack"], typer.Option(help="switch processes: one, or one per rack")
    ] = "one",
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="instead of the scenario's")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="a variant: links.buffer_kb=16, jobs.bytes=6e6, jobs.a.sockets=4"
        ),
    ] = None,
    budget: Annotated[
        bool, typer.Option("--budget", help="show where the jobs' time goes, too")
    ] = False,
    figure: FigureOption = None,
    timeline: TimelineOption = None,
    output: OutputOption = "table",
) -> None:
    """Simulate a scenario under each policy and compare. Figures and timelines: of the first
    seed."""
    loaded = scenarios.load(scenario, change or [])
    if seed is not None:
        loaded = loaded.model_copy(update={"seed": seed})
    if loaded.losses:
        raise ConfigError("losses", "", f"{scenario}: the simulator loses no packets")
    if loaded.delays:
        raise ConfigError("delays", "", f"{scenario}: the simulator has no long paths")
    per_rack = switches == "per-rack"
    if per_rack and not loaded.racks:
        raise ConfigError("--switches per-rack", "", f"{scenario}: its hosts have no `rack`")
    delay = round(delay_ms * MILLISECOND)
    look = Nanos(round(look_ms * MILLISECOND))
    plant = Plant(delays=Delays(low=delay, high=delay), look_ns=look)
    options = Options(chosen(policy, POLICIES), seeds, iterations, switch, per_rack, plant, budget)
    recordings: dict[str, Recording] | None = {} if figure or timeline else None
    results = simulate(loaded, options, recordings)
    keep(recordings or {}, timeline)
    if figure is not None and recordings:
        slowdowns = {policy: results.slowdowns(policy).tolist() for policy in recordings}
        draw(slowdowns, recordings, "iteration time / Ideal", figure)
    show(results, output)
