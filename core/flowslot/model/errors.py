# SPDX-License-Identifier: Apache-2.0
"""Exceptions for bad input. Broken invariants of our own are `assert`s instead."""


class FlowslotError(Exception):
    """Base of every error that flowslot raises on purpose."""


class ConfigError(FlowslotError):
    """A configuration file is wrong; says which file, which field, and what would be right.

    `field` is a path such as `links[2].capacity_gbps`, or empty when the whole file is meant.
    """

    def __init__(self, source: str, field: str, problem: str) -> None:
        self.source = source
        self.field = field
        self.problem = problem
        where = f"{source}: field `{field}`" if field else source
        super().__init__(f"{where}: {problem}")


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file could not be read, in words."""
    if isinstance(error, UnicodeDecodeError):
        utf16 = error.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        return "UTF-16 text; save it as UTF-8" if utf16 else "not UTF-8 text"
    return error.strerror or str(error)


class ProtocolError(FlowslotError):
    """A peer broke the negotiation protocol; its stream should be closed."""


class ScheduleRefused(FlowslotError):
    """An explicit schedule does not fit into the load table.

    `link` is the index of the first link that is too full, or None when the request is malformed.
    """

    def __init__(self, reason: str, link: int | None = None) -> None:
        self.reason = reason
        self.link = link
        super().__init__(reason)


class SessionEnded(FlowslotError):
    """A session is not honoured; its daemon must begin a new stream."""


class LimitExceeded(FlowslotError):
    """A peer asks for more than a limit allows."""
