"""CacheEventStore: the recent primary events in memory, least recently used ones evicted (paper 3.4.1).

Two generations of plain dicts: new and used events are in `hot`; when it holds half of the bytes it becomes
`cold`, and what was cold is forgotten. So an event goes between one half and one whole cache after its last
use, and no Python statement is spent on an event.
"""

import threading
from collections.abc import Sequence
from itertools import compress
from typing import Final, Protocol

# What an event costs beside its line: the key (64 with the allocator's rounding), the line's own header
# (33, rounded), and its share of the dict (from 37 to 110 as it grows; measured at 25abbdd).
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

    def get_many(self, keys: Sequence[bytes], counted: bool = True) -> list[bytes | None]:
        """A line or None for each key, in order. `counted`: among the hits and misses."""
        with self._lock:
            lines = list(map(self._hot.get, keys))
            if None in lines:
                self._look_into_cold(keys, lines)
            if counted:
                missed = lines.count(None)
                self.misses += missed
                self.hits += len(lines) - missed
        return lines

    def clear(self) -> None:
        """Forget all events."""
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


class Fill(Protocol):
    """Takes events for the cache."""

    def __call__(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None: ...


class CacheShare:
    """Thread-safe. `store` names the log file map that the events belong to; None until home was heard.

    Lines of one store are never given to who asks for another's: not after home's logs were exchanged, nor
    where a port has come to another system.
    """

    def __init__(self, bytes_max: int) -> None:
        self.cache = CacheEventStore(bytes_max)
        self.store: bytes | None = None
        self._filling = threading.Lock()

    def belong_to(self, store: bytes) -> None:
        """Forget what another store has put here."""
        if store == self.store:
            return
        with self._filling:
            self.store = None
            self.cache.clear()
            self.store = store

    def get_many(self, store: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        lines = self.cache.get_many(keys)
        # Looked at after the lines: had the store changed before, this would be another one already.
        return lines if store == self.store else [None] * len(keys)

    def put_many(self, store: bytes, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        with self._filling:
            if store == self.store:
                self.cache.put_many(keys, lines)
