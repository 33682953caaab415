# SPDX-License-Identifier: Apache-2.0
"""Configuration files of daemons and switch processes."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from flowslot.model.errors import ConfigError, why_unreadable
from flowslot.model.settings import PathText


def read_text(file: Path) -> str:
    """The text of a file, without a byte order mark. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), "", f"cannot be read: {why_unreadable(error)}") from None


def socket_folder(text: str) -> str:
    """The path of a folder for sockets. Raises ValueError: it is too long."""
    if len(os.fsencode(text)) > _MAX_FOLDER:
        raise ValueError(f"must have at most {_MAX_FOLDER} bytes: paths of sockets are short")
    return text


_MAX_FOLDER = 90
SocketFolder = Annotated[PathText, AfterValidator(socket_folder)]
