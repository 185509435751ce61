"""A CA of the system's own, and certificates by it: enough to try mutual TLS, and to run a system that has no
other CA. Whoever has `ca.key` can make more: it belongs on no machine that serves."""

import datetime
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import UsageError

CA_DAYS: Final = 3650
DAYS_MAX: Final = CA_DAYS
CA_NAME: Final = "ca"
_EARLIER: Final = datetime.timedelta(minutes=5)
"""Valid so long before now: clocks of machines differ."""
_FILE_NAME: Final = re.compile(r"(?:::)?[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")
_COMMON_NAME_MAX: Final = 64

Key = ec.EllipticCurvePrivateKey
Name = x509.DNSName | x509.IPAddress


@dataclass(frozen=True, slots=True)
class Files:
    """Where a certificate, its key and its CA lie: what [tls] names. `ends`: of the certificate, with its CA
    at the latest."""

    cert: Path
    key: Path
    ca: Path
    ends: datetime.datetime


class Authority:
    """The CA in a directory; made there when there is none."""

    def __init__(self, directory: Path, now: datetime.datetime) -> None:
        """UsageError for one that is there and can't sign; StorageError."""
        self._directory = directory
        self._now = now
        self._cert_path = directory / f"{CA_NAME}.pem"
        self._key_path = directory / f"{CA_NAME}.key"
        with storage_errors(directory):
            make_directory(directory)
        self.made = not self._cert_path.exists() and not self._key_path.exists()
        if self.made:
            self._make()
        self._cert, self._key = self._read()

    def issue(self, name: str, tls_name: str, days: float) -> Files:
        """One for `name`, for servers and for clients, which also carries `tls_name`.

        Where there is one already it is renewed, for the same key. UsageError, StorageError.
        """
        check_name(name)
        cert_path, key_path = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        key = _read_key(key_path) if key_path.exists() else ec.generate_private_key(ec.SECP256R1())
        names: list[Name] = [_general(one) for one in dict.fromkeys((tls_name, name, "localhost")) if one]
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names += [loopback] if loopback not in names else []
        ends = min(self._now + datetime.timedelta(days=days), self._cert.not_valid_after_utc)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(name, self._cert.subject, key, self._now, ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if not key_path.exists():
            _write(key_path, _key_pem(key))
        _write(cert_path, _pem(builder.sign(self._key, hashes.SHA256())))
        return Files(cert_path, key_path, self._cert_path, ends)

    def _make(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject("Photon CA")
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            _builder("Photon CA", subject, key, self._now, self._now + datetime.timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        # The key first: a certificate without its key would stop the next run, a key alone says the same.
        _write(self._key_path, _key_pem(key))
        _write(self._cert_path, _pem(certificate))

    def _read(self) -> tuple[x509.Certificate, Key]:
        key = _read_key(self._key_path)
        try:
            certificate = x509.load_pem_x509_certificate(self._cert_path.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._cert_path}: {_half(self._directory)} ({error})") from error
        if certificate.public_key() != key.public_key():
            raise UsageError(f"{self._cert_path}: is not of the key in {self._key_path}; put its own there")
        if certificate.not_valid_after_utc <= self._now:
            raise UsageError(
                f"{self._cert_path}: the CA has expired; make a new one in another directory (--out), and "
                "put both CAs' certificates into the file that tls.ca names until all nodes have new ones"
            )
        return certificate, key


def check_name(name: str) -> None:
    """UsageError for one that can't be a file's and a host's name."""
    if not _FILE_NAME.fullmatch(name) or name == CA_NAME:
        raise UsageError(
            f"--name {name!r}: is no name for a node; take letters, digits, dots and hyphens, not '{CA_NAME}'"
        )


def _read_key(path: Path) -> Key:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: {_half(path.parent)} ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path}: is no key that was made here; name another directory (--out)")
    return key


def _half(directory: Path) -> str:
    return f"can't be used to sign; put back the file that belongs into {directory}, or name another (--out)"


def _general(name: str) -> Name:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_COMMON_NAME_MAX])])


def _builder(
    name: str, issuer: x509.Name, key: Key, now: datetime.datetime, ends: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(ends)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    with storage_errors(path):
        write_file(path, data)
