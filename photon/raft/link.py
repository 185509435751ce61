"""One connection to a peer: a non-blocking socket, its handshake, its frames, what waits for it."""

import os
import socket
from collections import deque

from photon.raft.frames import FrameReader, pack_frame
from photon.raft.handshake import Handshake

SOCKET_BUFFER_BYTES = 4 << 20
_READ_BYTES = 1 << 20
# One link takes no more of a turn than so many reads.
_READS_A_TURN = 8
_BUFFERS_A_WRITE = 64


class LinkClosedError(Exception):
    """The other end has closed the connection. Never leaves the transport."""


class Link:
    """Raises OSError, LinkClosedError, FrameError, HandshakeError: then the transport closes it."""

    def __init__(
        self, sock: socket.socket, handshake: Handshake, bytes_max: int, now: float, target: str | None
    ) -> None:
        """`target`: the peer that was dialed; None where the other end dialed us."""
        self.sock = sock
        self.fd = sock.fileno()
        self.connecting = target is not None
        self.target = target
        self.opened_at = now
        self.heard_at = now
        self.said_at = now
        self.peer: str | None = None  # once it has proved who it is
        self.queued_bytes = 0
        self.wants_write = self.connecting  # what the poller was last told
        self._handshake = handshake
        self._reader = FrameReader(bytes_max)
        self._out: deque[memoryview] = deque()

    def finish_connecting(self) -> None:
        """The socket became writable: connected, or refused."""
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self.connecting = False
        self._queue(self._handshake.begin())

    def read(self, now: float) -> list[tuple[int, bytes]]:
        """What has come in, as whole frames. Sets `peer` when the handshake is done."""
        frames: list[tuple[int, bytes]] = []
        for _ in range(_READS_A_TURN):
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                if frames:
                    break  # the poller will tell of the end again
                raise LinkClosedError
            self.heard_at = now
            if self.peer is None:
                self._queue(self._handshake.feed(data))
                self.peer = self._handshake.peer
                data = b"" if self.peer is None else self._handshake.rest
            if data:
                frames += self._reader.feed(data)
        return frames

    def send(self, group: int, message: bytes, now: float) -> None:
        """Queue a frame."""
        self._queue(pack_frame(group, message))
        self._queue(message)
        self.said_at = now

    def write(self) -> None:
        """Write what the socket takes; what is left stays queued."""
        while self._out and not self.connecting:
            batch = [self._out[at] for at in range(min(len(self._out), _BUFFERS_A_WRITE))]
            try:
                written = self.sock.sendmsg(batch)
            except BlockingIOError:
                return
            self.queued_bytes -= written
            while written and written >= len(self._out[0]):
                written -= len(self._out.popleft())
            if written:
                self._out[0] = self._out[0][written:]

    def close(self) -> None:
        self.sock.close()

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
