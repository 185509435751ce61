"""The members of the CacheEventStore, and filling their shares from the home process (paper 3.4.1).

Filling is best effort: a share that is slow or away costs nobody anything but misses, as its queue is bounded
and what does not fit is dropped. Without cache processes all goes into home's own cache, in the caller's
thread.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np

from eventstore.cache import CacheEventStore
from eventstore.rules.ring import HOME, Ring
from photon.core.columns import join_lines, take_ids
from photon.core.ids import ID_BYTES
from photon.rpc import eventstore_pb2, eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network

ANNOUNCE_EVERY_S: Final = 1.0
SILENT_S_MAX: Final = 3.0
MEMBERS_MAX: Final = 256
"""With home. More are refused: each costs the others a call in every lookup."""


@dataclass(frozen=True, slots=True)
class Membership:
    """`version` is another one with each change and over restarts of home; 0 where there are no caches."""

    version: int = 0
    caches: tuple[str, ...] = ()


class Members:
    """For many threads at once. One that was not heard of for SILENT_S_MAX is a member no more."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._lock = threading.Lock()
        self._membership = Membership()

    def announce(self, address: str, now: float) -> bool:
        """A cache process is there, at `now` (monotonic seconds). False: there are too many already."""
        with self._lock:
            self._forget_silent(now)
            if address not in self._heard and len(self._heard) >= MEMBERS_MAX - 1:
                return False
            self._heard[address] = now
            self._renew()
            return True

    def leave(self, address: str) -> None:
        with self._lock:
            self._heard.pop(address, None)
            self._renew()

    def membership(self, now: float) -> Membership:
        if not self._heard:  # without a lock: the common case of one process
            return self._membership
        with self._lock:
            self._forget_silent(now)
            return self._membership

    def _forget_silent(self, now: float) -> None:
        silent = [address for address, heard in self._heard.items() if now - heard > SILENT_S_MAX]
        for address in silent:
            del self._heard[address]
        if silent:
            self._renew()

    def _renew(self) -> None:
        caches = tuple(sorted(self._heard))
        if caches != self._membership.caches:
            version = secrets.randbits(63) + 1 if caches else 0
            self._membership = Membership(version, caches)


QUEUE_BYTES_MAX: Final = 32 << 20
"""Of each cache process."""
_MESSAGE_BYTES: Final = 2 << 20
_MESSAGE_EVENTS_MAX: Final = 16_384
_PUT_TIMEOUT_S: Final = 1.0
_PAUSE_S: Final = 0.1  # after a failure, so that a dead process is not asked in a tight loop


class Filling:
    """Puts events into the caches of their owners. For many threads at once."""

    def __init__(
        self,
        cache: CacheEventStore,
        membership: Callable[[], Membership],
        virtual_nodes: int,
        store: bytes,
        network: Network = LOOPBACK,
    ) -> None:
        self._cache = cache
        self._membership = membership
        self._virtual_nodes = virtual_nodes
        self._store = store
        self._network = network
        self._lock = threading.Lock()
        self._known = Membership()
        self._ring = Ring([HOME], virtual_nodes)
        self._feeds: dict[str, _Feed] = {}
        self._dropped_before = 0  # by feeds that are closed
        self._sent_before = 0
        self._closed = False

    @property
    def dropped(self) -> int:
        """Events that were not put into their owner's cache."""
        return self._dropped_before + sum(feed.dropped for feed in list(self._feeds.values()))

    @property
    def sent(self) -> int:
        """Events that cache processes have taken."""
        return self._sent_before + sum(feed.sent for feed in list(self._feeds.values()))

    @property
    def waiting_bytes(self) -> int:
        return sum(feed.waiting_bytes for feed in list(self._feeds.values()))

    def put_many(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        """Of an id that is there already, or twice in the batch, the first line stays."""
        membership = self._membership()
        if membership is not self._known:
            self._follow(membership)
        if not membership.caches:
            self._cache.put_many(keys, lines)
            return
        ids = b"".join(keys)
        ring, feeds = self._ring, self._feeds
        for member, rows in ring.split(ids).items():
            chosen = rows.tolist()
            part = list(map(lines.__getitem__, chosen))
            feed = feeds.get(member)
            if feed is not None:
                feed.offer(take_ids(ids, rows), part)
            elif member == HOME:
                self._cache.put_many(list(map(keys.__getitem__, chosen)), part)

    def close(self) -> None:
        """Drop what waits and end the threads."""
        with self._lock:
            self._closed = True
            feeds, self._feeds = self._feeds, {}
        for feed in feeds.values():
            feed.close()

    def _follow(self, membership: Membership) -> None:
        with self._lock:
            if self._closed or membership is self._known:
                return
            feeds = {address: self._feeds.get(address) for address in membership.caches}
            left = [feed for address, feed in self._feeds.items() if address not in feeds]
            self._feeds = {
                address: feed or _Feed(address, self._store, self._network) for address, feed in feeds.items()
            }
            self._ring = Ring([HOME, *membership.caches], self._virtual_nodes)
            self._known = membership
            for feed in left:
                feed.close()
                self._dropped_before += feed.dropped
                self._sent_before += feed.sent


class _Feed:
    """The queue to one cache process, and the thread that empties it."""

    def __init__(self, address: str, store: bytes, network: Network) -> None:
        self._store = store
        self._channel = network.open(address)
        self._stub: Any = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._wake = threading.Condition()
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._closed = False
        self.waiting_bytes = 0
        self.dropped = 0
        self.sent = 0
        self._thread = threading.Thread(target=self._run, name=f"fill-{address}", daemon=True)
        self._thread.start()

    def offer(self, ids: bytes, lines: Sequence[bytes]) -> None:
        for message in _messages(ids, lines):
            size = len(message[0]) + len(message[1])
            with self._wake:
                if self._closed or self.waiting_bytes + size > QUEUE_BYTES_MAX:
                    self.dropped += len(message[0]) // ID_BYTES
                    continue
                self._queue.append(message)
                self.waiting_bytes += size
                self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self.dropped += sum(len(ids) for ids, _ in self._queue) // ID_BYTES
            self._queue.clear()
            self.waiting_bytes = 0
            self._wake.notify()
        self._channel.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                ids, events = self._queue.popleft()
            taken = self._put(ids, events)
            with self._wake:
                if self._closed:
                    return
                self.waiting_bytes -= len(ids) + len(events)  # it counted as waiting until now
                self.sent += taken
                self.dropped += len(ids) // ID_BYTES - taken
                if not taken:
                    self._wake.wait_for(lambda: self._closed, _PAUSE_S)

    def _put(self, ids: bytes, events: bytes) -> int:
        """How many events were taken."""
        request = eventstore_pb2.PutRequest(ids=ids, events=events, store=self._store)
        try:
            self._stub.Put(request, timeout=_PUT_TIMEOUT_S)
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed
            return 0
        return len(ids) // ID_BYTES


def _messages(ids: bytes, lines: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Ids and joined lines, cut into messages of a few MiB (a greater line comes alone)."""
    ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)))
    start = 0
    while start < len(lines):
        before = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, before + _MESSAGE_BYTES, "right"))
        end = min(max(end, start + 1), start + _MESSAGE_EVENTS_MAX)
        yield ids[start * ID_BYTES : end * ID_BYTES], join_lines(lines[start:end])
        start = end
