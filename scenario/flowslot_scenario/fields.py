# SPDX-License-Identifier: Apache-2.0
"""Fields of scenario files: names, and numbers with their bounds."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, FiniteFloat

from flowslot.model.settings import PRINTABLE, shortened


def _name(text: str) -> str:
    if not re.fullmatch("[a-z][a-z0-9-]*", text):
        rule = 'must begin with a letter from a to z and hold only a-z, 0-9 and "-"'
        raise ValueError(f'{rule}, got "{shortened(text)}"')
    return text


NAME = AfterValidator(_name)
HostName = Annotated[str, Field(max_length=12), PRINTABLE, NAME]  # d-<name> fits an interface name
RackName = Annotated[str, Field(max_length=12), PRINTABLE, NAME]  # and so does u-<name>
JobName = Annotated[str, Field(max_length=31), PRINTABLE, NAME]
# No limits of the lab: beyond these, a number is a mistake, or what it leads to overflows.
RateMbps = Annotated[FiniteFloat, Field(ge=1, le=1e6)]
BufferKb = Annotated[FiniteFloat, Field(ge=2, le=1e6)]  # a packet fits into 2 kB
Iterations = Annotated[int, Field(ge=0, le=1_000_000)]
