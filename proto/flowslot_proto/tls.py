# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS between daemons and switch processes: the section `[tls]` of both configurations, and
the files it names, which are read again when they change.

A certificate is for one host or one switch process: its DNS name (SAN) is the name in the topology.
Nothing here imports gRPC, and `cryptography` only where there are files.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from flowslot.model.errors import ConfigError, why_unreadable
from flowslot.model.settings import PathText, Settings
from flowslot_proto.endpoints import is_loopback

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

FIELDS = ("ca", "certificate", "key")
SOON = timedelta(days=30)
"""A certificate that ends so soon is a warning."""

_log = logging.getLogger(__name__)


class TlsSettings(Settings):
    """Section `[tls]`: paths of PEM files, from the configuration's folder on.

    `ca`: whom to trust, one certificate or several. `certificate`: ours, with what leads to that
    CA. `insecure`: plaintext over a network, where anybody may pretend to be any host.
    """

    ca: PathText | None = None
    certificate: PathText | None = None
    key: PathText | None = None
    insecure: bool = False

    def check(self, source: str, addresses: Iterable[str]) -> None:
        """Whether it may be so, for connections at these addresses ("host:port").

        Raises ConfigError.
        """
        given = [field for field in FIELDS if getattr(self, field) is not None]
        missing = [field for field in FIELDS if field not in given]
        if given and self.insecure:
            problem = f"must not be true together with tls.{given[0]}: choose one"
            raise ConfigError(source, "tls.insecure", problem)
        if given and missing:
            problem = f"is required but missing, because there is tls.{given[0]}"
            raise ConfigError(source, f"tls.{missing[0]}", problem)
        far = [address for address in addresses if not is_loopback(address)]
        if far and not given and not self.insecure:
            problem = (
                f"{far[0]} is reached over a network: give ca, certificate and key "
                "(`flowslot certs init` makes them), or insecure = true"
            )
            raise ConfigError(source, "tls", problem)

    def mode(self) -> str:
        """ "mutual", "insecure" or "loopback"."""
        return "mutual" if self.ca else "insecure" if self.insecure else "loopback"


@dataclass(frozen=True, slots=True)
class Material:
    """The three files as they were read at one moment, and found to fit together."""

    ca: bytes
    certificate: bytes
    key: bytes
    names: tuple[str, ...]
    begins: datetime
    ends: datetime
    issued_here: bool
    """The certificate is from a CA in `ca`, or from one that is in its own file."""

    def doubt(self, now: datetime) -> str:
        """Why others would not accept our certificate, as far as can be told here; or ""."""
        if now >= self.ends:
            return f"this certificate has expired on {self.ends:%Y-%m-%d %H:%M} UTC"
        if now < self.begins:
            return f"this certificate is not valid before {self.begins:%Y-%m-%d %H:%M} UTC"
        return "" if self.issued_here else "this certificate is not from a CA in tls.ca"


class TlsFiles:
    """Reads the files; broken or half-written ones leave the last good ones in force."""

    def __init__(self, settings: TlsSettings, source: str, folder: Path, name: str) -> None:
        """`name`: whose certificate it must be. Reads; raises ConfigError."""
        self.error = ""
        self._source, self._name = source, name
        self._paths = {field: folder / str(getattr(settings, field)) for field in FIELDS}
        self._lock = threading.Lock()
        self._seen = self._state()
        self._good = self._read()

    def current(self) -> Material:
        """The last good ones; looks whether the files have changed. In any thread."""
        with self._lock:
            seen = self._state()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._good = self._read()
                    self.error = ""
                    _log.info("TLS: took over the changed files")
                except ConfigError as error:
                    self.error = str(error)
                    _log.error("TLS: going on with the files as they were: %s", error)
            return self._good

    def describe(self, now: datetime) -> dict[str, str]:
        """For `flowslot status`."""
        good = self.current()
        return {
            "certificate": ", ".join(good.names),
            "ends": f"{good.ends:%Y-%m-%d}",
            "error": self.error or good.doubt(now),
        }

    def _state(self) -> tuple[object, ...]:
        return tuple(_stat(path) for path in self._paths.values())

    def _read(self) -> Material:
        from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
            load_pem_private_key,
        )

        ca, own, key = (self._bytes(field) for field in FIELDS)
        trusted = self._certificates("ca", ca)
        chain = self._certificates("certificate", own)
        with self._understood("key", "holds no private key in PEM without a password"):
            private = load_pem_private_key(key, None).public_key()
        with self._understood("certificate", "is a certificate of a kind that is not supported"):
            public, names = chain[0].public_key(), dns_names(chain[0])
        if private != public:
            raise self._wrong("key", "is not the key of tls.certificate")
        if self._name not in names:
            found = ", ".join(f'"{name}"' for name in names) or "no DNS name (SAN)"
            raise self._wrong("certificate", f'is for {found}; must be for "{self._name}"')
        begins, ends = chain[0].not_valid_before_utc, chain[0].not_valid_after_utc
        issued = any(_issued(chain[0], by) for by in (*trusted, *chain[1:]))
        return Material(ca, own, key, names, begins, ends, issued)

    def _bytes(self, field: str) -> bytes:
        try:
            return self._paths[field].read_bytes()
        except OSError as error:
            raise self._wrong(field, f"cannot be read: {why_unreadable(error)}") from None

    def _certificates(self, field: str, pem: bytes) -> list["Certificate"]:
        from cryptography import x509  # noqa: PLC0415

        with self._understood(field, "holds no certificate in PEM, or a broken one"):
            return x509.load_pem_x509_certificates(pem)

    @contextmanager
    def _understood(self, field: str, problem: str) -> Iterator[None]:
        """What the library cannot make sense of is a ConfigError; it has many names for that."""
        try:
            yield
        except Exception:
            raise self._wrong(field, problem) from None

    def _wrong(self, field: str, problem: str) -> ConfigError:
        return ConfigError(self._source, f"tls.{field}", f"{self._paths[field]} {problem}")


def open_files(settings: TlsSettings, source: str, folder: Path, name: str) -> TlsFiles | None:
    """None: without TLS. Raises ConfigError."""
    return TlsFiles(settings, source, folder, name) if settings.ca else None


def dns_names(certificate: "Certificate") -> tuple[str, ...]:
    """Those in its SAN."""
    from cryptography import x509  # noqa: PLC0415

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(found.value.get_values_for_type(x509.DNSName))


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


def _issued(certificate: "Certificate", by: "Certificate") -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except Exception:  # also of kinds that are not supported
        return False
    return True


def _stat(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_size, found.st_mtime_ns
