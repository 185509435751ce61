"""One connection to a peer: bytes, plain or through TLS; the handshake; frames; what waits for the socket.

Nothing here waits. A frame is length, group, MAC, message. TLS vouches for every byte already, so a link
through it has no MACs. On a plain link the MAC is keyed BLAKE2b, 16 bytes, over the frame's number on its
connection and direction, its length and group, and its message. Both ends count the number and never send
it: a frame that is changed, left out, repeated or moved does not verify, and that ends the connection, as the
stream can't be trusted after it. Where there is no secret (loopback only) anybody could make the key: then
the MAC is a checksum.
"""

import hashlib
import hmac
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from photon.core.errors import PhotonError
from photon.raft.handshake import Handshake

SOCKET_BUFFER_BYTES = 4 << 20
MAC_BYTES = 16
_HEAD = struct.Struct("<II")  # length of the message, group
_NUMBER = struct.Struct("<Q")
HEADER_BYTES_MAX = _HEAD.size + MAC_BYTES
# A frame of this group, without a message, only says that its sender is alive.
PING_GROUP = 0xFFFFFFFF

_READ_BYTES = 1 << 20
# One that has not proved who it is gets no more of our memory and time than this.
_STRANGER_READ_BYTES = 1 << 12
# One link takes no more of a turn than so many reads.
_READS_A_TURN = 8
_BUFFERS_A_WRITE = 64
# Plaintext that is encrypted at one time; more waits as plaintext until the socket took the ciphertext.
_PLAIN_BYTES = 256 << 10
# Ciphertext never exceeds that by much: no more than OpenSSL's own records are added.
_CIPHER_BYTES_MAX = 1 << 20
_RECORD_BYTES = 1 << 14
_BROKEN = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL"))


class LinkClosedError(Exception):
    """The connection is of no use any more. Never leaves the transport."""


class FrameError(PhotonError):
    """Bytes of a peer that are no frame. Its connection is closed."""


# -- frames: pure ---------------------------------------------------------------------------------------


class FrameWriter:
    """Makes the headers of one direction, in the order in which the frames are sent."""

    def __init__(self, key: bytes | None) -> None:
        """`key`: the session's of this direction, 1 to 64 bytes; None where TLS vouches for the bytes."""
        # A copy is cheaper than a new one.
        self._keyed = None if key is None else hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0
        self.header_bytes = _HEAD.size if key is None else HEADER_BYTES_MAX

    def header(self, group: int, message: bytes) -> bytes:
        """What to send before the message."""
        head = _HEAD.pack(len(message), group)
        if self._keyed is None:
            return head
        mac = self._keyed.copy()
        mac.update(_NUMBER.pack(self._number) + head)
        mac.update(message)
        self._number += 1
        return head + mac.digest()


class FrameReader:
    """Cuts a stream into frames, and believes none whose header is not what its writer would have made."""

    def __init__(self, key: bytes | None, bytes_max: int) -> None:
        """`key`: that of the writer at the other end. `bytes_max`: the longest message believed."""
        self._writer = FrameWriter(key)
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now, as (group, message). Raises FrameError."""
        self._buffer += data
        frames = []
        offset = 0
        while (start := offset + self._writer.header_bytes) <= len(self._buffer):
            length, group = _HEAD.unpack_from(self._buffer, offset)
            if length > self._bytes_max:
                raise FrameError(f"a frame of {length} bytes, where {self._bytes_max} is the most")
            end = start + length
            if end > len(self._buffer):
                break
            message = bytes(memoryview(self._buffer)[start:end])
            if not hmac.compare_digest(self._buffer[offset:start], self._writer.header(group, message)):
                raise FrameError("a frame that does not verify: it was changed, repeated or moved on its way")
            frames.append((group, message))
            offset = end
        if offset:
            del self._buffer[:offset]
        return frames


# -- bytes: plain, or through TLS -----------------------------------------------------------------------


class Channel:
    """The socket as it is. Raises OSError, LinkClosedError, and BlockingIOError where it is not ready."""

    established = True
    # What both ends know of the TLS session, and nobody between them; empty without TLS.
    binding = b""
    # Whether something waits for the socket though no more is sent.
    pending = False
    closed_because = "it closed the connection"

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def start(self) -> None:
        """The socket is connected, and this end dialed."""

    def receive(self, size: int) -> bytes:
        """One read of at most `size` bytes of the socket; what they say may be nothing."""
        data = self._sock.recv(size)
        if not data:
            raise LinkClosedError(self.closed_because)
        return data

    def send(self, buffers: Sequence[memoryview]) -> int:
        """How many bytes of these were taken."""
        return self._sock.sendmsg(buffers)

    def push(self) -> None:
        """Write what is pending."""


class TlsChannel(Channel):
    """TLS over the socket, `established` once both ends have shown their certificates.

    It runs on memory buffers (`ssl.MemoryBIO`), so that neither reading nor writing depends on the other:
    what OpenSSL wants to say is ciphertext that waits for the socket like any other.
    """

    established = False
    closed_because = "it closed the connection during the TLS handshake: is TLS set there too?"

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """`context`: of the side this end is on; it verifies the other."""
        super().__init__(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._waiting = memoryview(b"")  # taken from `_outgoing`, not yet by the socket
        accepts = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)

    @property
    def pending(self) -> bool:  # type: ignore[override]
        return bool(self._waiting) or self._outgoing.pending > 0

    def start(self) -> None:
        self._shake()

    def receive(self, size: int) -> bytes:
        self._incoming.write(super().receive(size))
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
            self.closed_because = Channel.closed_because
            self.binding = self._tls.get_channel_binding("tls-unique") or b""

    def _read(self) -> bytes:
        """All that is decrypted by now. Nothing is left behind: the poller does not know of it."""
        parts = []
        ended = False
        with suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_RECORD_BYTES):
                parts.append(part)
            ended = True
        if ended and not parts:
            raise LinkClosedError(self.closed_because)
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


# -- the connection -------------------------------------------------------------------------------------


class Link:
    """Raises OSError, LinkClosedError, FrameError, HandshakeError: then the transport closes it."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        handshake: Handshake,
        bytes_max: int,
        now: float,
        target: str | None,
        source: str = "",
    ) -> None:
        """`target`: the peer that was dialed; None where the other end, at the address `source`, dialed.

        `context`: of this end's side of TLS; None for a plain link.
        """
        self.sock = sock
        self.fd = sock.fileno()
        self.connecting = target is not None
        self.target = target
        self.source = source
        self.opened_at = now
        self.heard_at = now
        self.said_at = now
        self.peer: str | None = None  # once it has proved who it is
        self.newest = 0  # protocol version that the peer knows
        self.ended: LinkClosedError | None = None  # what was read before is to be delivered first
        self.queued_bytes = 0
        self.wants_write = self.connecting  # what the poller was last told
        self._channel = Channel(sock) if context is None else TlsChannel(sock, context)
        self._signs = context is None
        self._handshake = handshake
        self._begun = False  # the handshake, inside the channel
        self._bytes_max = bytes_max
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._out: deque[memoryview] = deque()
        if not self.connecting:
            self._begin()

    @property
    def unsent(self) -> bool:
        """Whether something waits for the socket."""
        return self.queued_bytes > 0 or self._channel.pending

    def finish_connecting(self) -> None:
        """The socket became writable: connected, or refused."""
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self.connecting = False
        self._channel.start()
        self._begin()

    def read(self, now: float) -> list[tuple[int, bytes]]:
        """What has come in, as whole frames. Sets `peer` when the handshake is done."""
        frames: list[tuple[int, bytes]] = []
        for _ in range(_READS_A_TURN):
            try:
                data = self._channel.receive(_STRANGER_READ_BYTES if self.peer is None else _READ_BYTES)
            except BlockingIOError:
                break
            except LinkClosedError as error:
                self.ended = error
                if self.peer is None and self._begun:
                    self.ended = LinkClosedError(f"{error} before the handshake ended: see its log for why")
                break
            self.heard_at = now
            self._begin()
            if self.peer is None and data:
                data = self._shake(data)
            if data and self._reader is not None:
                frames += self._reader.feed(data)
        return frames

    def send(self, group: int, message: bytes, now: float) -> None:
        """Queue a frame, to a peer that has proved who it is."""
        assert self._writer is not None
        self._queue(self._writer.header(group, message))
        self._queue(message)
        self.said_at = now

    def write(self) -> None:
        """Write what the socket takes; what is left stays queued."""
        if self.connecting:
            return
        try:
            self._channel.push()
            while self._out:
                batch = [self._out[at] for at in range(min(len(self._out), _BUFFERS_A_WRITE))]
                self._sent(self._channel.send(batch))
        except BlockingIOError:
            return

    def close(self) -> None:
        self.sock.close()

    def _begin(self) -> None:
        if self._channel.established and not self._begun:
            self._begun = True
            self._queue(self._handshake.begin(self._channel.binding))

    def _shake(self, data: bytes) -> bytes:
        """Feed the handshake; returns what came after it."""
        shaking = self._handshake
        self._queue(shaking.feed(data))
        if shaking.refusal is not None:
            with suppress(OSError):
                self.write()  # the other end is told why
            raise shaking.refusal
        if shaking.peer is None:
            return b""
        self.peer, self.newest = shaking.peer, shaking.newest
        send, receive = shaking.keys if self._signs else (None, None)
        self._writer = FrameWriter(send)
        self._reader = FrameReader(receive, self._bytes_max)
        return shaking.rest

    def _sent(self, written: int) -> None:
        self.queued_bytes -= written
        while written and written >= len(self._out[0]):
            written -= len(self._out.popleft())
        if written:
            self._out[0] = self._out[0][written:]

    def _queue(self, data: bytes) -> None:
        if data:
            self._out.append(memoryview(data))
            self.queued_bytes += len(data)


def tune(sock: socket.socket) -> None:
    """Non-blocking, no delay, large buffers."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    size_buffers(sock)


def size_buffers(sock: socket.socket) -> None:
    """A link of 100 ms carries no more than a buffer each 100 ms."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
