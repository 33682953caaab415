# SPDX-License-Identifier: Apache-2.0
"""Collectives that no DDP hands out: FSDP's, and those that a script calls itself.

They are seen where Python calls them, on the group's class: a group is made by the library, and
cannot be replaced where it is in use. What C++ calls by itself (DDP's reducer, DTensor) is not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from flowslot_torch.report import Attached, Reporter

_log = logging.getLogger(__name__)
_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "send"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *(
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
    ),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
_attached: dict[str, GroupAttachment] = {}
"""By the group's name."""


class GroupAttachment(Attached):
    """A process group's reports. An iteration begins with the first collective after an optimizer's
    step. What is done is seen by the kernel's counters alone."""

    def __init__(self, reporter: Reporter, owns: bool, group: dist.ProcessGroup) -> None:
        """See Attached. From now on the group's collectives are seen, by one attachment."""
        super().__init__(reporter, owns)
        self._name = group.group_name
        self._stepped = True
        if is_attached(group, reporter):
            _log.warning("flowslot: group %s is attached already", self._name)
            return
        self._handle = register_optimizer_step_post_hook(self._step)
        _attached[self._name] = self
        _watch()

    def _step(self, *_: Any) -> None:
        self._stepped = True

    def see(self, arguments: tuple[Any, ...]) -> None:
        """Of a collective that is about to begin."""
        if self._owns and self._stepped:
            self._stepped = False
            self.reporter.begin()
        self.reporter.ready(max(map(_bytes, arguments), default=0))

    def close(self) -> None:
        """Report no more."""
        if _attached.get(self._name) is self:
            del _attached[self._name]
            self._handle.remove()
        super().close()


def is_attached(group: dist.ProcessGroup, reporter: Reporter) -> bool:
    """Whether its collectives are reported there."""
    attachment = _attached.get(group.group_name)
    return attachment is not None and attachment.reporter is reporter


def _bytes(argument: Any) -> int:
    """Of a tensor, or of all in a list: the largest argument is what is gathered or reduced."""
    if isinstance(argument, torch.Tensor):
        return int(argument.numel() * argument.element_size())
    return sum(map(_bytes, argument)) if isinstance(argument, list | tuple) else 0


def _watch() -> None:
    """Once in a process."""
    for name in _METHODS:
        original = getattr(dist.ProcessGroup, name, None)  # versions differ
        if original is not None and not hasattr(original, "flowslot"):
            setattr(dist.ProcessGroup, name, _watched(original))


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: dist.ProcessGroup, *arguments: Any, **more: Any) -> Any:
        if _attached:
            _see(group, (*arguments, *more.values()))
        return original(group, *arguments, **more)

    call.flowslot = True  # type: ignore[attr-defined]
    return call


def _see(group: dist.ProcessGroup, arguments: tuple[Any, ...]) -> None:
    """Whatever happens here, the collective begins."""
    attachment = None
    try:
        attachment = _attached.get(group.group_name)
        if attachment is not None:
            attachment.see(arguments)
    except Exception as error:
        _log.warning("flowslot does not see a collective: %s", error)
        if attachment is not None:
            attachment.close()
