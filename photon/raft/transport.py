"""The peers' sockets of one host: who is connected, what comes in, what goes out. One thread, polled.

Between two nodes there is one connection, dialed by the one with the smaller id. Frames of all groups go
over it, in order. Where it breaks, all that was under way is lost, and the replicas are told: Raft sends
again.
"""

import errno
import ipaddress
import logging
import os
import random
import select
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

from photon.core.errors import AddressInUseError, PhotonError, SettingsError, UsageError
from photon.raft.frames import HEADER_BYTES, PING_GROUP
from photon.raft.handshake import ID_BYTES_MAX, Handshake
from photon.raft.link import Link, LinkClosedError, size_buffers, tune
from photon.raft.resolver import Resolver
from photon.raft.settings import RaftLimits, RaftTiming

_log = logging.getLogger(__name__)

# Strangers that are shaking hands at one time; the oldest makes room for one more.
STRANGERS_MAX = 64
HANDSHAKE_S = 5.0
# Complaints about strangers: at most one line in so long.
COMPLAINT_S = 1.0
_BACKLOG = 64
_PINGS_A_SILENCE = 4
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class Receiver(Protocol):
    """What the transport tells, from within `poll`, `tick` and `flush`."""

    def peer_up(self, peer: str) -> None: ...
    def peer_down(self, peer: str) -> None: ...
    def frame(self, peer: str, group: int, message: bytes) -> None:
        """Raises PhotonError of kind MessageError for bytes that are no message."""


class Transport:
    """`send` queues, `flush` writes, `poll` waits and reads."""

    def __init__(
        self,
        node: str,
        listen: tuple[str, int],
        peers: Mapping[str, tuple[str, int]],
        secret: bytes,
        timing: RaftTiming,
        limits: RaftLimits,
        rng: random.Random,
        clock: Callable[[], float],
        receiver: Receiver,
        refused: type[PhotonError],
    ) -> None:
        """`refused`: what `receiver.frame` raises for a message to close the connection over."""
        _check(node, listen, peers, secret)
        self._node = node
        self._listen_address = listen
        self._peers = dict(peers)
        self._dials_us = [peer for peer in peers if peer < node]
        self._secret = secret
        self._timing = timing
        self._limits = limits
        self._rng = rng
        self._clock = clock
        self._receiver = receiver
        self._refused = refused
        self._resolver = Resolver()
        self._poller = select.poll()
        self._listener: socket.socket | None = None
        self._links: dict[int, Link] = {}  # by descriptor, all of them
        self._up: dict[str, Link] = {}  # by peer, those that are through the handshake
        self._next_dial = {peer: 0.0 for peer in peers if peer > node}
        self._dialing: set[str] = set()
        self._complained_at = -COMPLAINT_S
        self._told_away: set[str] = set()  # peers whose absence was logged

    # -- life -------------------------------------------------------------------------------------------

    def listen(self) -> tuple[str, int]:
        """Bind; returns the address. Raises AddressInUseError, UsageError."""
        host, port = self._listen_address
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"raft: can't listen on {host}:{port}: {error}; set another address") from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            size_buffers(listener)  # what it accepts takes them over, before the window is agreed on
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            kind = AddressInUseError if error.errno == errno.EADDRINUSE else UsageError
            raise kind(
                f"raft: can't listen on {host}:{port}: {error.strerror}; set another address"
            ) from error
        self._listener = listener
        self._poller.register(listener, select.POLLIN)
        name = listener.getsockname()
        return name[0], name[1]

    def watch(self, fd: int) -> None:
        """Let `poll` return when something can be read from the descriptor."""
        self._poller.register(fd, select.POLLIN)

    def close(self) -> None:
        """Close every socket, telling nobody."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._up.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- each turn --------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> None:
        """Wait for bytes, at most so long; read and deliver them."""
        for fd, event in self._poller.poll(max(0, seconds) * 1000):
            link = self._links.get(fd)
            if link is not None:
                self._on_event(link, event)
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()

    def tick(self, now: float) -> None:
        """Dial who is missing, ping who hears nothing else of us, drop who is silent."""
        for peer, at in self._next_dial.items():
            if now >= at and peer not in self._up and peer not in self._dialing:
                self._dial(peer, now)
        ping = self._timing.silence_s / _PINGS_A_SILENCE
        for link in list(self._links.values()):
            if link.peer is None:
                if now - link.opened_at > HANDSHAKE_S:
                    self._drop(link, "it did not finish the handshake in time")
            elif now - link.heard_at > self._timing.silence_s:
                self._drop(link, "it was silent for too long")
            elif now - link.said_at > ping:
                link.send(PING_GROUP, b"", now)

    def deadline(self) -> float:
        """When `tick` has something to do, at the latest."""
        period = min(self._timing.silence_s / _PINGS_A_SILENCE, HANDSHAKE_S)
        dials = [
            at for peer, at in self._next_dial.items() if peer not in self._up and peer not in self._dialing
        ]
        return min([self._clock() + period, *dials])

    def flush(self) -> None:
        """Write what is queued, as far as the sockets take it."""
        for link in list(self._links.values()):
            if link.queued_bytes and not link.wants_write:
                self._write(link)

    # -- what replicas send -----------------------------------------------------------------------------

    def send(self, peer: str, group: int, message: bytes) -> None:
        """Queue a message; without a connection it is lost."""
        link = self._up.get(peer)
        if link is None:
            return
        link.send(group, message, self._clock())
        if link.queued_bytes > 2 * self._limits.outgoing_bytes + self._limits.frame_bytes_max:
            self._drop(link, "too much waits for it")

    def room(self, peer: str) -> int:
        """Bytes that may be queued for the peer before it falls behind."""
        link = self._up.get(peer)
        return 0 if link is None else self._limits.outgoing_bytes - link.queued_bytes - HEADER_BYTES

    # -- connections ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            self._complain(f"can't accept a connection: {error}")
            return
        tune(sock)
        strangers = [link for link in self._links.values() if link.peer is None and link.target is None]
        if len(strangers) >= STRANGERS_MAX:
            self._drop(strangers[0], "too many are shaking hands at once")
        self._add(sock, target=None)

    def _dial(self, peer: str, now: float) -> None:
        self._next_dial[peer] = now + self._rng.uniform(
            self._timing.reconnect_s_min, self._timing.reconnect_s_max
        )
        target = self._resolver.lookup(*self._peers[peer], now)
        if target is None:
            return
        sock = socket.socket(target[0], socket.SOCK_STREAM)
        try:
            tune(sock)
            sock.connect(target[1])
        except BlockingIOError:
            pass
        except OSError as error:
            sock.close()
            self._tell_away(peer, f"can't connect: {error}")
            return
        self._dialing.add(peer)
        self._add(sock, target=peer)

    def _add(self, sock: socket.socket, target: str | None) -> None:
        handshake = Handshake(self._node, self._dials_us, self._secret, os.urandom, target)
        link = Link(sock, handshake, self._limits.frame_bytes_max, self._clock(), target)
        self._links[link.fd] = link
        self._poller.register(link.fd, select.POLLIN | (select.POLLOUT if link.connecting else 0))

    def _on_event(self, link: Link, event: int) -> None:
        if link.connecting:
            try:
                link.finish_connecting()
            except OSError as error:
                self._drop(link, str(error))
                return
        if event & select.POLLOUT or link.queued_bytes:
            self._write(link)
        if event & _READABLE and link.fd in self._links:
            self._read(link)

    def _read(self, link: Link) -> None:
        known = link.peer
        try:
            frames = link.read(self._clock())
        except (OSError, LinkClosedError, PhotonError) as error:
            self._drop(link, str(error) or "it closed the connection")
            return
        if known is None and link.peer is not None:
            self._welcome(link, link.peer)
        for group, message in frames:
            if group == PING_GROUP:
                continue
            if link.fd not in self._links or link.peer is None:
                return
            try:
                self._receiver.frame(link.peer, group, message)
            except self._refused as error:
                self._drop(link, str(error))
                return

    def _welcome(self, link: Link, peer: str) -> None:
        """The newer connection counts: its peer may have restarted without the old one having noticed."""
        before = self._up.get(peer)
        if before is not None:
            self._drop(before, "it has connected anew")
        self._dialing.discard(peer)
        self._up[peer] = link
        self._told_away.discard(peer)
        _log.info("raft %s: connected to %s", self._node, peer)
        self._receiver.peer_up(peer)

    def _write(self, link: Link) -> None:
        try:
            link.write()
        except OSError as error:
            self._drop(link, str(error))
            return
        # Without this the rest of a large message waits for the next one (L3).
        wants_write = link.queued_bytes > 0
        if wants_write != link.wants_write:
            link.wants_write = wants_write
            self._poller.modify(link.fd, select.POLLIN | (select.POLLOUT if wants_write else 0))

    def _drop(self, link: Link, why: str) -> None:
        if self._links.pop(link.fd, None) is None:
            return
        self._poller.unregister(link.fd)
        link.close()
        peer = link.peer or link.target
        if peer is None:
            self._complain(f"closed the connection of a stranger: {why}")
        else:
            self._tell_away(peer, why)
        if link.target is not None:
            self._dialing.discard(link.target)
            self._next_dial[link.target] = self._clock() + self._rng.uniform(
                self._timing.reconnect_s_min, self._timing.reconnect_s_max
            )
        if link.peer is not None and self._up.get(link.peer) is link:
            del self._up[link.peer]
            self._receiver.peer_down(link.peer)

    def _tell_away(self, peer: str, why: str) -> None:
        """Once, until it has been connected again."""
        if peer not in self._told_away:
            self._told_away.add(peer)
            _log.warning("raft %s: no connection to %s: %s", self._node, peer, why)

    def _complain(self, what: str) -> None:
        """About strangers: seldom, lest they fill the log."""
        now = self._clock()
        if now - self._complained_at >= COMPLAINT_S:
            self._complained_at = now
            _log.warning("raft %s: %s", self._node, what)


def _check(node: str, listen: tuple[str, int], peers: Mapping[str, tuple[str, int]], secret: bytes) -> None:
    for name in (node, *peers):
        if not name or len(name.encode()) > ID_BYTES_MAX:
            raise SettingsError(f"raft: {name!r} can't be a node id; take 1 to {ID_BYTES_MAX} bytes")
    if node in peers:
        raise SettingsError(f"raft: {node} is among its own peers; name only the other nodes")
    if not secret and not _is_loopback(listen[0]):
        raise SettingsError(
            f"raft: will not listen on {listen[0]} without a cluster secret; set one, the same on all nodes"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
