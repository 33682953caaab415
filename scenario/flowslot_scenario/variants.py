# SPDX-License-Identifier: Apache-2.0
"""Variants of a scenario: single values changed, `links.buffer_kb=16` or `jobs.a.bytes=6e6`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from flowslot.model.errors import ConfigError
from flowslot.model.settings import printable, shortened


def apply(data: dict[str, Any], changes: Iterable[str]) -> None:
    """Make every change `KEY=VALUE` to a scenario file as it was parsed.

    KEY is `key`, `links.key`, `hosts.key`, `jobs.key`, `losses.key` or `delays.key` (all of them),
    or `hosts.NAME.key` or `jobs.NAME.key`. Raises ConfigError; whether the result is a valid
    scenario is not checked.
    """
    for change in changes:
        try:
            _make(data, printable(change))
        except ValueError as error:
            shown = shortened(change) if change.isprintable() else ""
            raise ConfigError("--set", shown, str(error)) from None


def _make(data: dict[str, Any], change: str) -> None:
    """One change. Raises ValueError."""
    path, equals, value = change.partition("=")
    if not (path and equals):
        raise ValueError("must be KEY=VALUE")
    *where, key = path.strip().split(".")
    for table in _tables(data, where):
        table[key] = _value(value)


def _tables(data: dict[str, Any], where: list[str]) -> list[dict[str, Any]]:
    """The tables that a change is for. Raises ValueError."""
    if not where:
        return [data]
    section = data.get(where[0])
    if isinstance(section, dict) and len(where) == 1:
        return [section]
    if isinstance(section, list) and len(where) <= 2:
        # What is no table is wrong already: whoever checks the result will say so.
        tables = [table for table in section if isinstance(table, dict)]
        if len(where) == 1:
            return tables
        found = [table for table in tables if table.get("name") == where[1]]
        if found:
            return found[:1]
        names = [name for table in tables if isinstance(name := table.get("name"), str)]
        known = shortened(", ".join(filter(str.isprintable, names))) or "(none)"
        raise ValueError(f'none of `{where[0]}` is called "{shortened(where[1])}"; of: {known}')
    raise ValueError("must begin with links., hosts., jobs., losses. or delays., or be one key")


def _value(text: str) -> object:
    """A TOML value; what is none is a string. 6e6 is an integer where it can be one."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value
