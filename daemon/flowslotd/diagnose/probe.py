# SPDX-License-Identifier: Apache-2.0
"""What this host's kernel and tools offer for pacing: the facts behind `flowslot doctor`.

Each probe tries the real thing where that leaves no trace, and says in one sentence what to do
about what is missing.
"""

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from flowslotd.pace.attached import AttachedPacer
from flowslotd.pace.bpf import OBJECT, BpfPacer
from flowslotd.pace.devices import qdisc_trial
from flowslotd.pace.edt import EdtPacer
from flowslotd.pace.htb import HtbPacer
from flowslotd.pace.libbpf import built, library
from flowslotd.pace.pacer import PacingError
from flowslotd.pace.sockopt import SocketPacer
from flowslotd.privileges import in_user_namespace, lacking

Status = Literal["ok", "warn", "missing"]

CAPABILITIES = ("CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_PERFMON", "CAP_BPF")
"""That pacing takes; watching jobs that do not register takes another one (passive/finder.py)."""
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    name: str
    status: Status
    """`missing`: something does not work; `warn`: only less well, or only in some cases."""
    detail: str
    advice: str = ""
    """One sentence; empty when all is well."""


def probe() -> list[Finding]:
    """All probes, in the order to read them. Takes some tenths of a second, and leaves only the
    modules that the kernel has loaded for it."""
    return [run() for run in PROBES]


def usable_backends(findings: list[Finding]) -> dict[str, Finding]:
    """For each back end, the finding that says whether it works here."""
    found = {finding.name: finding for finding in findings}
    deciding = {"bpf": "struct_ops", "edt": "edt", "htb": "htb", "socket": "pidfd_getfd"}
    return {backend: found[name] for backend, name in deciding.items()}


def kernel() -> Finding:
    """Version of the kernel."""
    release = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version >= (6, 4):
        return Finding("kernel", "ok", release)
    if version >= (6, 1):
        advice = (
            "Works, but a guardian process has to unregister the congestion control of a killed "
            "daemon; from Linux 6.4 on the kernel does."
        )
        return Finding("kernel", "warn", release, advice)
    return Finding("kernel", "missing", release, "Use Linux 6.1 or newer, better 6.4.")


def btf() -> Finding:
    """The kernel's own types, which CO-RE needs."""
    path = Path("/sys/kernel/btf/vmlinux")
    if path.exists():
        return Finding("btf", "ok", str(path))
    advice = "Use a kernel built with CONFIG_DEBUG_INFO_BTF, as distributions' kernels are."
    return Finding("btf", "missing", f"no {path}", advice)


def capabilities() -> Finding:
    """What this process may do."""
    absent = lacking(CAPABILITIES)
    if not absent:
        return Finding("capabilities", "ok", ", ".join(CAPABILITIES))
    detail = f"without {', '.join(absent)}"
    if in_user_namespace():
        advice = "Run flowslotd on the host, or in a container that is not rootless."
        return Finding("capabilities", "missing", f"{detail} outside this user namespace", advice)
    advice = "Run as root or grant them (AmbientCapabilities= in the systemd unit)."
    return Finding("capabilities", "missing", detail, advice)


def libbpf() -> Finding:
    """The library that loads BPF programs."""
    try:
        library()
    except (OSError, AttributeError) as error:
        return Finding("libbpf", "missing", str(error), "Install libbpf 1.1 or newer: libbpf1.")
    return Finding("libbpf", "ok", "libbpf.so.1")


def program() -> Finding:
    """The compiled congestion control."""
    file = built(OBJECT)
    if file is not None:
        return Finding("bpf program", "ok", str(file))
    return Finding("bpf program", "missing", "not built", "Build it: make -C bpf.")


def build_tools() -> Finding:
    """What building the program takes."""
    absent = [tool for tool in ("clang", "bpftool", "make") if _tool(tool) is None]
    if not absent:
        return Finding("build tools", "ok", "clang, bpftool, make")
    advice = f"Only needed to build the BPF program: install {', '.join(absent)}."
    status: Status = "warn" if built(OBJECT) else "missing"
    return Finding("build tools", status, f"without {', '.join(absent)}", advice)


def struct_ops() -> Finding:
    """Loads and registers our congestion control, and removes it again."""
    pacer = BpfPacer("doctor", slots=64)
    try:
        pacer.open()
        registered = pacer.congestion_control in _AVAILABLE.read_text().split()
    except PacingError as error:
        advice = "Without it flows are paced by SO_MAX_PACING_RATE: no top-up, slower to resume."
        return Finding("struct_ops", "missing", str(error), advice)
    finally:
        pacer.close()
    if pacer.congestion_control in _AVAILABLE.read_text().split():
        return Finding("struct_ops", "warn", "did not unregister", "Please report this.")
    if not registered:
        return Finding("struct_ops", "missing", "loads, does not register", "Please report this.")
    return Finding("struct_ops", "ok", "our congestion control loads and registers")


def opens(name: str, make: Callable[[], AttachedPacer], works: str, advice: str) -> Finding:
    """Whether a back end that changes nothing before it has flows can be opened."""
    pacer = make()
    try:
        pacer.open()
    except (PacingError, OSError) as error:
        return Finding(name, "warn" if pacer.qdiscs else "missing", str(error), advice)
    finally:
        pacer.close()
    if pacer.qdiscs and qdisc_trial(*pacer.qdiscs) is None:
        works += f", if the kernel has {' and '.join(pacer.qdiscs)}: only root can try that"
    return Finding(name, "ok", works)


def congestion_controls() -> Finding:
    """What the kernel offers besides ours."""
    found = _AVAILABLE.read_text().split()
    if "cubic" in found:
        return Finding("congestion controls", "ok", " ".join(found))
    advice = "Only a baseline of measurements is missing: modprobe tcp_cubic."
    return Finding("congestion controls", "warn", " ".join(found), advice)


def _tool(name: str) -> str | None:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where Debian keeps bpftool and tc
    return shutil.which(name, path=path)


PROBES: tuple[Callable[[], Finding], ...] = (
    kernel,
    btf,
    capabilities,
    libbpf,
    program,
    build_tools,
    struct_ops,
    partial(
        opens,
        "pidfd_getfd",
        partial(SocketPacer, sysctls=False),
        "sockets of other processes can be reached",
        "Needs Linux 5.6 and, for other users' processes, CAP_SYS_PTRACE.",
    ),
    partial(
        opens,
        "edt",
        partial(EdtPacer, sysctls=False),
        "departure times can be set at clsact and kept by fq",
        "Only pacing.backend = edt is not to be had; it needs sch_fq and sch_ingress.",
    ),
    partial(
        opens,
        "htb",
        HtbPacer,
        "flows can have classes of HTB",
        "Only pacing.backend = htb and the lab are not to be had: they need sch_htb, sch_tbf.",
    ),
    congestion_controls,
)
