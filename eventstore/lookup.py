"""A lookup: the cache first, the logs for what it does not have (paper 3.4).

LogsEventStore finds primary events straight in the logs, by log file map and short reads through a few files
that are kept open (paper 3.4.2).
"""

import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat, starmap
from typing import Any, Final, cast

import numpy as np

from eventstore.arrivals import Arrivals
from eventstore.cache import CacheEventStore, Fill
from eventstore.log_file_map import LogFileMap
from eventstore.read_on import ReadOn, first_lines
from eventstore.reader import Reader
from eventstore.rules.entries import Ints, Places
from photon.core.clock import Clock
from photon.core.columns import hash_ids, split_ids, take_ids
from photon.core.fates import Found
from photon.core.status import Histogram
from photon.logs.files import FileState
from photon.logs.formats import JsonLines

_FILES_AT_ONCE: Final = 32
"""That a lookup holds open, beside those that are kept."""
_SAMPLED: Final = 16
SPAN_BYTES_MAX: Final = 256 * 1024
GAP_BYTES_MAX: Final = 4096
"""Reading over so much that nobody asked for is cheaper than one more read."""


@dataclass(frozen=True, slots=True)
class Spans:
    """S spans of bytes that are read at once; `of` (N,): the span that each of the places lies in."""

    places: Places
    of: Ints


def spans_of(places: Places) -> Spans:
    """N places, sorted by file and offset -> spans of those that are close; a place is never cut. Pure."""
    files, starts = places["file"], places["offset"].astype(np.int64)
    ends = starts + places["length"]
    apart = np.ones(len(places), np.bool_)
    apart[1:] = (files[1:] != files[:-1]) | (starts[1:] > ends[:-1] + GAP_BYTES_MAX)
    # What is close goes on and on: cells of SPAN_BYTES_MAX from where it begins.
    begins = starts[np.maximum.accumulate(np.where(apart, np.arange(len(places)), 0))]
    cells = (ends - 1 - begins) // SPAN_BYTES_MAX
    apart[1:] |= cells[1:] != cells[:-1]
    first = np.flatnonzero(apart)
    spans = places[first]
    spans["length"] = np.maximum.reduceat(ends, first) - starts[first]
    return Spans(spans, np.cumsum(apart) - 1)


class _OpenLog:
    """Closed when the last reader lets go of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class OpenLogs:
    """The log files read lately. For many threads at once."""

    def __init__(self) -> None:
        self._open_max = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int, int], _OpenLog] = {}
        self.bytes_read = 0

    def read(self, places: Places, states: Mapping[int, FileState]) -> list[bytes]:
        """The bytes at N places, sorted by file and offset; fewer where the file is gone, is another one by
        now, shrank or can't be read. No Python statement is spent on a place.
        """
        spans = spans_of(places)
        read = self._read_spans(spans.places, states)
        if len(read) == len(places):
            return read
        starts = (places["offset"] - spans.places["offset"][spans.of]).astype(np.int64)
        ends = starts + places["length"]
        whole = map(read.__getitem__, spans.of.tolist())
        return list(map(bytes.__getitem__, whole, map(slice, starts.tolist(), ends.tolist())))

    def keep(self, numbers: Container[int]) -> None:
        """Let go of all other files: those that were deleted take room until then."""
        with self._lock:
            self._files = {key: file for key, file in self._files.items() if key[0] in numbers}

    def _read_spans(self, spans: Places, states: Mapping[int, FileState]) -> list[bytes]:
        numbers, first = np.unique(spans["file"], return_index=True)
        parts = list(starmap(slice, pairwise([*first.tolist(), len(spans)])))
        offsets, lengths = spans["offset"].tolist(), spans["length"].tolist()
        found: list[bytes] = []
        for start in range(0, len(parts), _FILES_AT_ONCE):
            some = slice(start, start + _FILES_AT_ONCE)
            logs = [self._open(states.get(number)) for number in numbers[some].tolist()]
            if len(spans) > 1:
                for log, part in zip(logs, parts[some], strict=True):
                    _read_ahead(log, offsets[part], lengths[part])
            for log, part in zip(logs, parts[some], strict=True):
                found += _read_file(log, lengths[part], offsets[part])
        with self._lock:
            self.bytes_read += sum(map(len, found))
        return found

    def _open(self, state: FileState | None) -> _OpenLog | None:
        if state is None:
            return None
        key = (state.number, state.device, state.inode)
        log = self._files.get(key)
        if log is not None:
            return log
        try:
            log = _OpenLog(os.open(state.path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        status = os.fstat(log.fd)
        if (status.st_dev, status.st_ino) != (state.device, state.inode):
            return None
        with self._lock:
            if len(self._files) >= self._open_max:
                del self._files[next(iter(self._files))]  # the one opened longest ago
            self._files[key] = log
        return log


def _read_file(log: _OpenLog | None, lengths: list[int], offsets: list[int]) -> list[bytes]:
    """What stands at each place; nothing where it can't be read."""
    if log is None:
        return [b""] * len(lengths)
    try:
        return list(map(os.pread, repeat(log.fd), lengths, offsets))
    except OSError:
        if len(lengths) == 1:
            return [b""]
    parts = [_read_file(log, [length], [offset]) for length, offset in zip(lengths, offsets, strict=True)]
    return [data for part in parts for data in part]


def _read_ahead(log: _OpenLog | None, offsets: list[int], lengths: list[int]) -> None:
    """Let the kernel fetch all of them side by side: cold, they cost 0.4 ms one by one.

    It costs 0.6 us a place, so it is not done where the kernel has a sample of them in memory.
    """
    if log is None:
        return
    try:
        sample = offsets[::_SAMPLED]
        deque(map(os.preadv, repeat(log.fd), repeat([bytearray(1)]), sample, repeat(os.RWF_NOWAIT)), 0)
    except OSError:  # BlockingIOError: not in memory; or the file system can't tell
        advice = repeat(os.POSIX_FADV_WILLNEED)
        deque(map(os.posix_fadvise, repeat(log.fd), offsets, lengths, advice), 0)


class LogsEventStore:
    """Thread-safe: each thread has its own parser, and reading stops nobody from writing.

    Of several lines with one id it finds the first that was read, of those in logs that are still there.
    """

    def __init__(
        self,
        log_file_map: LogFileMap,
        make_format: Callable[[], JsonLines],
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._map = log_file_map
        self._make_format = make_format
        self._notice = notice
        self._local = threading.local()
        self._logs = OpenLogs()
        self._gone = log_file_map.gone
        self._counting = threading.Lock()
        self.hits = 0
        self.misses = 0

    @property
    def bytes_read(self) -> int:
        return self._logs.bytes_read

    def get_many(self, keys: Sequence[bytes]) -> tuple[list[bytes | None], list[bool]]:
        """For each distinct id its line or None, and whether a log that may hold it could not be read."""
        ids = b"".join(keys)
        if self._gone != (gone := self._map.gone):
            self._gone = gone
            self._logs.keep({state.number for state in self._map.states()})
        rows, places, states = self._map.look_up(ids)
        found: dict[bytes, bytes] = {}
        doubted: set[bytes] = set()
        if len(rows):
            order = np.lexsort((places["offset"], places["file"]))
            found, doubted = self._read(take_ids(ids, rows[order]), places[order], states)
        with self._counting:
            self.hits += len(found)
            self.misses += len(keys) - len(found)
        return list(map(found.get, keys)), list(map(doubted.__contains__, keys))

    def _read(
        self, ids: bytes, places: Places, states: Mapping[int, FileState]
    ) -> tuple[dict[bytes, bytes], set[bytes]]:
        """N ids and places, sorted by these -> the lines, and the ids of which it is not known."""
        read = self._logs.read(places, states)
        keys = split_ids(ids)
        batch = self._format().parse_primary(b"\n".join(read))
        if batch.ids == ids:
            return dict(zip(keys, batch.lines, strict=True)), set()
        return self._check_each(keys, places, states, read)

    def _check_each(
        self, keys: Sequence[bytes], places: Places, states: Mapping[int, FileState], read: Sequence[bytes]
    ) -> tuple[dict[bytes, bytes], set[bytes]]:
        """The slow way, where some line is not the event that was looked for.

        The lines of those that are; and which events may be in a log that can't be read, or that was
        overwritten and not yet found to be.
        """
        found: dict[bytes, bytes] = {}
        doubted: set[bytes] = set()
        for key, place, data in zip(keys, places, read, strict=True):
            line, known = self._line_in(key, place, data, states)
            if known and line is None:
                line, known = self._look_further(key)
            if line is not None:
                found[key] = line
            elif not known:
                doubted.add(key)
        return found, doubted

    def _line_in(
        self, key: bytes, place: Any, data: bytes, states: Mapping[int, FileState]
    ) -> tuple[bytes | None, bool]:
        """What was read at a place -> the line if it is that of the id; whether it is an event that may stand
        there: of this id, or of another with the same hash."""
        if len(data) < place["length"]:
            return None, False
        batch = self._format().parse_primary(data)
        line = first_lines(batch).get(key)
        if line is not None or (batch.ids and hash_ids(batch.ids)[0] == hash_ids(key)[0]):
            return line, True
        state = states.get(int(place["file"]))
        self._notice(
            f"{state.name if state else 'a log'} does not hold what the log file map says: it was "
            "overwritten, or the map is damaged; if events keep waiting, stop and remove "
            f"{self._map.directory}: it is rebuilt"
        )
        return None, False

    def _look_further(self, key: bytes) -> tuple[bytes | None, bool]:
        """Among all places of the id's hash: its line, and whether it is known that there is none."""
        places, states = self._map.places_of(key)
        for row in range(len(places)):
            [data] = self._logs.read(places[row : row + 1], states)
            line, known = self._line_in(key, places[row], data, states)
            if line is not None or not known:
                return line, known
        return None, True

    def _format(self) -> JsonLines:
        if not hasattr(self._local, "format"):
            self._local.format = self._make_format()
        log_format: JsonLines = self._local.format
        return log_format


# Below the bound of a message. What does not fit is BEHIND: asked again without the others, it fits.
ANSWER_BYTES_MAX: Final = 48 << 20
_FINEST_CACHE_US: Final = 1.0


@dataclass
class EventLookup:
    """Thread-safe. `fill` gets what the logs gave.

    `read_on` is asked for what neither cache nor map have while the reader is behind; `arrivals` remembers
    what was not found. The latencies are of each call's look into the cache, and of its search in the logs.
    """

    cache: CacheEventStore
    logs: LogsEventStore
    reader: Reader
    clock: Clock
    fill: Fill
    read_on: ReadOn
    arrivals: Arrivals = field(default_factory=Arrivals)
    cache_latency: Histogram = field(default_factory=lambda: Histogram(_FINEST_CACHE_US))
    logs_latency: Histogram = field(default_factory=Histogram)

    def look_up(self, ids: bytes) -> tuple[bytes, list[bytes]]:
        """16 x N bytes -> core.fates.Found column and N lines, b"" where not found. StorageError."""
        keys = split_ids(ids)
        began = self.clock.monotonic()
        lines = self.cache.get_many(keys)
        cached = self.clock.monotonic()
        self.cache_latency.count((cached - began) * 1e6)
        outcomes = bytearray(len(keys))
        if None in lines:
            self._look_into_logs(keys, lines, outcomes)
            self.logs_latency.count((self.clock.monotonic() - cached) * 1e6)
        return bounded(lines, outcomes)

    def _look_into_logs(
        self, keys: tuple[bytes, ...], lines: list[bytes | None], outcomes: bytearray
    ) -> None:
        # Before the map is read: only so "absent" can be believed.
        caught_up, unread = self.reader.is_up_to_date, bool(self.reader.unreadable)
        missed = [row for row, line in enumerate(lines) if line is None]
        wanted = list(dict.fromkeys([keys[row] for row in missed]))
        self.arrivals.expect(wanted)
        in_logs, doubtful = self.logs.get_many(wanted)
        found = {key: line for key, line in zip(wanted, in_logs, strict=True) if line is not None}
        unreadable = {key for key, doubt in zip(wanted, doubtful, strict=True) if doubt}
        if found:
            self.fill(list(found), list(found.values()))
        if not caught_up and len(found) < len(wanted):
            # Not for the caches: the reader itself fills them when it comes by, the first of repeated ones.
            found |= self.read_on.get_many([key for key in wanted if key not in found])
        if found:
            self.arrivals.forget(found)
        absent = (Found.UNREADABLE if unread else Found.ABSENT) if caught_up else Found.BEHIND
        for row in missed:
            key = keys[row]
            if key in found:
                lines[row] = found[key]
            else:
                outcomes[row] = Found.UNREADABLE if key in unreadable else absent


def bounded(lines: list[bytes | None], outcomes: bytearray) -> tuple[bytes, list[bytes]]:
    """The answer, without the lines (which become BEHIND) that would make it too great."""
    answer = [line or b"" for line in lines] if None in lines else cast(list[bytes], lines)
    if sum(map(len, answer)) > ANSWER_BYTES_MAX:
        total = 0
        for row, line in enumerate(answer):
            if total and total + len(line) > ANSWER_BYTES_MAX:
                answer[row] = b""
                outcomes[row] = Found.BEHIND
            else:
                total += len(line)
    return bytes(outcomes), answer
