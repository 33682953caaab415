# SPDX-License-Identifier: Apache-2.0
"""What daemons send is not trusted: refuse what makes no sense, clamp what is out of range."""

import math
from dataclasses import replace
from typing import Any

from flowslot.arbiter.config import ArbiterConfig
from flowslot.model.errors import ProtocolError
from flowslot.model.units import SECOND
from flowslot.protocol.messages import Demand, Hello

MAX_ID = 2**64 - 1
MAX_COUNT = 2**62
MAX_BYTES = 2**50
MAX_TIME_NS = 3600 * SECOND
MAX_NAME = 64
MAX_HOPS = 16
MAX_SOCKETS = 64
"""That many count, of a job's sockets from one host on one path: as many as NCCL opens at most."""
_RANGES = (
    ("remaining", 0, MAX_BYTES),
    ("wait_ns", 0, MAX_TIME_NS),
    ("period_ns", 0, MAX_TIME_NS),
    ("next_in_ns", -MAX_TIME_NS, MAX_TIME_NS),
    ("next_bytes", 0, MAX_BYTES),
    ("gave_back", 0, MAX_COUNT),
    ("sockets", 1, MAX_SOCKETS),
)


def check_hello(hello: Hello, config: ArbiterConfig) -> None:
    """Raises ProtocolError when a Hello cannot be accepted."""
    if not 0 < len(hello.daemon) <= MAX_NAME:
        raise ProtocolError(f"daemon name must have 1 to {MAX_NAME} characters")
    if not 0 <= hello.session <= MAX_COUNT:
        raise ProtocolError("session number is out of range")
    if len(hello.held) > config.max_flows_per_session:
        raise ProtocolError(f"more than {config.max_flows_per_session} flows held")
    seen = set()
    for held in hello.held:
        if not (0 <= held.flow <= MAX_ID and 0 <= held.inc <= MAX_COUNT):
            raise ProtocolError("flow or incarnation held is out of range")
        if not (math.isfinite(held.rate) and held.rate >= 0):
            raise ProtocolError("rate held must be finite and at least 0")
        if held.flow in seen:
            raise ProtocolError(f"flow {held.flow} is held twice")
        seen.add(held.flow)


def refuse_demand(demand: Demand, n_links: int) -> str | None:
    """Why a demand cannot be accepted; None: it can."""
    if not (0 <= demand.flow <= MAX_ID and 0 <= demand.inc <= MAX_COUNT):
        return "flow or incarnation is out of range"
    if not 0 < len(demand.job) <= MAX_NAME:
        return f"job name must have 1 to {MAX_NAME} characters"
    if math.isnan(demand.cap):
        return "cap is not a number"
    return _refuse_path(demand.links, n_links)


def _refuse_path(links: tuple[int, ...], n_links: int) -> str | None:
    if not 0 < len(links) <= MAX_HOPS:
        return f"path must have 1 to {MAX_HOPS} links"
    if min(links) < 0 or max(links) >= n_links:
        return f"link index must be from 0 to {n_links - 1}"
    if len(set(links)) != len(links):
        return "path crosses a link twice"
    return None


def clamp_demand(demand: Demand) -> Demand:
    """The demand with every number in its range."""
    outside: dict[str, Any] = {}
    for name, least, most in _RANGES:
        value = getattr(demand, name)
        if not least <= value <= most:
            outside[name] = min(max(value, least), most)
    return replace(demand, **outside) if outside else demand
