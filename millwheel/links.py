"""Messages between the processes of a run: over Unix sockets in the work directory, and between machines over
TCP, through mutual TLS where [tls] is set.

A message is its length (u32, little endian), its kind (u8) and its bytes. Nothing waits: what can't be sent
yet is kept, and what is not whole yet is left. A lost link loses what was under way; who must, sends it
again.
"""

import contextlib
import functools
import os
import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from photon.core.addresses import split
from photon.raft.links import Channel, LinkClosedError, TlsChannel
from photon.rpc.network import Network, Tls

HELLO, FRAME, ACK, BEGINS, REPORT, MARKS, STATUS, FINISH, FINISHED, ASK, ANSWER, BEAT = range(12)
LATENESS, LEASE = range(12, 14)
"""Kinds: of workers to each other, of workers and who leads, of commands and the run."""

_KINDS: Final[dict[int, Any]] = {
    HELLO: tuple[str, int, int],
    ACK: dict[int, int],
    BEGINS: tuple[str, int, int, int, dict[str, int]],
    REPORT: tuple[int, int, dict[str, int]],
    MARKS: dict[str, int],
    STATUS: tuple[int, dict[str, Any]],
    FINISH: int,
    FINISHED: tuple[int, dict[str, Any], int],
    ASK: list[str],
    BEAT: tuple[int, int],
    LATENESS: dict[str, int],
    LEASE: float,
}
"""What is in them; an answer's may be anything, a frame's is its own."""
CONTROL: Final = "control.sock"
_HEAD: Final = 5
_READ_BYTES: Final = 1 << 20
_MESSAGE_BYTES_MAX: Final = 1 << 30
_STRANGER_BYTES_MAX: Final = 2 * _READ_BYTES
_STRANGER_S: Final = 10.0
_GONE_MS: Final = 5_000
"""A machine that vanished answers nothing, and says no goodbye."""
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
pack: Final = msgspec.msgpack.encode
_readers: Final = {kind: msgspec.msgpack.Decoder(type=there).decode for kind, there in _KINDS.items()}


class LostError(Exception):
    """The other side is gone."""


class Link:
    """One connection. For one thread. `connecting`: it was dialed, and may not be there yet."""

    def __init__(
        self, connection: socket.socket, channel: Channel | None = None, connecting: bool = False
    ) -> None:
        connection.setblocking(False)
        self.known = connecting
        """It has said who it is; until then it gets little room and time."""
        self._opened = time.monotonic()
        self._socket = connection
        self._channel = channel or Channel(connection)
        self._connecting = connecting
        self._unsent = bytearray()
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def established(self) -> bool:
        """What is sent goes out now."""
        return not self._connecting and self._channel.established

    @property
    def events(self) -> int:
        """What a selector is to wait for."""
        waits = self._connecting or self._channel.pending or (self._unsent and self.established)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)

    def send(self, kind: int, payload: bytes) -> None:
        """LostError."""
        self._unsent += len(payload).to_bytes(4, "little") + bytes((kind,)) + payload
        self.flush()

    def flush(self) -> None:
        """LostError."""
        try:
            if self._connecting and not self._is_connected():
                return
            self._channel.push()
            while self._unsent and self._channel.established:
                with memoryview(self._unsent) as view, view[:_READ_BYTES] as some:
                    sent = self._channel.send([some])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except (OSError, LinkClosedError) as error:
            raise LostError(str(error)) from error

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that are whole. LostError if the other side is gone and no whole one is left."""
        lost: Exception | None = None
        if not self.known and len(self._read) > _STRANGER_BYTES_MAX:
            raise LostError("it does not say who it is")
        try:
            self._read += self._channel.receive(_READ_BYTES)
        except BlockingIOError:
            pass
        except (OSError, LinkClosedError) as error:
            lost = error
        messages = []
        at = 0
        while len(self._read) - at >= _HEAD:
            length = int.from_bytes(self._read[at : at + 4], "little")
            if length > _MESSAGE_BYTES_MAX:
                raise LostError(f"a message of {length} bytes")
            if len(self._read) - at < _HEAD + length:
                break
            messages.append((self._read[at + 4], bytes(self._read[at + _HEAD : at + _HEAD + length])))
            at += _HEAD + length
        del self._read[:at]
        if lost is not None and not messages:
            raise LostError(str(lost)) from lost
        if lost is None:
            self.flush()  # of a handshake
        return messages

    def close(self) -> None:
        self._socket.close()

    def _is_connected(self) -> bool:
        """OSError if it never will be."""
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            self._socket.getpeername()
        except OSError:
            return False
        self._connecting = False
        self._channel.start()
        return True


def read(kind: int, payload: bytes) -> Any:
    """What a message says. LostError for what nobody of ours would say."""
    try:
        return _readers[kind](payload)
    except (KeyError, *UNREADABLE) as error:
        raise LostError(f"a message of kind {kind} that can't be read ({error})") from error


def strangers(selector: selectors.BaseSelector) -> list[Link]:
    """Who was accepted some time ago, and has not said who it is."""
    now = time.monotonic()
    links = [key.fileobj for key in selector.get_map().values() if isinstance(key.fileobj, Link)]
    return [link for link in links if not link.known and now - link._opened > _STRANGER_S]


def watch(selector: selectors.BaseSelector, link: Link) -> None:
    """Have the selector wait for what the link waits for."""
    key = selector.get_key(link)
    if key.events != link.events:
        selector.modify(link, link.events, key.data)


@dataclass(frozen=True, slots=True)
class Ways:
    """How the processes of a run reach each other.

    `lead`, `workers`: the addresses of who leads and of each worker; without them all are on this machine,
    and have sockets in the work directory. `holder`, `number`: of who leads and of the round, by which those
    of one run know each other.
    """

    work: Path
    holder: str = ""
    number: int = 0
    lead: str = ""
    workers: tuple[str, ...] = ()
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        """SettingsError."""
        if self.network.tls is not None:
            _contexts(self.network.tls)

    def listen(self, worker: int) -> socket.socket:
        """UsageError for a port beyond loopback that is not secured; OSError."""
        return self.bind(self.workers[worker]) if self.workers else listen(self.work, worker_socket(worker))

    def bind(self, address: str) -> socket.socket:
        """As `listen`."""
        host, port = split(self.network.bound(address))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        listener.setblocking(False)
        return listener

    def accept(self, listener: socket.socket) -> Link:
        """OSError."""
        connection, _ = listener.accept()
        tls = None if listener.family == socket.AF_UNIX else self.network.tls
        _let_go_of_the_dead(connection)
        return Link(connection, None if tls is None else TlsChannel(connection, _contexts(tls)[0]))

    def to_worker(self, worker: int) -> Link:
        """OSError."""
        return self.dial(self.workers[worker]) if self.workers else connect(self.work, worker_socket(worker))

    def to_lead(self) -> Link:
        """OSError."""
        return self.dial(self.lead) if self.lead else connect(self.work, CONTROL)

    def dial(self, address: str) -> Link:
        """It may turn out to be lost. OSError."""
        host, port = split(self.network.via.get(address, address))
        try:
            family, kind, protocol, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except UnicodeError as error:
            raise OSError(f"{host} is no name of a host") from error
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            _let_go_of_the_dead(connection)
            with contextlib.suppress(BlockingIOError):
                connection.connect(found)
            tls = self.network.tls
            channel = None if tls is None else TlsChannel(connection, _contexts(tls)[1])
        except BaseException:
            connection.close()
            raise
        return Link(connection, channel, connecting=True)


@functools.lru_cache(1)
def _contexts(tls: Tls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of who is dialed, and who dials: a process goes on with the files that it started with."""
    return tls.server_context(), tls.client_context()


def _let_go_of_the_dead(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)


def worker_socket(worker: int) -> str:
    return f"worker-{worker}.sock"


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
    link = Link(connection)
    link.known = True
    return link


def ask(link: Link, question: Any, timeout_s: float = 10.0) -> Any:
    """One question, one answer. ConnectionError if nobody answers in time."""
    with contextlib.closing(link), selectors.DefaultSelector() as selector:
        selector.register(link, link.events)
        try:
            link.send(ASK, pack(question))
            while True:
                watch(selector, link)
                found = selector.select(timeout_s)
                if not found:
                    raise TimeoutError("no answer in time")
                link.flush()
                if found[0][1] & selectors.EVENT_READ:
                    for kind, payload in link.receive():
                        if kind == ANSWER:
                            return msgspec.msgpack.decode(payload)
        except LostError as error:
            raise ConnectionError(f"no answer: {error}") from error


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A name of the directory that fits into a socket's address, however long its path is."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
