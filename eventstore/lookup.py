"""A lookup: the cache first, the logs for what it does not have (paper 3.4).

LogsEventStore finds primary events straight in the logs, by log file map and short reads through a few files
that are kept open (paper 3.4.2).
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from eventstore.arrivals import Arrivals
from eventstore.cache import CacheEventStore, Fill
from eventstore.log_file_map import LogFileMap
from eventstore.reader import Reader, ReadOn, first_lines
from eventstore.rules.entries import Place
from photon.core.clock import Clock
from photon.core.columns import split_ids
from photon.core.fates import Found
from photon.core.ids import opaque_mask
from photon.core.status import Histogram
from photon.logs.files import FileState
from photon.logs.formats import JsonLines

_OPEN_MAX: Final = 64
SPAN_BYTES_MAX: Final = 256 * 1024
GAP_BYTES_MAX: Final = 4096
"""Reading over so much that nobody asked for is cheaper than one more read."""


class Span(NamedTuple):
    """Bytes that are read at once, and the places in them, in order."""

    place: Place
    places: list[Place]


def spans_of(places: Sequence[Place]) -> list[Span]:
    """Sorted places -> spans of those that overlap or are close; a place is never cut. Pure."""
    spans: list[Span] = []
    for place in places:
        end = place.offset + place.length
        (file, offset, length), together = spans[-1] if spans else (Place(-1, 0, 0), [])
        reach = max(end, offset + length) - offset
        close = place.offset <= offset + length + GAP_BYTES_MAX
        if place.file == file and close and reach <= SPAN_BYTES_MAX:
            together.append(place)
            spans[-1] = Span(Place(file, offset, reach), together)
        else:
            spans.append(Span(place, [place]))
    return spans


class OpenLogs:
    """The log files read lately. Not for several threads at once: each has its own."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int, int], int] = {}
        self.bytes_read = 0

    def read_ahead(self, places: Iterable[Place], states: Mapping[int, FileState]) -> None:
        """Let the kernel fetch all these places side by side: cold, they cost 0.4 ms one by one."""
        for place in places:
            fd = self._open(states[place.file])
            if fd is not None:
                os.posix_fadvise(fd, place.offset, place.length, os.POSIX_FADV_WILLNEED)

    def read(self, place: Place, state: FileState) -> bytes | None:
        """The bytes there; None if the file is gone, is another one by now, shrank or can't be read."""
        fd = self._open(state)
        if fd is None:
            return None
        try:
            data = os.pread(fd, place.length, place.offset)
        except OSError:
            return None
        self.bytes_read += len(data)
        return data if len(data) == place.length else None

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _open(self, state: FileState) -> int | None:
        key = (state.number, state.device, state.inode)
        fd = self._files.get(key)
        if state.gone:
            if fd is not None:
                os.close(self._files.pop(key))
            return None
        if fd is not None:
            return fd
        try:
            fd = os.open(state.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (state.device, state.inode):
            os.close(fd)
            return None
        if len(self._files) >= _OPEN_MAX:
            os.close(self._files.pop(next(iter(self._files))))  # the one opened longest ago
        self._files[key] = fd
        return fd

    def __del__(self) -> None:
        self.close()


def probe_json_lines(key: bytes, data: bytes, low: int, high: int) -> bytes | None:
    """The first line in data[low:high] that may be a photon id's event, b"" if surely none is.

    None if only parsing can tell. The id's text ends with its timestamp, so a search for that finds it.
    """
    needle = b':%d"' % int.from_bytes(key[8:], "big")
    at = data.find(needle, low, high)
    # Any character may be written as an escape: such a line, if before the hit, would be overlooked.
    before = at if at >= 0 else high
    if data.find(b"\\", low, before) >= 0 and data.find(b"\\u", low, before) >= 0:
        return None
    if at < 0:
        return b""
    end = data.find(b"\n", at, high)
    start = data.rfind(b"\n", low, at) + 1
    return data[start or low : end if end >= 0 else high]


class LogsEventStore:
    """Thread-safe: each thread has its own open files and parser, and reading stops nobody from writing.

    Of several lines with one id it finds the first: for an opaque id the first that was read, for a photon
    id that of the lowest file number and offset.
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
        self._counting = threading.Lock()
        self.hits = 0
        self.misses = 0
        self.bytes_read = 0

    def get_many(self, keys: Sequence[bytes]) -> tuple[list[bytes | None], list[bool]]:
        """For each distinct id its line or None, and whether a log that may hold it could not be read."""
        places, states = self._map.look_up(keys)
        logs, log_format = self._tools()
        before = logs.bytes_read
        search = _Search(keys, places, states, logs, log_format)
        search.run()
        for name in search.contradicted:
            self._notice(
                f"{name} does not hold what the log file map says: it was overwritten, or the map is "
                f"damaged; if events keep waiting, stop and remove {self._map.directory}: it is rebuilt"
            )
        with self._counting:
            missed = search.lines.count(None)
            self.hits += len(keys) - missed
            self.misses += missed
            self.bytes_read += logs.bytes_read - before
        return search.lines, search.doubtful

    def _tools(self) -> tuple[OpenLogs, JsonLines]:
        if not hasattr(self._local, "tools"):
            self._local.tools = OpenLogs(), self._make_format()
        tools: tuple[OpenLogs, JsonLines] = self._local.tools
        return tools


@dataclass
class _Search:
    keys: Sequence[bytes]
    places: Sequence[Sequence[Place]]
    states: Mapping[int, FileState]
    logs: OpenLogs
    log_format: JsonLines

    def __post_init__(self) -> None:
        self.exact = opaque_mask(b"".join(self.keys)).tolist()
        self.lines: list[bytes | None] = [None] * len(self.keys)
        self.doubtful = [False] * len(self.keys)
        self.contradicted: set[str] = set()
        """Names of logs that hold another line where the map says one is."""

    def run(self) -> None:
        rows_at: dict[Place, list[int]] = {}
        for row, found in enumerate(self.places):
            for place in found:
                rows_at.setdefault(place, []).append(row)
        # What stood in a file that is gone is in the logs no more.
        spans = spans_of(sorted(place for place in rows_at if not self.states[place.file].gone))
        if len(spans) > 1:
            self.logs.read_ahead([span.place for span in spans], self.states)
        for span in spans:
            rows = [[row for row in rows_at[place] if self.lines[row] is None] for place in span.places]
            if not any(rows):
                continue
            data = self._read(span.place)
            for place, of_place in zip(span.places, rows, strict=True):
                if not of_place:
                    continue
                if data is not None:
                    self._look_into(data, place.offset - span.place.offset, place.length, of_place)
                else:  # its end may be cut off, and this place still there
                    self._look_into(self._read(place), 0, place.length, of_place)
        for row in self._verify():
            if self.exact[row]:
                self.doubtful[row] = True  # the log was overwritten, and not yet found to be
                self.contradicted |= {self.states[place.file].name for place in self.places[row]}
            else:
                self.lines[row] = self._by_parsing(row)

    def _read(self, place: Place) -> bytes | None:
        return self.logs.read(place, self.states[place.file])

    def _look_into(self, data: bytes | None, low: int, length: int, rows: Sequence[int]) -> None:
        """Look for the events of these rows in a place, which begins at `low` of the bytes that were read."""
        if data is None:
            for row in rows:
                self.doubtful[row] = True
            return
        high = low + length
        parsed: dict[bytes, bytes] | None = None
        for row in rows:
            if self.lines[row] is not None:
                continue  # an earlier place of the same span had it
            key = self.keys[row]
            line = data[low:high] if self.exact[row] else probe_json_lines(key, data, low, high)
            if line is None:
                parsed = self._parse(data[low:high]) if parsed is None else parsed
                line = parsed.get(key)
            self.lines[row] = line or None

    def _verify(self) -> list[int]:
        """Forget the lines that are not the event looked for; their rows."""
        rows = [row for row, line in enumerate(self.lines) if line is not None]
        found = [line for line in self.lines if line is not None]
        if not found:
            return []
        batch = self.log_format.parse_primary(b"\n".join(found))
        right: Sequence[bytes | None] = batch.lines
        if batch.ids != b"".join([self.keys[row] for row in rows]):
            parsed = zip(rows, map(self._parse, found), strict=True)
            right = [lines.get(self.keys[row]) for row, lines in parsed]
        for row, line in zip(rows, right, strict=True):
            self.lines[row] = line
        return [row for row in rows if self.lines[row] is None]

    def _by_parsing(self, row: int) -> bytes | None:
        """The slow way, where the text of an id stands in another field too."""
        for place in self.places[row]:
            line = self._parse(self._read(place) or b"").get(self.keys[row])
            if line is not None:
                return line
        return None

    def _parse(self, data: bytes) -> dict[bytes, bytes]:
        return first_lines(self.log_format.parse_primary(data))


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

    def look_up(self, ids: bytes, missed: bool = False) -> tuple[bytes, list[bytes]]:
        """16 x N bytes -> core.fates.Found column and N lines, b"" where not found. StorageError.

        `missed`: their owners' caches were asked and are where misses are counted.
        """
        keys = split_ids(ids)
        began = self.clock.monotonic()
        lines = self.cache.get_many(keys, counted=not missed)
        cached = self.clock.monotonic()
        self.cache_latency.count((cached - began) * 1e6)
        if missed and lines.count(None) < len(lines):
            # Its owner is new and does not have it yet.
            here = [row for row, line in enumerate(lines) if line is not None]
            self.fill([keys[row] for row in here], [lines[row] or b"" for row in here])
        outcomes = bytearray(len(keys))
        if None in lines:
            self._look_into_logs(keys, lines, outcomes)
            self.logs_latency.count((self.clock.monotonic() - cached) * 1e6)
        return bounded(lines, outcomes)

    def _look_into_logs(
        self, keys: tuple[bytes, ...], lines: list[bytes | None], outcomes: bytearray
    ) -> None:
        # Before the map is read: only so "absent" can be believed.
        caught_up, unread = self.reader.caught_up, bool(self.reader.unreadable)
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
