# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests: what `flowslot certs init` makes, and what it would never make."""

from pathlib import Path

from cryptography import x509
from switchproc import Switch, topology
from typer.testing import CliRunner

from flowslot_cli import certs
from flowslot_cli.main import app
from flowslot_proto.grpcio import grpc


def make(folder: Path, *, hosts: str = "h1,h2", switches: str = "s1", **flags: bool) -> None:
    """A CA and certificates, or more of them."""
    options = [f"--{name}" for name, given in flags.items() if given]
    command = ["certs", "init", str(folder), "--hosts", hosts, "--switches", switches, *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


def expired(folder: Path, name: str) -> None:
    """A certificate of that CA that was good until now, in "expired"."""
    (folder / "expired").mkdir()
    ca = certs._authority(folder)
    certs._issue(folder / "expired" / name, x509.ExtendedKeyUsageOID.CLIENT_AUTH, *ca, days=0)


def section(name: str, folder: str = "") -> str:
    """`[tls]` of a configuration beside which the files lie."""
    files = {"ca": "ca.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}
    lines = (f'{field} = "{Path(folder) / file}"\n' for field, file in files.items())
    return "[tls]\n" + "".join(lines)


class TlsSwitch(Switch):
    """Its files in `folder`, as h1's and h2's are; "other" there has another CA's."""

    def __init__(self, folder: Path, slot_ms: float = 1000, lease_slots: int = 100) -> None:
        super().__init__(folder)
        self.folder = folder
        self.topology.write_text(topology(self.port, strict=True))
        make(folder)
        (folder / "other").mkdir()
        make(folder / "other")
        expired(folder, "h1")
        arbiter = f"[arbiter]\nslot_ms = {slot_ms}\nlease_slots = {lease_slots}\n"
        self.configure(section("s1") + arbiter)

    def channel(self, name: str = "h1", ca: str = "", target: str = "s1") -> grpc.Channel:
        """As the holder of that certificate; "": of none."""
        key, own = ((self.folder / f"{name}.{end}") for end in ("key", "pem"))
        credentials = grpc.ssl_channel_credentials(
            (self.folder / ca / "ca.pem").read_bytes(),
            key.read_bytes() if name else None,
            own.read_bytes() if name else None,
        )
        options = [
            ("grpc.ssl_target_name_override", target),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 100),
        ]
        return grpc.secure_channel(self.address, credentials, options=options)
