# SPDX-License-Identifier: Apache-2.0
"""One line in a stock DDP script: `flowslot_torch.attach(model)`."""

import logging
import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from flowslot_torch.groups import GroupAttachment, is_attached
from flowslot_torch.peers import Peers, Store
from flowslot_torch.report import Attached, Reporter

_log = logging.getLogger(__name__)
Inner = tuple[Any, Callable[[Any, dist.GradBucket], Any]]


class Attachment(Attached):
    """One model's reports. The state of its hook."""

    def __init__(
        self, reporter: Reporter, owns: bool, group: dist.ProcessGroup, inner: Inner | None
    ) -> None:
        """See Attached."""
        super().__init__(reporter, owns)
        self._group, self._inner = group, inner
        self._divisor = dist.get_world_size(group)
        self._gloo = dist.get_backend(group) == "gloo"
        self._joined: Any = None
        self._pending = 0
        self._last = self._seen = False
        """`_seen`: the group's own attachment reports this iteration's collectives."""

    def exchange(self, bucket: dist.GradBucket) -> Any:
        """DDP hands a bucket over; returns its future."""
        if bucket.index() == 0:
            self._seen = is_attached(self._group, self.reporter)
            if self._owns:
                self.reporter.begin()
        buffer = bucket.buffer()
        self._last = bucket.is_last()
        self._pending += 1
        if not self._seen:
            self.reporter.ready(buffer.numel() * buffer.element_size())
        if self._inner is not None:
            state, hook = self._inner
            return hook(state, bucket).then(lambda future: self._done(future.value()))
        if self._joined is not None:
            self._joined.wait()
            self._divisor, self._joined = int(self._joined.result()[0].item()), None
        # DDP without a hook multiplies by this number; a division would round otherwise.
        work = self._group.allreduce([buffer.mul_(1.0 / self._divisor)])
        return work.get_future().then(lambda future: self._done(future.value()[0]))

    def count(self, work: Any) -> None:
        """`work`: the all-reduce that counts who still has data, by which DDP divides under `join`;
        None: by the size of the group."""
        self._joined, self._divisor = work, dist.get_world_size(self._group)

    def _done(self, result: torch.Tensor) -> torch.Tensor:
        self._pending -= 1
        if self._last and self._pending == 0 and self._gloo:  # others only say that work is queued
            self.reporter.complete()
        return result

    def __reduce__(self) -> Any:
        """A copy of the model is not attached."""
        return _nothing, ()


def _nothing() -> None:
    return None


class _Reducer:
    """DDP's own, beside which the hook sees by what DDP would divide under `join`."""

    def __init__(self, reducer: Any, attachment: Attachment) -> None:
        self._reducer, self._attachment = reducer, attachment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _set_forward_pass_work_handle(self, work: Any, by_first_size: bool) -> None:
        self._attachment.count(None if by_first_size else work)
        self._reducer._set_forward_pass_work_handle(work, by_first_size)


def attach(
    model: DistributedDataParallel | dist.ProcessGroup,
    *,
    job: str | None = None,
    daemon: str | None = None,
    hook: Inner | None = None,
) -> Attached:
    """Report the model's gradients to the daemon of this host, from the next iteration on. Of a
    process group: the collectives that a script or FSDP calls on it.

    `job`: its name, the same on all ranks; without one $FLOWSLOT_JOB, torchrun's id, the
    rendezvous's address or, where there is none of these, a name that ranks agree on in their
    store. `daemon`: the registration socket; $FLOWSLOT_SOCKET, else the system's. `hook`: the
    state and the function of a hook of your own, as for `register_comm_hook`: DDP takes only one.

    Gradients are DDP's, bit by bit, also under `join`. Without a daemon, or after any failure of
    ours, training goes on unscheduled. TypeError: `model` is neither; a group with a hook.
    """
    if isinstance(model, dist.ProcessGroup):
        if hook is not None:
            raise TypeError("hook: is DDP's; leave it out with a process group")
        return GroupAttachment(*Attached.reporter_of(lambda: _reporter(job, daemon)), model)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "model: must be a DistributedDataParallel or a ProcessGroup, is a"
            f" {type(model).__name__}; wrap it first, or pass its group"
        )
    reporter, owns = Attached.reporter_of(lambda: _reporter(job, daemon))
    attachment = Attachment(reporter, owns, model.process_group, hook)
    try:
        model.register_comm_hook(attachment, flowslot_hook)
        model.reducer = _Reducer(model.reducer, attachment)
    except RuntimeError as error:  # there is a hook already
        attachment.close()
        _log.warning("flowslot reports nothing of this model: %s", error)
    return attachment


def flowslot_hook(state: Attachment, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for each bucket."""
    return state.exchange(bucket)


def _reporter(job: str | None, daemon: str | None) -> Reporter:
    rank, world = dist.get_rank(), dist.get_world_size()
    return Reporter(job or _job_name(), rank, Peers(rank, world, _store()), daemon)


def _job_name() -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    met = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    meeting = ":".join(["torch", *met]) if all(met) else ""
    return os.environ.get("FLOWSLOT_JOB") or (run if run != "none" else meeting or _drawn_name())


def _drawn_name() -> str:
    """The first rank that asks draws one: no rank waits for another."""
    drawn = f"torch:{uuid.uuid4().hex[:12]}"
    try:
        store = distributed_c10d._get_default_store()
        return store.compare_set("flowslot/job", "", drawn).decode()  # type: ignore[no-any-return]
    except Exception as error:
        _log.warning("flowslot: ranks cannot agree on the job's name, pass job=: %s", error)
        return drawn


def _store() -> Callable[[], Store] | None:
    """Opens the ranks' store anew: on the connection that training uses, we might be in its way."""
    try:
        store = distributed_c10d._get_default_store()
    except Exception as error:  # not public: may be missing one day
        _log.info("flowslot: no store: %s", error)
        return None
    return store.clone  # type: ignore[no-any-return]
