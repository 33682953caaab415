# SPDX-License-Identifier: Apache-2.0
"""The library as such: what it exports, and when it lets NCCL go on to another network."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from .conftest import environment

ACTIVE = "4: ACTIVE"
FAKE = """
mount -t tmpfs none /sys/class && mkdir -p /sys/class/infiniband/mlx5_0/ports/1 &&
echo "$1" >/sys/class/infiniband/mlx5_0/ports/1/state && shift && exec "$@"
"""


def test_it_exports_its_tables_and_two_functions(library: Path) -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    names = set(re.findall(r" [A-Z] (\w+)$", symbols, re.MULTILINE))
    assert names == {f"ncclNetPlugin_v{n}" for n in range(6, 13)} | {
        "flowslot_iteration",
        "flowslot_collective",
    }


def test_it_is_never_unloaded(library: Path) -> None:
    flags = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert "NODELETE" in flags.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a mount namespace")
@pytest.mark.parametrize(
    ("state", "settings", "declines"),
    [
        (ACTIVE, {}, True),
        ("1: DOWN", {}, False),
        (ACTIVE, {"NCCL_IB_DISABLE": "1"}, False),
        (ACTIVE, {"NCCL_IB_DISABLE": "0"}, True),
        (ACTIVE, {"NCCL_IB_DISABLE": "false"}, True),  # NCCL reads a number: 0
        (ACTIVE, {"NCCL_NET": "FlowSlot"}, False),
        (ACTIVE, {"NCCL_NET": "IB"}, True),
    ],
)
def test_infiniband_is_left_alone(
    library: Path, program: Path, state: str, settings: dict[str, str], declines: bool
) -> None:
    command = ["unshare", "-m", "sh", "-c", FAKE, "sh", state, program, library, "12", "size=9"]
    done = subprocess.run(
        command, env=environment(settings), capture_output=True, text=True, timeout=60, check=False
    )
    assert ("stage=init" in done.stdout) == declines, done.stderr


ADAPTERS = """
ip link set lo up
for name in docker0 eth0 ib0; do
    number=$((number + 1))
    ip link add $name type veth peer name other$number && ip link set other$number up
    ip address add 10.9.$number.1/24 dev $name
    test $name = ib0 && test "$1" = no || ip link set $name up
done
shift && exec "$@"
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network namespace")
@pytest.mark.parametrize(("ib", "address"), [("yes", "10.9.3.1"), ("no", "10.9.2.1")])
def test_without_a_choice_interfaces_are_those_of_nccl(
    library: Path, program: Path, ib: str, address: str
) -> None:
    """IP over InfiniBand where there is any, else whatever is no container's."""
    command = ["unshare", "-n", "sh", "-c", ADAPTERS, "sh", ib, program, library, "12", "size=9"]
    settings = environment({"NCCL_SOCKET_IFNAME": "", "FLOWSLOT_TOTALS": "1"})
    done = subprocess.run(
        command, env=settings, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"({address}:" in done.stderr
