# SPDX-License-Identifier: Apache-2.0
"""The devices that flows leave by, set up for pacing.

Several daemons may pace on one device. Each has a number (instance_lock.py), and changes or removes
only what bears it.
"""

import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from errno import EPERM
from typing import NamedTuple

from flowslotd.pace import devices, guardian
from flowslotd.pace.devices import QUEUE_LENGTH, Device
from flowslotd.pace.guardian import Row
from flowslotd.pace.instance_lock import InstanceLock
from flowslotd.pace.pacer import PacingError
from flowslotd.pace.rtnetlink import Rtnetlink, device_of
from flowslotd.pace.undo import UndoTable
from flowslotd.sockets import namespace

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""After this time a device that was refused is tried again: its owner may have cleared it."""
_FAMILIES = socket.AF_INET, socket.AF_INET6
_PROTOCOLS = socket.IPPROTO_TCP, socket.IPPROTO_UDP
_NO_DEVICE = 2**31 - 1


class Change(NamedTuple):
    """What a back end does to a device."""

    kind: int
    """guardian.CLASSES or FILTER."""
    what: Callable[[Device, int], list[str]]
    """The changes in words, by the daemon with this number. Raises PacingError where they cannot be
    made."""
    add: Callable[[Device], None]


class Egress:
    """Ensures that devices are set up before flows are paced there. Holds the daemon's number until
    `close`."""

    def __init__(self, names: Sequence[str], undo: UndoTable, change: Change) -> None:
        """`names`: the devices that all flows leave by. Without any, each flow leaves by the device
        of its route, which is set up only if it has one of this host's addresses (`leave_by`).
        Without `leave_by`, all devices may be set up.

        Raises PacingError when no device can be set up here.
        """
        if guardian.remove(guardian.DELQDISC, _NO_DEVICE, 0, guardian.ROOT) == EPERM:
            raise PacingError("needs CAP_NET_ADMIN: run as root or grant it")
        self._names = names
        self._addresses: Collection[str] = ()
        self._undo, self._change = undo, change
        self._named: tuple[int, ...] = ()
        self._ready: dict[int, Device] = {}
        self._refused: dict[int, tuple[float, str]] = {}  # when, and why
        self._unrouted = False  # a flow had no route
        self._tried = time.monotonic()
        with socket.socket() as own:
            self._namespace = namespace(own)
        self.instance = InstanceLock()
        self.rtnetlink = Rtnetlink()

    def leave_by(self, addresses: Collection[str]) -> None:
        """The host's addresses from now on, as topologies spell them."""
        self._addresses = tuple(addresses)
        self._refused.clear()

    def close(self) -> None:
        """Give the number back. Devices stay as they are: the undo table brings them back."""
        self.rtnetlink.close()
        self.instance.held.close()

    def ensure_named(self) -> None:
        """Set all named devices up. Raises PacingError when one cannot be."""
        for index in self._resolved():
            self._set_up(index)

    def devices_of(self, sock: socket.socket) -> tuple[Device, ...]:
        """The devices that a flow leaves by, set up. Raises PacingError with the reason
        why the flow cannot be paced, and OSError when the socket cannot be asked."""
        domain, protocol = (
            sock.getsockopt(socket.SOL_SOCKET, k) for k in (socket.SO_DOMAIN, socket.SO_PROTOCOL)
        )
        if domain not in _FAMILIES or protocol not in _PROTOCOLS:
            raise PacingError("its socket is neither TCP nor UDP over IP")
        if namespace(sock) != self._namespace:
            raise PacingError("it is in another network namespace: run a daemon there")
        indices = self._resolved()
        if not indices:
            try:
                indices = (device_of(sock),)
            except OSError as error:
                self._unrouted = True
                raise PacingError(f"it is not known where its packets leave: {error}") from error
        return tuple(map(self._ensure, indices))

    def retry_due(self) -> bool:
        """Some flows could not be paced, and it is time to try again. True once each time."""
        now = time.monotonic()
        if not (self._refused or self._unrouted) or now - self._tried < AGAIN_S:
            return False
        for index, (when, _) in list(self._refused.items()):
            if now - when > 3 * AGAIN_S:  # no flow needs it any more
                del self._refused[index]
        self._tried, self._unrouted = now, False
        return True

    def _resolved(self) -> tuple[int, ...]:
        """Indices of the named devices. Raises PacingError."""
        if self._names and not self._named:
            named = (devices.named(name).index for name in self._names)
            self._named = tuple(dict.fromkeys(named))  # one may be named in two ways
        return self._named

    def forget(self, indices: Collection[int]) -> None:
        """These are not set up any more. Named devices may have been made anew, with other
        indices."""
        for index in indices:
            self._ready.pop(index, None)
        self._named = ()

    def _ensure(self, index: int) -> Device:
        """A device, set up. Raises PacingError; a refusal holds for AGAIN_S."""
        if index in self._ready:
            return self._ready[index]
        when, why = self._refused.get(index, (-AGAIN_S, ""))
        if time.monotonic() - when >= AGAIN_S:
            try:
                return self._set_up(index)
            except PacingError as error:
                if str(error) != why:
                    log.warning("%s: flows that leave by it are not paced", error)
                why = str(error)
                self._refused[index] = time.monotonic(), why
        raise PacingError(why)

    def _set_up(self, index: int) -> Device:
        try:
            if not self._names and index not in devices.indices(self._addresses):
                raise devices.unaddressed(socket.if_indextoname(index))
            with self.instance.abandoned() as numbers:
                for number in numbers:
                    guardian.undo(Row(self._change.kind, index, number))
            device = devices.device(index)
            changes = self._change.what(device, self.instance.number)
            self._undo.list(Row(self._change.kind, index, self.instance.number))
            if QUEUE_LENGTH in changes:
                self._undo.list(Row(guardian.QUEUE_LENGTH, index, 0))
            self._change.add(device)
        except OSError as error:
            raise PacingError(f"device {index} cannot be set up: {error}") from error
        self._ready[index] = device
        self._refused.pop(index, None)
        return device
