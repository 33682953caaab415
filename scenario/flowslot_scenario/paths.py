# SPDX-License-Identifier: Apache-2.0
"""What a scenario says of single paths: of packets from one host to another, in this direction."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from flowslot.model.settings import Settings, Text


class HostPath(Settings):
    """One direction between two hosts."""

    from_host: Text
    to_host: Text

    @property
    def name(self) -> str:
        """Of the path."""
        return f"{self.from_host} to {self.to_host}"


class Loss(HostPath):
    """A path that loses packets at random, seeded."""

    percent: Annotated[FiniteFloat, Field(ge=0.001, le=50)]


class Delay(HostPath):
    """A long path: its packets arrive so much later. A round trip is longer by both directions'."""

    us: Annotated[FiniteFloat, Field(ge=100, le=100_000)]
