"""Reading on behind the log file map: events that stand in the logs and not yet in the map (paper 3.4.2).

While the reader is behind (it catches up, the map was lost, the disk is full), what the map does not have
may stand right behind what it has. A lookup reads that little, from where the map ends: of the file that
its id's server wrote to last, else of the files that are behind. What was parsed is kept until the map has
it, and parsing takes a small share of the time only: all of it is the reader's work, which comes anyway.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from photon.core.chunks import whole_lines
from photon.core.clock import Clock
from photon.core.columns import split_ids
from photon.core.formats import JsonLines
from photon.core.logfiles import FileState

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


class ReadOn:
    """For many threads at once; one reads at a time.

    `positions`: how far the map knows each file. `last_files`: where the servers of photon ids wrote last.
    """

    def __init__(
        self,
        positions: Callable[[], Mapping[int, FileState]],
        last_files: Callable[[Sequence[bytes]], Sequence[int]],
        log_format: JsonLines,
        bytes_max: int,
        clock: Clock,
    ) -> None:
        self._positions = positions
        self._last_files = last_files
        self._format = log_format
        self._bytes_max = bytes_max
        self._clock = clock
        self._lock = threading.Lock()
        self._tails: dict[int, _Tail] = {}
        self._turn = 0
        self._rests_until = float("-inf")
        self.hits = 0
        self.bytes_read = 0

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The lines of those ids that it finds."""
        if not self._bytes_max:
            return {}
        wanted = set(keys)
        found: dict[bytes, bytes] = {}
        with self._lock:
            positions = self._positions()
            budget = self._bytes_max
            began = self._clock.monotonic()
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
                now = self._clock.monotonic()
                self._rests_until = now + _REST_FACTOR * (now - began)
            self._forget(positions)
            self.hits += len(found)
        return found

    def _candidates(self, keys: Sequence[bytes], positions: Mapping[int, FileState]) -> Iterator[FileState]:
        """The files to read on in, the likely ones first."""
        numbers = dict.fromkeys([*self._last_files(keys), *self._tails])
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
        if (
            tail is None
            or tail.identity != identity
            or not tail.start <= state.offset <= tail.end
            or state.offset - tail.start > self._bytes_max
        ):
            tail = self._tails[state.number] = _Tail(identity, state.offset, state.offset)
        return tail

    def _extend(self, tail: _Tail, state: FileState, budget: int) -> int:
        """Parse on; the bytes that were read."""
        data = _read(state, tail.end, min(budget, state.offset + self._bytes_max - tail.end))
        if not data:
            return 0
        self.bytes_read += len(data)
        whole = data[: whole_lines(data)]
        if whole:
            batch = self._format.parse_primary(whole)
            fresh = dict(zip(reversed(split_ids(batch.ids)), reversed(batch.lines), strict=True))
            tail.lines = fresh | tail.lines
            tail.end += len(whole)
        return len(data)

    def _forget(self, positions: Mapping[int, FileState]) -> None:
        """Tails that the map has by now, and the oldest where there are too many."""
        for number, tail in list(self._tails.items()):
            state = positions.get(number)
            if state is None or state.gone or state.offset >= tail.end:
                del self._tails[number]
        held = sum(tail.end - tail.start for tail in self._tails.values())
        for number, tail in list(self._tails.items()):
            if held <= _TAILS_HELD_MAX * self._bytes_max:
                break
            held -= tail.end - tail.start
            del self._tails[number]


def _size(state: FileState) -> int:
    try:
        return os.stat(state.path).st_size
    except OSError:
        return 0


def _read(state: FileState, start: int, length: int) -> bytes:
    """At most so many bytes; none if the file is another one by now or can't be read."""
    if length <= 0:
        return b""
    try:
        with open(state.path, "rb", buffering=0) as log:
            status = os.fstat(log.fileno())
            if (status.st_dev, status.st_ino) != (state.device, state.inode):
                return b""
            return os.pread(log.fileno(), length, start)
    except OSError:
        return b""
