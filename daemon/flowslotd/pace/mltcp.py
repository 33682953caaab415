# SPDX-License-Identifier: Apache-2.0
"""MLTCP in this host's kernel (bpf/mltcp.bpf.c), and its command, `flowslot mltcp`.

Usable alone: neither daemon nor switch has a part in it. What is registered stays until `off`, or
until the machine is booted anew; no process has to run.
"""

import contextlib
import math
import struct
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from flowslot.model.errors import FlowslotError
from flowslot.policy.mltcp import Aggressiveness
from flowslotd.pace.guardian import unregister
from flowslotd.pace.libbpf import Object, read, struct_ops_maps
from flowslotd.pace.pacer import PacingError

OBJECT = "mltcp.bpf.o"
NAMES = ("mltcp_reno", "mltcp_cubic")
"""Congestion controls, and their struct_ops."""
ONE = 1024
"""F is in units of 1 / so many, in the kernel."""
MOST = 16.0
"""What slope and intercept may be at most."""
_LINE = struct.Struct("=II")
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class Line(NamedTuple):
    """F in the kernel's units."""

    slope: int
    intercept: int

    @classmethod
    def of(cls, f: Aggressiveness) -> "Line":
        """Rounded."""
        return cls(round(f.slope * ONE), round(f.intercept * ONE))


def registered() -> list[str]:
    """Which of `NAMES` the kernel has, from here or from elsewhere."""
    available = _AVAILABLE.read_text().split()
    return [name for name in NAMES if name in available]


def turn_on(f: Aggressiveness) -> None:
    """Register both. Raises PacingError, and then neither is."""
    if found := registered():
        raise PacingError(f"{found[0]} is registered already: `flowslot mltcp off` first")
    elf = read(OBJECT)
    try:
        obj = Object(elf)
        try:
            constants = obj.map(".rodata").initial
            if constants.raw != _LINE.pack(*Line.of(Aggressiveness())):
                raise PacingError(f"{OBJECT} is not what this version expects: rebuild it")
            constants.raw = _LINE.pack(*Line.of(f))
            obj.load()
            for name in NAMES:
                obj.map(name).attach_struct_ops(link=False)
        finally:
            obj.close()
    except OSError as error:
        with contextlib.suppress(PacingError):
            turn_off()
        raise PacingError(f"the kernel refuses {OBJECT}: {error}") from error


def turn_off() -> list[str]:
    """Unregister what `turn_on` has registered; returns what. Open connections keep it until they
    end. Raises PacingError."""
    present = registered()
    try:
        for _, fd in struct_ops_maps(present):
            unregister(fd)
    except OSError as error:
        raise PacingError(f"the kernel does not tell its BPF maps: {error}") from error
    if left := registered():
        raise PacingError(f"{left[0]} is still registered: not by `flowslot mltcp on`")
    return present


app = typer.Typer(
    name="mltcp",
    help="MLTCP, a congestion control that lets equal jobs take turns by itself.",
    no_args_is_help=True,
    add_completion=False,
)
_Factor = typer.Option(min=1 / ONE, max=MOST, help="of F = slope * bytes_ratio + intercept")


@app.command()
def on(
    slope: Annotated[float, _Factor] = Aggressiveness().slope,
    intercept: Annotated[float, _Factor] = Aggressiveness().intercept,
) -> None:
    """Register `mltcp_reno` and `mltcp_cubic` in this kernel. Which connections use it is said
    elsewhere: by sysctl, by route, or by the job (docs/adr/0015-mltcp.md)."""
    if not (math.isfinite(slope) and math.isfinite(intercept)):
        raise typer.BadParameter("--slope and --intercept must be numbers")
    try:
        turn_on(Aggressiveness(slope, intercept))
    except PacingError as error:
        raise FlowslotError(f"mltcp on: {error}") from error
    print(f"registered: {', '.join(NAMES)}")


@app.command()
def off() -> None:
    """Unregister both. Open connections keep it until they end."""
    try:
        removed = turn_off()
    except PacingError as error:
        raise FlowslotError(f"mltcp off: {error}") from error
    print(f"unregistered: {', '.join(removed) or 'nothing was registered'}")
