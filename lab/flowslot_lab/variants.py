# SPDX-License-Identifier: Apache-2.0
"""Variants of a scenario: single values changed, `links.buffer_kb=16` or `jobs.a.bytes=6e6`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from typing import Any

from flowslot.errors import ConfigError


def apply(text: str, source: str, changes: Iterable[str]) -> str:
    """The scenario `text` with every `KEY=VALUE` of `changes`, as TOML again.

    KEY is `key`, `links.key`, `hosts.key` or `jobs.key` (all of them), or `hosts.NAME.key` or
    `jobs.NAME.key`. Raises ConfigError; whether the result is a valid scenario is not checked.
    """
    changes = list(changes)
    if not changes:
        return text
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, "", f"not valid TOML: {error}") from None
    for change in changes:
        path, equals, value = change.partition("=")
        if not (path and equals):
            raise ConfigError("--set", change, "must be KEY=VALUE")
        *where, key = path.strip().split(".")
        for table in _tables(data, where, change):
            table[key] = _value(value)
    return _dump(data)


def _tables(data: dict[str, Any], where: list[str], change: str) -> list[dict[str, Any]]:
    """The tables that a change is for."""
    if not where:
        return [data]
    section = data.get(where[0])
    if isinstance(section, dict) and len(where) == 1:
        return [section]
    if isinstance(section, list) and len(where) <= 2:
        names = [str(table.get("name")) for table in section]
        if len(where) == 1:
            return section
        if where[1] in names:
            return [section[names.index(where[1])]]
        problem = f'none of `{where[0]}` is called "{where[1]}"; of: {", ".join(names)}'
        raise ConfigError("--set", change, problem)
    raise ConfigError("--set", change, "must begin with links., hosts. or jobs., or be one key")


def _value(text: str) -> object:
    """A TOML value; what is none is a string. 6e6 is an integer where it can be one."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _dump(data: dict[str, Any]) -> str:
    """TOML for what a scenario consists of: values, tables, and arrays of tables."""
    lines = [_line(key, value) for key, value in data.items() if not _is_tables(value)]
    for key, value in data.items():
        if _is_tables(value):
            tables = value if isinstance(value, list) else [value]
            head = f"[[{key}]]" if isinstance(value, list) else f"[{key}]"
            for table in tables:
                lines += [head, *(_line(name, item) for name, item in table.items())]
    return "\n".join(lines) + "\n"


def _is_tables(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    )


def _line(key: str, value: object) -> str:
    return f"{json.dumps(key)} = {json.dumps(value)}"
