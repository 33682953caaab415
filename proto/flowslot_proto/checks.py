# SPDX-License-Identifier: Apache-2.0
"""Checks of what comes in by its form. All raise ProtocolError, which names the field."""

import math
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from flowslot.model.errors import ProtocolError

MAX_NAME = 64
MAX_INT = 2**62
M = TypeVar("M", bound=Message)


def parse(kind: type[M], raw: bytes) -> M:
    """Bytes from outside as a message of that kind."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise ProtocolError(f"not a {kind.DESCRIPTOR.name}") from None


def same_length(batch: str, **columns: Sequence[object]) -> int:
    """How many elements all columns of a batch have."""
    lengths = {name: len(column) for name, column in columns.items()}
    first, n = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != n:
            raise ProtocolError(
                f"field `{batch}.{name}`: must have as many elements as {first} ({n}), got {length}"
            )
    return n


def check_indices(field: str, values: Sequence[int], end: int, of: str) -> None:
    """Each is the index of one of `end` things."""
    if values and max(values) >= end:
        raise ProtocolError(f"field `{field}`: index {max(values)}, but there are {end} {of}")


def check_counts(field: str, values: Sequence[int]) -> Sequence[int]:
    """Returns them."""
    if values and max(values) > MAX_INT:
        raise ProtocolError(f"field `{field}`: must be at most 2^62, got {max(values)}")
    return values


def check_count(field: str, value: int) -> int:
    """Returns it."""
    return check_counts(field, (value,))[0]


def check_rates(field: str, values: Sequence[float]) -> Sequence[float]:
    """Returns them."""
    if values and not (all(map(math.isfinite, values)) and min(values) >= 0):
        raise ProtocolError(f"field `{field}`: must be finite and at least 0")
    return values


def check_range(field: str, values: Sequence[float], least: int) -> Sequence[float]:
    """Returns them: rates that are reckoned with, which must not overflow."""
    if not all(least <= value <= MAX_INT for value in values):
        raise ProtocolError(f"field `{field}`: must be {least} to 2^62")
    return values


def check_name(field: str, text: str) -> str:
    """Returns it."""
    if not 0 < len(text) <= MAX_NAME:
        raise ProtocolError(f"field `{field}`: must have 1 to {MAX_NAME} characters")
    return text
