# SPDX-License-Identifier: Apache-2.0
"""`flowslot certs`: a small private CA, for those who have none."""

import contextlib
import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flowslot.model.errors import FlowslotError, why_unreadable
from flowslot.model.topology import parse_topology
from flowslot_cli.client import BAD_INPUT, CommandError
from flowslot_proto.files import read_text

CA_NAME = "flowslot private CA"
CA_DAYS = 3650
EARLIER = timedelta(hours=1)  # clocks differ
_SWITCH_USER = "flowslot-switch"  # of its systemd unit
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9_])?")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Key = ec.EllipticCurvePrivateKey


@app.callback()
def certs() -> None:
    """A private CA, and certificates for hosts and switch processes."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="where the files are made")],
    *,
    topology: Annotated[
        Path | None, typer.Option(help="all hosts and switch processes of this topology file")
    ] = None,
    hosts: Annotated[str, typer.Option(help="names of hosts, with commas between")] = "",
    switches: Annotated[str, typer.Option(help="names of switch processes")] = "",
    days: Annotated[int, typer.Option(min=1, max=CA_DAYS, help="how long they are valid")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="make certificates that are there already anew")
    ] = False,
) -> None:
    """Make a CA in FOLDER, and a certificate and key for each host and switch process.

    Once more with more names, it adds those: the CA and what is there stays, unless --renew.
    """
    wanted = _wanted(topology, hosts, switches)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, ca = _authority(folder)
        made = []
        for name, purpose in wanted.items():
            if renew or not (folder / f"{name}.pem").exists():
                _issue(folder / name, purpose, key, ca, days)
                made.append(name)
    except OSError as error:
        raise FlowslotError(f"{error.filename}: {why_unreadable(error)}") from None
    for name, purpose in wanted.items():
        state = f"made, valid for {days} days" if name in made else "was there already"
        typer.echo(f"{name}: {state}; copy ca.pem, {name}.pem and {name}.key to it, as in")
        typer.echo(f'  [tls]\n  ca = "ca.pem"\n  certificate = "{name}.pem"\n  key = "{name}.key"')
        if purpose == ExtendedKeyUsageOID.SERVER_AUTH:
            typer.echo("  and let its systemd unit's user read the key:")
            typer.echo(f"  useradd --system {_SWITCH_USER}; chown {_SWITCH_USER} {name}.key")
    typer.echo(f"Keep {folder / 'ca.key'} to yourself: whoever has it can be any host.")


def _wanted(topology: Path | None, hosts: str, switches: str) -> dict[str, x509.ObjectIdentifier]:
    """Names, and what their certificates are for."""
    named = {"hosts": _split(hosts), "switches": _split(switches)}
    if topology is not None:
        read = parse_topology(read_text(topology), str(topology))
        named["hosts"] += read.hosts
        named["switches"] += read.switches
    both = sorted({*named["hosts"]} & {*named["switches"]})
    if both:
        problem = f'"{both[0]}" is a host and a switch process: give one of them another name'
        raise CommandError(problem, BAD_INPUT)
    wanted = dict.fromkeys(named["hosts"], ExtendedKeyUsageOID.CLIENT_AUTH)
    wanted |= dict.fromkeys(named["switches"], ExtendedKeyUsageOID.SERVER_AUTH)
    if not wanted:
        raise CommandError("give --topology FILE, or --hosts and --switches", BAD_INPUT)
    for name in wanted:
        if not NAME.fullmatch(name) or name == "ca":
            problem = f'"{name}" cannot be a DNS name, which a certificate needs'
            raise CommandError(problem, BAD_INPUT)
    return wanted


def _split(names: str) -> list[str]:
    return [name for name in (part.strip() for part in names.split(",")) if name]


def _authority(folder: Path) -> tuple[Key, x509.Certificate]:
    """The CA that is in the folder, or a new one."""
    key_file, file = folder / "ca.key", folder / "ca.pem"
    if key_file.exists() != file.exists():
        there = key_file if key_file.exists() else file
        problem = f"{there} is there alone; a CA has ca.key and ca.pem: move it away, or bring both"
        raise CommandError(problem, BAD_INPUT)
    if file.exists():
        try:
            ca = x509.load_pem_x509_certificate(file.read_bytes())
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        except (ValueError, TypeError):
            raise CommandError(f"{folder}: ca.pem or ca.key is broken", BAD_INPUT) from None
        if not isinstance(key, Key) or key.public_key() != ca.public_key():
            problem = f"{key_file} is not the key of {file}, or none that we can use"
            raise CommandError(problem, BAD_INPUT)
        return key, ca
    key = ec.generate_private_key(ec.SECP256R1())
    ca = (
        _builder(CA_NAME, _called(CA_NAME), key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    _write(key_file, _pem(key), 0o600)
    _write(file, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    return key, ca


def _issue(
    file: Path,
    purpose: x509.ObjectIdentifier,
    ca_key: Key,
    ca: x509.Certificate,
    days: int,
) -> None:
    """`file`: both files' name, without its ending."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(file.name, ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(file.name)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, SHA256())
    )
    _write(file.with_name(f"{file.name}.key"), _pem(key), 0o600)
    _write(
        file.with_name(f"{file.name}.pem"),
        certificate.public_bytes(serialization.Encoding.PEM),
        0o644,
    )


def _builder(name: str, issuer: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_called(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(**given: bool) -> x509.KeyUsage:
    names: Iterable[str] = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    usage: Any = {name: given.get(name, False) for name in names}
    return x509.KeyUsage(**usage)


def _pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(file: Path, data: bytes, mode: int) -> None:
    """As a whole: whoever reads the file finds the old one or the new one."""
    scratch = file.with_name(f".{file.name}.new")
    with contextlib.suppress(FileNotFoundError):
        scratch.unlink()
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(data)
    scratch.replace(file)
