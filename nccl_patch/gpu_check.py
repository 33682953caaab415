# SPDX-License-Identifier: Apache-2.0
"""The plugin in stock NCCL on a real GPU: all-reduces of two ranks, and NCCL's own sockets beside.

    python3 nccl_patch/gpu_check.py [--nccl PATH/libnccl.so.2] [--mebibytes 256] [--rounds 20]

Needs a GPU and its driver, gcc and make, and a libnccl.so.2: of --nccl, of an installed package
nvidia-nccl-cu12 or -cu13, or where the linker finds one. Nothing else: this file plays the daemon,
too. Without a GPU it says so, and ends with 0.

Both ranks use the first GPU. NCCL refuses that on one host, so each names itself another
(NCCL_HOSTID). So they have no memory to share, either; P2P and shared memory are switched off all
the same. What is measured is of two processes that take turns on a GPU.

Ring and Simple are fixed: then an all-reduce of n bytes sends 2n, over both ranks, to the byte.
"""

import argparse
import array
import ctypes
import importlib.util
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLUGIN = HERE.parent / "build" / "nccl" / "libnccl-net-flowslot.so"
SOCKETS = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
    "FLOWSLOT_JOB": "gpu-check",
} | SOCKETS
VERIFIED = (4, 4_000, 4_000_000)
"""Bytes of all-reduces that come before the large one."""
LIMIT = 180.0
"""s, for one pair of ranks."""
PERIOD = 65_521
INT32, SUM = 2, 0


class Failed(Exception):
    """What went wrong, for whoever runs this."""


# ---- CUDA's driver and NCCL ----------------------------------------------------------------------


class Cuda:
    """The first GPU, through its driver. `absent`: why there is none."""

    def __init__(self) -> None:
        self.absent = ""
        count = ctypes.c_int()
        try:
            self.driver = ctypes.CDLL("libcuda.so.1")
        except OSError as problem:
            self.absent = str(problem)
            return
        code = self.driver.cuInit(0) or self.driver.cuDeviceGetCount(ctypes.byref(count))
        if code != 0 or count.value == 0:
            self.absent = f"the driver says {code}, {count.value} devices"

    def call(self, name: str, *arguments: Any) -> None:
        """Raises Failed unless the function says 0."""
        code = getattr(self.driver, name)(*arguments)
        if code != 0:
            raise Failed(f"{name}: CUDA error {code}")

    def name(self) -> str:
        """Of the GPU."""
        text, device = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDeviceGetName", text, 100, device)
        return text.value.decode()

    def enter(self) -> ctypes.c_void_p:
        """A stream in the context that NCCL uses, too."""
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def allocate(self, size: int) -> ctypes.c_uint64:
        """The address of so many bytes on the GPU."""
        memory = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        return memory


class UniqueId(ctypes.Structure):
    """How the ranks of a communicator find each other."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Nccl:
    """The library."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.ncclCommInitRank.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
        ]
        self.library.ncclAllReduce.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self.library.ncclCommDestroy.argtypes = [ctypes.c_void_p]

    def call(self, name: str, *arguments: Any) -> None:
        """Raises Failed unless the function says 0."""
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise Failed(f"{name}: NCCL error {code}")

    def version(self) -> str:
        """As in 2.27.3."""
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        major, rest = divmod(number.value, 10_000)
        return f"{major}.{rest // 100}.{rest % 100}"


def find_nccl() -> str:
    """The library of an installed package, or its name for the linker."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for library in Path(folder).glob("nccl/lib/libnccl.so.2"):
            return str(library)
    return "libnccl.so.2"


# ---- A rank --------------------------------------------------------------------------------------


def said() -> str:
    """What this file's main process says to this rank."""
    return sys.stdin.readline().strip()


def say(**values: Any) -> None:
    """To the main process."""
    print("rank: " + json.dumps(values), flush=True)


def pattern(size: int, factor: int) -> bytes:
    """Numbers of 32 bits, of which no two near each other are the same."""
    period = array.array("I", (i * factor for i in range(PERIOD))).tobytes()
    return (period * (size // len(period) + 1))[:size]


def rank_main(rank: int, nccl_path: str, plugin: str, largest: int, rounds: int) -> None:
    """One rank. `plugin`: its path, where it is used; `largest`: bytes."""
    cuda, nccl = Cuda(), Nccl(nccl_path)
    stream = cuda.enter()
    identity = UniqueId()
    if rank == 0:
        nccl.call("ncclGetUniqueId", ctypes.byref(identity))
        say(id=bytes(identity).hex())
    else:
        identity = UniqueId.from_buffer_copy(bytes.fromhex(said()))
    comm = ctypes.c_void_p()
    nccl.call("ncclCommInitRank", ctypes.byref(comm), 2, identity, rank)
    if plugin:  # all that follows is one iteration: the record counts up
        ctypes.CDLL(plugin).flowslot_iteration(ctypes.c_uint64(0))
    here, there = cuda.allocate(largest), cuda.allocate(largest)

    def reduce(size: int) -> None:
        nccl.call("ncclAllReduce", here, there, size // 4, INT32, SUM, comm, stream)

    for size in (*VERIFIED, largest):
        got = ctypes.create_string_buffer(size)
        cuda.call("cuMemcpyHtoD_v2", here, pattern(size, 1 + 2 * rank), ctypes.c_size_t(size))
        cuda.call("cuMemsetD8_v2", there, ctypes.c_ubyte(0xA5), ctypes.c_size_t(size))
        cuda.call("cuCtxSynchronize")  # the stream waits for neither
        reduce(size)
        cuda.call("cuStreamSynchronize", stream)
        cuda.call("cuMemcpyDtoH_v2", got, there, ctypes.c_size_t(size))
        if got.raw != pattern(size, 1 + 3):
            raise Failed(f"rank {rank}: an all-reduce of {size} bytes has a wrong sum")
    begin = time.monotonic()
    for _ in range(rounds):
        reduce(largest)
    cuda.call("cuStreamSynchronize", stream)
    say(seconds=time.monotonic() - begin)
    said()  # until the record has been read
    nccl.call("ncclCommDestroy", comm)


# ---- The daemon's part ---------------------------------------------------------------------------


class Registrar:
    """Accepts records, and reads them as the daemon does; see shm/flowslot_shm.h."""

    def __init__(self, path: str) -> None:
        self.records: list[mmap.mmap] = []
        self._held: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(path)
        self._listening.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                _, fds, _, _ = socket.recv_fds(client, 256, 1)
            except OSError:
                return
            self.records.append(mmap.mmap(fds[0], 0, prot=mmap.PROT_READ))
            client.send(struct.pack("=8sHHi16s232s", b"flowslot", 1, 2, 0, b"", b""))
            self._held.append(client)

    def flows(self) -> list[dict[str, int]]:
        """Those that send."""
        found = []
        for record in self.records:
            for at in range(64, len(record), 256):
                state, role = struct.unpack_from("=HH", record, at + 4)
                rank, peer = struct.unpack_from("=ii", record, at + 88)
                ready, posted, done = struct.unpack_from("=QQQ", record, at + 112)
                if state != 0 and role != 4:
                    values = {"rank": rank, "peer": peer, "ready": ready, "posted": posted}
                    found.append(values | {"done": done})
        return found

    def close(self) -> None:
        """No more of them."""
        self._listening.close()


def check_record(registrar: Registrar, expected: int, seconds: float = 5.0) -> None:
    """What the two ranks' records say is what they had to send, once it has been written."""
    end = time.monotonic() + seconds
    while True:
        flows = registrar.flows()
        sums = {name: sum(flow[name] for flow in flows) for name in ("ready", "posted", "done")}
        pairs = {(flow["rank"], flow["peer"]) for flow in flows if flow["posted"]}
        if set(sums.values()) == {expected} and pairs == {(0, 1), (1, 0)}:
            return
        if time.monotonic() > end:
            raise Failed(f"expected {expected} bytes of ranks 0 and 1, records say {sums}, {pairs}")
        time.sleep(0.01)


# ---- Both ranks ----------------------------------------------------------------------------------


class Rank:
    """A process."""

    def __init__(self, rank: int, environment: dict[str, str], arguments: list[str]) -> None:
        command = [sys.executable, __file__, "--rank", str(rank), *arguments]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "FLOWSLOT_"))}
        more = {"NCCL_HOSTID": f"gpu-check-{rank}"}
        self.process = subprocess.Popen(
            command,
            env=clean | environment | more,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def hear(self) -> Any:
        """What the rank says next."""
        other: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("rank: "):
                return json.loads(line.removeprefix("rank: "))
            other.append(line)
        raise Failed("a rank ended early:\n" + "".join(other[-25:]))

    def tell(self, text: str = "") -> None:
        """A line."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Raises Failed when the process failed."""
        out, _ = self.process.communicate("\n", timeout=LIMIT)
        if self.process.returncode != 0:
            raise Failed("a rank failed when it ended:\n" + out[-2000:])


def measure(nccl: str, plugin: bool, largest: int, rounds: int) -> float:
    """Bytes a second that one rank sends. `plugin`: through ours."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/register.sock"
        registrar = Registrar(path)
        environment = ENVIRONMENT | {"FLOWSLOT_SOCKET": path}
        environment |= {"NCCL_DEBUG_FILE": f"{folder}/log.%p"}
        if plugin:
            paths = f"{PLUGIN.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
            environment |= {"NCCL_NET": "flowslot", "NCCL_NET_PLUGIN": "flowslot"}
            environment |= {"LD_LIBRARY_PATH": paths}
        else:
            environment |= {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
        arguments = ["--nccl", nccl, "--bytes", str(largest), "--rounds", str(rounds)]
        arguments += ["--plugin", str(PLUGIN)] if plugin else []
        ranks = [Rank(i, environment, arguments) for i in range(2)]
        late = threading.Timer(LIMIT, lambda: [rank.process.kill() for rank in ranks])
        late.start()
        try:
            ranks[1].tell(ranks[0].hear()["id"])
            seconds = max(rank.hear()["seconds"] for rank in ranks)
            if plugin:
                check_record(registrar, 2 * (sum(VERIFIED) + largest * (rounds + 1)))
            elif registrar.records:
                raise Failed("NCCL's own sockets registered: the plugin was used for them, too")
            for rank in ranks:
                rank.tell()
            for rank in ranks:
                rank.end()
        except (Failed, OSError, subprocess.SubprocessError) as problem:
            logs = [log.read_text(errors="replace") for log in Path(folder).glob("log.*")]
            raise Failed("\n".join([str(problem), *(log[-3000:] for log in logs)])) from problem
        finally:
            late.cancel()
            registrar.close()
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
        return largest * rounds / seconds


def main() -> int:
    """0: passed, or skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nccl", default=find_nccl(), help="libnccl.so.2")
    parser.add_argument("--mebibytes", type=int, default=256, help="of the largest all-reduce")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plugin", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mebibytes < 1 or options.rounds < 1:
        parser.error("--mebibytes and --rounds: at least 1")
    if options.rank is not None:
        rank_main(options.rank, options.nccl, options.plugin, options.bytes, options.rounds)
        return 0
    cuda = Cuda()
    if cuda.absent:
        print(f"gpu-check: skipped, there is no GPU: {cuda.absent}")
        return 0
    subprocess.run(["make", "-s", "-C", str(HERE / "plugin")], check=True)
    try:
        version, largest = Nccl(options.nccl).version(), options.mebibytes << 20
        rates = {
            name: measure(options.nccl, plugin, largest, options.rounds)
            for name, plugin in (("flowslot", True), ("Socket", False))
        }
    except (Failed, OSError) as problem:
        print(f"gpu-check: failed: {problem}", file=sys.stderr)
        return 1
    print(
        f"gpu-check: passed, {time.strftime('%Y-%m-%d')}, NCCL {version}, {cuda.name()}: "
        f"sums right, records right to the byte; {options.rounds} all-reduces of "
        f"{options.mebibytes} MiB, 4 sockets: {rates['flowslot'] / 1e6:.0f} MB/s, "
        f"NCCL's own {rates['Socket'] / 1e6:.0f} MB/s, "
        f"ratio {rates['flowslot'] / rates['Socket']:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
