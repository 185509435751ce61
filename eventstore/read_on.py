"""Reading on behind the end of the log file map, for lookups that come while the reader is behind.

While it catches up, the map was lost or the disk is full, what the map does not have may stand right behind
what it has. A lookup reads that little, from where the map ends: of the file that its id's server wrote to
last, else of the files that are behind. What was parsed is kept until the map has it, and parsing takes a
small share of the time only: all of it is the reader's work, which comes anyway.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from cachetools import LRUCache

from eventstore.log_file_map import LogFileMap
from eventstore.reader import Reader
from photon.core.clock import Clock
from photon.core.columns import split_ids
from photon.logs.files import FileState, read_at, whole_lines
from photon.logs.formats import JsonLines, PrimaryBatch

FILES_LOOKED_AT_MAX: Final = 64
"""At a lookup, of the files that no id points to; at the next one others have their turn."""
_TAILS_HELD_MAX: Final = 8
"""In times `read_on_bytes_max`."""
_REST_FACTOR: Final = 10
"""After it parsed for a time it rests for ten times as long."""


@dataclass(slots=True)
class _Tail:
    """What stands in a file from `start` to `end`: the first line of each id."""

    identity: tuple[int, int]
    start: int
    end: int
    lines: dict[bytes, bytes] = field(default_factory=dict)

    def size(self) -> int:
        return self.end - self.start

    def reaches(self, offset: int, bytes_max: int) -> bool:
        return self.start <= offset <= min(self.end, self.start + bytes_max)


@dataclass
class ReadOn:
    """For many threads at once; one reads at a time."""

    reader: Reader
    log_file_map: LogFileMap
    log_format: JsonLines
    bytes_max: int
    clock: Clock
    hits: int = 0
    bytes_read: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: LRUCache[int, _Tail] = LRUCache(_TAILS_HELD_MAX * self.bytes_max, getsizeof=_Tail.size)
        self._turn = 0
        self._rests_until = float("-inf")

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The lines of those ids that it finds."""
        if not self.bytes_max:
            return {}
        wanted = set(keys)
        found: dict[bytes, bytes] = {}
        with self._lock:
            positions = self.reader.positions
            budget = self.bytes_max
            began = self.clock.monotonic()
            resting = began < self._rests_until
            before = self.bytes_read
            for state in self._candidates(keys, positions):
                tail = self._tail(state)
                if budget > 0 and not resting:
                    budget -= self._extend(tail, state, budget)
                for key in wanted & tail.lines.keys():
                    found[key] = tail.lines[key]
                wanted -= found.keys()
                if not wanted:
                    break
            if self.bytes_read > before:
                now = self.clock.monotonic()
                self._rests_until = now + _REST_FACTOR * (now - began)
            self._forget(positions)
            self.hits += len(found)
        return found

    def _candidates(self, keys: Sequence[bytes], positions: Mapping[int, FileState]) -> Iterator[FileState]:
        """The files to read on in, the likely ones first."""
        numbers = dict.fromkeys([*self.log_file_map.last_files(keys), *self._tails])
        for number in numbers:
            state = positions.get(number)
            if state is not None and not state.gone:
                yield state
        others = [s for s in list(positions.values()) if not s.gone and s.number not in numbers]
        start = self._turn = self._turn % max(1, len(others))
        for state in (others[start:] + others[:start])[:FILES_LOOKED_AT_MAX]:
            if _size(state) > state.offset:
                yield state
            else:
                self._turn += 1

    def _tail(self, state: FileState) -> _Tail:
        """What is parsed already behind the map's end; a new one if the map is past it."""
        tail = self._tails.get(state.number)
        identity = (state.device, state.inode)
        if tail is None or tail.identity != identity or not tail.reaches(state.offset, self.bytes_max):
            tail = self._tails[state.number] = _Tail(identity, state.offset, state.offset)
        return tail

    def _extend(self, tail: _Tail, state: FileState, budget: int) -> int:
        """Parse on; the bytes that were read."""
        data = _read(state, tail.end, min(budget, state.offset + self.bytes_max - tail.end))
        if not data:
            return 0
        self.bytes_read += len(data)
        whole = data[: whole_lines(data)]
        if whole:
            tail.lines = first_lines(self.log_format.parse_primary(whole)) | tail.lines
            tail.end += len(whole)
            self._tails[state.number] = tail  # of another size now
        return len(data)

    def _forget(self, positions: Mapping[int, FileState]) -> None:
        """Tails that the map has by now."""
        for number, tail in list(self._tails.items()):
            state = positions.get(number)
            if state is None or state.gone or state.offset >= tail.end:
                del self._tails[number]


def first_lines(batch: PrimaryBatch) -> dict[bytes, bytes]:
    """The first line of each id."""
    return dict(zip(reversed(split_ids(batch.ids)), reversed(batch.lines), strict=True))


def _size(state: FileState) -> int:
    try:
        return os.stat(state.path).st_size
    except OSError:
        return 0


def _read(state: FileState, start: int, length: int) -> bytes:
    """At most so many bytes; none if the file is another one by now or can't be read."""
    with suppress(OSError):
        return read_at(state.path, start, max(0, length), (state.device, state.inode))
    return b""
