"""`photon certs`: a CA of the system's own, and certificates by it for [tls].

Enough to try mutual TLS, and to run a system that has no other CA. Whoever has `ca.key` can make more: it
belongs on no machine that serves.
"""

import datetime
import ipaddress
import json
import re
from pathlib import Path
from typing import Final

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import UsageError
from photon.core.settings import Tls

CA_DAYS: Final = 3650
CA_NAME: Final = "ca"
_EARLIER: Final = datetime.timedelta(minutes=5)
"""Valid so long before now: clocks of machines differ."""
_FILE_NAME: Final = re.compile(r"(?:::)?[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}")
_COMMON_NAME_MAX: Final = 64

Key = ec.EllipticCurvePrivateKey


@click.command("certs")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Directory of the CA; one that is there signs, and is never replaced.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    default=("node",),
    show_default=True,
    help="Host or address of a node; once for each.",
)
@click.option(
    "--days",
    type=click.IntRange(1, CA_DAYS),
    default=365,
    show_default=True,
    help="How long the certificates are good.",
)
def command(out: Path, names: tuple[str, ...], days: int) -> None:
    """Make a CA and certificates by it, each for servers and for clients.

    Every machine gets its own certificate and key, and ca.pem; ca.key stays where you keep secrets.
    """
    for name in names:
        check_name(name)
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority(out, now)
    if authority.made:
        click.echo(f"# a new CA, good for {CA_DAYS} days: {out / 'ca.pem'}; keep ca.key away from the nodes")
    for name in names:
        good = (authority.issue(name, Tls().name, days) - now).days
        click.echo(f"\n# {name}, good for {good} days{', as long as its CA' if good < days else ''}\n[tls]")
        for key, file in (("cert", f"{name}.pem"), ("key", f"{name}.key"), ("ca", f"{CA_NAME}.pem")):
            click.echo(f"{key} = {json.dumps(str((out / file).resolve()), ensure_ascii=False)}")


class Authority:
    """The CA in a directory; made there when there is none."""

    def __init__(self, directory: Path, now: datetime.datetime) -> None:
        """UsageError for one that is there and can't sign; StorageError."""
        self._directory, self._now = directory, now
        self._cert_path, self._key_path = directory / f"{CA_NAME}.pem", directory / f"{CA_NAME}.key"
        with storage_errors(directory):
            make_directory(directory)
        self.made = not self._cert_path.exists() and not self._key_path.exists()
        if self.made:
            self._make()
        self._key = _read_key(self._key_path)
        self._cert = self._read()

    def issue(self, name: str, tls_name: str, days: float) -> datetime.datetime:
        """DIRECTORY/<name>.pem and .key, for servers and for clients, which also carries `tls_name`; when it
        ends: with its CA at the latest.

        Where there is one already it is renewed, for the same key. UsageError, StorageError.
        """
        check_name(name)
        cert_path, key_path = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        key = _read_key(key_path) if key_path.exists() else ec.generate_private_key(ec.SECP256R1())
        names = [_general(one) for one in dict.fromkeys((tls_name, name, "localhost", "127.0.0.1")) if one]
        ends = min(self._now + datetime.timedelta(days=days), self._cert.not_valid_after_utc)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            self._builder(name, self._cert.subject, key, ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(signer, critical=False)
        )
        self._write(builder, key, key_path, cert_path)
        return ends

    def _make(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
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
        self._key = key
        ends = self._now + datetime.timedelta(days=CA_DAYS)
        builder = (
            self._builder("Photon CA", _subject("Photon CA"), key, ends)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        self._write(builder, key, self._key_path, self._cert_path)

    def _read(self) -> x509.Certificate:
        try:
            certificate = x509.load_pem_x509_certificate(self._cert_path.read_bytes())
        except (OSError, ValueError) as error:
            raise _unusable(self._cert_path, error) from error
        if certificate.public_key() != self._key.public_key():
            raise UsageError(f"{self._cert_path}: is not of the key in {self._key_path}; put its own there")
        if certificate.not_valid_after_utc <= self._now:
            raise UsageError(
                f"{self._cert_path}: the CA has expired; make a new one in another directory (--out), and "
                "put both CAs' certificates into the file that tls.ca names until all nodes have new ones"
            )
        return certificate

    def _builder(
        self, name: str, issuer: x509.Name, key: Key, ends: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(_subject(name))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _EARLIER)
            .not_valid_after(ends)
        )

    def _write(self, builder: x509.CertificateBuilder, key: Key, key_path: Path, cert_path: Path) -> None:
        # The key first: a certificate without its key would stop the next run, a key alone says the same.
        if not key_path.exists():
            plain = serialization.NoEncryption()
            pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
            with storage_errors(key_path):
                write_file(key_path, pem)
        signed = builder.sign(self._key, hashes.SHA256())
        with storage_errors(cert_path):
            write_file(cert_path, signed.public_bytes(serialization.Encoding.PEM))


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
        raise _unusable(path, error) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path}: is no key that was made here; name another directory (--out)")
    return key


def _unusable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{path}: can't be used to sign; put back the file that belongs into {path.parent}, or name another "
        f"(--out) ({error})"
    )


def _general(name: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_COMMON_NAME_MAX])])
