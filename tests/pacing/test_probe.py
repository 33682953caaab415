# SPDX-License-Identifier: Apache-2.0
"""What `flowslot doctor` reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowslotd.diagnose import diagnosis, probe
from flowslotd.diagnose.probe import Finding


@pytest.mark.root
def test_all_probes_run_and_leave_nothing() -> None:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    findings = probe.probe()
    assert [f.name for f in findings if f.status != "ok" and not f.advice] == []
    assert [f.name for f in findings if f.status == "ok" and f.advice] == []
    assert len({f.name for f in findings}) == len(probe.PROBES)
    assert not [name for name in available.read_text().split() if "doctor" in name]
    status = {f.name: f.status for f in findings}
    assert status["struct_ops"] == status["pidfd_getfd"] == status["htb"] == "ok"
    assert probe.usable_backends(findings)["bpf"].status == "ok"


DOCTOR = (sys.executable, "-m", "flowslot_cli.main", "doctor", "--output", "json")


@pytest.mark.root
@pytest.mark.parametrize(
    ("wrapper", "says", "chosen"),
    [
        (("unshare", "-Urn"),
         "without CAP_PERFMON, CAP_BPF outside this user namespace", "socket"),
        (("unshare", "-Ur"),
         "without CAP_PERFMON, CAP_BPF outside this user namespace", "socket"),
        # CAP_SYS_ADMIN has these two included.
        (("setpriv", "--bounding-set", "-bpf,-perfmon"), "CAP_NET_ADMIN", "bpf"),
        (("setpriv", "--bounding-set", "-bpf,-perfmon,-sys_admin"),
         "without CAP_PERFMON, CAP_BPF", "socket"),
    ],
    ids=["user namespace", "its network is the host's", "SYS_ADMIN", "none"],
)  # fmt: skip
def test_capabilities_count_where_the_kernel_asks_for_them(
    wrapper: tuple[str, ...], says: str, chosen: str
) -> None:
    ran = subprocess.run([*wrapper, *DOCTOR], capture_output=True, text=True, check=False)
    assert "Traceback" not in ran.stderr and ran.returncode == 0
    found = json.loads(ran.stdout)
    (capabilities,) = [one for one in found["findings"] if one["name"] == "capabilities"]
    assert says in capabilities["detail"]
    works = {one["name"]: one["works"] for one in found["backends"]}
    assert (found["backend"], works["bpf"]) == (chosen, chosen == "bpf")
    assert (capabilities["status"] == "ok") == works["bpf"]


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowslotd.pace.libbpf.PLACES", (Path("/nonexistent"),))
    assert (probe.program().status, probe.struct_ops().status) == ("missing", "missing")
    assert "make -C bpf" in probe.struct_ops().detail


@pytest.mark.parametrize(
    ("release", "status"),
    [("6.18.1", "ok"), ("6.1.0-18-amd64", "warn"), ("5.15.0", "missing"), ("odd", "missing")],
)
def test_kernel_versions(monkeypatch: pytest.MonkeyPatch, release: str, status: str) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    assert probe.kernel().status == status


@pytest.mark.parametrize(
    ("wanted", "works", "backend", "words"),
    [
        ("auto", ("struct_ops", "pidfd_getfd"), "bpf", "auto tries bpf then socket."),
        ("auto", ("pidfd_getfd", "htb"), "socket", "bpf does not work (struct_ops says so)."),
        ("auto", ("edt", "htb"), "none", "socket does not work"),  # they are for somebody to choose
        ("htb", ("pidfd_getfd", "htb"), "htb", "the configuration says so"),
        ("edt", ("htb",), "none", "wants edt, which does not work: edt says so"),
        ("none", ("struct_ops",), "none", "the configuration says so"),
    ],
)
def test_a_diagnosis_says_why(
    monkeypatch: pytest.MonkeyPatch, wanted: str, works: tuple[str, ...], backend: str, words: str
) -> None:
    found_out = [
        Finding(name, "ok" if name in works else "missing", f"{name} says so")
        for name in ("struct_ops", "pidfd_getfd", "edt", "htb")
    ]
    monkeypatch.setattr("flowslotd.diagnose.diagnosis.probe", lambda: found_out)
    found = diagnosis.diagnose(wanted)
    assert found.backend == backend
    assert words in diagnosis.verdict(found)
    data = diagnosis.as_data(found)
    assert {one["name"]: one["works"] for one in data["backends"]} == {
        "bpf": "struct_ops" in works,
        "edt": "edt" in works,
        "htb": "htb" in works,
        "socket": "pidfd_getfd" in works,
    }
    for one in data["backends"]:
        assert f"  {one['name']:7} " in diagnosis.table(found)
        assert one["protocols"] and one["granularity"] and one["resume"] and one["changes"]
