# SPDX-License-Identifier: Apache-2.0
"""The command line `flowslot`.

Exit status: 0 fine, 1 failure, 2 bad input or usage, 3 the daemon cannot be reached. Other
packages add commands through the entry-point group `flowslot.commands`; they are imported only
when they are called or listed, which keeps the start of every other command quick. Where one raises
a FlowslotError, that is one line, and status 1, or 2 for a ConfigError.
"""

import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flowslot.model.errors import ConfigError, FlowslotError
from flowslot_cli.client import BAD_INPUT, FAILURE, CommandError, ask
from flowslot_scenario.output import OutputOption, as_text

PLUGINS = "flowslot.commands"
LAZY = {"certs": EntryPoint("certs", "flowslot_cli.certs:app", PLUGINS)}
"""Of our own, but too slow to import for every command."""


def _plugins() -> dict[str, EntryPoint]:
    return LAZY | {entry.name: entry for entry in entry_points(group=PLUGINS)}


def _load(entry: EntryPoint) -> Any:
    """A plug-in's command: from a typer app, or from a function that typer can wrap."""
    try:
        loaded = entry.load()
    except Exception as error:
        problem = f"command `{entry.name}` is not available: {type(error).__name__}: {error}"

        def broken() -> None:
            raise FlowslotError(problem)

        broken.__doc__ = f"(not available: {type(error).__name__})"
        loaded = broken
    if not isinstance(loaded, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(entry.name)(loaded)
        loaded = app
    command = typer.main.get_command(loaded)
    command.name = entry.name
    return command


class Commands(TyperGroup):
    """The built-in commands, and those of plug-ins."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, built-in ones first."""
        own = list(super().list_commands(ctx))
        return own + sorted(set(_plugins()) - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name; None: unknown."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = _plugins().get(cmd_name)
        return _load(entry) if entry else None


app = typer.Typer(
    cls=Commands,
    help="Staggers the flows of training jobs that share a network, slot by slot.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RuntimeDirOption = Annotated[
    Path,
    typer.Option(
        "--runtime-dir", envvar="FLOWSLOT_RUNTIME_DIR", help="the daemon's runtime directory"
    ),
]
RUNTIME_DIR = Path("/run/flowslot")
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="refresh every second")]


def _show(command: str, output: str, runtime_dir: Path, watch: bool) -> None:
    if watch and output != "table":
        raise CommandError("--watch goes with `-o table` only", BAD_INPUT)
    path = runtime_dir / "control.sock"
    answer = ask(path, command)
    if output != "table":
        typer.echo(as_text(answer, output))
        return
    from flowslot_cli import render  # noqa: PLC0415  (heavy, and not needed for an error)

    if not watch:
        render.show(command, answer)
        return
    with render.live() as update:
        while True:
            update(command, answer)
            time.sleep(1.0)
            answer = ask(path, command)


QUESTIONS = {
    "status": "The daemon: mode, policy, arbiter, lateness, counters, errors.",
    "jobs": "Jobs with flows on this host, and how far each flow is: bytes ready, sent, "
    "acknowledged.",
    "flows": "Flows that start at this host: path, remaining bytes, rate, and why.",
    "schedule": "The rate of each flow in the next slots.",
    "links": "The load table: what is reserved on each link in the next slots.",
}
"""What the daemon can be asked, and the help text of the command that asks it."""


def _question(command: str) -> Callable[..., None]:
    def show(
        output: OutputOption = "table",
        runtime_dir: RuntimeDirOption = RUNTIME_DIR,
        watch: WatchOption = False,
    ) -> None:
        _show(command, output, runtime_dir, watch)

    return show


for _command, _help in QUESTIONS.items():
    app.command(_command, help=_help)(_question(_command))


@app.command()
def reload(
    output: OutputOption = "table",
    runtime_dir: RuntimeDirOption = RUNTIME_DIR,
) -> None:
    """Make the daemon read its configuration and topology again."""
    _show("reload", output, runtime_dir, watch=False)


policy = typer.Typer(
    help="The policy of a running daemon or switch process.", rich_markup_mode=None
)
app.add_typer(policy, name="policy", no_args_is_help=True)


@policy.command("show")
def policy_show(
    output: OutputOption = "table",
    runtime_dir: RuntimeDirOption = RUNTIME_DIR,
) -> None:
    """The policy in force, and of a daemon's switch processes theirs."""
    _tell(ask(runtime_dir / "control.sock", "policy"), output)


@policy.command("set")
def policy_set(
    name: Annotated[str, typer.Argument(help="of the policy")],
    output: OutputOption = "table",
    runtime_dir: RuntimeDirOption = RUNTIME_DIR,
) -> None:
    """Go on under another policy until the next reload or restart. No connection is lost. A switch
    process's (--runtime-dir) is that of its whole domain; a daemon's is its host's."""
    _tell(ask(runtime_dir / "control.sock", "set-policy", SET_S, name=name), output)


SET_S = 15.0


def _tell(answer: dict[str, Any], output: str) -> None:
    if output != "table":
        typer.echo(as_text(answer, output))
        return
    typer.echo(f"{answer['process']}: {answer['policy']}")
    for one in answer["switches"]:
        state = "" if one["live"] else ", not live"
        typer.echo(f"  switch process {one['switch']}: {one['policy'] or 'not known'}{state}")


PidOption = Annotated[int | None, typer.Option("--pid", help="a process")]
CgroupOption = Annotated[
    str | None, typer.Option("--cgroup", help="a control group's path, with those below it")
]


@app.command()
def enlist(
    pid: PidOption = None,
    cgroup: CgroupOption = None,
    job: Annotated[
        str | None, typer.Option(help="its name, the same on all hosts; else $FLOWSLOT_JOB")
    ] = None,
    runtime_dir: RuntimeDirOption = RUNTIME_DIR,
) -> None:
    """Schedule a job that reports nothing: its sockets' counters tell, and its iterations are
    learnt."""
    if (pid is None) == (cgroup is None):
        raise CommandError("needs either --pid or --cgroup", BAD_INPUT)
    path = runtime_dir / "control.sock"
    _tell_targets("enlisted", ask(path, "enlist", pid=pid, cgroup=cgroup, job=job))


@app.command()
def release(
    pid: PidOption = None,
    cgroup: CgroupOption = None,
    everything: Annotated[bool, typer.Option("--all", help="all that was enlisted")] = False,
    runtime_dir: RuntimeDirOption = RUNTIME_DIR,
) -> None:
    """Leave alone what was enlisted: its sockets are as they were before."""
    if [pid is None, cgroup is None, not everything].count(False) != 1:
        raise CommandError("needs one of --pid, --cgroup, --all", BAD_INPUT)
    answer = ask(runtime_dir / "control.sock", "release", pid=pid, cgroup=cgroup)
    _tell_targets("released", answer)


def _tell_targets(what: str, answer: dict[str, Any]) -> None:
    for target in answer["targets"]:
        kind = "pid" if "pid" in target else "cgroup"
        job = f", job {target['job']}" if target["job"] else ""
        typer.echo(f"{what}: {kind} {target[kind]}{job}")


@app.command()
def version() -> None:
    """The installed version."""
    from importlib.metadata import version as installed  # noqa: PLC0415

    typer.echo(f"flowslot {installed('flowslot')}")


def main() -> None:
    """Entry point of `flowslot`."""
    try:
        app(prog_name="flowslot")
    except FlowslotError as error:
        typer.echo(f"flowslot: {error}", err=True)
        bad = BAD_INPUT if isinstance(error, ConfigError) else FAILURE
        sys.exit(error.status if isinstance(error, CommandError) else bad)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
