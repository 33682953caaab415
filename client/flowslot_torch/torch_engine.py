# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors and Gloo, as the programs' engine and transport."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from flowslot_torch.engines import Array
from flowslot_torch.transport import LATER_S, PeerLost, Pending

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "int32", "int64", "uint8")
}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TorchEngine:
    """Arrays are tensors on the processor."""

    def alloc(self, count: int, dtype: str) -> Array:
        """See Engine; whatever mode the calling thread is in."""
        with torch.inference_mode(False):
            return torch.empty(count, dtype=_DTYPES[dtype], device="cpu")

    def astype(self, array: Array, dtype: str) -> Array:
        """See Engine."""
        return array.to(_DTYPES[dtype])

    def dtype(self, array: Array) -> str:
        """See Engine."""
        return NAMES[array.dtype]

    def nbytes(self, array: Array) -> int:
        """See Engine."""
        if not array.is_contiguous() or array.device.type != "cpu":
            raise ValueError("tensor: must be in one piece, and in the processor's memory")
        return int(array.nbytes)

    def memory(self, array: Array) -> memoryview:
        """See Engine."""
        self.nbytes(array)
        return memoryview(array.detach().view(torch.uint8).numpy())

    def fuse(self, arrays: Sequence[Array], buffer: Array) -> None:
        """See Engine."""
        with torch.no_grad():  # gradients may have a graph of their own (`create_graph`)
            torch.cat(tuple(arrays), out=buffer)

    def unfuse(self, buffer: Array, arrays: Sequence[Array], scale: float = 1.0) -> None:
        """See Engine."""
        parts = buffer.split([array.numel() for array in arrays])  # torch does `len` in Python
        with torch.no_grad():
            for array, part in zip(arrays, parts, strict=True):
                array.copy_(part) if scale == 1 else torch.mul(part, scale, out=array)


class GlooTransport:
    """Communicators of Gloo, one per topology, made on a thread when they are first asked for and
    kept. Ranks are those of `members`, in their order."""

    native = True

    def __init__(
        self,
        store: Any,
        rank: int,
        members: Sequence[int],
        *,
        epoch: int = 0,
        timeout_s: float = 60,
    ) -> None:
        """`store`: torch's, shared by all; `epoch`: differs after each change of membership."""
        self.rank, self.members, self.timeout_s = rank, tuple(members), timeout_s
        self._store, self._epoch = store, epoch
        self._groups: dict[tuple[int, ...], _Making] = {}
        self._closed = False
        self.prepare(self.members)

    def prepare(self, group: Sequence[int]) -> None:
        """Begin to connect a topology; its first operation waits for the end."""
        key = tuple(group)
        new = key not in self._groups  # asked first: `close` takes them away once it has said so
        if new and self.rank in key and len(key) > 1 and not self._closed:
            self._groups[key] = _Making(lambda: self._make(key))

    def _make(self, key: tuple[int, ...]) -> Any:
        name = f"flowslot/{self._epoch}/" + ",".join(map(str, key))
        options = dist.PrefixStore(name, self._store), key.index(self.rank), len(key)
        agreed = self._epoch and key == self.members
        connect_s = min(self.timeout_s, LATER_S) if agreed else self.timeout_s
        made = dist.ProcessGroupGloo(*options, timedelta(seconds=connect_s))
        made.set_timeout(timedelta(seconds=self.timeout_s))
        return made

    def _group(self, group: tuple[int, ...]) -> Any:
        if self._closed:
            raise PeerLost(group, "the connection was closed here")
        self.prepare(group)
        making = self._groups.get(group)
        if making is None:
            raise PeerLost(group, "the connection was closed here")
        return self._do(group, making.get)

    def send(self, memory: memoryview, to: int) -> Pending:
        """See Transport."""
        group = self._group(self.members)
        work = self._do((to,), lambda: group.send([_bytes(memory)], self.members.index(to), 0))
        return _Work(self, work, (to,), memory)

    def receive(self, memory: memoryview, source: int) -> Pending:
        """See Transport."""
        group = self._group(self.members)
        index = self.members.index(source)
        work = self._do((source,), lambda: group.recv([_bytes(memory)], index, 0))
        return _Work(self, work, (source,), memory)

    def allreduce(self, array: Array, dtype: str, group: tuple[int, ...]) -> Pending:
        """See Transport; by Gloo's own algorithm."""
        pg = self._group(group)
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        work = self._do(group, lambda: pg.allreduce([tensor]))
        return _Work(self, work, group, (tensor, pg))  # a group's end would wait for its work

    def close(self) -> None:
        """Let go of all connections."""
        self._closed = True
        groups, self._groups = self._groups, {}  # two threads may close
        for making in list(groups.values()):
            making.drop()
        groups.clear()
        gc.collect()  # Gloo closes a connection when nobody knows of it any more

    def _do(self, peers: tuple[int, ...], action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            others = tuple(rank for rank in peers if rank != self.rank)
            text = str(error).strip().partition("\n")[0]
            raise PeerLost(others, text) from None


class _Work:
    """An operation of Gloo that is under way."""

    def __init__(self, of: GlooTransport, work: Any, peers: tuple[int, ...], held: Any) -> None:
        self._of, self._work, self._peers, self._held = of, work, peers, held

    def wait(self) -> None:
        """See Pending."""
        self._of._do(self._peers, self._work.wait)


class _Making:
    """A communicator that is being made on a thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._made: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self._made = make()
        except Exception as error:
            self._error = error

    def get(self) -> Any:
        """When it is made. RuntimeError: it could not be."""
        self._thread.join()
        made = self._made
        if self._error is not None:
            raise RuntimeError(f"{self._error}")
        return made

    def drop(self) -> None:
        """Let go of it."""
        self._error = RuntimeError("the transport was closed")  # first: another thread may ask
        self._made = None


def _bytes(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
