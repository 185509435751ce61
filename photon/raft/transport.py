"""The peers' sockets of one host: who is connected, what comes in, what goes out. One thread, polled.

Between two nodes there is one connection, dialed by the one with the smaller id. Frames of all groups go
over it, in order. Where it breaks, all that was under way is lost, and the replicas are told: Raft sends
again.
"""

import logging
import os
import random
import select
import socket
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import Protocol

from photon.core.clock import Backoff
from photon.raft.addresses import Address, Endpoint, Resolver, bind
from photon.raft.core import now
from photon.raft.handshake import Handshake, HandshakeError, RefusedError
from photon.raft.links import HEADER_BYTES_MAX, PING_GROUP, FrameError, Link, LinkClosedError, tune
from photon.raft.port import RaftLimits, RaftTiming
from photon.raft.rules.codec import MessageError

_log = logging.getLogger(__name__)

# Strangers that are shaking hands at one time; past it one makes room for one more.
STRANGERS_MAX = 64
HANDSHAKE_S = 5.0
# How long one waits before it dials a peer again which refused it, or which it refused.
REFUSED_S = 1.0
# How long none is accepted after the process ran out of descriptors.
_ACCEPT_PAUSE_S = 0.1
_PINGS_A_SILENCE = 4
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR
# Complaints about strangers: at most one line in so long, and the same line again after so long.
COMPLAINT_S = 1.0
_AGAIN_S = 600.0
_REMEMBERED_MAX = 256


class Receiver(Protocol):
    """What the transport tells, from within `poll`, `tick`, `flush`, `send` and `set_peers`."""

    def last_life(self, peer: str) -> bytes:
        """The one it was last up in; of one that may be nobody's peer, too."""

    def life_seen(self, peer: str, life: bytes, last_life: bytes) -> str | None:
        """The peer has proved who it is, and is not up yet. `last_life`: of this node, as the peer remembers.

        A reason to refuse it (which both ends are told), or None. What it raises comes out of `poll`.
        """

    def peer_up(self, peer: str) -> None: ...
    def peer_down(self, peer: str) -> None: ...
    def frame(self, peer: str, group: int, message: bytes) -> None:
        """Raises MessageError for bytes that are no message: they end the connection."""


class LinkLog:
    """Lines about peers are told once until they are connected again; about strangers, seldom."""

    def __init__(self, node: str, clock: Callable[[], float]) -> None:
        self._node = node
        self._clock = clock
        self._away: set[str] = set()
        self._refused: dict[str, str] = {}  # by peer, why
        self._complained_at = -COMPLAINT_S
        self._complaints: dict[str, float] = {}  # when each was told

    def connected(self, peer: str) -> None:
        self._away.discard(peer)
        self._refused.pop(peer, None)
        _log.info("raft %s: connected to %s", self._node, peer)

    def away(self, peer: str, why: str) -> None:
        if peer not in self._away:
            self._away.add(peer)
            _log.warning("raft %s: no connection to %s: %s", self._node, peer, why)

    def refused(self, peer: str, why: str) -> None:
        """A peer and this node know each other's secret, and one will not speak to the other."""
        if self._refused.get(peer) != why:
            self._refused[peer] = why
            _log.error("raft %s: no connection to %s: %s", self._node, peer, why)

    def only(self, peers: Container[str]) -> None:
        """Forget what was told of all others."""
        self._away = {peer for peer in self._away if peer in peers}
        self._refused = {peer: why for peer, why in self._refused.items() if peer in peers}

    def stranger(self, what: str) -> None:
        at = self._clock()
        if at - self._complained_at < COMPLAINT_S:
            return
        if at - self._complaints.get(what, -_AGAIN_S) < _AGAIN_S:
            return
        if len(self._complaints) >= _REMEMBERED_MAX:
            self._complaints.clear()
        self._complained_at = self._complaints[what] = at
        _log.warning("raft %s: %s", self._node, what)


class Transport:
    """`send` queues, `flush` writes, `poll` waits and reads."""

    def __init__(
        self,
        endpoint: Endpoint,
        life: bytes,
        peers: Mapping[str, Address],
        receiver: Receiver,
        timing: RaftTiming,
        limits: RaftLimits,
        rng: random.Random,
    ) -> None:
        """`life`: this node's present one; peers see it."""
        self._endpoint = endpoint
        self._node = endpoint.node
        self._life = life
        self._peers = dict(peers)
        self._receiver = receiver
        self._timing = timing
        self._limits = limits
        self._rng = rng
        tls = endpoint.tls
        self._contexts = None if tls is None else (tls.client_context(), tls.server_context())
        self._resolver = Resolver()
        self._poller = select.poll()
        self._listener: socket.socket | None = None
        self._accepts_again_at: float | None = None
        self._links: dict[int, Link] = {}  # by descriptor, all of them
        self._up: dict[str, Link] = {}  # by peer, those that are through the handshake
        self._next_dial = {peer: 0.0 for peer in peers if peer > self._node}
        self._dials: dict[str, int] = {}
        """How often each was dialed since it was last connected for a while."""
        self._dialing: set[str] = set()
        self._log = LinkLog(self._node, now)

    @property
    def versions(self) -> dict[str, int]:
        """Peer that is connected -> the newest protocol version that it knows."""
        return {peer: link.newest for peer, link in self._up.items()}

    # -- life -------------------------------------------------------------------------------------------

    def listen(self) -> Address:
        """Bind; returns the address. Raises AddressInUseError, UsageError."""
        listener = bind(*self._endpoint.listen)
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

    def set_peers(self, peers: Mapping[str, Address]) -> None:
        """From now on these are the peers, by id, with the addresses to dial; the thread of `poll` only.

        One that is gone is disconnected and refused, one at another address is dialed there.
        """
        moved = {peer for peer, address in self._peers.items() if peers.get(peer) != address}
        self._peers = dict(peers)
        self._log.only(peers)
        self._resolver.only({self._endpoint.dialed(*address) for address in peers.values()})
        for link in list(self._links.values()):
            peer = link.peer or link.target
            if peer is None or peer not in moved:
                continue
            if peer not in peers:
                self._drop(link, "it is no peer any more")
            elif link.target is not None:
                self._drop(link, "it has moved to another address")
        for peer in moved:
            self._dials.pop(peer, None)
        self._next_dial = {
            peer: 0.0 if peer in moved else self._next_dial.get(peer, 0.0)
            for peer in peers
            if peer > self._node
        }

    # -- each turn --------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> None:
        """Wait for bytes, at most so long; read and deliver them, and those of one stranger.

        A handshake through TLS costs a signature. The other strangers are heard in later turns, so that a
        flood of them holds up no heartbeat.
        """
        strangers = []
        for fd, event in self._poller.poll(max(0, seconds) * 1000):
            link = self._links.get(fd)
            if link is not None and link.peer is None and link.target is None:
                strangers.append((link, event))
            elif link is not None:
                self._on_event(link, event)
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()
        strangers = [one for one in strangers if self._links.get(one[0].fd) is one[0]]
        if strangers:
            self._on_event(*self._rng.choice(strangers))

    def tick(self, at: float) -> None:
        """Dial who is missing, ping who hears nothing else of us, drop who is silent. `at`: the time."""
        if self._accepts_again_at is not None and at >= self._accepts_again_at and self._listener is not None:
            self._accepts_again_at = None
            self._poller.register(self._listener, select.POLLIN)
        for peer, due in list(self._next_dial.items()):
            if at >= due and self._is_missing(peer):
                self._dial(peer, at)
        ping = self._timing.silence_s / _PINGS_A_SILENCE
        for link in list(self._links.values()):
            if link.peer is None:
                if at - link.opened_at > HANDSHAKE_S:
                    self._drop(link, "it did not finish the handshake in time")
            elif at - link.heard_at > self._timing.silence_s:
                self._drop(link, "it was silent for too long")
            elif at - link.said_at > ping:
                link.send(PING_GROUP, b"", at)

    def deadline(self) -> float:
        """When `tick` has something to do, at the latest."""
        times = [at for peer, at in self._next_dial.items() if self._is_missing(peer)]
        if self._accepts_again_at is not None:
            times.append(self._accepts_again_at)
        period = min(self._timing.silence_s / _PINGS_A_SILENCE, HANDSHAKE_S)
        return min([now() + period, *times])

    def flush(self) -> None:
        """Write what is queued, as far as the sockets take it."""
        for link in list(self._links.values()):
            if link.unsent and not link.wants_write:
                self._write(link)

    # -- what replicas send -----------------------------------------------------------------------------

    def send(self, peer: str, group: int, message: bytes) -> None:
        """Queue a message; without a connection it is lost."""
        link = self._up.get(peer)
        if link is None:
            return
        link.send(group, message, now())
        if link.queued_bytes > 2 * self._limits.outgoing_bytes + self._limits.frame_bytes_max:
            self._drop(link, "too much waits for it")

    def room(self, peer: str) -> int:
        """Bytes that may be queued for the peer before it falls behind."""
        link = self._up.get(peer)
        return 0 if link is None else self._limits.outgoing_bytes - link.queued_bytes - HEADER_BYTES_MAX

    # -- connections ------------------------------------------------------------------------------------

    def _is_missing(self, peer: str) -> bool:
        return peer not in self._up and peer not in self._dialing

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has left again
        except OSError as error:
            self._log.stranger(f"can't accept a connection: {error}")
            # Else the one that waits would wake the thread without end.
            self._poller.unregister(self._listener)
            self._accepts_again_at = now() + _ACCEPT_PAUSE_S
            return
        try:
            tune(sock)
        except OSError:
            sock.close()
            return
        self._make_room_for_stranger()
        self._add(sock, target=None, source=str(address[0]))

    def _make_room_for_stranger(self) -> None:
        """The oldest goes, of the address that has most of them: a flood from one drives out no peer."""
        strangers = [link for link in self._links.values() if link.peer is None and link.target is None]
        if len(strangers) >= STRANGERS_MAX:
            ((most, _),) = Counter(link.source for link in strangers).most_common(1)
            oldest = next(link for link in strangers if link.source == most)
            self._drop(oldest, "too many are shaking hands at once")

    def _dial(self, peer: str, at: float) -> None:
        self._dials[peer] = self._dials.get(peer, 0) + 1
        self._dial_later(peer, at)
        sock = None
        try:
            target = self._resolver.lookup(*self._endpoint.dialed(*self._peers[peer]), at)
            if target is None:
                return
            sock = socket.socket(target[0], socket.SOCK_STREAM)
            tune(sock)
            sock.connect(target[1])
        except BlockingIOError:
            pass
        except OSError as error:
            if sock is not None:
                sock.close()
            self._log.away(peer, f"can't connect: {error}")
            return
        assert sock is not None
        self._dialing.add(peer)
        self._add(sock, target=peer)

    def _dial_later(self, peer: str, at: float, wait_s: float = 0.0) -> None:
        if peer in self._next_dial:
            backoff = Backoff(self._timing.reconnect_s_min, self._timing.reconnect_s_max)
            delay_s = backoff.delay_s(max(1, self._dials.get(peer, 0)), self._rng.uniform)
            self._next_dial[peer] = at + wait_s + delay_s

    def _add(self, sock: socket.socket, target: str | None, source: str = "") -> None:
        receiver, secret = self._receiver, self._endpoint.secret
        admit = self._admit if target is None else receiver.life_seen
        handshake = Handshake(self._node, self._life, secret, os.urandom, target, receiver.last_life, admit)
        context = None if self._contexts is None else self._contexts[0 if target is not None else 1]
        link = Link(sock, context, handshake, self._limits.frame_bytes_max, now(), target, source)
        self._links[link.fd] = link
        self._poller.register(link.fd, select.POLLIN | (select.POLLOUT if link.connecting else 0))

    def _admit(self, peer: str, life: bytes, last_life: bytes) -> str | None:
        """Of those that dial us."""
        if peer not in self._peers or peer > self._node:
            return (
                f"{peer} is not a peer of {self._node} that dials it: check both lists of peers, "
                "and stop it if it was removed or replaced"
            )
        return self._receiver.life_seen(peer, life, last_life)

    def _on_event(self, link: Link, event: int) -> None:
        if link.connecting:
            try:
                link.finish_connecting()
            except OSError as error:
                self._drop(link, str(error))
                return
        if event & select.POLLOUT or link.unsent:
            self._write(link)
        if event & _READABLE and self._links.get(link.fd) is link:
            self._read(link)

    def _read(self, link: Link) -> None:
        known = link.peer
        try:
            frames = link.read(now())
        except RefusedError as error:
            self._refuse(link, error)
            return
        except (OSError, LinkClosedError, FrameError, HandshakeError) as error:
            self._drop(link, str(error))
            return
        if known is None and link.peer is not None:
            self._welcome(link, link.peer)
        for group, message in frames:
            if group == PING_GROUP:
                continue
            if self._links.get(link.fd) is not link or link.peer is None:
                return
            try:
                self._receiver.frame(link.peer, group, message)
            except MessageError as error:
                self._drop(link, str(error))
                return
        if link.ended is not None:
            self._drop(link, str(link.ended))

    def _welcome(self, link: Link, peer: str) -> None:
        """The newer connection counts: its peer may have restarted without the old one having noticed."""
        before = self._up.get(peer)
        if before is not None:
            self._drop(before, "it has connected anew")
        self._dialing.discard(peer)
        self._up[peer] = link
        self._log.connected(peer)
        self._receiver.peer_up(peer)

    def _write(self, link: Link) -> None:
        try:
            link.write()
        except OSError as error:
            self._drop(link, str(error))
            return
        # Without this the rest of a large message waits for the next one (L3).
        wants_write = link.unsent
        if wants_write != link.wants_write:
            link.wants_write = wants_write
            self._poller.modify(link.fd, select.POLLIN | (select.POLLOUT if wants_write else 0))

    def _drop(self, link: Link, why: str) -> None:
        if self._links.get(link.fd) is not link:
            return
        peer = link.peer or link.target
        if peer is None:
            self._log.stranger(f"closed the connection of a stranger at {link.source}: {why}")
        elif peer in self._peers:
            self._log.away(peer, why)
        self._forget(link)

    def _refuse(self, link: Link, error: RefusedError) -> None:
        if error.peer in self._peers:
            self._log.refused(error.peer, str(error))
        else:
            self._log.stranger(f"refused the connection of {error.peer}: {error}")
        self._forget(link)
        self._dial_later(error.peer, now(), REFUSED_S)

    def _forget(self, link: Link) -> None:
        del self._links[link.fd]
        self._poller.unregister(link.fd)
        link.close()
        if link.target is not None:
            self._dialing.discard(link.target)
            if link.peer is not None and now() - link.opened_at > self._timing.reconnect_s_max:
                self._dials.pop(link.target, None)
            self._dial_later(link.target, now())
        if link.peer is not None and self._up.get(link.peer) is link:
            del self._up[link.peer]
            self._receiver.peer_down(link.peer)
