# SPDX-License-Identifier: Apache-2.0
"""Which way of pacing this host can use."""

import logging

from flowslotd.pacing.base import Pacer, PacingError
from flowslotd.pacing.bpf_cc import BpfPacer
from flowslotd.pacing.null import NullPacer
from flowslotd.pacing.sock_pacing import SocketPacer

log = logging.getLogger(__name__)

BACKENDS = ("auto", "bpf", "socket", "none")


def make_pacer(backend: str, instance: str) -> Pacer:
    """An opened pacer. `auto`: BPF where it loads, else sockets, else none.

    Raises PacingError or OSError when the chosen back end does not work here, ValueError when
    there is none of that name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"pacing back end must be one of {', '.join(BACKENDS)}, got {backend!r}")
    candidates: dict[str, list[Pacer]] = {
        "auto": [BpfPacer(instance), SocketPacer(instance), NullPacer()],
        "bpf": [BpfPacer(instance)],
        "socket": [SocketPacer(instance)],
        "none": [NullPacer()],
    }
    *others, last = candidates[backend]
    for pacer in others:
        try:
            return _opened(pacer)
        except (PacingError, OSError) as error:
            log.warning("pacing by %s does not work here: %s", pacer.name, error)
    return _opened(last)


def _opened(pacer: Pacer) -> Pacer:
    try:
        pacer.open()
    except BaseException:
        pacer.close()
        raise
    return pacer
