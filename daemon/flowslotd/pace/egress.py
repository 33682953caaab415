# SPDX-License-Identifier: Apache-2.0
"""Which devices a flow leaves by, and that they are set up for it: by one daemon of several, which
its number tells from the others."""

import logging
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from errno import EPERM
from typing import NamedTuple

from flowslotd.pace import guardian
from flowslotd.pace.devices import QUEUE_LENGTH, Device, Devices
from flowslotd.pace.instance_lock import Berth
from flowslotd.pace.pacer import PacingError
from flowslotd.pace.rtnetlink import Rtnetlink
from flowslotd.pace.undo import UndoTable

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""A device that refused is asked again: somebody may have cleared it."""
_SO_NETNS_COOKIE = 71
_FAMILIES = socket.AF_INET, socket.AF_INET6
_PROTOCOLS = socket.IPPROTO_TCP, socket.IPPROTO_UDP
_NO_DEVICE = 2**31 - 1


class Change(NamedTuple):
    """What is done to a device."""

    kind: int
    """guardian.CLASSES or FILTER."""
    what: Callable[[Device, int], list[str]]
    """In words. Raises PacingError where it cannot be done, by the daemon with this number."""
    add: Callable[[Devices, Device], None]


class Ways:
    """Holds its number from the beginning to `close`."""

    def __init__(
        self, names: Sequence[str], addresses: Collection[str], undo: UndoTable, change: Change
    ) -> None:
        """`names`: of the devices that all flows leave by; none: what each flow's route says, but
        then only devices that have one of the `addresses` are set up, if there are any. A job's
        socket may be bound to any device of the host.

        Raises PacingError when no device can be set up here.
        """
        if guardian.ask(guardian.DELQDISC, _NO_DEVICE, 0, guardian.ROOT) == EPERM:
            raise PacingError("needs CAP_NET_ADMIN: run as root or grant it")
        self._names, self._addresses = tuple(names), tuple(addresses)
        self._undo, self._change = undo, change
        self._named: tuple[int, ...] = ()
        self._ready: dict[int, Device] = {}
        self._refused: dict[int, tuple[float, str]] = {}  # when, and why
        self._waits = False  # a flow without a route
        self._tried = time.monotonic()
        with socket.socket() as own:
            self._namespace = _namespace(own)
        with ExitStack() as stack:
            self.rtnetlink = Rtnetlink()
            stack.callback(self.rtnetlink.close)
            self._devices = Devices()
            stack.callback(self._devices.close)
            self._berth = Berth()
            stack.callback(self._berth.close)
            self._open = stack.pop_all()

    def leave_by(self, addresses: Collection[str]) -> None:
        """From now on."""
        self._addresses = tuple(addresses)
        self._refused.clear()

    def close(self) -> None:
        """What was set up stays: the undo table's business."""
        self._open.close()

    @property
    def number(self) -> int:
        """No other daemon in this network namespace has it."""
        return self._berth.number

    def fileno(self) -> int:
        """Whoever holds this descriptor keeps the number."""
        return self._berth.fileno()

    def set_up(self) -> None:
        """All named devices. Raises PacingError when one cannot be."""
        for index in self._resolved():
            self._set_up(index)

    def of(self, sock: socket.socket) -> tuple[int, ...]:
        """Indices of devices, set up. Raises PacingError: this flow cannot be paced, and why; and
        OSError when the socket cannot be asked."""
        domain, protocol = (
            sock.getsockopt(socket.SOL_SOCKET, k) for k in (socket.SO_DOMAIN, socket.SO_PROTOCOL)
        )
        if domain not in _FAMILIES or protocol not in _PROTOCOLS:
            raise PacingError("its socket is neither TCP nor UDP over IP")
        if _namespace(sock) != self._namespace:
            raise PacingError("it is in another network namespace: run a daemon there")
        indices = self._resolved()
        if not indices:
            try:
                indices = (self.rtnetlink.way_out(sock),)
            except OSError as error:
                self._waits = True
                raise PacingError(f"it is not known where its packets leave: {error}") from error
        for index in indices:
            self._be_ready(index)
        return indices

    def due(self) -> bool:
        """It is time to try again with flows that could not be paced; true once each time."""
        now = time.monotonic()
        if not (self._refused or self._waits) or now - self._tried < AGAIN_S:
            return False
        for index, (when, _) in list(self._refused.items()):
            if now - when > 3 * AGAIN_S:  # nobody asks for it any more
                del self._refused[index]
        self._tried, self._waits = now, False
        return True

    def _resolved(self) -> tuple[int, ...]:
        """The named devices, which may have been made anew. Raises PacingError."""
        if self._names and not self._named:
            self._named = tuple(self._devices.named(name).index for name in self._names)
        return self._named

    def mtu(self, index: int) -> int:
        """Of a device that is set up."""
        return self._ready[index].mtu

    def forget(self, devices: Collection[int]) -> None:
        """These are not set up any more, and named ones may be others by now."""
        for index in devices:
            self._ready.pop(index, None)
        self._named = ()

    def _be_ready(self, index: int) -> None:
        if index in self._ready:
            return
        when, why = self._refused.get(index, (-AGAIN_S, ""))
        if time.monotonic() - when >= AGAIN_S:
            try:
                self._set_up(index)
                return
            except PacingError as error:
                if str(error) != why:
                    log.warning("%s: flows that leave by it are not paced", error)
                why = str(error)
                self._refused[index] = time.monotonic(), why
        raise PacingError(why)

    def _set_up(self, index: int) -> None:
        try:
            if not self._names and index not in self._devices.indices(self._addresses):
                raise PacingError(
                    f"{socket.if_indextoname(index)} has none of this host's addresses: if flows "
                    "are to be paced there, name it in pacing.devices"
                )
            with self._berth.deserted() as numbers:
                for number in numbers:
                    guardian.undo_change(self._change.kind, index, number)
            device = self._devices.device(index)
            changes = self._change.what(device, self.number)
            self._undo.list_change(self._change.kind, index, self.number)
            if QUEUE_LENGTH in changes:
                self._undo.list_change(guardian.QUEUE_LENGTH, index, 0)
            self._change.add(self._devices, device)
        except OSError as error:
            raise PacingError(f"device {index} cannot be set up: {error}") from error
        self._ready[index] = device
        self._refused.pop(index, None)


def _namespace(sock: socket.socket) -> int:
    """0 where the kernel does not tell (before Linux 5.14)."""
    try:
        cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    except OSError:
        return 0
    return int.from_bytes(cookie, sys.byteorder)
