"""The reader of the primary logs: fills the log file map and the cache, in one thread (paper 3.4.1, 3.4.2).

What it takes up is kept as a group until the map has it; then the cache gets it. While it catches up a group
is many chunks: all that is done with a group is faster with many events at once.

While the reader is behind (it catches up, the map was lost, the disk is full), what the map does not have
may stand right behind what it has. A lookup reads that little, from where the map ends: of the file that
its id's server wrote to last, else of the files that are behind. What was parsed is kept until the map has
it, and parsing takes a small share of the time only: all of it is the reader's work, which comes anyway.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np
from cachetools import LRUCache

from eventstore.cache import Fill
from eventstore.log_file_map import Counts, LogFileMap, Rows
from eventstore.rules.entries import Ints
from photon.core.clock import Backoff, Clock
from photon.core.columns import split_ids, unpack_times
from photon.core.errors import CorruptStateError, StorageError
from photon.core.fates import Fate
from photon.core.ids import ID_BYTES
from photon.core.settings import Logs
from photon.core.status import Notices
from photon.logs.files import Chunk, FileState, read_at, shown, whole_lines
from photon.logs.follow import LogFollower
from photon.logs.formats import JsonLines, PrimaryBatch
from photon.logs.text import ALL_READ, LINGER_S, Part, Text, gather
from photon.logs.writer import DeadLetter, RotatingLog, dead_letter_lines

GROUP_BYTES_MAX: Final = 32 << 20
_OVERSIZED_KEPT_BYTES: Final = 1024
_RETRIES: Final = Backoff(0.05, 5.0)
_UNENDED_EVERY_S: Final = 1.0
LOOKS_S_MAX: Final = 3 * _UNENDED_EVERY_S
"""A reader that has not looked at its logs for so long stands still: with nothing to do it looks each
second."""


@dataclass(slots=True)
class _Group:
    """Chunks that are parsed and not yet in the map."""

    ids: list[bytes] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    files: list[Ints] = field(default_factory=list)
    starts: list[Ints] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    states: dict[int, FileState] = field(default_factory=dict)
    tails: set[int] = field(default_factory=set)
    bytes: int = 0
    lost_bytes: int = 0

    def rows(self) -> Rows | None:
        if not self.lines:
            return None
        lengths = np.fromiter(map(len, self.lines), np.int64, len(self.lines))
        return Rows(b"".join(self.ids), np.concatenate(self.files), np.concatenate(self.starts), lengths)


@dataclass
class Reader:
    """Use `start` and `stop`, or call `step` (tests). `on_failure` gets what no retry can mend; `on_read`, up
    to about which time of events (us) all logs are read, or ALL_READ."""

    follower: LogFollower
    log_file_map: LogFileMap
    fill: Fill
    log_format: JsonLines
    dead_letters: RotatingLog
    settings: Logs
    clock: Clock
    notices: Notices
    on_failure: Callable[[Exception], None] = lambda _: None
    wake: threading.Event = field(default_factory=threading.Event)
    on_read: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="primary-reader", daemon=True)
        self._group = _Group()
        self.dead_letters.truncate(self.log_file_map.counts.dead_letters)
        self._next_unended = float("-inf")
        self.caught_up = False
        """Every byte that the follower has seen is in map and cache; in a drain it has seen a log."""
        self._looked_at = float("-inf")
        self.positions = {state.number: state for state in self.log_file_map.states() if not state.gone}
        """How far the map knows each log; of one that is new, nothing. For other threads to look at."""
        self.storage_error: str | None = None
        self.unended: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        self._newest: dict[int, int] = {}
        """The event time (us) up to which each log is read, while there is more: all advance together."""
        self.follower.order = lambda number: self._newest.get(number, 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the group under way. What can't be made durable then is read again at the next start."""
        self._stopping.set()
        self.wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(StorageError):
            self._flush()
        self.follower.close()

    def step(self) -> bool:
        """Read and store one group; was there anything? StorageError: call again, the group is kept."""
        if self.log_file_map.flush_due:
            self._flush()
        group = self._group
        for state in self.follower.scan_if_due():
            group.states[state.number] = state
            self.positions.setdefault(state.number, state)
        group.lost_bytes += self.follower.take_lost()
        looked_at = self.clock.monotonic()
        self.follower.poll()
        self.caught_up = self.caught_up and self.follower.caught_up
        self._looked_at = looked_at
        while group.bytes < GROUP_BYTES_MAX and not self._stopping.is_set():
            parts, oversized = gather(self.follower, self.settings.chunk_bytes // 2)
            self.caught_up = self.caught_up and not (parts or oversized)
            if self._take(parts, oversized):
                break
        worked = bool(group.states)
        if worked:
            self._write()
        self.caught_up = self.follower.caught_up and self._in_sight()
        self.on_read(self._read_to_us())
        self.unreadable = self.follower.unreadable
        if worked or self.clock.monotonic() >= self._next_unended:
            self.unended = self.follower.unended()
            self._next_unended = self.clock.monotonic() + _UNENDED_EVERY_S
        return worked

    def _read_to_us(self) -> int:
        """A log that says no times, or can't be read, does not count."""
        if self.caught_up:
            return ALL_READ
        return min((self._newest.get(one.number, 0) for one in self.follower.growing()), default=ALL_READ)

    @property
    def is_up_to_date(self) -> bool:
        """Caught up, and it looked a moment ago: a process that stood still, or whose reader gets no CPU,
        does not know what was written meanwhile. For other threads."""
        looked_at = self._looked_at  # before the other: what that look has found shows in it
        return self.caught_up and self.clock.monotonic() - looked_at <= LOOKS_S_MAX

    def _in_sight(self) -> bool:
        """False while logs that grow no more are to be read and none is there, as before a disk is mounted:
        absent is final then, and all events would be given up."""
        if self.positions or not self.follower.drain:
            return True
        self.notices.tell("no primary log is in sight, so nothing is given up: check 'primary' and its disk")
        return False

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    worked = self.step()
                except StorageError as error:
                    # A restart mends the latter: it looks at what is on disk.
                    if isinstance(error, CorruptStateError) or self.dead_letters.broken:
                        raise
                    failures += 1
                    self._tell(error)
                    self._stopping.wait(_RETRIES.delay_s(failures))
                    continue
                failures, self.storage_error = 0, None
                if not worked:
                    self.wake.wait(self._pause_s())
                    self.wake.clear()
                elif self.caught_up:
                    self._stopping.wait(LINGER_S)
        except Exception as error:
            self.caught_up = False
            self.storage_error = str(error)
            self.notices.tell(f"the reader stopped: {error}")
            self.on_failure(error)

    def _pause_s(self) -> float:
        """Until there may be something to do, unless the follower wakes the reader before."""
        others = self._next_unended - self.clock.monotonic()
        return min(self.follower.patience_s, max(others, self.settings.poll_interval_ms / 1000))

    def _tell(self, error: StorageError) -> None:
        if self.storage_error != str(error):
            self.notices.tell(f"{error}; tried again until it works")
        self.storage_error = str(error)

    def _take(self, parts: Sequence[Part], oversized: Part | None) -> bool:
        """Add chunks to the group. True if they are all for now: nothing more is known, or a file grows by
        little bits and these wait no longer."""
        group, tails = self._group, set()
        if parts:
            self._parse(parts)
        if oversized is not None:
            group.letters.append(self._oversized(*oversized))
            parts = [*parts, oversized]
        for file, chunk in parts:
            group.bytes += chunk.end - chunk.start
            group.states[file.number] = self.follower.advanced(file.number, chunk.end)
            if chunk.end - chunk.start < self.settings.chunk_bytes // 2:
                tails.add(file.number)
        again = not tails.isdisjoint(group.tails)
        group.tails |= tails
        return again or not parts

    def _parse(self, parts: Sequence[Part]) -> None:
        group, text = self._group, Text(parts)
        batch = self.log_format.parse_primary(text.data)
        group.letters += [
            DeadLetter(Fate.MALFORMED, bad.reason, bad.line, *text.origin(bad.start))
            for bad in batch.malformed
        ]
        if not batch.lines:
            return
        numbers = np.array([file.number for file, _ in parts], np.int64)
        group.ids.append(batch.ids)
        group.lines += batch.lines
        group.starts.append(text.offsets(batch.starts))
        group.files.append(numbers[text.parts_of(batch.starts)])
        for (file, chunk), last in zip(parts, text.last_rows(batch.starts), strict=True):
            if chunk.more and last is not None:
                row = slice(last * ID_BYTES, (last + 1) * ID_BYTES)
                times, _ = self.log_format.primary_times(batch.ids[row], batch.lines[last : last + 1])
                self._newest[file.number] = int(unpack_times(times)[0]) or ALL_READ

    def _oversized(self, file: FileState, chunk: Chunk) -> DeadLetter:
        reason = (
            f"line of {chunk.end - chunk.start} bytes, 'logs.line_bytes_max' is "
            f"{self.settings.line_bytes_max}; only its beginning is kept here"
        )
        beginning = b""
        with suppress(OSError):
            beginning = read_at(file.path, chunk.start, _OVERSIZED_KEPT_BYTES)
        return DeadLetter(Fate.MALFORMED, reason, beginning, shown(file.name), chunk.start)

    def _write(self) -> None:
        """The group to the dead letters, the map, the cache; then a new group begins."""
        group, counts = self._group, self.log_file_map.counts
        rows = group.rows()
        repeats = self.log_file_map.write(rows, group.states.values(), self._with_letters(counts))
        self._group = _Group()
        for number, state in group.states.items():
            if state.gone:
                self.positions.pop(number, None)
                self.follower.forget(number)
                self._newest.pop(number, None)
            else:
                self.positions[number] = state
        if rows is None:
            return
        keys, lines = split_ids(rows.ids), group.lines
        if repeats:
            first = np.ones(len(lines), np.bool_)
            first[repeats] = False
            keys, lines = tuple(compress(keys, first)), list(compress(lines, first))
        self.fill(keys, lines)

    def _flush(self) -> None:
        """Make what was read durable; the dead letters before the map, which says where they end."""
        self.caught_up = False  # however long it takes, nothing is read meanwhile
        self.dead_letters.sync()
        self.log_file_map.flush()

    def _with_letters(self, counts: Counts) -> Counts:
        """Append the group's dead letters, all or none. What the map is to say of them."""
        group = self._group
        position = counts.dead_letters
        if group.letters:
            position = self.dead_letters.append(dead_letter_lines(group.letters))
        return Counts(
            counts.primary_events + len(group.lines),
            counts.malformed + len(group.letters),
            position.file,
            position.offset,
            counts.lost_bytes + group.lost_bytes,
        )


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
