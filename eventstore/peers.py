"""The event stores of a datacenter: who is there, and what each tells the others it has read (paper 3.4).

All are equal, and nobody has a say: each has the whole log file map, a share of the cache and a share of the
logs to read. A call from each to each other one (`Follow`) is open all the time. It is answered with what was
read meanwhile, or after a second with nothing, so it also tells who is there. One that gives no answer is
gone at once where its process is, after SILENT_S_MAX where it stands still or can't be reached; whoever
notices reads its logs, too. Where two disagree on who is there, a log is read twice for a while, which costs
time and nothing else (eventstore/reader.py).

One that lacks much of what the others have read, as it is new or was away, does not serve yet: it reads what
it lacks by itself, and neither clients nor logs are given to it until it has all.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from secrets import randbits
from typing import Any, Final

import grpc
import numpy as np

from eventstore.rules.ring import Ring, version_of
from photon.core.addresses import mistake
from photon.core.clock import Clock
from photon.core.ids import ID_BYTES
from photon.logs.shares import SLOTS, slot_of
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network, failure_of

SILENT_S_MAX: Final = 3.0
ANSWER_S_MAX: Final = 1.0
"""So long a call waits for something to tell."""
MEMBERS_MAX: Final = 64
"""More are not followed: each costs the others a thread."""
FEED_BYTES_MAX: Final = 64 << 20
"""Kept for those who follow; what one has missed it reads by itself."""
INBOX_BYTES_MAX: Final = 64 << 20
"""Of what others have read; then their feeds wait."""
_ANSWER_BYTES: Final = 8 << 20
_AGAIN_S: Final = 0.2
_FORGOTTEN_S: Final = 60.0
"""After so long one that no settings name is no longer asked."""
_POSITION_BITS: Final = 62


_SLOTS: Final = b"".join(slot.to_bytes(ID_BYTES, "big") for slot in range(SLOTS))


class Membership:
    """Who is to be asked, and who reads the logs: those that serve, or all, where none does. Immutable."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.members = ring.members
        self.version = version_of(ring.members)
        """The same wherever the members are the same."""
        self._readers: list[str] = np.array(ring.members, object)[ring.owners(_SLOTS)].tolist()

    def reader(self, name: str) -> str:
        """Of the log of that name, and of what rotation makes of it."""
        return self._readers[slot_of(name)]


class Feed:
    """What was read here, for those who follow. For many threads at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: deque[tuple[int, list[pb.Stretch]]] = deque()
        self._bytes = 0
        self._asked = float("-inf")
        self.closed = False
        self.life = randbits(_POSITION_BITS) + 1
        self.position = 0

    @property
    def followed(self) -> bool:
        """Somebody has asked lately; else there is no need to `tell`."""
        return self._clock.monotonic() - self._asked <= SILENT_S_MAX

    def tell(self, stretches: list[pb.Stretch]) -> None:
        size = sum(one.ByteSize() for one in stretches)
        with self._changed:
            self.position += 1
            self._kept.append((size, stretches))
            self._bytes += size
            while self._bytes > FEED_BYTES_MAX:
                self._bytes -= self._kept.popleft()[0]
            self._changed.notify_all()

    def after(self, life: int, position: int, wait_s: float) -> tuple[int, list[pb.Stretch]]:
        """What was told since the position of that life, or is kept still; the position after it. Waits where
        there is nothing."""
        with self._changed:
            self._asked = self._clock.monotonic()
            known = position if life == self.life else 0
            self._changed.wait_for(lambda: self.closed or self.position > known, wait_s)
            skipped = max(0, len(self._kept) - (self.position - known))
            found: list[pb.Stretch] = []
            size, taken = 0, self.position - len(self._kept) + skipped
            for number in range(skipped, len(self._kept)):
                one_size, stretches = self._kept[number]
                if found and size + one_size > _ANSWER_BYTES:
                    break
                found += stretches
                size, taken = size + one_size, taken + 1
            return taken, found

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


class Peers:
    """`address`: by which the others know this one. `known`: addresses of others, more may come.

    `serves`: whether this one does; `wake` is called when there is something to take, or others are there
    than before; `changed`, when other members serve. For many threads at once; the methods up to `start` are
    for one.
    """

    def __init__(
        self,
        address: str,
        known: Sequence[str],
        virtual_nodes: int,
        clock: Clock,
        serves: Callable[[], bool] = lambda: True,
        wake: Callable[[], None] = lambda: None,
        network: Network = LOOPBACK,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.feed = Feed(clock)
        self.virtual_nodes = virtual_nodes
        self._settled = tuple(dict.fromkeys(one for one in known if one != address))
        self._clock = clock
        self._serves = serves
        self._wake = wake
        self._changed = changed
        self._network = network
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._taken = threading.Condition()
        self._inbox: deque[pb.Stretch] = deque()
        self._inbox_bytes = 0
        self._stopping = threading.Event()
        self._membership = Membership(Ring([address], virtual_nodes))

    def start(self, address: str) -> None:
        """`address`: with the port that was chosen for `:0`."""
        self.address, self._membership = address, Membership(Ring([address], self.virtual_nodes))
        for one in self._settled:
            self._add(one)

    def stop(self) -> None:
        """The others learn at once that this one leaves."""
        self._stopping.set()
        self.feed.close()
        with self._taken:
            self._taken.notify_all()
        with self._lock:
            peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()

    @property
    def others(self) -> bool:
        """Whether any is there, or was a moment ago."""
        return bool(self._peers)

    def membership(self) -> Membership:
        if not self._peers:
            return self._membership
        now = self._clock.monotonic()
        there = [peer for peer in list(self._peers.values()) if peer.is_there(now)]
        serving = [peer.address for peer in there if peer.serves]
        if self._serves():
            serving.append(self.address)
        members = tuple(sorted(serving or [self.address, *(peer.address for peer in there)]))
        if members != self._membership.members:
            self._membership = Membership(Ring(members, self.virtual_nodes))
            self._wake()
            self._changed()
        return self._membership

    def status(self) -> dict[str, Any]:
        now = self._clock.monotonic()
        return {
            peer.address: {
                "there": peer.is_there(now),
                "serves": peer.serves,
                "events": peer.events,
                "trouble": peer.trouble,
            }
            for peer in list(self._peers.values())
        }

    def take(self) -> list[pb.Stretch]:
        """What others have read since, in the order that each has."""
        if not self._inbox:
            return []
        with self._taken:
            taken, self._inbox, self._inbox_bytes = list(self._inbox), deque(), 0
            self._taken.notify_all()
            return taken

    def answer(self, request: pb.FollowRequest) -> pb.FollowResponse:
        """To a call of another one; it is followed, too, from now on."""
        if request.address != self.address:
            self._add(request.address)
        position, stretches = self.feed.after(request.life, request.after, ANSWER_S_MAX)
        now = self._clock.monotonic()
        return pb.FollowResponse(
            life=self.feed.life,
            position=position,
            serves=self._serves(),
            leaves=self.feed.closed,
            members=[one.address for one in list(self._peers.values()) if one.is_there(now)],
            stretches=stretches,
        )

    def _add(self, address: str) -> None:
        with self._lock:
            if address in self._peers or address == self.address or self._stopping.is_set():
                return
            if len(self._peers) >= MEMBERS_MAX - 1 or mistake(address) is not None:
                return
            peer = self._peers[address] = _Peer(address, self._clock.monotonic(), self._network)
        threading.Thread(target=self._follow, args=(peer,), name=f"follow-{address}", daemon=True).start()

    def _follow(self, peer: "_Peer") -> None:
        while not self._stopping.is_set():
            now = self._clock.monotonic()
            if peer.silent_s(now) > _FORGOTTEN_S and peer.address not in self._settled:
                with self._lock:
                    self._peers.pop(peer.address, None)
                peer.close()
                return
            response = peer.ask(self.address, self._clock)
            if response is not None:
                for address in response.members:
                    self._add(address)
                self._put(response.stretches)
            self.membership()
            if response is None or response.leaves:
                self._stopping.wait(_AGAIN_S)

    def _put(self, stretches: Sequence[pb.Stretch]) -> None:
        for stretch in stretches:
            with self._taken:
                self._taken.wait_for(lambda: self._inbox_bytes < INBOX_BYTES_MAX or self._stopping.is_set())
                self._inbox.append(stretch)
                self._inbox_bytes += stretch.ByteSize()
        if stretches:
            self._wake()


class _Peer:
    """Another event store, as it was heard last."""

    def __init__(self, address: str, since: float, network: Network) -> None:
        self.address = address
        self._channel = network.open(address)
        self._stub: Any = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._life = self._position = 0
        self._heard = float("-inf")
        self._since = since
        self._there = False
        self.serves = False
        self.events = 0
        self.trouble: str | None = None

    def is_there(self, now: float) -> bool:
        return self._there and now - self._heard <= SILENT_S_MAX

    def silent_s(self, now: float) -> float:
        return now - max(self._heard, self._since)

    def ask(self, address: str, clock: Clock) -> pb.FollowResponse | None:
        request = pb.FollowRequest(address=address, life=self._life, after=self._position)
        try:
            response: pb.FollowResponse = self._stub.Follow(request, timeout=SILENT_S_MAX)
        except ValueError:
            return None  # the channel was closed
        except grpc.RpcError as error:
            self.trouble = failure_of(error)
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._there = False  # nobody is at that address
            return None
        self._heard, self._there, self.trouble = clock.monotonic(), not response.leaves, None
        self.serves = response.serves and not response.leaves
        self._life, self._position = response.life, response.position
        self.events += sum(len(one.ids) for one in response.stretches) // ID_BYTES
        return response

    def close(self) -> None:
        self._channel.close()
