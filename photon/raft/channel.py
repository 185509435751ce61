"""Bytes to and from a non-blocking socket, plain or through TLS. Nothing here waits.

TLS runs on memory buffers (`ssl.MemoryBIO`), so that neither reading nor writing ever depends on the other:
what OpenSSL wants to say is ciphertext that waits for the socket like any other.
"""

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

# Plaintext that is encrypted at one time; more waits as plaintext until the socket took the ciphertext.
_PLAIN_BYTES = 256 << 10
# Ciphertext never exceeds that by much: no more than OpenSSL's own records are added.
_CIPHER_BYTES_MAX = 1 << 20
_RECORD_BYTES = 1 << 14
_BROKEN = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL"))


class LinkClosedError(Exception):
    """The connection is of no use any more. Never leaves the transport."""


class Channel(Protocol):
    """Raises OSError and LinkClosedError, and BlockingIOError where the socket is not ready."""

    established: bool

    @property
    def binding(self) -> bytes:
        """What both ends know of the TLS session, and nobody between them; empty without TLS."""

    @property
    def pending(self) -> bool:
        """Whether something waits for the socket though no more is sent."""

    def start(self) -> None:
        """The socket is connected, and this end dialed."""

    def receive(self, size: int) -> bytes:
        """One read of at most so many bytes of the socket; what they say may be nothing."""

    def send(self, buffers: Sequence[memoryview]) -> int:
        """How many bytes of these were taken."""

    def push(self) -> None:
        """Write what is pending."""


class PlainChannel:
    """The socket as it is."""

    established = True
    binding = b""
    pending = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def start(self) -> None:
        pass

    def receive(self, size: int) -> bytes:
        data = self._sock.recv(size)
        if not data:
            raise LinkClosedError("it closed the connection")
        return data

    def send(self, buffers: Sequence[memoryview]) -> int:
        return self._sock.sendmsg(buffers)

    def push(self) -> None:
        pass


class TlsChannel:
    """TLS over the socket. `established` once both ends have shown their certificates."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """`context`: of the side this end is on; it verifies the other."""
        self.established = False
        self._sock = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._waiting = memoryview(b"")  # taken from `_outgoing`, not yet by the socket
        accepts = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)

    @property
    def binding(self) -> bytes:
        return self._tls.get_channel_binding("tls-unique") or b""

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or self._outgoing.pending > 0

    def start(self) -> None:
        self._shake()

    def receive(self, size: int) -> bytes:
        data = self._sock.recv(size)
        if not data:
            while_shaking = "" if self.established else " during the TLS handshake: is TLS set there too?"
            raise LinkClosedError(f"it closed the connection{while_shaking}")
        self._incoming.write(data)
        try:
            if not self.established:
                self._shake()
            plain = self._read() if self.established else b""
        except ssl.SSLError as error:
            with suppress(OSError):
                self.push()  # the alert that tells the other end why
            raise LinkClosedError(_reason(error)) from error
        if self._outgoing.pending > _CIPHER_BYTES_MAX:
            raise LinkClosedError("it asks for answers and does not read them")
        return plain

    def send(self, buffers: Sequence[memoryview]) -> int:
        self.push()
        batch: list[memoryview] = []
        room = _PLAIN_BYTES
        for buffer in buffers:
            batch.append(buffer[:room])
            room -= len(batch[-1])
            if not room:
                break
        # Joined: a record for each small message would cost more than the copy.
        plain = memoryview(b"".join(batch))
        taken = 0
        while taken < len(plain):
            taken += self._tls.write(plain[taken:])
        with suppress(BlockingIOError):
            self.push()
        return taken

    def push(self) -> None:
        while self.pending:
            if not self._waiting:
                self._waiting = memoryview(self._outgoing.read())
            self._waiting = self._waiting[self._sock.send(self._waiting) :]

    def _shake(self) -> None:
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.established = True

    def _read(self) -> bytes:
        """All that is decrypted by now. Nothing is left behind: the poller does not know of it."""
        parts = []
        ended = False
        with suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_RECORD_BYTES):
                parts.append(part)
            ended = True
        if ended and not parts:
            raise LinkClosedError("it closed the connection")
        return b"".join(parts)


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not good: {error.verify_message}; "
            "the certificates of all nodes must be of the CA that is set here"
        )
    reason = error.reason or str(error)
    if reason in _BROKEN:
        return "it does not speak TLS, which is set on this node: set it on all nodes or on none"
    if "ALERT" in reason:
        told = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return f"it refuses this node's TLS ({told}): check the certificate, the key and the CA of both"
    return f"TLS failed: {reason.replace('_', ' ').lower()}"
