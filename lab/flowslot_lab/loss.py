# SPDX-License-Identifier: Apache-2.0
"""Paths that lose packets, by bpf/loss.bpf.c: seeded, and counted."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from flowslot_lab.rivals import filled_object
from flowslot_lab.tools import run
from flowslot_scenario.paths import Loss

_FROM_HOST, _LOST_BELOW, _SEED = 0xF1075109, 0xF107510A, 0xF107510B


class LossyPath:
    """One direction between two hosts; gone with the namespace of the host where it ends."""

    def __init__(
        self, loss: Loss, source: str, end: tuple[str, str], seed: int, folder: Path
    ) -> None:
        """`source`: address of the sending host. `end`: namespace and device where its packets
        arrive. Raises LabError."""
        self.loss = loss
        space, device = end
        numbers = (
            (_FROM_HOST, socket.inet_aton(source)),
            (_LOST_BELOW, round(loss.percent / 100 * 2**32).to_bytes(4, sys.byteorder)),
            (_SEED, seed.to_bytes(4, sys.byteorder)),
        )
        changes = [(a.to_bytes(4, sys.byteorder), b) for a, b in numbers]
        made = filled_object("loss.bpf.o", folder, changes)
        run(["tc", "-n", space, "qdisc", "replace", "dev", device, "clsact"])
        at = ["dev", device, "ingress"]
        inside = ["nsenter", f"--net=/run/netns/{space}"]
        run([*inside, "tc", "filter", "add", *at, "bpf", "da", "obj", str(made), "sec", "tc/lose"])
        shown = json.loads(run(["tc", "-n", space, "-j", "filter", "show", *at]))
        # The one added last is the first.
        program = next(
            one["options"]["prog"]["id"] for one in shown if "prog" in one.get("options", {})
        )
        about = json.loads(run(["bpftool", "-j", "prog", "show", "id", str(program)]))
        self._maps = about["map_ids"]

    def counts(self) -> tuple[int, int]:
        """Packets that came, and those of them that were lost. LabError."""
        for number in self._maps:
            if json.loads(run(["bpftool", "-j", "map", "show", "id", str(number)])).get("name") == (
                "loss_counts"
            ):
                entries = json.loads(run(["bpftool", "-j", "map", "dump", "id", str(number)]))
                found = {e["formatted"]["key"]: e["formatted"]["value"] for e in entries}
                return found[0], found[1]
        raise AssertionError(self._maps)
