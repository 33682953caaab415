# SPDX-License-Identifier: Apache-2.0
"""Which devices a flow leaves by, and that they are set up for it."""

import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from errno import EPERM

from flowslotd.pacing import guardian
from flowslotd.pacing.base import PacingError
from flowslotd.pacing.devices import Device, Devices
from flowslotd.pacing.rtnetlink import Rtnetlink

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""A device that refused is asked again: somebody may have cleared it."""
_SO_NETNS_COOKIE, _SO_DOMAIN, _SO_PROTOCOL = 71, 39, 38
_FAMILIES = socket.AF_INET, socket.AF_INET6
_PROTOCOLS = socket.IPPROTO_TCP, socket.IPPROTO_UDP
_DELQDISC, _NO_DEVICE = 37, 2**31 - 1


class Ways:
    """Open from the beginning to `close`."""

    def __init__(self, names: Sequence[str], prepare: Callable[[Devices, Device], None]) -> None:
        """`names`: of the devices that all flows leave by; none: what each flow's route says.
        `prepare` sets a device up, or raises PacingError with the reason why not.

        Raises PacingError when a named device cannot be set up, or none can.
        """
        self._prepare = prepare
        if guardian.ask(_DELQDISC, _NO_DEVICE, 0, guardian.ROOT) == EPERM:
            raise PacingError("needs CAP_NET_ADMIN: run as root or grant it")
        self.rtnetlink = Rtnetlink()
        try:
            self._devices = Devices()
        except BaseException:
            self.rtnetlink.close()
            raise
        self._names = tuple(names)
        self._named: tuple[int, ...] = ()
        self._ready: dict[int, Device] = {}
        self._refused: dict[int, tuple[float, str]] = {}  # when, and why
        self._waits = False  # a flow without a route
        self._tried = time.monotonic()
        try:
            with socket.socket() as own:
                self._namespace = _namespace(own)
            for index in self._resolved():
                self._set_up(index)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """What was set up stays."""
        self._devices.close()
        self.rtnetlink.close()

    def of(self, sock: socket.socket) -> tuple[int, ...]:
        """Indices of devices, set up. Raises PacingError: this flow cannot be paced, and why; and
        OSError when the socket cannot be asked."""
        domain, protocol = (
            sock.getsockopt(socket.SOL_SOCKET, k) for k in (_SO_DOMAIN, _SO_PROTOCOL)
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

    def forget(self) -> None:
        """No device is set up any more, and named ones may be others by now."""
        self._ready.clear()
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
            device = self._devices.device(index)
            self._prepare(self._devices, device)
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
