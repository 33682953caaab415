# SPDX-License-Identifier: Apache-2.0
"""Plays NCCL's part towards a profiler: walks its table as NCCL's threads do. Layouts are declared
here anew, from what is known of NCCL, and not from our library."""

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

Fields = list[tuple[str, Any]]


def _made(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (Structure,), {"_fields_": list(fields)})


_NAMED: Fields = [("name", c_char_p), ("comm", c_uint64)]
_BUFFERS: Fields = [("from", c_void_p), ("to", c_void_p), ("count", c_size_t), ("root", c_int)]
_TEXTS: Fields = [("algorithm", c_char_p), ("protocol", c_char_p)]
_BYTES: Fields = [("channels", c_uint8), ("warps", c_uint8)]
_C1 = _made(
    "C1",
    *_NAMED,
    ("number", c_uint64),
    ("function", c_uint8),
    *_BUFFERS,
    ("type", c_uint8),
    ("operation", c_uint32),
    ("traffic", c_size_t),
    *_BYTES,
    ("algorithm", c_uint8),
    ("protocol", c_uint8),
    ("collnet", c_int),
    ("nvls", c_int),
)
_HEAD: Fields = [("number", c_uint64), ("function", c_char_p), *_BUFFERS, ("type", c_char_p)]
_C2 = _made("C2", *_NAMED, *_HEAD, ("traffic", c_size_t), *_BYTES, *_TEXTS)
_C3 = _made("C3", *_NAMED, *_HEAD, *_BYTES, *_TEXTS)
_C4 = _made("C4", *_HEAD, *_BYTES, *_TEXTS)
_C5 = _made("C5", *_HEAD, *_BYTES, *_TEXTS, ("group", c_void_p))
COLLECTIVE = {1: _C1, 2: _C2, 3: _C3, 4: _C4, 5: _C5, 6: _C5}

_TO: Fields = [("count", c_size_t), ("peer", c_int)]
_P1 = _made("P1", *_NAMED, ("function", c_uint8), ("buffer", c_void_p), ("type", c_uint8), *_TO)
_SENT: Fields = [("function", c_char_p), ("buffer", c_void_p), ("type", c_char_p), *_TO]
_P2 = _made("P2", *_NAMED, *_SENT)
_P4 = _made("P4", *_SENT, ("channels", c_uint8))
_P5 = _made("P5", *_SENT, ("channels", c_uint8), ("group", c_void_p))
P2P = {1: _P1, 2: _P2, 3: _P2, 4: _P4, 5: _P5, 6: _P5}

_OP = _made(
    "Op",
    ("pid", c_int),
    ("channel", c_uint8),
    ("peer", c_int),
    ("steps", c_int),
    ("chunk", c_int),
    ("sends", c_int),
)
OP = dict.fromkeys(range(1, 7), _OP)
_COPY_ENGINE = _made(
    "CopyEngine",
    *_HEAD,
    ("strategy", c_char_p),
    ("intra", ctypes.c_bool),
    ("sizes", c_uint32 * 3),
    ("stream", c_void_p),
)


def _event(version: int) -> Any:
    parts: Fields = [
        ("collective", COLLECTIVE[version]),
        ("p2p", P2P[version]),
        ("op", _OP),
        ("step", c_int),
    ]
    if version == 6:
        parts.append(("copy_engine", _COPY_ENGINE))
    of = type("Of", (Union,), {"_fields_": parts})
    kind = c_uint64 if version >= 5 else c_uint8
    return _made("Event", ("kind", kind), ("parent", c_void_p), ("rank", c_int), ("of", of))


EVENTS = {version: _event(version) for version in range(1, 7)}
READ = {
    "collective": {"function", "from", "to", "count", "type"},
    "p2p": {"function", "buffer", "type", "count", "peer"},
    "op": {"pid", "channel", "peer", "steps", "chunk", "sends"},
}
"""The fields that our library reads."""

COLLECTIVE_KIND, P2P_KIND, OP_KIND, STEP_KIND = 2, 4, 8, 16
ALL_REDUCE, SEND, RECEIVE = b"AllReduce", b"Send", b"Recv"
_NUMBERS = {ALL_REDUCE: 4, SEND: 6, RECEIVE: 7, b"ncclFloat32": 7, b"ncclInt8": 0}
GROUP_KIND = 1
OP_POSTED, OP_SENT, OP_DONE, STEP_SENT = 0, 2, 3, 9

_START = CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_void_p)
_STOP = CFUNCTYPE(c_int, c_void_p)
_RECORD = CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)


class Table(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("init", c_void_p),
        ("start", _START),
        ("stop", _STOP),
        ("record", _RECORD),
        ("finalize", _STOP),
    ]


class Communicator:
    """One, as NCCL's threads speak of it."""

    def __init__(
        self, library: Path, version: int, rank: int = 0, ranks: int = 4, comm: int = 77
    ) -> None:
        self.version = version
        self.table = Table.in_dll(ctypes.CDLL(str(library)), f"ncclProfiler_v{version}")
        self.context, self.mask = c_void_p(), c_int()
        self.rank = rank
        self.said = 500  # NCCL never sets this number back: what operations have moved (v1 to v3)
        begin: list[Any] = [byref(self.context)]
        end: list[Any] = [c_int(2), c_int(ranks), c_int(rank), None]
        if version <= 3:
            rest = [byref(self.mask)]
        elif version == 4:
            rest = [byref(self.mask), b"comm", c_uint64(comm), *end]
        else:
            rest = [c_uint64(comm), byref(self.mask), b"comm", *end]
        kinds: list[Any] = [c_void_p] * (1 + len(rest))
        for i, value in enumerate(begin + rest):
            kinds[i] = type(value) if isinstance(value, (c_int, c_uint64)) else c_void_p
        kinds = [c_char_p if v == b"comm" else k for k, v in zip(kinds, begin + rest, strict=True)]
        function = CFUNCTYPE(c_int, *kinds)(self.table.init)
        arguments = [
            ctypes.cast(v, c_void_p) if k is c_void_p and v is not None else v
            for k, v in zip(kinds, begin + rest, strict=True)
        ]
        assert function(*arguments) == 0

    def start(
        self, kind: int, parent: int | None = None, part: str = "", **fields: Any
    ) -> int | None:
        rank = 0 if kind == GROUP_KIND else self.rank  # NCCL does not fill that in
        event = EVENTS[self.version](kind=kind, parent=parent, rank=rank)
        of = getattr(event.of, part) if part else None
        for name, value in fields.items():
            numbered = self.version == 1 and part != "op" and value in _NUMBERS
            setattr(of, name, _NUMBERS[value] if numbered else value)
        handle = c_void_p()
        assert self.table.start(self.context, byref(handle), ctypes.addressof(event)) == 0
        return handle.value

    def stop(self, handle: int | None) -> None:
        assert self.table.stop(handle) == 0

    def record(self, handle: int | None, state: int, size: int) -> None:
        args = (c_size_t * 2)(size, 0)
        assert self.table.record(handle, state, ctypes.addressof(args)) == 0

    def all_reduce(self, count: int, buffer: int = 0x1000, **more: Any) -> int | None:
        """Enqueued: `count` floats."""
        fields: dict[str, Any] = {"from": buffer, "to": buffer, "count": count, **more}
        fields |= {"function": ALL_REDUCE, "type": b"ncclFloat32"}
        handle = self.start(COLLECTIVE_KIND, None, "collective", **fields)
        self.stop(handle)
        return handle

    def send(self, parent: int | None, slices: list[int], pid: int = 0, sends: int = 1) -> None:
        """A ProxyOp of the network, slice by slice."""
        most = {"steps": len(slices), "chunk": max(slices), "sends": sends, "channel": 1, "peer": 1}
        op = self.start(OP_KIND, parent, "op", pid=pid or os.getpid(), **most)
        for size in slices:
            step = self.start(STEP_KIND, op)
            if self.version >= 4:
                self.record(step, STEP_SENT, size)
                self.stop(step)
            else:
                self.record(op, OP_POSTED, self.said)
                self.said += size if self.version > 1 else 0
                self.record(op, OP_SENT, self.said)
                self.said += size if self.version == 1 else 0
                self.stop(step)
                self.record(op, OP_DONE, self.said)
        self.stop(op)

    def finalize(self) -> None:
        assert self.table.finalize(self.context) == 0
