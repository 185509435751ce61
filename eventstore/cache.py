"""CacheEventStore: the recent primary events in memory, spread over processes (paper 3.4.1).

Two generations of plain dicts: new and used events are in `hot`; when it holds half of the bytes it becomes
`cold`, and what was cold is forgotten. So an event goes between one half and one whole cache after its last
use, and no Python statement is spent on an event (docs/decisions/001-dependencies.md).

The reader fills the shares of other event stores. That is best effort: one that is slow or away costs misses
and nothing else, as its queue is bounded and what does not fit is dropped. One that is alone puts all into
its own cache, in the caller's thread.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from typing import Any, Final

import grpc
import numpy as np

from eventstore.peers import Membership, Peers
from photon.core.columns import join_lines, take_ids
from photon.core.ids import ID_BYTES
from photon.rpc import eventstore_pb2, eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network

# What an event costs beside its line: the key (64 with the allocator's rounding), the line's own header
# (33, rounded), and its share of the dict (from 37 to 110 as it grows).
ENTRY_BYTES: Final = 200
_FILLED_AT_ONCE: Final = 8192  # a lookup waits no longer than for this many


class CacheEventStore:
    """Lines of primary events by packed id, at most `bytes_max` with all that Python needs to hold them.

    Thread-safe: a lock is held for a batch. (Single dict calls are safe without, but a generation must not
    change between a lookup and its promotion, nor the byte counts be changed by two at once.)
    """

    def __init__(self, bytes_max: int) -> None:
        self._half = bytes_max // 2
        self._lock = threading.Lock()
        self._hot: dict[bytes, bytes] = {}
        self._cold: dict[bytes, bytes] = {}
        self._hot_bytes = 0
        self._cold_bytes = 0
        self._promoted = 0
        self.hits = 0
        self.misses = 0

    @property
    def held_bytes(self) -> int:
        """Bytes held, promoted events counted in both generations (never too little)."""
        return self._hot_bytes + self._cold_bytes

    @property
    def events(self) -> int:
        return len(self._hot) + len(self._cold) - self._promoted

    def status(self) -> dict[str, int]:
        return {"hits": self.hits, "misses": self.misses, "bytes": self.held_bytes, "events": self.events}

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """A line or None for each key, in order."""
        with self._lock:
            lines = list(map(self._hot.get, keys))
            if None in lines:
                self._look_into_cold(keys, lines)
            missed = lines.count(None)
            self.misses += missed
            self.hits += len(lines) - missed
        return lines

    def clear(self) -> None:
        with self._lock:
            self._age()
            self._age()

    def put_many(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        """Add events. Of an id that is here already, or twice in the batch, the first line stays."""
        for start in range(0, len(keys), _FILLED_AT_ONCE):
            part = slice(start, start + _FILLED_AT_ONCE)
            with self._lock:
                if not self._put_at_once(keys[part], lines[part]):
                    self._put(dict(zip(reversed(keys[part]), reversed(lines[part]), strict=True)))

    def _put_at_once(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> bool:
        """The common case in one pass over the dict; False where the cold ones must be looked at, or aged."""
        size = sum(map(len, lines)) + ENTRY_BYTES * len(lines)
        if self._hot_bytes + size > self._half or not self._cold.keys().isdisjoint(keys):
            return False
        before = len(self._hot)
        held = list(map(self._hot.setdefault, keys, lines))
        if len(self._hot) - before < len(keys):
            size = sum(
                len(line) + ENTRY_BYTES for line, kept in zip(lines, held, strict=True) if line is kept
            )
        self._hot_bytes += size
        return True

    def _put(self, fresh: dict[bytes, bytes]) -> None:
        for generation in (self._hot, self._cold):
            if not generation.keys().isdisjoint(fresh):
                for key in generation.keys() & fresh.keys():
                    del fresh[key]
        size = _bytes_of(fresh)
        if self._hot_bytes + size <= self._half:
            self._hot.update(fresh)
            self._hot_bytes += size
        else:
            self._put_in_parts(fresh)

    def _put_in_parts(self, fresh: dict[bytes, bytes]) -> None:
        """So that no generation outgrows its half. A line that fits in no half is not kept."""
        for key, line in fresh.items():
            size = len(line) + ENTRY_BYTES
            if size > self._half:
                continue
            if self._hot_bytes + size > self._half:
                self._age()
            self._hot[key] = line
            self._hot_bytes += size

    def _look_into_cold(self, keys: Sequence[bytes], lines: list[bytes | None]) -> None:
        rows = [row for row, line in enumerate(lines) if line is None]
        missed = [keys[row] for row in rows]
        found = list(map(self._cold.get, missed))
        hit = [line is not None for line in found]
        if not any(hit):
            return
        for row, line in zip(compress(rows, hit), compress(found, hit), strict=True):
            lines[row] = line
        used = {key: line for key, line in zip(missed, found, strict=True) if line is not None}
        size = _bytes_of(used)
        if self._hot_bytes + size <= self._half:
            self._hot.update(used)
            self._hot_bytes += size
            self._promoted += len(used)
        else:
            self._age()
            self._put_in_parts(used)

    def _age(self) -> None:
        self._cold, self._cold_bytes = self._hot, self._hot_bytes
        self._hot, self._hot_bytes, self._promoted = {}, 0, 0


def _bytes_of(events: dict[bytes, bytes]) -> int:
    return sum(map(len, events.values())) + ENTRY_BYTES * len(events)


Fill = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Takes events, ids and lines, for the cache."""


QUEUE_BYTES_MAX: Final = 32 << 20
"""For each of the others."""
_MESSAGE_BYTES: Final = 2 << 20
_MESSAGE_EVENTS_MAX: Final = 16_384
_PUT_TIMEOUT_S: Final = 1.0
_PAUSE_S: Final = 0.1  # after a failure, so that a dead process is not asked in a tight loop


class Filling:
    """Puts events into the caches of their owners. For many threads at once."""

    def __init__(
        self,
        cache: CacheEventStore,
        peers: Peers,
        network: Network = LOOPBACK,
    ) -> None:
        self._cache = cache
        self._peers = peers
        self._network = network
        self._lock = threading.Lock()
        self._known = peers.membership()
        self._feeds: dict[str, _Feed] = {}
        self._dropped_before = 0  # by feeds that are closed
        self._sent_before = 0
        self._closed = False

    def status(self) -> dict[str, int]:
        """Events that others have taken, those that were not put anywhere, and what waits."""
        feeds = [*self._feeds.values()]
        return {
            "sent": self._sent_before + sum(feed.sent for feed in feeds),
            "dropped": self._dropped_before + sum(feed.dropped for feed in feeds),
            "waiting_bytes": sum(feed.waiting_bytes for feed in feeds),
        }

    def put_many(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        """Of an id that is there already, or twice in the batch, the first line stays."""
        membership = self._peers.membership()
        if membership is not self._known:
            self._follow(membership)
        here = self._peers.address
        if membership.members == (here,):
            self._cache.put_many(keys, lines)
            return
        ids, feeds = b"".join(keys), self._feeds
        for member, rows in membership.ring.split(ids).items():
            chosen = rows.tolist()
            part = list(map(lines.__getitem__, chosen))
            feed = feeds.get(member)
            if feed is not None:
                feed.offer(take_ids(ids, rows), part)
            elif member == here:
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
            old = self._feeds
            self._feeds = {
                address: old.get(address) or _Feed(address, self._network)
                for address in membership.members
                if address != self._peers.address
            }
            self._known = membership
            for address in old.keys() - self._feeds.keys():
                feed = old[address]
                feed.close()
                self._dropped_before += feed.dropped
                self._sent_before += feed.sent


class _Feed:
    """Sends to one event store, one message at a time, those that wait in order."""

    def __init__(self, address: str, network: Network) -> None:
        self._channel = network.open(address)
        self._stub: Any = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._sending = ThreadPoolExecutor(1, f"fill-{address}")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._waiting = 0
        self.waiting_bytes = 0
        self.dropped = 0
        self.sent = 0

    def offer(self, ids: bytes, lines: Sequence[bytes]) -> None:
        for message in _messages(ids, lines):
            size, count = len(message[0]) + len(message[1]), len(message[0]) // ID_BYTES
            with self._lock:
                if self._closed.is_set() or self.waiting_bytes + size > QUEUE_BYTES_MAX:
                    self.dropped += count
                    continue
                self._waiting += count
                self.waiting_bytes += size
                self._sending.submit(self._put, *message)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self.dropped += self._waiting
            self.waiting_bytes = 0
        self._sending.shutdown(wait=False, cancel_futures=True)
        self._channel.close()

    def _put(self, ids: bytes, events: bytes) -> None:
        request = eventstore_pb2.PutRequest(ids=ids, events=events, filled=True)
        taken = count = len(ids) // ID_BYTES
        try:
            self._stub.Put(request, timeout=_PUT_TIMEOUT_S)
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed
            taken = 0
        with self._lock:
            if self._closed.is_set():
                return
            self._waiting -= count
            self.waiting_bytes -= len(ids) + len(events)  # it counted as waiting until now
            self.sent += taken
            self.dropped += count - taken
        if not taken:
            self._closed.wait(_PAUSE_S)


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
