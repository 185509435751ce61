"""TLS between machines: which files, checked once, and the contexts made of them.

Mutual: both ends show a certificate of one CA, which is the system's own. Between registry replicas host
names are not checked, since nodes are known by their ids, which their room proves by the system's secret.
Clients of gRPC look for `name` in the server's certificate; where it is empty, for the host they dial.
"""

import math
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from photon.core.errors import SettingsError

EXPIRES_SOON_S: Final = 14 * 86_400.0
"""A certificate that ends within so long is complained of."""

_HANDSHAKE_STEPS_MAX: Final = 10
_OTHER_NAME: Final = 62  # X509_V_ERR_HOSTNAME_MISMATCH


@dataclass(frozen=True, slots=True)
class Tls:
    """[tls]: three PEM files. Make it by `load_tls`, which has tried them."""

    cert: Path
    """This node's certificate, with those between it and the CA behind it."""
    key: Path
    """Its key, without a passphrase."""
    ca: Path
    """The certificates of the CA that all nodes' certificates are of, and nobody else's."""
    name: str = ""
    """Of every certificate of the system, looked for by gRPC in place of the host name; empty: that is."""
    expires_s: float = field(default=math.inf, compare=False)
    """Unix time at which nobody accepts the certificate any more, as it was when it was tried."""

    def server_context(self) -> ssl.SSLContext:
        """For the end that was dialed. Raises SettingsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # No session is resumed: each connection shows its certificates.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        return self._set(context)

    def client_context(self) -> ssl.SSLContext:
        """For the end that dials. Raises SettingsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._set(context)

    def _set(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"tls.ca: {self.ca}: holds no certificates ({_why(error)}); name a PEM file with the CA's"
            ) from error
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"tls.cert, tls.key: {self.cert} and {self.key}: are no certificate and its key "
                f"({_why(error)}); name PEM files that belong together, the key without a passphrase"
            ) from error
        return context


def load_tls(cert: Path, key: Path, ca: Path, name: str = "") -> Tls:
    """The files, once this node was able to shake hands with itself by them. Raises SettingsError.

    `name`: one that the certificate must carry, as every other of the system; empty: none is asked for.
    """
    for setting, path in (("cert", cert), ("key", key), ("ca", ca)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise SettingsError(
                f"tls.{setting}: {path}: cannot be read ({error.strerror}); name an existing file"
            ) from error
    tls = Tls(cert, key, ca, name)
    return replace(tls, expires_s=_try(tls))


def expiry_complaint(tls: Tls, now_s: float) -> str | None:
    """What to tell of a certificate that ends soon; None of one that does not."""
    left_s = tls.expires_s - now_s
    if left_s > EXPIRES_SOON_S:
        return None
    when = f"expires in {left_s / 86_400:.1f} days" if left_s > 0 else "has expired"
    return (
        f"tls.cert: {tls.cert}: {when}: sign a new one (`photon certs` does for its own CA), then restart "
        "the processes one after the other"
    )


def _try(tls: Tls) -> float:
    """What no peer would accept (another CA's, expired, not for this use, without the name) is found before
    it is served. When it expires, in Unix seconds."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    dials = tls.client_context()
    # The rule of gRPC's clients: one of the alternative names; the common name counts for nothing.
    dials.check_hostname, dials.hostname_checks_common_name = bool(tls.name), False
    try:
        client = dials.wrap_bio(to_client, to_server, server_hostname=tls.name or None)
        server = tls.server_context().wrap_bio(to_server, to_client, server_side=True)
        ends = [client, server]
        for _ in range(_HANDSHAKE_STEPS_MAX):
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    pass
            if not ends:
                shown = client.getpeercert() or {}
                return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
        raise AssertionError("a TLS handshake without an end")
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _OTHER_NAME:
            raise SettingsError(
                f"tls.cert: {tls.cert}: no client would accept it: it does not carry the name '{tls.name}' "
                f"(subjectAltName DNS:{tls.name}), which tls.name asks of every certificate; sign one that "
                "does (`photon certs`), or set tls.name"
            ) from error
        raise SettingsError(
            f"tls.cert: {tls.cert}: no node would accept it: {error.verify_message}; "
            f"take one that the CA in {tls.ca} has signed, valid now, for servers and for clients"
        ) from error
    except ssl.SSLError as error:
        raise SettingsError(f"tls.cert: {tls.cert}: TLS fails with it ({_why(error)})") from error
    except ValueError as error:
        raise SettingsError(f"tls.name: {tls.name!r} is no name of a host ({error})") from error


def _no_passphrase() -> str:
    # OpenSSL would ask for it on the terminal.
    raise ValueError("the key is encrypted")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error) or type(error).__name__
