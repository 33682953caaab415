# SPDX-License-Identifier: Apache-2.0
"""The daemon's answers as tables. Rates are shown in Mbit/s on the wire."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from flowslot.model.units import wire_bps
from flowslot_shm.layout import CHANNELS

Data = dict[str, Any]
NONE = "-"
RATES = {"rate", "ceiling", "goodput"}
TITLES = {
    "iteration_bytes": "of",
    "remaining_bytes": "left",
    "rate": "Mbit/s",
    "goodput": "Mbit/s",
    "name": "link",
}
"""Of columns; the others are called as their values are, without the unit."""


def show(command: str, data: Data) -> None:
    """Print an answer."""
    console().print(TABLES[command](data))


@contextmanager
def live() -> Iterator[Callable[[str, Data], None]]:
    """A view that is redrawn in place; call the result with each new answer."""
    with Live(console=console(), auto_refresh=False, screen=sys.stdout.isatty()) as view:
        yield lambda command, data: view.update(TABLES[command](data), refresh=True)


def console() -> Console:
    """As wide as the terminal; wide enough for every table when the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def mbps(rate: float | None) -> str:
    """Payload bytes/s as Mbit/s on the wire."""
    if rate is None or not math.isfinite(rate):
        return NONE
    value = wire_bps(rate) / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def size(count: float | None) -> str:
    """Bytes with a decimal unit."""
    if count is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(value: float | None) -> str:
    """Seconds with three digits."""
    return NONE if value is None else f"{value:.3g} s"


def _percentiles(summary: Data) -> str:
    if not summary["count"]:
        return NONE
    return (
        f"p50 {summary['p50_us'] / 1e3:.2f}  p90 {summary['p90_us'] / 1e3:.2f}  "
        f"p99 {summary['p99_us'] / 1e3:.2f}  max {summary['max_us'] / 1e3:.2f} ms "
        f"({summary['count']})"
    )


def _counts(counts: Data) -> str:
    return "  ".join(f"{name} {value}" for name, value in counts.items()) or NONE


def status(data: Data) -> RenderableType:
    """`flowslot status`."""
    domain, slot, config = data["domain"], data["slot"], data["config"]
    arbiter = domain["state"]
    if domain.get("switch"):
        arbiter += f" {domain['switch']}"
    if domain.get("switch_pid"):
        arbiter += f" (pid {domain['switch_pid']})"
    if domain.get("policy", "") not in {"", data["policy"]}:
        arbiter += f", deciding by {domain['policy']}"
    gone = [one["switch"] for one in domain.get("switches", ()) if not one["live"]]
    if gone and domain["state"] == "switch":
        arbiter += f", without {', '.join(gone)}"
    offset = data["clock_offset_us"]
    rows = [
        ("daemon", f"{data['host']} (pid {data['pid']}), up {data['uptime_s']:.0f} s"),
        ("mode", data["mode"]),
        ("policy", data["policy"]),
        ("pacing", f"{data['backend']}  {data['congestion_control'] or ''}".strip()),
        ("arbiter", arbiter),
        *_tls(data["tls"]),
        ("reservations", _counts(data["reservations"])),
        ("slot", f"{slot['number']} of {slot['slot_ms']:g} ms, {slot['missed']} missed"),
        ("lateness", _percentiles(slot["lateness"])),
        ("decision time", _percentiles(data["decision"])),
        ("negotiation", _percentiles(data["negotiation"])),
        ("clock offset", NONE if offset is None else f"{offset / 1e3:.3f} ms"),
        ("flows", _counts(data["flows"])),
        ("records", _counts(data["records"])),
        ("unpatched", _unpatched(data["unpatched"])),
        ("rate writes", str(data["rate_writes"])),
        ("errors", _counts(data["errors"])),
        ("feedback", data["feedback"] and _feedback(data["feedback"])),
        ("last error", data["last_error"]),
        *(("machine", f"[red]{escape(text)}[/red]") for text in data["machine"]),
        ("configuration", config["file"]),
        ("", config["error"] and f"[red]not reloaded: {config['error']}[/red]"),
    ]
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        if text:
            table.add_row(f"[bold]{name}[/bold]", text)
    return table


def _tls(data: Data) -> list[tuple[str, str]]:
    """Between daemons and switch processes, where that is over a network."""
    if data["mode"] == "loopback":
        return []
    if data["mode"] == "insecure":
        return [("TLS", "[red]insecure: none; anybody may pretend to be any host[/red]")]
    ours = f"certificate of {data['certificate']}, until {data['ends']}"
    return [("TLS", ours), ("", data["error"] and f"[red]{data['error']}[/red]")]


def _unpatched(data: Data) -> str:
    """Processes that do not register, where they are watched."""
    found = {name: data[name] for name in ("processes", "connections")}
    enlisted = {"enlisted": len(data["targets"])} if data["targets"] else {}
    return _counts(enlisted | found) if data["watching"] else ""


def _feedback(data: Data) -> str:
    """Of a policy that plans: its rounds, and what stood still."""
    text = _counts({name: data[name] for name in ("rounds", "late", "livelocks", "starvations")})
    gone = [one["switch"] for one in data["switches"] if not one["live"]]
    return f"{text}, without {', '.join(gone)}" if gone else text


def jobs(data: Data) -> RenderableType:
    """`flowslot jobs`: all of a job's flows together, then how far each of them is."""
    flows = [
        {**flow, "job": job["job"], "ranks": _ranks(flow, _communicators(job["progress"]))}
        for job in data["jobs"]
        for flow in job["progress"]
    ]
    left = "iteration_bytes remaining_bytes rate"
    table = _table(
        data["jobs"],
        f"job flows active iteration period_s {left}",
        "no job has registered on this host",
    )
    collective = "collective" if any(flow["collective"] for flow in flows) else ""
    keys = f"job role {collective} ranks destination state iteration"
    keys += " ready_bytes sent_bytes acked_bytes"
    return Group(table, "", _table(flows, f"{keys} {left}")) if flows else table


def _communicators(flows: list[Data]) -> list[int]:
    """Those that a job's channels belong to. Of all but the first one, numbers are arbitrary."""
    return sorted({flow["channel"] // CHANNELS for flow in flows if flow["channel"] >= 0})


def _ranks(flow: Data, communicators: list[int]) -> str:
    """From which to which; of a ring with the one before. -1: not known, as from outside. The
    channel, and which of several communicators has it."""
    ends = [NONE if flow[end] == -1 else flow[end] for end in ("rank", "peer")]
    if flow["previous"] is not None:
        ends.insert(0, flow["previous"])
    said, number = " to ".join(map(str, ends)), flow["channel"]
    if number > 0 or (number == 0 and len(communicators) > 1):
        said += f" #{number % CHANNELS}"
    if number >= 0 and len(communicators) > 1:
        said += f" of communicator {communicators.index(number // CHANNELS) + 1}"
    return said


def flows(data: Data) -> RenderableType:
    """`flowslot flows`."""
    keys = "job source destination state path remaining_bytes rate ceiling mode note"
    return _table(data["flows"], keys, "no flow has been reported on this host")


def schedule(data: Data) -> RenderableType:
    """`flowslot schedule`."""
    return _by_slot(data, "Mbit/s", "flows", "job cookie", "rates", none="no flow is paced")


def links(data: Data) -> RenderableType:
    """`flowslot links`: what is reserved."""
    keys, none = "name switch goodput", "the topology names no link"
    return _by_slot(data, "Mbit/s reserved", "links", keys, "load", none=none)


def _by_slot(data: Data, what: str, of: str, keys: str, rates: str, *, none: str) -> RenderableType:
    """`what` there is in each of the next slots, which have a column each: the list `rates` of each
    row; None: unknown."""
    slots = [f"+{k}" for k in range(data["horizon"])]
    unknown = [None] * len(slots)
    rows = [{**row, **dict(zip(slots, row[rates] or unknown, strict=True))} for row in data[of]]
    head = f"slot {data['slot']}, {what} in each of the next slots of {data['slot_ms']:g} ms"
    return Group(head, _table(rows, " ".join([keys, *slots]), none))


def reload(data: Data) -> RenderableType:
    """`flowslot reload`."""
    return f"reloaded {data['file']}: {data['changed'] or 'nothing changed'}"


def _table(rows: list[Data], keys: str, none: str = "") -> RenderableType:
    """`keys`: of the values in each row, from left to right. `none`: what is said without rows."""
    if not rows:
        return none
    table = Table(box=None, header_style="bold", pad_edge=False)
    for key in keys.split():
        title = key.removesuffix("_bytes").removesuffix("_s")
        table.add_column(TITLES.get(key, title), no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(key, row[key]) for key in keys.split()))
    return table


def _cell(key: str, value: Any) -> str:
    """In the unit that the key tells of."""
    if key in RATES or key.startswith("+"):
        return mbps(value)
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith("_s"):
        return seconds(value)
    if key == "cookie":
        return f"{value:x}"
    text = " ".join(value) or None if isinstance(value, list) else value
    return NONE if text is None else str(text)


_ALL: tuple[Callable[[Data], RenderableType], ...] = (status, jobs, flows, schedule, links, reload)
TABLES = {table.__name__: table for table in _ALL}
