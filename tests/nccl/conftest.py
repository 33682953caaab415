# SPDX-License-Identifier: Apache-2.0
"""The plugin as NCCL loads it, between two processes on loopback (pair.c)."""

import os
import re
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from registering import starting  # noqa: F401
from waiting import settle

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "nccl_patch" / "plugin"
NOBODY = {"FLOWSLOT_SOCKET": "/nonexistent/register.sock"}
Pair = Callable[..., "Outcome"]


class Outcome(dict[str, float]):
    """What the sender printed, and what both said."""

    said: str = ""


def build(sanitizer: str = "") -> Path:
    """The library; `sanitizer`: address, thread or none."""
    setting = [f"SANITIZE={sanitizer}"] if sanitizer else []
    subprocess.run(["make", "-s", "-C", PLUGIN, *setting], check=True)
    folder = f"nccl-{sanitizer}" if sanitizer else "nccl"
    return ROOT / "build" / folder / "libnccl-net-flowslot.so"


def compile_pair(to: Path, *flags: str) -> Path:
    source = Path(__file__).with_name("pair.c")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", "-std=gnu11", "-O1", *warnings, *flags, source, "-o", to], check=True)
    return to


def arguments(values: dict[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def environment(more: dict[str, str]) -> dict[str, str]:
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "FLOWSLOT_"))}
    return mine | {"NCCL_SOCKET_IFNAME": "=lo"} | NOBODY | more


def read(output: str, said: str = "") -> Outcome:
    outcome = Outcome({k: float(v) for k, v in re.findall(r"(\w+)=([\d.]+)", output)})
    outcome.said = said
    return outcome


@pytest.fixture(scope="session")
def library() -> Path:
    return build()


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_pair(tmp_path_factory.mktemp("nccl") / "pair")


@pytest.fixture
def pair(library: Path, program: Path) -> Pair:
    """pair(version, {variable: value}, name=value of pair.c, ...)"""

    def run(version: int = 12, settings: dict[str, str] | None = None, **values: object) -> Outcome:
        done = subprocess.run(
            [program, library, str(version), *arguments(values)],
            env=environment(settings or {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return read(done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def profiler() -> Path:
    folder = ROOT / "nccl_patch" / "profiler"
    subprocess.run(["make", "--no-print-directory", "-s", "-C", folder], check=True)
    return ROOT / "build" / "nccl" / "libnccl-profiler-flowslot.so"


def is_up(host: str) -> bool:
    shown = subprocess.run(
        ["ip", "-n", host, "link", "show", "eth0"], check=True, capture_output=True, text=True
    )
    return "state UP" in shown.stdout


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Namespaces with a cable between them: 10.9.0.1 and 10.9.0.2."""
    names = [f"nccl-{uuid.uuid4().hex[:8]}-{i}" for i in (1, 2)]
    lines = [f"netns add {name}" for name in names]
    lines.append(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
    for i, name in enumerate(names, 1):
        lines.append(f"-n {name} addr add 10.9.0.{i}/24 dev eth0")
        lines += [f"-n {name} link set {device} up" for device in ("lo", "eth0")]
    try:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True)
        settle(lambda: all(is_up(name) for name in names), what="a carrier")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
