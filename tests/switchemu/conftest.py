# SPDX-License-Identifier: Apache-2.0
"""Real switch processes for the tests here."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from switchproc import Switch


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    """A process that has just begun to serve, and never finds a daemon late."""
    with Switch(tmp_path, slot_ms=1000, lease_slots=100) as process:
        yield process.start()


@pytest.fixture(scope="module")
def shared_switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switch]:
    """One for tests that leave nothing behind in it."""
    with Switch(tmp_path_factory.mktemp("switch")) as process:
        process.start().wait_recovered()
        yield process


@pytest.fixture(scope="module")
def unhurried_switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switch]:
    """One that never finds a daemon late; it grants nothing while it recovers, which is long."""
    with Switch(tmp_path_factory.mktemp("unhurried"), slot_ms=1000, lease_slots=100) as process:
        yield process.start()
