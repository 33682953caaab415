# SPDX-License-Identifier: Apache-2.0
"""What `flowslot doctor` reports."""

import sys
from pathlib import Path

import pytest

from flowslotd import probe
from flowslotd.probe import Finding


@pytest.mark.root
def test_all_probes_run_and_leave_nothing() -> None:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    findings = probe.probe()
    assert [f.name for f in findings if f.status != "ok" and not f.advice] == []
    assert [f.name for f in findings if f.status == "ok" and f.advice] == []
    assert len({f.name for f in findings}) == len(probe.PROBES)
    assert not [name for name in available.read_text().split() if "doctor" in name]
    status = {f.name: f.status for f in findings}
    assert status["struct_ops"] == status["pidfd_getfd"] == status["sch_htb"] == "ok"
    assert probe.usable_backend(findings) == "bpf"


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowslotd.pacing.libbpf.PLACES", (Path("/nonexistent"),))
    assert (probe.program().status, probe.struct_ops().status) == ("missing", "missing")
    assert "make -C bpf" in probe.struct_ops().detail


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.nghttp2().status == "ok"
    monkeypatch.setitem(sys.modules, "flowslot_rpc.http2", None)
    finding = probe.nghttp2()
    assert finding.status == "missing"
    assert "libnghttp2-14" in finding.advice and "1.52.0-1+deb12u1" in finding.advice


@pytest.mark.parametrize(
    ("release", "status"),
    [("6.18.1", "ok"), ("6.1.0-18-amd64", "warn"), ("5.15.0", "missing"), ("odd", "missing")],
)
def test_kernel_versions(monkeypatch: pytest.MonkeyPatch, release: str, status: str) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    assert probe.kernel().status == status


def test_the_back_end_follows_from_the_findings() -> None:
    def chosen(bpf: probe.Status, sockets: probe.Status) -> str:
        findings = [Finding("struct_ops", bpf, ""), Finding("pidfd_getfd", sockets, "")]
        return probe.usable_backend(findings)

    assert chosen("ok", "ok") == "bpf"
    assert chosen("missing", "ok") == "socket"
    assert chosen("missing", "missing") == "none"
