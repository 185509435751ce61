"""Messages between the processes of a run, over Unix sockets in the work directory.

A message is its length (u32, little endian), its kind (u8) and its bytes. Nothing waits: what can't be sent
yet is kept, and what is not whole yet is left. A lost link loses what was under way; who must, sends it
again.
"""

import contextlib
import os
import selectors
import socket
from pathlib import Path
from typing import Any, Final

import msgspec

HELLO, FRAME, ACK, BEGINS, REPORT, MARKS, STATUS, FINISH, FINISHED, ASK, ANSWER, BEAT = range(12)
LATENESS, LEASE = range(12, 14)
"""Kinds: of workers to each other, of workers and the authority, of commands and the run."""

_HEAD: Final = 5
_READ_BYTES: Final = 1 << 20
_MESSAGE_BYTES_MAX: Final = 1 << 30
pack: Final = msgspec.msgpack.encode
unpack: Final = msgspec.msgpack.decode


class LostError(Exception):
    """The other side is gone."""


class Link:
    """One connection. For one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent = bytearray()
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What a selector is to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, kind: int, payload: bytes) -> None:
        """LostError."""
        self._unsent += len(payload).to_bytes(4, "little") + bytes((kind,)) + payload
        self.flush()

    def flush(self) -> None:
        """LostError."""
        try:
            while self._unsent:
                with memoryview(self._unsent) as view:
                    sent = self._socket.send(view[:_READ_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LostError from error

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that are whole. LostError if the other side is gone and no whole one is left."""
        lost = False
        try:
            data = self._socket.recv(_READ_BYTES)
            lost = not data
            self._read += data
        except BlockingIOError:
            pass
        except OSError:
            lost = True
        messages = []
        at = 0
        while len(self._read) - at >= _HEAD:
            length = int.from_bytes(self._read[at : at + 4], "little")
            if length > _MESSAGE_BYTES_MAX:
                raise LostError
            if len(self._read) - at < _HEAD + length:
                break
            messages.append((self._read[at + 4], bytes(self._read[at + _HEAD : at + _HEAD + length])))
            at += _HEAD + length
        del self._read[:at]
        if lost and not messages:
            raise LostError
        return messages

    def close(self) -> None:
        self._socket.close()


def listen(directory: Path, name: str) -> socket.socket:
    """A socket of this name, in place of one that a process before left. OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(directory) as short:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{short}/{name}")
        listener.bind(f"{short}/{name}")
    listener.listen()
    listener.setblocking(False)
    return listener


def connect(directory: Path, name: str) -> Link:
    """OSError if nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(directory) as short:
            connection.connect(f"{short}/{name}")
    except OSError:
        connection.close()
        raise
    return Link(connection)


def ask(directory: Path, name: str, question: Any, timeout_s: float = 10.0) -> Any:
    """One question, one answer. OSError if nobody answers in time."""
    link = connect(directory, name)
    try:
        link._socket.settimeout(timeout_s)
        link._socket.sendall(b"".join(_message(ASK, pack(question))))
        while True:
            for kind, payload in link.receive():
                if kind == ANSWER:
                    return unpack(payload)
    except LostError as error:
        raise ConnectionError(f"{directory / name}: no answer") from error
    finally:
        link.close()


def _message(kind: int, payload: bytes) -> tuple[bytes, ...]:
    return len(payload).to_bytes(4, "little"), bytes((kind,)), payload


@contextlib.contextmanager
def _short(directory: Path) -> Any:
    """A name of the directory that fits into a socket's address, however long its path is."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
