# SPDX-License-Identifier: Apache-2.0
"""Messages to rtnetlink: qdiscs, filters, the class and the route of a flow."""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import ENETUNREACH

from flowslot.model.topology_file import normal_ip
from flowslotd.pace import guardian
from flowslotd.pace.pacer import PacingError

_NEWROUTE, _GETROUTE, _NEWQDISC, _NEWTCLASS, _NEWTFILTER = 24, 26, 36, 40, 44
_REPLACE, _CREATE = 0x100, 0x400
_RTMSG = struct.Struct("=BBBBBBBBI")
_NEXTHOP = struct.Struct("=H2xi")  # struct rtnexthop
_FIB_MATCH = 0x2000
"""RTM_F_FIB_MATCH: the route itself, not what became of a lookup."""
_RATE = struct.Struct("=BBHhHI")  # struct tc_ratespec
_HTB_OPT = struct.Struct("=12s12sIIIII")  # struct tc_htb_opt
_TBF_OPT = struct.Struct("=12s12sIII")  # struct tc_tbf_qopt
_STATS = struct.Struct("=QI16xI")  # of struct tc_stats: bytes, packets, qlen
_KIND, _OPTIONS, _TCA_STATS = 1, 2, 3
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_MULTIPATH, _RTA_MARK = 1, 2, 4, 9, 16
_RTA_IP_PROTO, _RTA_SPORT, _RTA_DPORT = 27, 28, 29
_SO_BINDTOIFINDEX = 62
_FQ_LIMIT, _FQ_FLOW_LIMIT, _FQ_RATE_ENABLE = 1, 2, 5
_HTB_PARMS, _HTB_INIT, _HTB_RATE64, _HTB_CEIL64 = 1, 2, 6, 7
_TBF_PARMS, _TBF_RATE64, _TBF_BURST = 1, 4, 6
_BPF_FD, _BPF_NAME, _BPF_FLAGS, _BPF_DIRECT = 6, 7, 8, 1
_ETHERNET, _ETH_P_ALL = 1, 3
_TICK_NS = 64
_MOST_U32 = 2**32 - 1
_MOST_SEQ = 2**31
_AT_ONCE = 64
"""Messages at once: so many fit into any socket's buffer."""
_BOUNDLESS = 10**15
"""Bytes/s of a TBF that only cuts. At this rate a packet takes 0 ns. At a lower rate a packet that
is larger than the burst would wait for ever: the burst may be lowered while the packet waits."""


Request = tuple[int, int, bytes]
"""Kind, flags and body of a message."""


class Rtnetlink:
    """A socket in the network namespace of the thread that makes this object. It is held, so that
    rates can be set when the process is out of descriptors."""

    def __init__(self) -> None:
        """Raises PacingError."""
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        except OSError as error:
            raise PacingError(f"rtnetlink does not work here: {error}") from error
        self._socket.settimeout(5)
        self._seq = 0

    def close(self) -> None:
        """Harmless when closed."""
        self._socket.close()

    def make(self, wanted: Request) -> None:
        """Make or change one object. Raises OSError."""
        for code in self.put([wanted]).values():
            raise OSError(code, os.strerror(code))

    def put(self, wanted: Sequence[Request]) -> dict[int, int]:
        """Make or change these, in this order. Returns the errno of each that failed, by its index
        in `wanted`. Raises OSError."""
        failed: dict[int, int] = {}
        for first in range(0, len(wanted), _AT_ONCE):
            batch = wanted[first : first + _AT_ONCE]
            begin = self._seq % _MOST_SEQ + 1
            self._seq = begin + len(batch) - 1
            numbered = enumerate(batch, begin)
            self._socket.send(b"".join(guardian.message(*one, seq) for seq, one in numbered))
            answered = 0
            while answered < len(batch):
                for _, seq, answer in guardian.messages(self._socket.recv(1 << 16)):
                    if begin <= seq <= self._seq:
                        answered += 1
                        (error,) = struct.unpack_from("=i", answer)
                        if error:
                            failed[first + seq - begin] = -error
        return failed


def device_of(sock: socket.socket) -> int:
    """Index of the device that a connected TCP or UDP socket's packets leave by. Raises OSError."""
    (here, sport, *_), (there, dport, *scope) = sock.getsockname(), sock.getpeername()
    local, peer = packed(here), packed(there)
    mark, bound = choices(sock)
    device = bound or (scope[1] if scope else 0)  # of a link-local address
    protocol = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
    return device_between(local, peer, (protocol, sport, dport), mark, device)


def choices(sock: socket.socket) -> tuple[int, int]:
    """What an application has chosen that decides on its route: mark, and device it is bound to (0:
    none). Raises OSError."""
    mark = sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)
    return mark, sock.getsockopt(socket.SOL_SOCKET, _SO_BINDTOIFINDEX)


def device_between(
    local: bytes, peer: bytes, ports: tuple[int, int, int], mark: int = 0, device: int = 0
) -> int:
    """Index of the device that packets from one address to another (as `packed`) leave by.
    `ports`: protocol, source and destination. `device`: the one it is bound to. Raises OSError."""
    protocol, sport, dport = ports
    fields = {
        _RTA_IP_PROTO: bytes([protocol]),
        _RTA_SPORT: struct.pack("!H", sport),
        _RTA_DPORT: struct.pack("!H", dport),
    }
    chosen = {_RTA_OIF: device, _RTA_MARK: mark}
    fields |= {field: struct.pack("=i", value) for field, value in chosen.items() if value}
    found = _route(local, peer, fields, 0).get(_RTA_OIF)
    if found is None:
        raise OSError(ENETUNREACH, "the route has no device")
    return int(struct.unpack("=i", found)[0])


def devices_between(local: bytes, peer: bytes) -> set[int]:
    """Indices of all devices that flows from one address to another may leave by, those of an ECMP
    route among them. Raises OSError."""
    route = _route(local, peer, {}, _FIB_MATCH)
    hops, found = route.get(_RTA_MULTIPATH, b""), set()
    while len(hops) >= _NEXTHOP.size:
        size, index = _NEXTHOP.unpack_from(hops)
        found.add(index)
        hops = hops[(max(size, _NEXTHOP.size) + 3) & ~3 :]
    if _RTA_OIF in route:
        found.add(struct.unpack("=i", route[_RTA_OIF])[0])
    return found or {device_between(local, peer, (socket.IPPROTO_TCP, 0, 0))}


def _route(local: bytes, peer: bytes, fields: Mapping[int, bytes], flags: int) -> dict[int, bytes]:
    """The attributes of a route. Raises OSError."""
    family = socket.AF_INET if len(peer) == 4 else socket.AF_INET6
    body = _RTMSG.pack(family, 8 * len(peer), 8 * len(peer), 0, 0, 0, 0, 0, flags)
    body += _pack({_RTA_DST: peer, _RTA_SRC: local, **fields})
    kind, answer = next(guardian.answers(_GETROUTE, 0, body))
    if kind != _NEWROUTE:
        raise OSError(-struct.unpack_from("=i", answer)[0], "no route")
    return attributes(answer[_RTMSG.size :])


def qdisc(
    kind: str, device: int, handle: int = 0, parent: int = guardian.ROOT, options: bytes = b""
) -> Request:
    """Put a qdisc on a device."""
    return _new(_NEWQDISC, kind, device, handle, parent, options=options)


def root_htb(device: int) -> Request:
    """Put HTB at a device's root. What has no class passes by."""
    options = _attribute(_HTB_INIT, struct.pack("=IIIII", 3, 10, 0, 0, 0))  # struct tc_htb_glob
    return qdisc("htb", device, guardian.HTB, options=options)


def root_fq(device: int) -> Request:
    """Put fq at a device's root, for departure times only. Its own pacing is off: fq would mark
    every socket that sends through it, and these would not pace themselves any more once fq is
    gone. Its limit of 100 packets per flow is lifted: a socket bounds what it has in queues
    itself."""
    fields = {_FQ_LIMIT: 1 << 20, _FQ_FLOW_LIMIT: 1 << 16, _FQ_RATE_ENABLE: 0}
    return qdisc("fq", device, guardian.FQ, options=_numbers(fields))


def clsact(device: int) -> Request:
    """What filters at a device's egress hang on."""
    return qdisc("clsact", device, guardian.CLSACT, guardian.CLSACT_ROOT)


def egress_filter(device: int, program: int, name: str, preference: int) -> Request:
    """Have packets pass a program, given by its descriptor, at clsact's egress. Its answer
    decides."""
    options = _numbers({_BPF_FD: program, _BPF_FLAGS: _BPF_DIRECT})
    options += _attribute(_BPF_NAME, name.encode() + b"\0")
    where = device, 0, guardian.EGRESS, preference << 16 | socket.htons(_ETH_P_ALL)
    return _new(_NEWTFILTER, "bpf", *where, options=options)


def htb_class(device: int, handle: int, rate: int, burst: int) -> Request:
    """Make or change a class. `handle`: major << 16 | minor. `rate`: bytes/s as the device sends
    them, with all headers down to Ethernet's. `burst`: bytes that may be sent at once."""
    spec = _RATE.pack(0, _ETHERNET, 0, 0, 0, min(rate, _MOST_U32))
    ticks = min(burst * 10**9 // rate // _TICK_NS, _MOST_U32)
    # The quantum matters only between classes that borrow, but the kernel warns of 0.
    quantum = min(burst, 200_000)
    fields = {_HTB_PARMS: _HTB_OPT.pack(spec, spec, ticks, ticks, quantum, 0, 0)}
    if rate > _MOST_U32:
        fields |= dict.fromkeys((_HTB_RATE64, _HTB_CEIL64), struct.pack("=Q", rate))
    return _new(_NEWTCLASS, "htb", device, handle, guardian.HTB, options=_pack(fields))


def cutter(device: int, parent: int, most: int, limit: int) -> Request:
    """Make or change a TBF below a class. It cuts packets of more than `most` bytes (TCP's and
    UDP's super-packets), and limits nothing; `limit` bytes may wait. HTB alone would send such a
    packet whole, and then wait for as long as the packet takes at the present rate, even when the
    rate rises meanwhile."""
    spec = _RATE.pack(0, _ETHERNET, 0, 0, 0, _MOST_U32)
    fields = {
        _TBF_PARMS: _TBF_OPT.pack(spec, bytes(12), limit, 0, 0),
        _TBF_RATE64: struct.pack("=Q", _BOUNDLESS),
        _TBF_BURST: struct.pack("=I", most),
    }
    kind, flags, body = qdisc("tbf", device, 0, parent, _pack(fields))
    return kind, flags | _REPLACE, body


def class_counts(devices: Iterable[int]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Bytes and packets that our classes have sent, and packets that wait, by device and handle.
    Raises OSError."""
    counts = {}
    for device in devices:
        for one in guardian.classes(device):
            stats = attributes(one.attributes).get(_TCA_STATS)
            if stats is not None:
                counts[device, one.handle] = _STATS.unpack_from(stats)
    return counts


def packed(address: str) -> bytes:
    """An address, 4 or 16 bytes; it may be written as IPv4 inside IPv6, or have a zone."""
    return ipaddress.ip_address(normal_ip(address.partition("%")[0])).packed


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _pack(fields: Mapping[int, bytes]) -> bytes:
    return b"".join(_attribute(kind, value) for kind, value in fields.items())


def _numbers(fields: Mapping[int, int]) -> bytes:
    return _pack({field: struct.pack("=I", value) for field, value in fields.items()})


def _new(what: int, kind: str, *where: int, options: bytes) -> Request:
    """Make an object of traffic control. `where`: see `guardian.tcmsg`."""
    fields = {_KIND: kind.encode() + b"\0"} | ({_OPTIONS: options} if options else {})
    return what, guardian.NLM_ACK | _CREATE, guardian.tcmsg(*where) + _pack(fields)


def attributes(data: bytes) -> dict[int, bytes]:
    """The values of attributes by their kinds."""
    return dict(each(data))


def each(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and value of each attribute, of which several may be of one kind."""
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4:
            break
        yield kind & 0x3FFF, data[at + 4 : at + size]
        at += (size + 3) & ~3
