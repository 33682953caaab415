# SPDX-License-Identifier: Apache-2.0
"""Long paths: a switch hands their packets to a relay (lab/relay), which gives them back later."""

from __future__ import annotations

import ctypes
import re
import select
import sys
from pathlib import Path

from flowslot_lab.library import BUILT
from flowslot_lab.procs import start, stop
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError, run
from flowslot_scenario.paths import Delay
from flowslot_scenario.results import Relayed

_RELAY = "lab/relay"
_READY_S = 5.0
_HELD_S = 0.05
"""Beyond the delay, a relay may hold what its path's link carries in this time."""
_LEAST_MEMORY, _MOST_MEMORY = 1 << 20, 1 << 28
_WAITING = 10_000
"""Frames that wait for a relay that is late, in the kernel."""
_PROBES, _CLOSED_PORT = 20, 9
_MOST_OVER_US = 2_000.0
"""A round trip on an idle network that is longer by more than this is not the one asked for."""
_PROBE = """
import socket, sys, time
for _ in range(int(sys.argv[3])):
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.settimeout(0.5)
    began = time.monotonic_ns()
    try:
        sock.connect((sys.argv[1], int(sys.argv[2])))
    except ConnectionRefusedError:
        print(time.monotonic_ns() - began)
    except OSError:
        pass
    sock.close()
"""
"""A closed port's answer takes a round trip."""


class _Counts(ctypes.Structure):
    """As in lab/relay/relay.c."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("came", "left", "dropped", "late_ns", "most_late_ns", "tardy")
    )


class LongPath:
    """One direction between two hosts. Its relay is a process of the run; the device is gone with
    the relay, and with the switch's namespace."""

    def __init__(
        self,
        number: int,
        delay: Delay,
        end: tuple[str, str],
        to: str,
        *,
        rate_mbps: float,
        state: RunState,
    ) -> None:
        """`number`: of the scenario's. `end`: namespace of the sending host's switch, and the
        device by which that host's packets come. `to`: address of the receiving host. `rate_mbps`:
        of the sending host. Raises LabError."""
        self.delay = delay
        self.round_trip_us = 0.0
        """As it was measured."""
        self._probes = 0
        self._space, self._device = end[0], f"long{number}"
        self._counts = state.folder / f"{self._device}.counts"
        memory = round(2 * rate_mbps / 8 * (delay.us + _HELD_S * 1e6))
        memory = min(max(memory, _LEAST_MEMORY), _MOST_MEMORY)
        relay = str(BUILT / _RELAY)
        if not Path(relay).exists():
            raise LabError(f"{relay} is missing; `make setup` builds it")
        command = [relay, self._device, str(round(delay.us)), str(memory), str(self._counts)]
        self.process = start(state, f"relay-{self._device}", self._space, command, pipes=True)
        try:
            self._connect(end[1], to)
        except BaseException:
            self.stop()
            raise

    def _connect(self, entry: str, to: str) -> None:
        out = self.process.popen.stdout
        assert out is not None
        if not (select.select([out], [], [], _READY_S)[0] and out.readline()):
            raise LabError(f"{self.process.name} did not start: {self.process.tail()}")
        # A host's address is learnt at the port that its cable is in, not here.
        run(
            ["ip", "-n", self._space, "-batch", "-"],
            f"link set {self._device} txqueuelen {_WAITING} addrgenmode none master data\n"
            f"link set {self._device} type bridge_slave learning off flood off "
            f"mcast_flood off bcast_flood off\n"
            f"link set {self._device} up\n",
        )
        tc = ["tc", "-n", self._space]
        run([*tc, "qdisc", "replace", "dev", entry, "clsact"])
        match = ["protocol", "ip", "u32", "match", "ip", "dst", f"{to}/32"]
        redirect = ["action", "mirred", "egress", "redirect", "dev", self._device]
        run([*tc, "filter", "add", "dev", entry, "ingress", *match, *redirect])

    @property
    def receives(self) -> tuple[str, str]:
        """Namespace and device by which packets come back from the relay."""
        return self._space, self._device

    def measure(self, space: str, to: str, expected_us: float) -> None:
        """The round trip from a host's namespace to an address. LabError: not the expected one."""
        inside = ["nsenter", f"--net=/run/netns/{space}", sys.executable, "-c", _PROBE]
        took = run([*inside, to, str(_CLOSED_PORT), str(_PROBES)]).split()
        if not took:
            raise LabError(f"path {self.delay.name}: no answer in {_PROBES} tries")
        self.round_trip_us = min(map(int, took)) / 1000
        if not expected_us <= self.round_trip_us <= expected_us + _MOST_OVER_US:
            raise LabError(
                f"path {self.delay.name}: a round trip takes {self.round_trip_us:.0f} us, "
                f"not {expected_us:g} us"
            )

    def begin(self) -> None:
        """Frames count from here on: all paths have been measured."""
        self._probes = self._read().came

    def _read(self) -> _Counts:
        return _Counts.from_buffer_copy(self._counts.read_bytes())

    def seen(self) -> Relayed:
        """What the relay has done since `begin`. LabError: it has ended."""
        if self.process.popen.poll() is not None:
            raise LabError(f"{self.process.name} has ended: {self.process.tail()}")
        counts = self._read()
        return Relayed(
            round_trip_us=self.round_trip_us,
            frames=counts.came - self._probes,
            dropped=counts.dropped + self._dropped_by_kernel(),
            late_us=counts.late_ns / 1000 / max(counts.left, 1),
            most_late_us=counts.most_late_ns / 1000,
            tardy=counts.tardy,
        )

    def _dropped_by_kernel(self) -> int:
        """On the way to the relay, or from it."""
        shown = run(["nsenter", f"--net=/run/netns/{self._space}", "cat", "/proc/net/dev"])
        found = re.search(rf"^ *{self._device}:((?: +\d+){{16}})$", shown, re.M)
        if found is None:
            raise LabError(f"{self._device} is not there any more")
        fields = found[1].split()
        return int(fields[3]) + int(fields[11])

    def stop(self) -> None:
        """Idempotent."""
        stop([self.process])
