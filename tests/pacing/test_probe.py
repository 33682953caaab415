# SPDX-License-Identifier: Apache-2.0
"""What `flowslot doctor` reports."""

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
