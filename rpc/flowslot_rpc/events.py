# SPDX-License-Identifier: Apache-2.0
"""What an HTTP/2 session says has happened: (what, number of the stream or 0, content)."""

from typing import Literal

Headers = list[tuple[bytes, bytes]]
Event = (
    tuple[Literal["request"], int, Headers]  # the other side has opened the stream
    | tuple[Literal["headers"], int, Headers]  # of a response, or trailing
    | tuple[Literal["data"], int, bytes]
    | tuple[Literal["end"], int, None]  # the other side sends nothing more on the stream
    | tuple[Literal["close"], int, int]  # the stream is over, both ways; an error code
    | tuple[Literal["pong"], int, bytes]  # what the ping held
    | tuple[Literal["settings", "goaway"], int, None]
)
