"""Who is at the other end: mutual proof of the cluster's secret, before anything else is believed.

Pure: no socket.

dialer -> acceptor   hello: version, nonce, own id, the id it means to reach
acceptor -> dialer   challenge: version, nonce, own id, HMAC-SHA256 over both hellos' fields
dialer -> acceptor   proof: HMAC-SHA256 over the same fields

Each proof covers both nonces and both ids, and says which side it is of, so none can be replayed or
reflected. What follows on the connection is not encrypted: between machines it belongs into a private
network or a tunnel.
"""

import hmac
import struct
from collections.abc import Callable, Collection

from photon.core.errors import PhotonError

PROTOCOL_VERSION = 1
_MAGIC = b"PHRAFTH1"
_LENGTH = struct.Struct("<H")
_FIXED = struct.Struct("<8sH32sBB")  # magic, version, nonce, length of own id, length of the other's id
NONCE_BYTES = 32
_MAC_BYTES = 32
ID_BYTES_MAX = 255
_MESSAGE_BYTES_MAX = _FIXED.size + 2 * ID_BYTES_MAX + _MAC_BYTES


class HandshakeError(PhotonError):
    """The other end is not a peer of ours. Its connection is closed."""


class Handshake:
    """One side of one handshake: feed it what comes in, send what it returns, until `peer` is set."""

    def __init__(
        self,
        node: str,
        peers: Collection[str],
        secret: bytes,
        nonce: Callable[[int], bytes],
        target: str | None,
    ) -> None:
        """`peers`: the ids that may be at the other end.

        `target`: the one we dialed, None where we were dialed.
        """
        self.peer: str | None = None
        self._node = node
        self._peers = peers
        self._secret = secret
        self._nonce = nonce(NONCE_BYTES)
        self._target = target
        self._claimed: str | None = None  # by one who has not proved it yet
        self._expected_proof = b""
        self._buffer = b""

    def begin(self) -> bytes:
        """What to send first."""
        if self._target is None:
            return b""
        return _pack(self._fields(self._target))

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the other end; returns what to answer. Raises HandshakeError.

        Once `peer` is set, `rest` is what came after the handshake.
        """
        self._buffer += data
        answer = b""
        while self.peer is None and (body := self._next_message()) is not None:
            answer += self._on_message(body)
        return answer

    @property
    def rest(self) -> bytes:
        """The bytes after the handshake."""
        return self._buffer

    def _next_message(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MESSAGE_BYTES_MAX:
            raise HandshakeError(f"a handshake message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body, self._buffer = self._buffer[_LENGTH.size : end], self._buffer[end:]
        return body

    def _on_message(self, body: bytes) -> bytes:
        if self._target is not None:
            return self._on_challenge(body)
        if self._claimed is None:
            return self._on_hello(body)
        if not hmac.compare_digest(body, self._expected_proof):
            raise HandshakeError(f"one that says it is {self._claimed} does not know the cluster's secret")
        self.peer = self._claimed
        return b""

    def _on_hello(self, hello: bytes) -> bytes:
        node, target, rest = _unpack(hello)
        if rest:
            raise HandshakeError("a hello of the wrong size")
        if target != self._node:
            raise HandshakeError(
                f"{node} looks for {target} but has reached {self._node}: check its peer addresses"
            )
        if node not in self._peers:
            raise HandshakeError(
                f"{node} is not a peer of {self._node} that dials it: check both lists of peers"
            )
        self._claimed = node
        fields = self._fields(node)
        self._expected_proof = self._mac(b"dialer", hello, fields)
        return _pack(fields + self._mac(b"acceptor", hello, fields))

    def _on_challenge(self, challenge: bytes) -> bytes:
        assert self._target is not None
        node, target, proof = _unpack(challenge)
        if node != self._target or target != self._node:
            raise HandshakeError(f"dialed {self._target} but reached {node}: check the peer addresses")
        hello, fields = self._fields(self._target), challenge[: len(challenge) - len(proof)]
        if not hmac.compare_digest(proof, self._mac(b"acceptor", hello, fields)):
            raise HandshakeError(f"{node} does not know the cluster's secret: give all nodes the same one")
        self.peer = node
        return _pack(self._mac(b"dialer", hello, fields))

    def _fields(self, other: str) -> bytes:
        own, theirs = self._node.encode(), other.encode()
        return _FIXED.pack(_MAGIC, PROTOCOL_VERSION, self._nonce, len(own), len(theirs)) + own + theirs

    def _mac(self, side: bytes, hello: bytes, challenge: bytes) -> bytes:
        said = side + _LENGTH.pack(len(hello)) + hello + challenge
        return hmac.digest(self._secret, said, "sha256")


def _pack(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _unpack(body: bytes) -> tuple[str, str, bytes]:
    """(the sender's id, the id it speaks to, what follows)."""
    if len(body) < _FIXED.size:
        raise HandshakeError("a handshake message that is too short")
    magic, version, _, own, other = _FIXED.unpack_from(body)
    if magic != _MAGIC:
        raise HandshakeError("it does not speak this protocol")
    if version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"it speaks version {version} of the protocol, this node version {PROTOCOL_VERSION}"
        )
    middle = _FIXED.size + own
    end = middle + other
    if len(body) < end:
        raise HandshakeError("a handshake message that is too short")
    try:
        return body[_FIXED.size : middle].decode(), body[middle:end].decode(), body[end:]
    except UnicodeDecodeError as error:
        raise HandshakeError("a node id that is not text") from error
