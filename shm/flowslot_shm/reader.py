# SPDX-License-Identifier: Apache-2.0
"""Reads a job's progress record. The job is another user's process: nothing in it is trusted.

Everything is copied out before it is looked at, so that a job cannot change a value between the
check and the use, and the seals guarantee that a mapped page cannot disappear (SIGBUS).
"""

import fcntl
import mmap
import os
from contextlib import suppress
from socket import AF_INET, AF_INET6

import numpy as np
from numpy.typing import NDArray

from flowslot_shm import slot_check
from flowslot_shm.layout import (
    HEADER,
    MAGIC,
    MAX_SLOTS,
    SLOT,
    VERSION,
    Quiet,
    Role,
    Transport,
    fence,
    offset,
    record_bytes,
)
from flowslot_shm.slot_check import Fault

_RETRIES = 8
_SEALS = {
    "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
    "F_SEAL_GROW": fcntl.F_SEAL_GROW,
    "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
}
_WORDS = SLOT.itemsize // 8
_JOB = slice(offset("job"), offset("rank"))  # bytes of a slot; the others are 64-bit words
_IDENTITY = slice(offset("family") // 8, offset("iteration") // 8)
_ROLE = offset("role") * 8  # bits of the first word; from there to its end
_NONE: NDArray[np.intp] = np.zeros(0, np.intp)


class RecordError(ValueError):
    """A record that cannot be used: `field` is what is wrong, `problem` what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field `{field}`: {problem}")
        self.field = field
        self.problem = problem


class RecordReader:
    """A read-only view of one record.

    `good`, uint64[slots, 32]: the slots as they were last read, sound, for reading only.
    `opened` changes whenever a flow opens or closes, or is said to be another one: its ranks may
    become known only after it has opened.
    `torn`: slots that the last look could not read (forever odd: the writer died in the middle), so
    that another one is due. `faults`, int64[slots]: Fault bits seen so far.
    """

    def __init__(self, fd: int, max_slots: int = MAX_SLOTS) -> None:
        """Validate and map the record; `fd` stays the caller's. Raises RecordError."""
        self.slots = _check(fd, max_slots)
        try:
            self._map = mmap.mmap(fd, record_bytes(self.slots), mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise RecordError("record", f"must be mappable: {error.strerror}") from None
        self._quiet_word = _quiet_word(fd)
        self._quiet: Quiet | None = None  # as last written
        header = np.frombuffer(self._map, HEADER, 1)[0]
        self.pid = int(header["pid"])
        self._live = np.frombuffer(self._map, np.int64, offset=HEADER.itemsize).reshape(-1, _WORDS)
        self._live_seq = self._live.view(np.uint32)[:, 0]
        self.good = np.zeros(self._live.shape, np.uint64)
        self._kept = self.good.view(np.int64)
        self.opened = 0
        self._seen = np.zeros(self.slots, np.int64)  # sequence numbers of `good`
        self._at = np.zeros(self.slots, np.intp)
        self._seqs, self._verdicts = np.zeros((2, self.slots), np.int64)
        self.torn = _NONE
        self.faults = np.zeros(self.slots, np.int64)

    def snapshot(self) -> NDArray[np.void]:
        """A copy of all slots as SLOT[slots], each consistent and within bounds; never raises.

        A slot that is being written keeps its last good value (FREE, all zero, before the first),
        and one whose content was wrong is repaired: see `torn` and `faults`.
        """
        self.look()
        return self.good.copy().view(SLOT)[:, 0]

    def look(self) -> None:
        """Bring `good` up to date; never raises. Only what was written since is copied."""
        n = slot_check.changed(self._live, self._seen, self._at, self._seqs)
        self.torn = _NONE
        if not n:
            return
        at, seqs, verdicts = self._at[:n], self._seqs[:n], self._verdicts[:n]
        fence()
        words = self._live[at]
        fence()
        found = (at, seqs, verdicts)
        if not slot_check.settle(self._live, words, self._kept, self._seen, self.faults, found):
            return
        for i in np.flatnonzero(verdicts == slot_check.TORN).tolist():
            slot = int(at[i])
            if self._read_again(slot, seqs[i : i + 1], words[i]):
                self.faults[slot] |= slot_check.repair(words, i, self._kept, slot)
                verdicts[i] = slot_check.STRANGE
        self.torn = at[verdicts == slot_check.TORN]
        strange = verdicts == slot_check.STRANGE
        if strange.any():
            self._accept(at[strange], seqs[strange], words[strange])

    def _accept(
        self, at: NDArray[np.intp], seqs: NDArray[np.int64], words: NDArray[np.int64]
    ) -> None:
        """Take over what may be another flow now."""
        last = self._kept[at]
        self.faults[at] |= _repair_identity(words)
        another = (
            (words[:, _IDENTITY] != last[:, _IDENTITY]).any(axis=1)
            | (words[:, 0] >> _ROLE != last[:, 0] >> _ROLE)
            | (words.any(axis=1) != last.any(axis=1))
        )
        self.opened += bool(another.any())
        self._kept[at] = words
        self._seen[at] = seqs

    def set_quiet(self, quiet: Quiet) -> None:
        """Tell the job which of its doorbells are of no use.

        A job may ignore it, and one whose record lets nobody else write is never told. Nothing is
        ordered either: a job may miss a change that comes as its flow begins, which costs what a
        lost doorbell costs. The word is the job's to spoil, so nothing here ever reads it.
        """
        if self._quiet_word is not None and quiet != self._quiet:
            self._quiet_word[0] = quiet
            self._quiet = quiet

    def close(self) -> None:
        """Unmap the record; later snapshots show all slots free, and set_quiet does nothing."""
        self._quiet_word = None  # unmapped with its only user
        self._live = np.zeros_like(self._live)
        self._live_seq = self._live.view(np.uint32)[:, 0]
        self._seen[:] = 0
        self.good[:] = 0
        self.opened += 1
        with suppress(BufferError):  # still in use by a snapshot: unmapped with its last user
            self._map.close()

    def _read_again(self, slot: int, seq: NDArray[np.int64], words: NDArray[np.int64]) -> bool:
        """Retry one slot alone, whose short window a busy writer hits less often."""
        for _ in range(_RETRIES):
            before = self._live_seq[slot]
            if before & 1:
                continue
            fence()
            words[:] = self._live[slot]
            fence()
            if before == self._live_seq[slot]:
                seq[0] = before
                return True
        return False


def _quiet_word(fd: int) -> NDArray[np.uint32] | None:
    """The header's `quiet`, writable, in a mapping of its own: slots stay read-only.

    None where the kernel refuses: a record sealed against writing, a read-only descriptor.
    """
    try:
        header = mmap.mmap(fd, HEADER.itemsize, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError):
        return None
    return np.frombuffer(header, np.uint32, 1, offset("quiet", HEADER))


def _check(fd: int, max_slots: int) -> int:
    """Number of slots of a sound record; RecordError names the first field that is not."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise RecordError("record", "must be a memfd, got another kind of file") from None
    missing = [name for name, bit in _SEALS.items() if not seals & bit]
    if missing:
        raise RecordError(
            "seals", f"must include {', '.join(_SEALS)}; missing {', '.join(missing)}"
        )
    # From here on neither the size nor the seals can change.
    size = os.fstat(fd).st_size
    if size < HEADER.itemsize:
        raise RecordError("size", f"must be at least {HEADER.itemsize} bytes, got {size}")
    try:
        raw = os.pread(fd, HEADER.itemsize, 0)
    except OSError as error:
        raise RecordError("record", f"must be readable: {error.strerror}") from None
    header = np.frombuffer(raw, HEADER, 1)[0]
    if header["magic"] != MAGIC:
        raise RecordError("magic", f"must be {MAGIC!r}, got {bytes(header['magic'])!r}")
    if header["version"] != VERSION:
        raise RecordError("version", f"must be {VERSION}, got {header['version']}")
    slots = int(header["slots"])
    if not 1 <= slots <= max_slots:
        raise RecordError("slots", f"must be 1 to {max_slots}, got {slots}")
    # Exactly: this also keeps huge-page memfds out, whose faults can fail even when sealed.
    if size != record_bytes(slots):
        wanted = f"must be {record_bytes(slots)} bytes for {slots} slots"
        raise RecordError("size", f"{wanted}, got {size}")
    return slots


def _repair_identity(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Make sound, in place, what does not change while a flow is open; returns n Fault sets."""
    slots = words.view(SLOT)[:, 0]
    bits = np.zeros(len(words), np.int64)
    for name, known, else_, fault in (
        ("role", slots["role"] <= max(Role), Role.UNKNOWN, Fault.STATE),
        ("transport", slots["transport"] <= max(Transport), Transport.UNKNOWN, Fault.STATE),
        ("family", np.isin(slots["family"], (0, AF_INET, AF_INET6)), 0, Fault.STATE),
        ("fd", slots["fd"] >= -1, -1, Fault.RANGE),
    ):
        slots[name][~known] = else_
        bits[~known] |= fault
    # The job's name: ended after 31 characters, '_' for what is not visible ASCII.
    text = words.view(np.uint8)[:, _JOB]
    unended = text[:, -1] != 0
    text[:, -1] = 0
    ended = np.logical_or.accumulate(text == 0, axis=1)
    strange = ~ended & ((text < 0x21) | (text > 0x7E))
    text[ended] = 0
    text[strange] = ord("_")
    bits[strange.any(axis=1) | unended] |= Fault.TEXT
    return bits
