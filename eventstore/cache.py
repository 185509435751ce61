"""CacheEventStore: the recent primary events in memory, spread over processes (paper 3.4.1).

Two generations of plain dicts: new and used events are in `hot`; when it holds half of the bytes it becomes
`cold`, and what was cold is forgotten. So an event goes between one half and one whole cache after its last
use, and no Python statement is spent on an event (docs/decisions/001-dependencies.md). Of what is read while
the logs are caught up with, most is never asked for: it is kept in blocks, as the texts that were read and an
index of them, which takes a third of the room beside the lines and hardly any time.

The reader fills the shares of other event stores. That is best effort: one that is slow or away costs misses
and nothing else, as its queue is bounded and what does not fit is dropped. One that is alone puts all into
its own cache, in the caller's thread.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from eventstore.peers import Membership, Peers
from eventstore.rules.entries import Hashes, Ints
from photon.core.columns import hash_ids, join_lines, split_ids, take_ids
from photon.core.ids import ID_BYTES
from photon.logs.formats import Lines
from photon.rpc import eventstore_pb2, eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network

# What an event costs beside its line: the key (64 with the allocator's rounding), the line's own header
# (33, rounded), and its share of the dict (from 37 to 110 as it grows).
ENTRY_BYTES: Final = 200
_FILLED_AT_ONCE: Final = 8192  # a lookup waits no longer than for this many
_BLOCKS_MAX: Final = 32
"""In a generation, as a lookup searches each; what would be less than its share goes into the dict."""
BLOCK_ENTRY_BYTES: Final = 64
"""What an event of a block costs beside its line."""

_Halves = npt.NDArray[np.uint64]


class Block:
    """N events that were read together, in the texts that they were read in."""

    def __init__(self, ids: bytes, lines: Sequence[Lines], hashes: Hashes, rows: Ints) -> None:
        """16 x N bytes, and the N lines of one text after the other. Of the M events that are the first with
        their id: sorted hashes of the ids, and the rows."""
        self.ids = ids
        self._lines = lines
        self._hashes = hashes
        self._rows = rows
        self.held_bytes = sum(len(one.text) for one in lines) + BLOCK_ENTRY_BYTES * len(ids) // ID_BYTES
        self._ends = np.cumsum([len(one) for one in lines])
        self._starts = np.concatenate([one.starts for one in lines])
        self._lengths = np.concatenate([one.lengths for one in lines])

    def __len__(self) -> int:
        return len(self._rows)

    def events(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """The first with each id: ids, and copies of the lines."""
        keys, lines = split_ids(self.ids), [line for one in self._lines for line in one.lines]
        if len(self) == len(keys):
            return keys, lines
        is_first = np.zeros(len(keys), np.bool_)
        is_first[self._rows] = True
        return tuple(compress(keys, is_first)), list(compress(lines, is_first))

    def tail(self, bytes_max: int) -> "Block":
        """What fits of the last texts, and the very last in any case."""
        sizes = np.cumsum([len(one.text) + BLOCK_ENTRY_BYTES * len(one) for one in reversed(self._lines)])
        lines = self._lines[-max(1, int(np.searchsorted(sizes, bytes_max, "right"))) :]
        begin = int(self._ends[-1]) - sum(map(len, lines))
        kept = self._rows >= begin
        return Block(self.ids[begin * ID_BYTES :], lines, self._hashes[kept], self._rows[kept] - begin)

    def find(self, hashes: Hashes, halves: _Halves) -> tuple[Ints, list[bytes]]:
        """Sorted hashes of W ids, and the ids (W, 2) -> which of them are here, and their lines."""
        if not len(self):
            return np.zeros(0, np.int64), []
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1)
        hit = np.flatnonzero(self._hashes[at] == hashes)
        rows = self._rows[at[hit]]
        same = (_halves_of(self.ids)[rows] == halves[hit]).all(axis=1)
        hit, rows = hit[same], rows[same]
        texts = [self._lines[number].text for number in np.searchsorted(self._ends, rows, "right").tolist()]
        starts = self._starts[rows]
        ends = starts + self._lengths[rows]
        return hit, list(map(bytes.__getitem__, texts, map(slice, starts.tolist(), ends.tolist())))


def _halves_of(ids: bytes) -> _Halves:
    return np.frombuffer(ids, "<u8").reshape(-1, 2)


def _find(blocks: Sequence[Block], keys: Sequence[bytes]) -> list[bytes | None]:
    """The line of each key, or None."""
    lines: list[bytes | None] = [None] * len(keys)
    if not keys:
        return lines
    ids = b"".join(keys)
    hashes = hash_ids(ids)
    left = np.argsort(hashes)
    halves = _halves_of(ids)
    for block in reversed(blocks):
        if not len(left):
            break
        hit, found = block.find(hashes[left], halves[left])
        for row, line in zip(left[hit].tolist(), found, strict=True):
            lines[row] = line
        left = np.delete(left, hit)
    return lines


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
        self._hot_blocks: list[Block] = []
        self._cold_blocks: list[Block] = []
        self._hot_bytes = 0
        self._cold_bytes = 0
        self.hits = 0
        self.misses = 0

    @property
    def held_bytes(self) -> int:
        """Bytes held, used events counted twice where they are held twice (never too little)."""
        return self._hot_bytes + self._cold_bytes

    @property
    def events(self) -> int:
        """Counted as their bytes are."""
        return len(self._hot) + len(self._cold) + sum(map(len, [*self._hot_blocks, *self._cold_blocks]))

    def status(self) -> dict[str, int]:
        return {"hits": self.hits, "misses": self.misses, "bytes": self.held_bytes, "events": self.events}

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """A line or None for each key, in order."""
        with self._lock:
            lines = list(map(self._hot.get, keys))
            if None in lines:
                self._look_further(keys, lines)
            missed = lines.count(None)
            self.misses += missed
            self.hits += len(lines) - missed
        return lines

    def clear(self) -> None:
        with self._lock:
            self._age()
            self._age()

    def put_block(self, block: Block) -> None:
        """Add the first event with each id, the last of them where there are too many. None of these ids was
        in a block before."""
        if block.held_bytes > self._half:
            block = block.tail(self._half)
        repeats = 2 * len(block) < len(block.ids) // ID_BYTES  # most of its text would be for nothing
        if repeats or not self._half // _BLOCKS_MAX <= block.held_bytes <= self._half:
            self._put_many(*block.events())
            return
        with self._lock:
            if self._hot_bytes + block.held_bytes > self._half:
                self._age()
            self._hot_blocks.append(block)
            self._hot_bytes += block.held_bytes

    def put_many(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        """Add events. Of an id that is here already, or twice in the batch, the first line stays."""
        with self._lock:
            blocks = [*self._cold_blocks, *self._hot_blocks]
        if blocks:
            fresh = [line is None for line in _find(blocks, keys)]
            keys, lines = list(compress(keys, fresh)), list(compress(lines, fresh))
        self._put_many(keys, lines)

    def _put_many(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
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

    def _look_further(self, keys: Sequence[bytes], lines: list[bytes | None]) -> None:
        used: dict[bytes, bytes] = {}
        if self._hot_blocks:
            used |= _fill_in(keys, lines, partial(_find, self._hot_blocks))
        if self._cold:
            used |= _fill_in(keys, lines, lambda missed: list(map(self._cold.get, missed)))
        if self._cold_blocks:
            used |= _fill_in(keys, lines, partial(_find, self._cold_blocks))
        if not used:
            return
        size = _bytes_of(used)
        if self._hot_bytes + size <= self._half:
            self._hot.update(used)
            self._hot_bytes += size
        else:
            self._age()
            self._put_in_parts(used)

    def _age(self) -> None:
        self._cold, self._cold_bytes = self._hot, self._hot_bytes
        self._cold_blocks = self._hot_blocks
        self._hot, self._hot_blocks, self._hot_bytes = {}, [], 0


def _fill_in(
    keys: Sequence[bytes],
    lines: list[bytes | None],
    find: Callable[[Sequence[bytes]], Sequence[bytes | None]],
) -> dict[bytes, bytes]:
    """Look for those that have no line yet; what was found."""
    rows = [row for row, line in enumerate(lines) if line is None]
    missed = [keys[row] for row in rows]
    found = {}
    for row, key, line in zip(rows, missed, find(missed), strict=True):
        if line is not None:
            lines[row] = found[key] = line
    return found


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

    def put_block(self, block: Block) -> None:
        """As CacheEventStore.put_block; where there are other event stores, in parts."""
        if self._membership().members == (self._peers.address,):
            self._cache.put_block(block)
        else:
            self.put_many(*block.events())

    def put_many(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        """Of an id that is there already, or twice in the batch, the first line stays."""
        membership = self._membership()
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

    def _membership(self) -> Membership:
        membership = self._peers.membership()
        if membership is not self._known:
            self._follow(membership)
        return membership

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
