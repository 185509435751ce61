"""LogsEventStore: primary events straight from the logs, by log file map and short reads (paper 3.4.2)."""

import threading
from collections.abc import Callable, Mapping, Sequence

from eventstore.entries import Place
from eventstore.log_file_map import LogFileMap
from eventstore.open_logs import OpenLogs, spans_of
from photon.core.formats import JsonLines
from photon.core.ids import opaque_mask
from photon.core.logfiles import FileState

Probe = Callable[[bytes, bytes, int, int], bytes | None]
"""A packed photon id, some bytes of a log, and from where to where in them a run is -> the first line that
may be its event, b"" if surely none, or None if only parsing can tell."""


def probe_json_lines(key: bytes, data: bytes, low: int, high: int) -> bytes | None:
    """The text of a photon id ends with its timestamp, so a search for that finds it without any parsing."""
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
        probe: Probe = probe_json_lines,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._map = log_file_map
        self._notice = notice
        self._make_format = make_format
        self._probe = probe
        self._local = threading.local()
        self._counting = threading.Lock()
        self.hits = 0
        self.misses = 0
        self.bytes_read = 0

    def get_many(self, keys: Sequence[bytes]) -> tuple[list[bytes | None], list[bool]]:
        """For each distinct id its line or None, and whether a log that may hold it could not be read."""
        places, states = self._map.look_up(keys)
        search = self._search()
        before = search.logs.bytes_read
        lines = search.run(keys, places, states)
        found = len(lines) - lines.count(None)
        for name in search.contradicted:
            self._notice(
                f"{name} does not hold what the log file map says: it was overwritten, or the map is "
                f"damaged; if events keep waiting, stop and remove {self._map.directory}: it is rebuilt"
            )
        with self._counting:
            self.hits += found
            self.misses += len(lines) - found
            self.bytes_read += search.logs.bytes_read - before
        return lines, search.doubtful

    def _search(self) -> "_Search":
        if not hasattr(self._local, "search"):
            self._local.search = _Search(self._make_format(), self._probe)
        search: _Search = self._local.search
        return search


class _Search:
    """One thread's search for a batch of ids."""

    def __init__(self, log_format: JsonLines, probe: Probe) -> None:
        self.logs = OpenLogs()
        self.doubtful: list[bool] = []
        self.contradicted: set[str] = set()
        """Names of logs that hold another line where the map says one is."""
        self._format = log_format
        self._probe = probe

    def run(
        self, keys: Sequence[bytes], places: Sequence[Sequence[Place]], states: Mapping[int, FileState]
    ) -> list[bytes | None]:
        rows_at: dict[Place, list[int]] = {}
        for row, found in enumerate(places):
            for place in found:
                rows_at.setdefault(place, []).append(row)
        # What stood in a file that is gone is in the logs no more.
        spans = spans_of(sorted(place for place in rows_at if not states[place.file].gone))
        if len(spans) > 1:
            self.logs.read_ahead([span.place for span in spans], states)
        self.doubtful = [False] * len(keys)
        self.contradicted = set()
        exact = opaque_mask(b"".join(keys)).tolist()
        lines: list[bytes | None] = [None] * len(keys)
        for span in spans:
            rows = [[row for row in rows_at[place] if lines[row] is None] for place in span.places]
            if not any(rows):
                continue
            data = self.logs.read(span.place, states[span.place.file])
            for place, of_place in zip(span.places, rows, strict=True):
                if of_place:
                    part = (data, place.offset - span.place.offset)
                    if data is None:  # its end may be cut off, and this place still there
                        part = (self.logs.read(place, states[place.file]), 0)
                    self._look_into(part, place, of_place, keys, exact, lines)
        for row in self._verify(keys, lines):
            if exact[row]:
                self.doubtful[row] = True  # the log was overwritten, and not yet found to be
                self.contradicted |= {states[place.file].name for place in places[row]}
            else:
                lines[row] = self._by_parsing(keys[row], places[row], states)
        return lines

    def _look_into(
        self,
        part: tuple[bytes | None, int],
        place: Place,
        rows: Sequence[int],
        keys: Sequence[bytes],
        exact: Sequence[bool],
        lines: list[bytes | None],
    ) -> None:
        """`part`: the bytes that were read and where in them the place is."""
        data, low = part
        if data is None:
            for row in rows:
                self.doubtful[row] = True
            return
        high = low + place.length
        parsed: dict[bytes, bytes] | None = None
        for row in rows:
            if lines[row] is not None:
                continue  # an earlier place of the same span had it
            line = data[low:high] if exact[row] else self._probe(keys[row], data, low, high)
            if line is None:
                parsed = self._parse(data[low:high]) if parsed is None else parsed
                line = parsed.get(keys[row])
            lines[row] = line or None

    def _verify(self, keys: Sequence[bytes], lines: list[bytes | None]) -> list[int]:
        """Forget the lines that are not the event looked for; their rows."""
        found = [(row, line) for row, line in enumerate(lines) if line is not None]
        if not found:
            return []
        batch = self._format.parse_primary(b"\n".join([line for _, line in found]))
        if batch.ids == b"".join([keys[row] for row, _ in found]):
            for (row, _), line in zip(found, batch.lines, strict=True):
                lines[row] = line
            return []
        for row, line in found:
            lines[row] = self._parse(line).get(keys[row])
        return [row for row, _ in found if lines[row] is None]

    def _by_parsing(
        self, key: bytes, places: Sequence[Place], states: Mapping[int, FileState]
    ) -> bytes | None:
        """The slow way, where the text of an id stands in another field too."""
        for place in places:
            line = self._parse(self.logs.read(place, states[place.file]) or b"").get(key)
            if line is not None:
                return line
        return None

    def _parse(self, data: bytes) -> dict[bytes, bytes]:
        """The first line of each id."""
        batch = self._format.parse_primary(data)
        keys = [batch.ids[start : start + 16] for start in range(0, len(batch.ids), 16)]
        return dict(zip(reversed(keys), reversed(batch.lines), strict=True))
