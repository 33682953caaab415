# SPDX-License-Identifier: Apache-2.0
"""Those functions of libbpf.so.1 that are needed, through ctypes."""

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterator
from ctypes import c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from errno import EINVAL
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowslotd.pace.pacer import PacingError

F_LINK = 1 << 13
"""BPF_F_LINK: a link attaches the struct_ops map (Linux 6.4)."""
STRUCT_OPS = 44
"""BPF_STRUCT_OPS, the attach type."""
TCX_EGRESS = 47
"""BPF_TCX_EGRESS, the attach type of programs that see packets before clsact's filters do (Linux
6.6)."""
_STRUCT_OPS_MAP = 26
"""BPF_MAP_TYPE_STRUCT_OPS."""
_MAP_INFO = struct.Struct("=I20x16s")
"""The beginning of struct bpf_map_info: type and name."""
_MOST_PROGRAMS = 64
"""BPF_MPROG_MAX: at one place of a device."""
PLACES = (
    Path(__file__).parent,
    Path(__file__).parents[3] / "bpf",
    Path("/usr/lib/flowslot"),
)

_PRINT = ctypes.CFUNCTYPE(c_int, c_int, c_char_p, c_void_p)
_SAMPLE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)
_SILENT = _PRINT(lambda level, text, arguments: 0)

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "bpf_object__open_mem": (c_void_p, [c_void_p, c_size_t, c_void_p]),
    "bpf_object__load": (c_int, [c_void_p]),
    "bpf_object__close": (None, [c_void_p]),
    "bpf_object__find_map_by_name": (c_void_p, [c_void_p, c_char_p]),
    "bpf_map__fd": (c_int, [c_void_p]),
    "bpf_map__set_map_flags": (c_int, [c_void_p, c_uint32]),
    "bpf_map__initial_value": (c_void_p, [c_void_p, c_void_p]),
    "bpf_map__set_max_entries": (c_int, [c_void_p, c_uint32]),
    "bpf_map__attach_struct_ops": (c_void_p, [c_void_p]),
    "bpf_map_update_elem": (c_int, [c_int, c_void_p, c_void_p, c_uint64]),
    "bpf_map_get_next_id": (c_int, [c_uint32, c_void_p]),
    "bpf_map_get_fd_by_id": (c_int, [c_uint32]),
    "bpf_obj_get_info_by_fd": (c_int, [c_int, c_void_p, c_void_p]),
    "bpf_map_delete_elem": (c_int, [c_int, c_void_p]),
    "bpf_object__find_program_by_name": (c_void_p, [c_void_p, c_char_p]),
    "bpf_program__fd": (c_int, [c_void_p]),
    "bpf_link_create": (c_int, [c_int, c_int, c_int, c_void_p]),
    "bpf_prog_query": (c_int, [c_int, c_int, c_uint32, c_void_p, c_void_p, c_void_p]),
    "ring_buffer__new": (c_void_p, [c_int, _SAMPLE, c_void_p, c_void_p]),
    "ring_buffer__consume": (c_int, [c_void_p]),
    "ring_buffer__epoll_fd": (c_int, [c_void_p]),
    "ring_buffer__free": (None, [c_void_p]),
    "libbpf_set_print": (c_void_p, [c_void_p]),
}


_UNCHECKED = {"bpf_map_delete_elem", "ring_buffer__consume", "libbpf_set_print"}
"""Functions whose failure matters to nobody."""


def built(name: str) -> Path | None:
    """The file of a compiled program, if there is one."""
    return next((file for place in PLACES if (file := place / name).is_file()), None)


def read(name: str) -> bytes:
    """A compiled program. Raises PacingError."""
    file = built(name)
    if file is None:
        raise PacingError(f"{name} is missing: build it with `make -C bpf`")
    return file.read_bytes()


@cache
def library() -> ctypes.CDLL:
    """libbpf.so.1. Its functions raise OSError when they fail. Raises OSError when it is not
    installed."""
    lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
        if result is not None and name not in _UNCHECKED:
            function.errcheck = _check
    lib.libbpf_set_print(ctypes.cast(_SILENT, c_void_p))
    return lib


def _check(result: int | None, function: Any, arguments: object) -> int:
    if result is None or (function.restype is c_int and result < 0):
        code = ctypes.get_errno()
        raise OSError(code, f"{function.__name__}: {os.strerror(code)}")
    return result


def attached(device: int, place: int) -> list[int]:
    """Ids of the programs that are attached to a device at a place (TCX_EGRESS), in their order.
    None where the kernel does not know the place. Raises OSError."""
    ids, count = (c_uint32 * _MOST_PROGRAMS)(), c_uint32(_MOST_PROGRAMS)
    try:
        library().bpf_prog_query(device, place, 0, None, ids, ctypes.byref(count))
    except OSError as error:
        if error.errno != EINVAL:
            raise
        return []
    return ids[: count.value]


def struct_ops_maps(names: Collection[str]) -> Iterator[tuple[str, int]]:
    """Maps of struct_ops that are called so: name, and a descriptor, valid until the next one.
    Raises OSError."""
    number, info = c_uint32(0), ctypes.create_string_buffer(_MAP_INFO.size)
    while True:
        try:
            library().bpf_map_get_next_id(number, ctypes.byref(number))
        except FileNotFoundError:
            return
        try:
            fd = int(library().bpf_map_get_fd_by_id(number))
        except FileNotFoundError:
            continue  # it has just gone
        try:
            library().bpf_obj_get_info_by_fd(fd, info, ctypes.byref(c_uint32(len(info))))
            kind, name = _MAP_INFO.unpack(info.raw)
            if kind == _STRUCT_OPS_MAP and (known := name.rstrip(b"\0").decode()) in names:
                yield known, fd
        finally:
            os.close(fd)


class Map:
    """A map of an object. Its methods raise OSError."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    @property
    def fd(self) -> int:
        """Descriptor, valid while the object is loaded."""
        return int(library().bpf_map__fd(self._pointer))

    @property
    def initial(self) -> ctypes.Array[ctypes.c_char]:
        """Before loading: what a map of constants or variables will hold. Writable."""
        size = c_size_t(0)
        at = library().bpf_map__initial_value(self._pointer, ctypes.byref(size))
        return (ctypes.c_char * size.value).from_address(at)

    def set_flags(self, flags: int) -> None:
        """Before loading."""
        library().bpf_map__set_map_flags(self._pointer, flags)

    def set_max_entries(self, entries: int) -> None:
        """Before loading."""
        library().bpf_map__set_max_entries(self._pointer, entries)

    def put(self, key: bytes | None, value: bytes) -> None:
        """Add or replace an entry. Without a key: add to a stack or queue."""
        library().bpf_map_update_elem(self.fd, key, value, 0)

    def remove(self, key: bytes) -> None:
        """Remove an entry. Harmless when it is not there."""
        library().bpf_map_delete_elem(self.fd, key)

    def attach_struct_ops(self, *, link: bool) -> int | None:
        """Register the struct_ops. Returns the descriptor of the link: its end is the
        registration's."""
        # libbpf's own link object is not freed. It owns nothing, and its clean-up would remove a
        # registration without a link.
        library().bpf_map__attach_struct_ops(self._pointer)
        return library().bpf_link_create(self.fd, 0, STRUCT_OPS, None) if link else None


class Object:
    """A BPF object from the bytes of an ELF file. Its methods raise OSError."""

    def __init__(self, elf: bytes) -> None:
        self._elf = ctypes.create_string_buffer(elf, len(elf))
        self._pointer: int | None = library().bpf_object__open_mem(self._elf, len(elf), None)

    def map(self, name: str) -> Map:
        """A map by name."""
        return Map(library().bpf_object__find_map_by_name(self._pointer, name.encode()))

    def table(
        self, name: str, dtype: np.dtype[Any], rows: int, *, writable: bool = True
    ) -> NDArray[np.void]:
        """The memory of a loaded map."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        shared = mmap.mmap(self.map(name).fd, rows * dtype.itemsize, mmap.MAP_SHARED, access)
        return np.frombuffer(shared, dtype)

    def program(self, name: str) -> int:
        """Descriptor of a loaded program."""
        found = library().bpf_object__find_program_by_name(self._pointer, name.encode())
        return int(library().bpf_program__fd(found))

    def load(self) -> None:
        """Create the maps and load the programs."""
        library().bpf_object__load(self._pointer)

    def close(self) -> None:
        """Close all its descriptors."""
        if self._pointer:
            library().bpf_object__close(self._pointer)
            self._pointer = None


class RingBuffer:
    """Reads a ring buffer map; `sink` gets a copy of each record."""

    def __init__(self, fd: int, sink: Callable[[bytes], None]) -> None:
        def sample(context: int, data: int, size: int) -> int:
            sink(ctypes.string_at(data, size))
            return 0

        self._callback = _SAMPLE(sample)  # kept: C holds no reference
        self._pointer: int | None = library().ring_buffer__new(fd, self._callback, None, None)

    @property
    def fd(self) -> int:
        """Readable when there is something to consume."""
        return int(library().ring_buffer__epoll_fd(self._pointer))

    def consume(self) -> int:
        """Hand over all records without waiting; returns their number."""
        return int(library().ring_buffer__consume(self._pointer))

    def close(self) -> None:
        """Unmap."""
        if self._pointer:
            library().ring_buffer__free(self._pointer)
            self._pointer = None
