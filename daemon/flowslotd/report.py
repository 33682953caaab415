# SPDX-License-Identifier: Apache-2.0
"""What the daemon answers on its control socket. Rates are payload bytes/s."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from flowslot_proto.control import Answer, Json
from flowslot_proto.tls import utc_now
from flowslot_shm.layout import SLOT, Collective, Role, State
from flowslotd.clock import monotonic
from flowslotd.flows.flow_info import FlowInfo
from flowslotd.flows.rows import Records
from flowslotd.observe.passive import commands
from flowslotd.pace.pacer import PaceEntry

if TYPE_CHECKING:
    from flowslotd.daemon import Daemon

VERSION = version("flowslot")


def status(daemon: Daemon) -> Json:
    """Mode, policy, arbiter, counters, lateness, errors: the evidence of a run."""
    settings, engine, metrics = daemon.config.settings, daemon.engine, daemon.metrics
    source, table = engine.source, daemon.table
    records = daemon.registration.records
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "host": settings.host,
        "instance": daemon.config.instance,
        "uptime_s": (monotonic() - daemon.started_ns) / 1e9,
        "mode": settings.mode,
        "policy": settings.policy,
        "backend": engine.pacer.name,
        "congestion_control": engine.pacer.congestion_control,
        **source.describe(),
        "tls": {
            "mode": settings.tls.mode(),
            **(daemon.config.tls.describe(utc_now()) if daemon.config.tls else {}),
        },
        "slot": {
            "number": daemon.slot,
            "slot_ms": settings.slot_ms,
            "count": metrics.slots,
            "missed": metrics.slots_missed,
            "lateness": metrics.lateness.summary(),
        },
        "decision": metrics.decision.summary(),
        "replan": metrics.replan.summary(),
        "rate_writes": engine.enforcer.rate_writes,
        "flows": {
            "total": len(table),
            "active": int(table.rows["active"].sum()),
            "paced": len(_paced(daemon)),
            "unmapped": int((table.rows["path"][table.used()] == 0).sum()),
            "refused": len(daemon.observer.refused()),
        },
        "records": {
            "registered": len(records),
            "refused": daemon.registration.refused,
            "faulty_slots": sum(int((r.reader.faults != 0).sum()) for r in records.values()),
            "torn_slots": sum(r.reader.torn.size for r in records.values()),
        },
        "unpatched": {
            "watching": daemon.passive.watching,
            **commands.describe(daemon.passive.enlisted),
            "processes": len(daemon.passive.records),
            "connections": sum(source.flows for source in daemon.passive.records.values()),
        },
        "errors": dict(metrics.errors),
        "last_error": metrics.last_error,
        "machine": daemon.uplinks.describe(),
        "config": {
            "file": str(daemon.config.file),
            "topology": str(daemon.config.topology_file),
            "error": daemon.config_error,
        },
    }


def policy(daemon: Daemon) -> Json:
    """The policy that runs here, and those of the arbiters that grant this host its rates."""
    domain = daemon.engine.source.describe()["domain"]
    streams = domain.get("switches") or ([domain] if domain.get("switch") else [])
    return {
        "process": f"daemon of {daemon.config.settings.host}",
        "policy": daemon.config.settings.policy,
        "switches": [
            {"switch": one["switch"], "policy": one.get("policy") or None, "live": one["live"]}
            for one in streams
        ],
    }


def jobs(daemon: Daemon) -> Json:
    """Jobs with flows that start at this host."""
    table = daemon.table
    paced, said = _paced(daemon), _said(daemon)
    before = _previous(said)
    listed = []
    for number, name in enumerate(table.jobs):
        at = np.flatnonzero(table.rows["job"] == number)
        rows = table.rows[at]
        progress = [
            {
                **_progress(table.infos[i], table.rows[i], said, paced),
                "previous": before.get(_place(table.infos[i])),
            }
            for i in at.tolist()
        ]
        rates = [flow["rate"] for flow in progress if flow["rate"] is not None]
        listed.append(
            {
                "job": name,
                "flows": len(rows),
                "active": sum(flow["state"] == "active" for flow in progress),
                "iteration": max(flow["iteration"] for flow in progress),
                "period_s": float(rows["period"].max()) / 1e9 or None,
                "iteration_bytes": int(rows["expected"].sum()),
                "remaining_bytes": sum(flow["remaining_bytes"] for flow in progress),
                "rate": sum(rates) if rates else None,
                "progress": progress,
            }
        )
    return {"jobs": listed}


def _paced(daemon: Daemon) -> dict[int, PaceEntry]:
    """What is in force, by socket cookie: not what the back end could not put into force."""
    pacer, held = daemon.engine.pacer, daemon.engine.enforcer.paced()
    return {cookie: entry for cookie, entry in held.items() if not pacer.refusal(cookie)}


def _said(daemon: Daemon) -> dict[tuple[int, int], Records]:
    """What records say at this moment: their slots by source and cookie."""
    found = {}
    for record in daemon.passive.sources().values():
        record.reader.look()
        slots = record.reader.good.view(SLOT)[:, 0]
        for slot in slots[slots["state"] != State.FREE]:
            found[record.id, int(slot["sock_cookie"])] = slot
    return found


_Place = tuple[int, int, int]
"""In rings: source, rank, channel."""
COLLECTIVES = {int(kind): kind.name.lower().replace("_", "-") for kind in Collective}


def _place(info: FlowInfo) -> _Place | None:
    return (info.source, info.rank, info.channel) if info.role == Role.RING else None


def _previous(said: Mapping[tuple[int, int], Records]) -> dict[_Place | None, int | None]:
    """The rank before, by place, as the ends of flows that arrive here tell it; None: two do."""
    found: dict[_Place | None, int | None] = {}
    for (source, _), slot in said.items():
        rank, peer, channel = (int(slot[field]) for field in ("rank", "peer", "channel"))
        if slot["role"] == Role.RECEIVE and min(rank, peer, channel) >= 0:
            same = found.setdefault((source, rank, channel), peer) == peer
            found[source, rank, channel] = peer if same else None
    return found


def _progress(
    info: FlowInfo,
    row: Records,
    said: Mapping[tuple[int, int], Records],
    paced: Mapping[int, PaceEntry],
) -> dict[str, Any]:
    """How far a flow's iteration is: bytes by the job's own account at this moment, and what is
    left, for which the kernel's count at the last look may know better."""
    slot = said.get((info.source, info.cookie))
    entry = paced.get(info.cookie)
    target, left = int(row["target"]), int(row["remaining"])
    if slot is not None:
        same = int(slot["iteration"]) == int(row["iteration"])
        target = max(int(slot["iteration_total"]), int(slot["ready"]), target if same else 0)
        known = left if same else target
        active = slot["state"] == State.ACTIVE
        left = min(target - int(slot["done"]), known) if active else 0
    return {
        **_ends(info),
        "collective": COLLECTIVES.get(int(slot["collective"])) if slot is not None else None,
        "state": "active" if left > 0 else "idle",
        "iteration": int((slot if slot is not None else row)["iteration"]),
        "ready_bytes": int(slot["ready"]) if slot is not None else None,
        "sent_bytes": int(slot["posted"]) if slot is not None else None,
        "acked_bytes": int(slot["done"]) if slot is not None else None,
        "iteration_bytes": target,
        "remaining_bytes": left,
        "rate": entry.reserved if entry else None,
    }


def _ends(info: FlowInfo) -> Json:
    return {
        "role": info.role.name.lower(),
        "rank": info.rank,
        "peer": info.peer,
        "channel": info.channel,
        "source": f"{info.src}:{info.sport}",
        "destination": f"{info.dst}:{info.dport}",
    }


def flows(daemon: Daemon) -> Json:
    """Every flow in a record, also those that are left alone, and why they are."""
    table, paced = daemon.table, daemon.engine.enforcer.paced()
    rows = [
        _flow(daemon, info, row, paced.get(info.cookie))
        for info, row in zip(table.infos, table.rows, strict=True)
        if info.cookie
    ]
    return {"flows": rows + [_flow(daemon, info, None, None) for info in daemon.observer.refused()]}


def _flow(daemon: Daemon, info: FlowInfo, row: Records | None, paced: PaceEntry | None) -> Json:
    note = info.note
    if row is not None and not info.path:
        note = "not in the topology: observed, never paced"
    elif row is not None and paced is None:
        note = "not paced: " + _why_unpaced(daemon)
    elif paced and (refusal := daemon.engine.pacer.refusal(info.cookie)):
        paced, note = None, f"not paced: {refusal}"
    if row is not None and (detour := daemon.uplinks.detours.get(info.cookie)):
        note = "; ".join(filter(None, (note, f"leaves by {detour.device}")))
    return {
        "job": info.job,
        "cookie": info.cookie,
        "pid": info.pid,
        **_ends(info),
        "src": info.src,
        "sport": info.sport,
        "dst": info.dst,
        "dport": info.dport,
        "owned": info.owned,
        "path": [daemon.config.topology.links[link].name for link in info.path],
        "state": "refused" if row is None else "active" if row["active"] else "idle",
        "iteration": int(row["iteration"]) if row is not None else None,
        "iteration_bytes": int(row["target"]) if row is not None else None,
        "remaining_bytes": int(row["remaining"]) if row is not None else None,
        "sent_total_bytes": int(row["counter"]) if row is not None and row["kernel"] else None,
        "period_s": float(row["period"]) / 1e9 or None if row is not None else None,
        "rate": paced.reserved if paced else None,
        "ceiling": paced.ceiling if paced else None,
        "mode": ("reserved" if paced.guaranteed else "capped") if paced else "open",
        "note": note,
    }


def _why_unpaced(daemon: Daemon) -> str:
    settings, engine = daemon.config.settings, daemon.engine
    if settings.mode == "observe":
        return "mode is observe"
    if engine.pacer.name == "none":
        return f"policy {settings.policy} and back end {settings.pacing.backend} change nothing"
    return engine.source.why_unpaced


def schedule(daemon: Daemon) -> Json:
    """The rate of each paced flow in the next slots, as last decided."""
    table, paced, listed = daemon.table, _paced(daemon), []
    slots = range(daemon.slot, daemon.slot + daemon.config.grid.horizon)
    for cookie, rates in daemon.engine.enforcer.plan(slots).items():
        row = table.find(cookie)
        if row is not None and cookie in paced:
            listed.append({"job": table.infos[row].job, "cookie": cookie, "rates": rates})
    return {"slot": daemon.slot, **_grid(daemon), "flows": listed}


async def links(daemon: Daemon) -> Json:
    """The load table: payload bytes/s reserved on each link in the next slots; null: unknown."""
    topology = daemon.config.topology
    load = await daemon.engine.source.load_table(monotonic())
    rows: list[list[float]] = [[math.nan]] * len(topology.links) if load is None else load.tolist()
    listed = [
        {
            "name": link.name,
            "switch": link.switch,
            "goodput": link.goodput,
            "load": row if all(map(math.isfinite, row)) else None,
        }
        for link, row in zip(topology.links, rows, strict=True)
    ]
    return {"slot": daemon.slot, **_grid(daemon), "links": listed}


def _grid(daemon: Daemon) -> Json:
    return {"slot_ms": daemon.config.settings.slot_ms, "horizon": daemon.config.grid.horizon}


_ALL: tuple[Callable[[Daemon], Answer], ...] = (
    status,
    policy,
    jobs,
    flows,
    schedule,
    links,
)
COMMANDS = {answer.__name__: answer for answer in _ALL}
