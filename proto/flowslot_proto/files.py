# SPDX-License-Identifier: Apache-2.0
"""Configuration files of daemons and switch processes."""

from pathlib import Path

from flowslot.model.errors import ConfigError, why_unreadable


def read_text(file: Path) -> str:
    """The text of a file, without a byte order mark. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), "", f"cannot be read: {why_unreadable(error)}") from None
