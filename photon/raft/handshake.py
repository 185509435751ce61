"""Who is at the other end: mutual proof of the cluster's secret, before anything else is believed.

Pure: no socket.

dialer -> acceptor   hello: versions, nonce, own life, the last life of the other that it remembers, own id,
                     the id it means to reach
acceptor -> dialer   challenge: the same fields, and a proof
dialer -> acceptor   verdict: empty, or why it refuses; and a proof
acceptor -> dialer   verdict: likewise

A proof is an HMAC-SHA256 with the secret over both hellos' fields, the verdict, what binds the connection to
the TLS session beneath it, and which of the four messages it stands in: none can be replayed, reflected or
carried over to another connection. The keys of the frames that follow on a plain link are made of the same:
no two connections and no two directions share one.
"""

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass

from photon.core.errors import PhotonError
from photon.core.protocol import NEWEST, OLDEST
from photon.raft.store import LIFE_BYTES

_MAGIC = b"PHRAFTH1"
_LENGTH = struct.Struct("<H")
# Magic, newest and oldest protocol version, nonce, own life, the other's last one, lengths of own id and the
# other's: the same in all versions.
_FIXED = struct.Struct(f"<8sHH32s{LIFE_BYTES}s{LIFE_BYTES}sBB")
NONCE_BYTES = 32
ID_BYTES_MAX = 255
_MAC_BYTES = 32
_REASON_BYTES_MAX = 500
_MESSAGE_BYTES_MAX = _FIXED.size + 2 * ID_BYTES_MAX + _MAC_BYTES
# The first bytes of a TLS handshake or alert.
_TLS_STARTS = (b"\x16\x03", b"\x15\x03")


class HandshakeError(PhotonError):
    """The other end is not a peer of ours. Its connection is closed."""


class RefusedError(HandshakeError):
    """One that knows the secret, and is refused all the same, by us or by itself."""

    def __init__(self, peer: str, reason: str) -> None:
        """`peer`: its id, proved."""
        super().__init__(reason)
        self.peer = peer


class Handshake:
    """One side of one handshake: `begin`, then feed it what comes in and send what it returns.

    It has ended well when `peer` is set, and ill when `refusal` is set, which is to be raised
    once the last answer is sent.
    """

    def __init__(
        self,
        node: str,
        life: bytes,
        secret: bytes,
        nonce: Callable[[int], bytes],
        target: str | None,
        last_life: Callable[[str], bytes],
        admit: Callable[[str, bytes, bytes], str | None],
    ) -> None:
        """`life`: this node's. `target`: the peer we dialed, None where we were dialed.

        `last_life`: of a peer, as this node remembers it.
        `admit`: asked about one that has proved who it is: its id, its life, and which life of this node it
        remembers; a reason to refuse it, or None.
        """
        self.peer: str | None = None
        self.newest = 0
        """The protocol version that it knows, once it has said so."""
        self.keys = (b"", b"")  # of frames, to send and to receive with, once `peer` is set; 32 bytes each
        self.refusal: RefusedError | None = None
        self._node = node
        self._life = life
        self._secret = secret
        self._nonce = nonce(NONCE_BYTES)
        self._target = target
        self._last_life = last_life
        self._admit = admit
        self._claimed = ""  # by one who has not proved it yet
        self._claimed_lives = b"", b""
        self._transcript = b""
        self._binding = b""
        self._on_next: Callable[[bytes], bytes] = self._on_hello if target is None else self._on_challenge
        self._buffer = b""

    def begin(self, binding: bytes = b"") -> bytes:
        """What to send first. `binding`: what both ends know of the TLS session beneath, and only they."""
        self._binding = binding
        if self._target is None:
            return b""
        return _pack(self._fields(self._target))

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the other end; returns what to answer. Raises HandshakeError.

        Once `peer` is set, `rest` is what came after the handshake.
        """
        self._buffer += data
        answer = b""
        while self.peer is None and self.refusal is None and (body := self._next_message()) is not None:
            answer += self._on_next(body)
        return answer

    @property
    def rest(self) -> bytes:
        """The bytes after the handshake."""
        return self._buffer

    def _next_message(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        if self._buffer.startswith(_TLS_STARTS):
            raise HandshakeError(
                "it speaks TLS, which is not set on this node: set it on all nodes or on none"
            )
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MESSAGE_BYTES_MAX:
            raise HandshakeError(f"a handshake message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body, self._buffer = self._buffer[_LENGTH.size : end], self._buffer[end:]
        return body

    # -- the acceptor's side ----------------------------------------------------------------------------

    def _on_hello(self, hello: bytes) -> bytes:
        hello_of = _unpack(hello)
        if hello_of.rest:
            raise HandshakeError("a hello of the wrong size")
        if hello_of.target != self._node:
            raise HandshakeError(
                f"{hello_of.node} looks for {hello_of.target} but has reached {self._node}: "
                "check its peer addresses"
            )
        self._claimed, self._claimed_lives, self.newest = hello_of.node, hello_of.lives, hello_of.newest
        fields = self._fields(self._claimed)
        self._transcript = _pack(hello) + _pack(fields)
        self._on_next = self._on_verdict
        return _pack(fields + self._mac(b"challenge"))

    # -- the dialer's side ------------------------------------------------------------------------------

    def _on_challenge(self, challenge: bytes) -> bytes:
        assert self._target is not None
        challenge_of = _unpack(challenge)
        if challenge_of.node != self._target or challenge_of.target != self._node:
            raise HandshakeError(
                f"dialed {self._target} but reached {challenge_of.node}: check the peer addresses"
            )
        self._claimed, self._claimed_lives = challenge_of.node, challenge_of.lives
        self.newest = challenge_of.newest
        fields = challenge[: len(challenge) - len(challenge_of.rest)]
        self._transcript = _pack(self._fields(self._target)) + _pack(fields)
        if not hmac.compare_digest(challenge_of.rest, self._mac(b"challenge")):
            raise HandshakeError(
                f"{self._claimed} does not know the cluster's secret: give all nodes the same one"
            )
        self._on_next = self._on_verdict
        return self._decide(b"dialer's verdict", done=False)

    # -- both sides -------------------------------------------------------------------------------------

    def _on_verdict(self, body: bytes) -> bytes:
        """The other end's on this node; the dialer's comes first."""
        accepts = self._target is None
        reason, proof = body[:-_MAC_BYTES], body[-_MAC_BYTES:]
        message = b"dialer's verdict" if accepts else b"acceptor's verdict"
        if not hmac.compare_digest(proof, self._mac(message, reason)):
            raise HandshakeError(
                f"one that says it is {self._claimed} does not know the cluster's secret"
                if accepts
                else f"the last message of {self._claimed} was changed on its way"
            )
        if reason:
            text = "".join(c if c.isprintable() else "?" for c in reason.decode(errors="replace"))
            raise RefusedError(self._claimed, f"{self._claimed} refuses this node: {text}")
        if accepts:
            return self._decide(b"acceptor's verdict", done=True)
        self._finish()
        return b""

    def _decide(self, message: bytes, done: bool) -> bytes:
        """The verdict on one that has proved who it is; `done`: it is the handshake's last message."""
        reason = self._admit(self._claimed, *self._claimed_lives)
        said = b""
        if reason is not None:
            self.refusal = RefusedError(self._claimed, reason)
            said = reason.encode()[:_REASON_BYTES_MAX] or b"no reason given"
        elif done:
            self._finish()
        return _pack(said + self._mac(message, said))

    def _finish(self) -> None:
        dialers, acceptors = self._mac(b"dialer's frames"), self._mac(b"acceptor's frames")
        self.keys = (acceptors, dialers) if self._target is None else (dialers, acceptors)
        self.peer = self._claimed

    def _fields(self, other: str) -> bytes:
        own, theirs = self._node.encode(), other.encode()
        lives = self._life, self._last_life(other)
        fixed = _FIXED.pack(_MAGIC, NEWEST, OLDEST, self._nonce, *lives, len(own), len(theirs))
        return fixed + own + theirs

    def _mac(self, purpose: bytes, verdict: bytes = b"") -> bytes:
        said = b"".join(map(_pack, (purpose, self._transcript, self._binding, verdict)))
        return hmac.digest(self._secret, said, "sha256")


@dataclass(frozen=True, slots=True)
class _Hello:
    node: str  # the sender's id
    target: str  # the id it speaks to
    lives: tuple[bytes, bytes]  # its own; the last one that it remembers of whom it speaks to
    newest: int  # protocol version that it knows
    rest: bytes  # what follows the fields


def _pack(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _unpack(body: bytes) -> _Hello:
    if not body.startswith(_MAGIC):
        raise HandshakeError("it does not speak this protocol")
    if len(body) < _FIXED.size:
        raise HandshakeError("a handshake message that is too short")
    _, newest, oldest, _, life, last_life, own, other = _FIXED.unpack_from(body)
    if min(newest, NEWEST) < max(oldest, OLDEST):
        raise HandshakeError(
            f"it speaks versions {oldest} to {newest} of the protocol, this node {OLDEST} to {NEWEST}: "
            "upgrade through a release between them"
        )
    middle = _FIXED.size + own
    end = middle + other
    if len(body) < end:
        raise HandshakeError("a handshake message that is too short")
    node, target = _id(body[_FIXED.size : middle]), _id(body[middle:end])
    return _Hello(node, target, (life, last_life), newest, body[end:])


def _id(data: bytes) -> str:
    """Ids go into the log before they are proved: nothing that could write a line of its own."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise HandshakeError("a node id that is not text") from error
    if not text.isprintable():
        raise HandshakeError("a node id that is not text")
    return text
