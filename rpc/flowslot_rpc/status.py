# SPDX-License-Identifier: Apache-2.0
"""What a call ends with (gRPC's statuses), and how it is written in HTTP/2's fields."""

import enum
import re
from urllib.parse import unquote

from flowslot_rpc.events import Headers

MAX_DETAILS = 1024
"""Bytes of details that are sent: they must fit into a block of fields, escaped."""


class Status(enum.IntEnum):
    """https://grpc.io/docs/guides/status-codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    """A call has ended, or is to end, otherwise than well."""

    def __init__(self, status: Status, details: str) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status
        self.details = details


class Rejected(RpcError):
    """A call ends because the other side has broken a rule or a limit."""


# RFC 9113, 7, as gRPC reads it; what is not here is INTERNAL.
NO_ERROR, REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM = 0x0, 0x7, 0x8, 0xB
_RESETS = {
    NO_ERROR: Status.UNAVAILABLE,
    REFUSED_STREAM: Status.UNAVAILABLE,
    CANCEL: Status.CANCELLED,
    ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
}


def of_reset(code: int) -> RpcError:
    """A stream was closed with that HTTP/2 error code before it had a status."""
    status = _RESETS.get(code, Status.INTERNAL)
    return RpcError(status, f"the stream was reset (HTTP/2 error code {code})")


def write(status: Status, details: str) -> Headers:
    """The trailing fields that end a call."""
    fields = [(b"grpc-status", b"%d" % status)]
    if details:
        # All but printable ASCII, and the percent sign itself.
        text = details.encode(errors="replace")[:MAX_DETAILS]
        escaped = re.sub(rb"[^ -$&-~]", lambda m: b"%%%02X" % m[0][0], text)
        fields.append((b"grpc-message", escaped))
    return fields


def read(fields: dict[bytes, bytes]) -> RpcError | None:
    """What trailing fields say; None: all is well."""
    code = fields.get(b"grpc-status", b"")
    details = unquote(fields.get(b"grpc-message", b"").decode(errors="replace"))
    if not re.fullmatch(rb"[0-9]{1,3}", code):
        return RpcError(Status.UNKNOWN, "the call ended without a gRPC status")
    if int(code) == Status.OK:
        return None
    known = int(code) in Status._value2member_map_
    return RpcError(Status(int(code)) if known else Status.UNKNOWN, details)
