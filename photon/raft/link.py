"""One connection to a peer: a non-blocking channel, its handshake, its frames, what waits for it."""

import os
import socket
from collections import deque
from contextlib import suppress

from photon.raft.channel import Channel, LinkClosedError
from photon.raft.frames import FrameReader, FrameWriter
from photon.raft.handshake import Handshake

SOCKET_BUFFER_BYTES = 4 << 20
_READ_BYTES = 1 << 20
# One that has not proved who it is gets no more of our memory and time than this.
_STRANGER_READ_BYTES = 1 << 12
# One link takes no more of a turn than so many reads.
_READS_A_TURN = 8
_BUFFERS_A_WRITE = 64


class Link:
    """Raises OSError, LinkClosedError, FrameError, HandshakeError: then the transport closes it."""

    def __init__(
        self,
        sock: socket.socket,
        channel: Channel,
        handshake: Handshake,
        bytes_max: int,
        now: float,
        target: str | None,
        source: str = "",
    ) -> None:
        """`target`: the peer that was dialed; None where the other end, at the address `source`, dialed."""
        self.sock = sock
        self.fd = sock.fileno()
        self.connecting = target is not None
        self.target = target
        self.source = source
        self.opened_at = now
        self.heard_at = now
        self.said_at = now
        self.peer: str | None = None  # once it has proved who it is
        self.ended: LinkClosedError | None = None  # what was read before is to be delivered first
        self.queued_bytes = 0
        self.wants_write = self.connecting  # what the poller was last told
        self._channel = channel
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
        if shaking.peer is None or shaking.keys is None:
            return b""
        self.peer = shaking.peer
        self._writer = FrameWriter(shaking.keys.send)
        self._reader = FrameReader(shaking.keys.receive, self._bytes_max)
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
