# SPDX-License-Identifier: Apache-2.0
"""Messages to rtnetlink that each flow needs: its class, its rate, its route.

Devices are set up through pyroute2 (devices.py). That takes a millisecond or two for a message, too
much where many flows change their rates in each slot.
"""

import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from flowslotd.pace import guardian
from flowslotd.pace.pacer import PacingError

_NEWROUTE, _GETROUTE, _NEWTCLASS = 24, 26, 40
_REQUEST, _ACK, _REPLACE, _CREATE = 1, 4, 0x100, 0x400
_HEAD = struct.Struct("=IHHII")
_TCMSG = struct.Struct("=BxxxiIII")
_RTMSG = struct.Struct("=BBBBBBBBI")
_RATE = struct.Struct("=BBHhHI")  # struct tc_ratespec
_HTB_OPT = struct.Struct("=12s12sIIIII")  # struct tc_htb_opt
_TBF_OPT = struct.Struct("=12s12sIII")  # struct tc_tbf_qopt
_STATS = struct.Struct("=QI16xI")  # of struct tc_stats: bytes, packets, qlen
_KIND, _OPTIONS, _TCA_STATS = 1, 2, 3
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_MARK = 1, 2, 4, 16
_RTA_IP_PROTO, _RTA_SPORT, _RTA_DPORT = 27, 28, 29
_SO_BINDTOIFINDEX = 62
_FQ_LIMIT, _FQ_FLOW_LIMIT, _FQ_RATE_ENABLE = 1, 2, 5
_ETHERNET = 1
_TICK_NS = 64
_MOST_U32 = 2**32 - 1
_MOST_SEQ = 2**31
_AT_ONCE = 64
"""Messages at once: so many fit into any socket's buffer."""
_BOUNDLESS = 10**15
"""Bytes/s of a TBF that only cuts. At this rate a packet takes 0 ns. At a lower rate a packet that
is larger than the burst would wait for ever: the burst may be lowered while the packet waits."""


class HtbClass(NamedTuple):
    """`handle`: major << 16 | minor. `rate`: bytes/s as the device sends them, with all headers
    down to Ethernet's. `burst`: bytes that may be sent at once."""

    device: int
    handle: int
    rate: int
    burst: int


class Cutter(NamedTuple):
    """A TBF below a class. It cuts packets of more than `most` bytes (TCP's and UDP's
    super-packets), and limits nothing. HTB alone would send such a packet whole, and then wait for
    as long as the packet takes at the present rate, even when the rate rises meanwhile."""

    device: int
    parent: int
    most: int
    limit: int
    """Bytes that may wait."""


class Rtnetlink:
    """A socket in the network namespace of the thread that makes this object."""

    def __init__(self) -> None:
        """Raises PacingError."""
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0
            )
        except OSError as error:
            raise PacingError(f"rtnetlink does not work here: {error}") from error
        self._socket.settimeout(5)
        self._seq = 0

    def close(self) -> None:
        """Harmless when closed."""
        self._socket.close()

    def put(self, wanted: Sequence[HtbClass | Cutter]) -> dict[int, int]:
        """Make or change these, in this order. Returns the errno of each that failed, by its index
        in `wanted`. Raises OSError."""
        failed: dict[int, int] = {}
        for first in range(0, len(wanted), _AT_ONCE):
            failed |= self._put(wanted[first : first + _AT_ONCE], first)
        return failed

    def _put(self, wanted: Sequence[HtbClass | Cutter], first: int) -> dict[int, int]:
        begin = self._seq = self._seq % _MOST_SEQ
        self._socket.send(b"".join(map(self._message, wanted)))
        failed, answered = {}, 0
        while answered < len(wanted):
            answer = self._socket.recv(1 << 16)
            at = 0
            while at + 20 <= len(answer):
                size, _, _, seq, _, error = struct.unpack_from("=IHHIIi", answer, at)
                if begin < seq <= self._seq:
                    answered += 1
                    if error:
                        failed[first + seq - begin - 1] = -error
                at += (size + 3) & ~3
        return failed

    def _message(self, one: HtbClass | Cutter) -> bytes:
        self._seq += 1
        if isinstance(one, HtbClass):
            kind, flags, body = _NEWTCLASS, _CREATE, _encoded_class(one)
        else:
            kind, flags, body = guardian.NEWQDISC, _CREATE | _REPLACE, _encoded_cutter(one)
        return _HEAD.pack(16 + len(body), kind, _REQUEST | _ACK | flags, self._seq, 0) + body

    def device_of(self, sock: socket.socket) -> int:
        """Index of the device that a connected TCP or UDP socket's packets leave by. Raises
        OSError."""
        (here, sport, *_), (there, dport, *scope) = sock.getsockname(), sock.getpeername()
        local, peer = packed(here), packed(there)
        family = socket.AF_INET if len(peer) == 4 else socket.AF_INET6
        bits = 8 * len(peer)
        body = _RTMSG.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
        body += _attribute(_RTA_DST, peer) + _attribute(_RTA_SRC, local)
        protocol = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
        body += _attribute(_RTA_IP_PROTO, bytes([protocol]))
        body += _attribute(_RTA_SPORT, struct.pack("!H", sport))
        body += _attribute(_RTA_DPORT, struct.pack("!H", dport))
        bound = sock.getsockopt(socket.SOL_SOCKET, _SO_BINDTOIFINDEX)
        device = bound or (scope[1] if scope else 0)  # of a link-local address
        for kind, value in (
            (_RTA_OIF, device),
            (_RTA_MARK, sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)),
        ):
            if value:
                body += _attribute(kind, struct.pack("=i", value))
        self._seq = self._seq % _MOST_SEQ + 1
        self._socket.send(_HEAD.pack(16 + len(body), _GETROUTE, _REQUEST, self._seq, 0) + body)
        while True:
            answer = self._socket.recv(1 << 16)
            _, kind, _, seq, _ = _HEAD.unpack_from(answer)
            if seq == self._seq:
                break
        if kind != _NEWROUTE:
            code = -struct.unpack_from("=i", answer, 16)[0]
            raise OSError(code, "no route")
        oif = _attributes(answer[16 + _RTMSG.size :]).get(_RTA_OIF)
        if oif is None:
            raise OSError(101, "the route has no device")  # ENETUNREACH
        return int(struct.unpack("=i", oif)[0])


def add_fq(device: int) -> None:
    """Put fq at a device's root, for departure times only. Its own pacing is off: fq would mark
    every socket that sends through it, and these would not pace themselves any more once fq is
    gone. Its limit of 100 packets per flow is lifted: a socket bounds what it has in queues itself.

    Raises OSError.
    """
    options = b"".join(
        _attribute(kind, struct.pack("=I", value))
        for kind, value in ((_FQ_LIMIT, 1 << 20), (_FQ_FLOW_LIMIT, 1 << 16), (_FQ_RATE_ENABLE, 0))
    )
    code = add_root(device, guardian.FQ, "fq", options)
    if code:
        raise OSError(code, os.strerror(code))


def add_root(device: int, handle: int, kind: str, options: bytes = b"") -> int:
    """Put a root qdisc on a device. Returns the kernel's errno."""
    create = _attribute(_KIND, kind.encode() + b"\0")
    if options:
        create += _attribute(_OPTIONS, options)
    return guardian.ask(guardian.NEWQDISC, device, handle, guardian.ROOT, create=create)


def class_counts(device: int) -> dict[int, tuple[int, int, int]]:
    """Bytes and packets that our classes have sent, and packets that wait, by handle. Raises
    OSError."""
    counts = {}
    for one in guardian.classes(device):
        stats = _attributes(one.attributes).get(_TCA_STATS)
        if stats is not None:
            counts[one.handle] = _STATS.unpack_from(stats)
    return counts


def packed(address: str) -> bytes:
    """An address, 4 or 16 bytes; it may be written as IPv4 inside IPv6, or have a zone."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.packed


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(data: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4:
            break
        found[kind & 0x3FFF] = data[at + 4 : at + size]
        at += (size + 3) & ~3
    return found


def _encoded_class(one: HtbClass) -> bytes:
    rate = _RATE.pack(0, _ETHERNET, 0, 0, 0, min(one.rate, _MOST_U32))
    ticks = min(one.burst * 10**9 // one.rate // _TICK_NS, _MOST_U32)
    # The quantum matters only between classes that borrow, but the kernel warns of 0.
    quantum = min(one.burst, 200_000)
    options = _attribute(1, _HTB_OPT.pack(rate, rate, ticks, ticks, quantum, 0, 0))
    if one.rate > _MOST_U32:
        options += _attribute(6, struct.pack("=Q", one.rate))  # TCA_HTB_RATE64
        options += _attribute(7, struct.pack("=Q", one.rate))  # TCA_HTB_CEIL64
    body = _TCMSG.pack(0, one.device, one.handle, guardian.HTB, 0)
    return body + _attribute(_KIND, b"htb\0") + _attribute(_OPTIONS, options)


def _encoded_cutter(one: Cutter) -> bytes:
    rate = _RATE.pack(0, _ETHERNET, 0, 0, 0, _MOST_U32)
    options = _attribute(1, _TBF_OPT.pack(rate, bytes(12), one.limit, 0, 0))
    options += _attribute(4, struct.pack("=Q", _BOUNDLESS))  # TCA_TBF_RATE64
    options += _attribute(6, struct.pack("=I", one.most))  # TCA_TBF_BURST
    body = _TCMSG.pack(0, one.device, 0, one.parent, 0)
    return body + _attribute(_KIND, b"tbf\0") + _attribute(_OPTIONS, options)
