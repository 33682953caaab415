# SPDX-License-Identifier: Apache-2.0
"""Which back ends there are, and which of them works on this host."""

import logging
from collections.abc import Callable, Sequence

from flowslotd.pace.bpf import BpfPacer
from flowslotd.pace.edt import EdtPacer
from flowslotd.pace.htb import HtbPacer
from flowslotd.pace.pacer import Pacer, PacingError, Traits
from flowslotd.pace.sockopt import SocketPacer

log = logging.getLogger(__name__)

AUTO = ("bpf", "socket", "none")
"""Tried in this order, best first. Back ends that put anything on a device are not among them: the
host's owner chooses those."""
TRAITS: dict[str, Traits] = {
    pacer.name: pacer.traits for pacer in (BpfPacer, EdtPacer, HtbPacer, SocketPacer)
}
"""What each back end can do, by name."""


def make_pacer(
    backend: str,
    instance: str,
    *,
    devices: Sequence[str] = (),
    sysctls: bool = True,
) -> Pacer:
    """An opened pacer. `auto`: the first of AUTO that works here. `devices`: for `edt` and `htb`,
    the names of those that all flows leave by; none: what each flow's route says (see
    `Pacer.leave_by`). `sysctls`: whether any may be set.

    Raises PacingError or OSError when the chosen back end does not work here.
    """
    makers: dict[str, Callable[[], Pacer]] = {
        "bpf": lambda: BpfPacer(instance),
        "edt": lambda: EdtPacer(devices, sysctls),
        "htb": lambda: HtbPacer(devices),
        "socket": lambda: SocketPacer(sysctls=sysctls),
        "none": Pacer,
    }
    *others, last = AUTO if backend == "auto" else (backend,)
    for name in others:
        try:
            return _opened(makers[name]())
        except (PacingError, OSError) as error:
            log.warning("pacing by %s does not work here: %s", name, error)
    return _opened(makers[last]())


def _opened(pacer: Pacer) -> Pacer:
    try:
        pacer.open()
    except BaseException:
        pacer.close()
        raise
    return pacer
