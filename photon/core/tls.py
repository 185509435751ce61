"""TLS between machines: which files, checked once, and the contexts made of them.

Mutual: both ends show a certificate of one CA, which is the cluster's own. Host names are not checked, since
nodes are known by their ids, which their room proves by the cluster's secret.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from photon.core.errors import SettingsError

_HANDSHAKE_STEPS_MAX = 10


@dataclass(frozen=True, slots=True)
class Tls:
    """[tls]: three PEM files. Make it by `load_tls`, which has tried them."""

    cert: Path
    """This node's certificate, with those between it and the CA behind it."""
    key: Path
    """Its key, without a passphrase."""
    ca: Path
    """The certificates of the CA that all nodes' certificates are of, and nobody else's."""

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


def load_tls(cert: Path, key: Path, ca: Path) -> Tls:
    """The files, once this node was able to shake hands with itself by them. Raises SettingsError."""
    for name, path in (("cert", cert), ("key", key), ("ca", ca)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise SettingsError(
                f"tls.{name}: {path}: cannot be read ({error.strerror}); name an existing file"
            ) from error
    tls = Tls(cert, key, ca)
    _try(tls)
    return tls


def _try(tls: Tls) -> None:
    """What no peer would accept (another CA's, expired, not for this use) is found before it is served."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        tls.client_context().wrap_bio(to_client, to_server),
        tls.server_context().wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for _ in range(_HANDSHAKE_STEPS_MAX):
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    pass
            if not ends:
                return
        raise AssertionError("a TLS handshake without an end")
    except ssl.SSLCertVerificationError as error:
        raise SettingsError(
            f"tls.cert: {tls.cert}: no node would accept it: {error.verify_message}; "
            f"take one that the CA in {tls.ca} has signed, valid now, for servers and for clients"
        ) from error
    except ssl.SSLError as error:
        raise SettingsError(f"tls.cert: {tls.cert}: TLS fails with it ({_why(error)})") from error


def _no_passphrase() -> str:
    # OpenSSL would ask for it on the terminal.
    raise ValueError("the key is encrypted")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error) or type(error).__name__
