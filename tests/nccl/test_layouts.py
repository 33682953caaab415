# SPDX-License-Identifier: Apache-2.0
"""The layouts that our libraries for NCCL are built on are those of stock NCCL."""

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nccl_profiler
import pytest
from nccl_wheels import NEWEST, Stock, stock

ROOT = Path(__file__).parents[2]
PROFILER = ROOT / "nccl_patch" / "profiler"
NET_LAYOUTS = ROOT / "nccl_patch" / "plugin" / "layouts.h"

NET_ORDER = [
    "name",
    "init",
    "devices",
    "getProperties",
    "listen",
    "connect",
    "accept",
    "regMr",
    "regMrDmaBuf",
    "deregMr",
    "isend",
    "irecv",
    "iflush",
    "test",
    "closeSend",
    "closeRecv",
    "closeListen",
    "getDeviceMr",
    "irecvConsumed",
    "makeVDevice",
    "finalize",
    "setNetAttr",
]
OURS = dict(
    zip(
        NET_ORDER[3:],
        [
            "properties",
            "listen",
            "connect",
            "accept",
            "register_memory",
            "register_dmabuf",
            "deregister_memory",
            "send",
            "receive",
            "flush",
            "test",
            "close_send",
            "close_receive",
            "close_listen",
            "device_memory",
            "consumed",
            "make_device",
            "finalize",
            "set_attributes",
        ],
        strict=True,
    )
)
NET = {5: (128, 48), 6: (136, 48), 7: (152, 56), 8: (152, 64), 9: (160, 104), 10: (160, 104)}
NET |= {11: (176, 112), 12: (176, 128)}
"""By version: bytes of the table and of a device's properties."""
PROPERTIES = {
    6: {"name": 0, "pciPath": 8, "guid": 16, "ptrSupport": 24, "speed": 28, "port": 32}
    | {"latency": 36, "maxComms": 40, "maxRecvs": 44},
}
PROPERTIES[5] = PROPERTIES[6]
PROPERTIES[7] = PROPERTIES[6] | {"netDeviceType": 48, "netDeviceVersion": 52}
PROPERTIES[8] = (
    {"name": 0, "pciPath": 8, "guid": 16, "ptrSupport": 24, "regIsGlobal": 28}
    | {"speed": 32, "port": 36, "latency": 40, "maxComms": 44, "maxRecvs": 48}
    | {"netDeviceType": 52, "netDeviceVersion": 56}
)
PROPERTIES[9] = PROPERTIES[10] = (
    {"name": 0, "pciPath": 8, "guid": 16, "ptrSupport": 24, "regIsGlobal": 28}
    | {"forceFlush": 32, "speed": 36, "port": 40, "latency": 44, "maxComms": 48, "maxRecvs": 52}
    | {"netDeviceType": 56, "netDeviceVersion": 60, "vProps": 64}
    | {"maxP2pBytes": 88, "maxCollBytes": 96}
)
PROPERTIES[11] = PROPERTIES[9] | {"maxMultiRequestSize": 104}
PROPERTIES[12] = (
    PROPERTIES[11]
    | {"maxP2pBytes": 104, "maxCollBytes": 112, "maxMultiRequestSize": 120}
    | {"railId": 124, "planeId": 126}
)
OUR_PROPERTIES = {
    "forceFlush": "force_flush",
    "vProps": "parts",
    "maxP2pBytes": "max_p2p_bytes",
    "maxCollBytes": "max_collective_bytes",
    "maxMultiRequestSize": "max_multi_request",
    "railId": "rail",
    "planeId": "plane",
    "name": "name",
    "pciPath": "pci_path",
    "guid": "guid",
    "ptrSupport": "memory",
    "regIsGlobal": "registration_is_global",
    "speed": "speed",
    "port": "port",
    "latency": "latency",
    "maxComms": "max_comms",
    "maxRecvs": "max_receives",
    "netDeviceType": "device_type",
    "netDeviceVersion": "device_version",
}

# What wheels leave out, as far as nccl_net.h needs it.
STUBS = {
    "cuda_runtime.h": "typedef void *cudaStream_t;",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "nccl_common.h": "typedef void (*ncclDebugLogger_t)(int, unsigned long, const char *, int, "
    "const char *, ...);",
    "net_device.h": "typedef enum { NCCL_NET_DEVICE_HOST } ncclNetDeviceType;"
    "typedef struct ncclNetDeviceHandle ncclNetDeviceHandle_t, ncclNetDeviceHandle_v7_t, "
    "ncclNetDeviceHandle_v8_t;",
}


def compiled(folder: Path, source: str, *include: Path) -> str:
    """What a C program says."""
    (folder / "it.c").write_text(source)
    command = ["gcc", "-std=c11", "-o", str(folder / "it"), str(folder / "it.c")]
    command += [f"-I{path}" for path in include]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return subprocess.run([folder / "it"], check=True, capture_output=True, text=True).stdout


# ---- Our profiler's ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(1, 7))
def test_profiler_events_are_laid_out_as_declared_independently(
    tmp_path: Path, version: int
) -> None:
    kinds = {1: "event_1", 2: "event_2", 3: "event_2", 4: "event_4", 5: "event_5", 6: "event_5"}
    theirs = nccl_profiler.EVENTS[version]
    fields = {
        "head.parent": theirs.parent.offset,
        "head.rank": theirs.rank.offset,
    }
    for part in ("collective", "p2p", "op"):
        inner = getattr(nccl_profiler, part.upper())[version]
        for name, _ in inner._fields_:
            if name in nccl_profiler.READ[part]:
                fields[f"{part}.{name}"] = theirs.of.offset + getattr(inner, name).offset
    lines = [
        f'printf("{name} %zu\\n", offsetof(struct {kinds[version]}, {name}));' for name in fields
    ]
    text = (
        '#include <stdio.h>\n#include "layouts.h"\nint main(void) {'
        + "".join(lines)
        + f'printf("size %zu table %zu\\n", event_size[{version}], sizeof(struct profiler));}}'
    )
    said = compiled(tmp_path, text, PROFILER).splitlines()
    assert dict(line.split() for line in said[:-1]) == {k: str(v) for k, v in fields.items()}
    assert said[-1] == f"size {ctypes.sizeof(theirs)} table 48"


# ---- Network plugins: headers --------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.19.3", "2.21.5", "2.23.4"])
def test_network_tables_are_those_of_stock_headers(tmp_path: Path, version: str) -> None:
    found = stock(version)
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text + "\n")
    header = (found.include / "nccl_net.h").read_text()
    there = sorted({int(n) for n in re.findall(r"\} ncclNet_v(\d)_t;", header)})
    assert there == ([5, 6, 7] if version == "2.19.3" else [5, 6, 7, 8])
    prints, wanted = [], []
    for n in there:
        properties = 6 if n == 5 else n
        order = [name for name in NET_ORDER if n != 5 or name != "regMrDmaBuf"]
        order = order[: NET[n][0] // 8]
        prints += [f'printf("v{n} %zu %zu\\n", sizeof(ncclNet_v{n}_t), '
                   f"sizeof(ncclNetProperties_v{properties}_t));"]  # fmt: skip
        wanted += [f"v{n} {NET[n][0]} {NET[n][1]}"]
        for i, name in enumerate(order):
            prints += [f'printf("v{n} {name} %zu\\n", offsetof(ncclNet_v{n}_t, {name}));']
            wanted += [f"v{n} {name} {8 * i}"]
        for name, at in PROPERTIES[n].items():
            where = f"offsetof(ncclNetProperties_v{properties}_t, {name})"
            prints += [f'printf("v{n} {name} %zu\\n", {where});']
            wanted += [f"v{n} {name} {at}"]
    head = ["#include <stdio.h>", "#include <stddef.h>", '#include "nccl_net.h"']
    text = "\n".join([*head, "int main(void) {", *prints, "}"])
    said = compiled(tmp_path, text, tmp_path, found.include).splitlines()
    assert said == wanted


@pytest.mark.parametrize("n", range(6, 13))
def test_our_network_tables_have_the_same_offsets(tmp_path: Path, n: int) -> None:
    order = NET_ORDER[: NET[n][0] // 8]
    table, properties = f"struct net_table_v{n}", f"struct net_properties_v{9 if n == 10 else n}"
    prints = [f'printf("%zu %zu\\n", sizeof({table}), sizeof({properties}));']
    wanted = ["{} {}".format(*NET[n])]
    for i, name in enumerate(order):
        prints += [f'printf("{name} %zu\\n", offsetof({table}, {OURS.get(name, name)}));']
        wanted += [f"{name} {8 * i}"]
    for name, at in PROPERTIES[n].items():
        prints += [f'printf("{name} %zu\\n", offsetof({properties}, {OUR_PROPERTIES[name]}));']
        wanted += [f"{name} {at}"]
    text = "\n".join(
        ["#include <stdio.h>", '#include "layouts.h"', "int main(void) {", *prints, "}"]
    )
    assert compiled(tmp_path, text, NET_LAYOUTS.parent).splitlines() == wanted


# ---- What stock libraries look for ---------------------------------------------------------------

LOOKED_FOR = {
    "2.19.3": (range(5, 8), range(0)),
    "2.20.5": (range(5, 9), range(0)),
    "2.21.5": (range(5, 9), range(0)),
    "2.23.4": (range(5, 9), range(1, 2)),
    NEWEST: (range(6, 13), range(1, 8)),
}
"""By version: of network plugins, and of profilers."""


@pytest.mark.parametrize("version", LOOKED_FOR)
def test_stock_libraries_look_for_these_versions(version: str) -> None:
    with (
        stock(version).library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        for symbol, versions in zip(("ncclNetPlugin", "ncclProfiler"), LOOKED_FOR[version],
                                    strict=True):  # fmt: skip
            found = [n for n in range(1, 16) if text.find(f"\0{symbol}_v{n}\0".encode()) >= 0]
            assert [n for n in found if n > 4 or symbol == "ncclProfiler"] == list(versions)


# ---- A plugin in stock libraries -----------------------------------------------------------------

STUB = """
static int init(void *log) { return log == 0; }
const struct { const char *name; void *functions[40]; }
"""
ASK = """
import ctypes, sys
nccl = ctypes.CDLL(sys.argv[1])
print(nccl.ncclGetUniqueId(ctypes.create_string_buffer(128)))
print(open("/proc/self/maps").read())
"""


def loaded(found: Stock, folder: Path, name: str) -> tuple[bool, str]:
    """Whether stock NCCL keeps the plugin of that name mapped, and what it logs."""
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder),
        "NCCL_NET_PLUGIN": name,
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-c", ASK, str(found.library)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert "0" in lines, done.stdout[:2000]
    log = "\n".join(line for line in lines if "NCCL" in line)
    return any(line.endswith(f"/libnccl-net-{name}.so") for line in lines), log


@pytest.mark.parametrize("version", ["2.19.3", "2.20.5", "2.21.5"])
def test_stock_libraries_load_the_plugin(tmp_path: Path, library: Path, version: str) -> None:
    found = stock(version)
    shutil.copy(library, tmp_path)
    newest = max(LOOKED_FOR[version][0])
    is_there, log = loaded(found, tmp_path, "flowslot")
    assert is_there, log
    assert f"Failed to find ncclNetPlugin_v{newest}" not in log


@pytest.mark.parametrize("version", ["2.19.3", "2.20.5", "2.21.5"])
def test_stock_libraries_load_the_newest_table_only_of_those_they_know(
    tmp_path: Path, version: str
) -> None:
    """The same with tables of our own: that it can be seen which one is not found."""
    found = stock(version)
    newest = max(LOOKED_FOR[version][0])
    for name, n in (("new", newest), ("unknown", newest + 5)):
        source = tmp_path / f"{name}.c"
        source.write_text(f'{STUB} ncclNetPlugin_v{n} = {{"{name}", {{init}}}};\n')
        library = tmp_path / f"libnccl-net-{name}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    is_there, log = loaded(found, tmp_path, "new")
    assert is_there and "Failed to find ncclNetPlugin_v" not in log
    is_there, log = loaded(found, tmp_path, "unknown")
    assert not is_there and f"Failed to find ncclNetPlugin_v{newest}" in log
