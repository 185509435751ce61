"""The log file map: where in the logs an event is, and how far they are read (paper 3.4.2).

Log-structured. What was read last is in memory, in sorted parts; FLUSH_ENTRIES of it become a segment, a
sorted file that never changes. A thread merges segments of one size into greater ones and leaves out entries
of logs that were deleted meanwhile, which lookups pass by. What a lookup searches is a tuple that is
exchanged as a whole, so lookups wait for nobody. A file goes only after the manifest without it is durable.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from eventstore.rules.entries import (
    Entries,
    Hashes,
    Ints,
    Listed,
    Places,
    all_places,
    entries_of,
    first_places,
    job_of,
    joined,
)
from eventstore.segments import (
    Counts,
    Manifest,
    Segment,
    Writer,
    corrupt,
    merged,
    read_manifest,
    segment_name,
    with_states,
    write_manifest,
)
from photon.core.clock import Background, Backoff
from photon.core.columns import hash_ids
from photon.core.disk import DirectoryLock, storage_errors
from photon.core.errors import DiskFullError, SettingsError, StorageError
from photon.core.ids import opaque_mask, server_keys
from photon.core.settings import EventStore
from photon.logs.files import FileState

__all__ = ["Counts", "LogFileMap", "Rows"]

FLUSH_ENTRIES: Final = 1 << 18
FLUSH_BYTES: Final = 256 << 20
"""Of logs: so much is read again at most after a crash."""
SEGMENTS_MAX: Final = 64
"""With more the reader waits for the merges."""
_MERGE_WAIT_S: Final = 60.0
_DEAD_SHARE: Final = 8
"""A segment is written anew when an eighth of it points to logs that are gone."""
_RETRIES: Final = Backoff(10.0, 10.0)
_PAUSE_S: Final = 0.002  # between parts: lookups go first
_SERVERS_MAX: Final = 1 << 16
_NO_HASHES: Final[Hashes] = np.zeros(0, np.uint64)
_NO_ROWS: Final[Ints] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """N events in the order they were read: packed ids, and file number, offset and length of their lines."""

    ids: bytes
    files: Ints
    starts: Ints
    lengths: Ints


class _GivenUpError(Exception):
    """The merger is stopping."""


class LogFileMap:
    """One process at a time writes it (LockedError), in one thread; any thread may look up while it does.

    `identity` says by which settings ids are made of log lines: a map of other ids is refused.
    """

    def __init__(self, directory: Path, settings: EventStore, identity: str = "") -> None:
        self.directory = directory
        self._bytes_max = settings.map_bytes_max
        self._lock = DirectoryLock(directory)
        try:
            self._manifest = read_manifest(directory) or Manifest(identity)
            if self._manifest.identity != identity:
                raise SettingsError(
                    f"{directory}: written with other ids ({self._manifest.identity}, now {identity}); put "
                    "the settings back, or remove the directory: the map is rebuilt from the logs"
                )
            self._remove_unlisted()
            self._segments = {one.number: self._open(one) for one in self._manifest.segments}
        except BaseException:
            self._lock.release()
            raise
        self._numbers = itertools.count(max(self._segments, default=-1) + 1)
        self.counts = self._manifest.counts
        self._states = {state.number: state for state in self._manifest.states()}
        self.next_number = self._manifest.next_number
        """What a log that is found next is to be numbered, at least."""
        self._live = np.zeros(0, np.bool_)
        self._set_live()
        self._recent: list[Entries] = []
        self._unsaved_bytes = 0
        self._unsaved_gone = False
        self._making = 0
        """Bytes that the segments may get that are being made."""
        self._tables: tuple[Entries, ...] = ()
        self._exchange_tables()
        self._last_files: dict[int, int] = {}
        self._changing = threading.Condition()
        """Held to write the manifest, and to exchange what lookups search."""
        self._due = False
        self._started = False
        self._closed = False
        self._merger = Background("map-merger", self._work_off, _RETRIES)
        self.gone = 0
        """Logs that have gone since the start."""
        self.swept = 0
        """Entries of deleted logs that were left out by merges of this process."""

    @property
    def disk_bytes(self) -> int:
        """Size of the files on disk."""
        return sum(segment.disk_bytes for segment in list(self._segments.values()))

    @property
    def trouble(self) -> str | None:
        """Why segments can't be merged at the moment; it is tried again."""
        return self._merger.trouble

    @property
    def segments(self) -> list[Listed]:
        return self._manifest.segments

    def entries(self) -> int:
        """How many there are, those of deleted logs among them until they are merged away."""
        return sum(map(len, self._tables))

    def states(self) -> list[FileState]:
        """Of the logs that are there."""
        return list(self._states.values())

    def write(self, rows: Rows | None, states: Iterable[FileState], counts: Counts) -> tuple[Hashes, Ints]:
        """Add events, how far their files are read, and the counts; on disk they are after a `flush`.

        The events that are the first with their id in the logs that are still there: sorted hashes of the
        ids, and the rows.
        """
        gone = self._put_states(states)
        self.counts = counts
        hashes, order = _NO_HASHES, _NO_ROWS
        if rows is not None and rows.ids:
            fresh, order = entries_of(hash_ids(rows.ids), rows.files, rows.starts, rows.lengths)
            again = np.zeros(len(fresh), np.bool_)
            again[1:] = fresh.hashes[1:] == fresh.hashes[:-1]
            again[first_places(self._tables, fresh.hashes, self._live)[0]] = True
            hashes = fresh.hashes
            if again.any():
                hashes, order = hashes[~again], order[~again]
            self._keep_servers(rows)
            with self._changing:
                self._add_recent(fresh)
        if gone:
            self.gone += gone
            self.wake()
        return hashes, order

    @property
    def flush_due(self) -> bool:
        """Whether there is as much in memory as there may be."""
        return sum(map(len, self._recent)) >= FLUSH_ENTRIES or self._unsaved_bytes >= FLUSH_BYTES

    @property
    def holds_last(self) -> bool:
        """Whether something in memory can't be read again: it was counted of a log that is gone."""
        return self._unsaved_gone or self.counts.lost_bytes > self._manifest.counts.lost_bytes

    def flush(self) -> None:
        """Make all that was written durable; by the thread that writes. StorageError: call again.

        Waits a while where there are more than SEGMENTS_MAX: the writer is faster than the merges.
        """
        states, fresh = list(self._states.values()), joined(self._recent) if self._recent else None
        if fresh is not None:
            fresh = fresh.take(self._live[fresh.places["file"]])
        with self._changing, self._room(len(fresh)) if fresh else nullcontext():
            number = self._write_segment([fresh], len(fresh)) if fresh else None
            listed = [*self._manifest.segments, *([] if number is None else [Listed(number, 0)])]
            manifest = with_states(self._manifest, states, self.next_number)
            self._put_manifest(msgspec.structs.replace(manifest, counts=self.counts, segments=listed), number)
            self._recent, self._unsaved_bytes, self._unsaved_gone = [], 0, False
            self._exchange_tables()
        self.wake()
        with self._changing:
            self._changing.wait_for(lambda: len(self.segments) <= SEGMENTS_MAX, _MERGE_WAIT_S)

    def look_up(self, ids: bytes) -> tuple[Ints, Places, dict[int, FileState]]:
        """N ids -> rows of those that are known, the places that should hold their lines, and the files.

        Of several lines with one id that is the first that was read, of those in logs that are still there.
        The line may be that of another id with the same hash.
        """
        if self._closed:
            raise StorageError(f"{self.directory}: the log file map is closed")
        hashes = hash_ids(ids)
        order = np.argsort(hashes)
        found, places = first_places(self._tables, hashes[order], self._live)
        states = self._states_of(places)
        return order[found], places, states

    def places_of(self, key: bytes) -> tuple[Places, dict[int, FileState]]:
        """All places that may hold the line of an id, in the order they were read, and the files."""
        _, places = all_places(self._tables, hash_ids(key), self._live)
        return places, self._states_of(places)

    def last_files(self, ids: Sequence[bytes]) -> list[int]:
        """The files to which the servers of these photon ids wrote last, as far as this process has read."""
        packed = b"".join(ids)
        servers = server_keys(packed)[~opaque_mask(packed)].tolist()
        files = dict.fromkeys(map(self._last_files.get, servers))
        return [file for file in files if file is not None]

    def wake(self) -> None:
        """Look for merges to do."""
        with self._changing:
            self._due = True
            if not self._started and not self._merger.stopping:
                self._started = True
                self._merger.start()
        self._merger.wake()

    def close(self) -> None:
        """What was not flushed is read again. Lookups raise StorageError after that; a merge is given up."""
        self._merger.stop()
        self._closed = True
        self._lock.release()

    def _put_states(self, states: Iterable[FileState]) -> int:
        """How many of them are gone."""
        changed, gone = False, 0
        for state in states:
            before = self._states.get(state.number)
            changed |= before is None or state.gone
            self.next_number = max(self.next_number, state.number + 1)
            if state.gone:
                gone += 1
                self._states.pop(state.number, None)
                self._unsaved_gone |= self._unsaved_bytes > 0
            else:
                self._states[state.number] = state
                self._unsaved_bytes += max(0, state.offset - (before.offset if before else 0))
        if changed:
            self._set_live()
        return gone

    def _set_live(self) -> None:
        live = np.zeros(self.next_number, np.bool_)
        live[list(self._states)] = True
        self._live = live

    def _states_of(self, places: Places) -> dict[int, FileState]:
        """None of a file that went this very moment."""
        numbers = np.unique(places["file"]).tolist()
        found = map(self._states.get, numbers)
        return {number: state for number, state in zip(numbers, found, strict=True) if state is not None}

    def _keep_servers(self, rows: Rows) -> None:
        servers = server_keys(rows.ids)
        last = np.ones(len(servers), np.bool_)
        last[:-1] = (servers[1:] != servers[:-1]) | (rows.files[1:] != rows.files[:-1])
        last &= ~opaque_mask(rows.ids)
        if len(self._last_files) > _SERVERS_MAX:
            self._last_files.clear()
        self._last_files.update(zip(servers[last].tolist(), rows.files[last].tolist(), strict=True))

    def _add_recent(self, fresh: Entries) -> None:
        """Parts halve in size, at least: so there are few, and an entry is merged a few times."""
        self._recent.append(fresh)
        while len(self._recent) > 1 and len(self._recent[-2]) < 2 * len(self._recent[-1]):
            self._recent[-2:] = [joined(self._recent[-2:])]
        self._exchange_tables()

    def _exchange_tables(self) -> None:
        segments = (self._segments[one.number].entries for one in self._manifest.segments)
        self._tables = (*segments, *self._recent)

    def _path(self, number: int) -> Path:
        return self.directory / segment_name(number)

    def _open(self, one: Listed) -> Segment:
        try:
            return Segment(self._path(one.number))
        except (OSError, ValueError) as error:
            raise corrupt(self.directory, str(error)) from error

    def _remove_unlisted(self) -> None:
        """What a process that was killed has left."""
        names = {segment_name(one.number) for one in self._manifest.segments}
        with storage_errors(self.directory):
            for path in self.directory.glob("segment-*"):
                if path.name not in names:
                    path.unlink()

    @contextmanager
    def _room(self, capacity: int) -> Iterator[None]:
        """Around the making of a segment of so many entries, and the end of those that it stands for. Who is
        short of room waits for a merge that is under way. DiskFullError."""
        size = Writer.bytes_of(capacity)

        def is_there() -> bool:
            return self.disk_bytes + self._making + size <= self._bytes_max

        with self._changing:
            self._changing.wait_for(lambda: is_there() or not self._making, _MERGE_WAIT_S)
            if not is_there():
                raise DiskFullError(
                    f"{self.directory}: the log file map is full; raise 'eventstore.map_bytes_max' and start "
                    "again, nothing is lost"
                )
            self._making += size
        try:
            yield
        finally:
            with self._changing:
                self._making -= size
                self._changing.notify_all()

    def _write_segment(self, parts: Iterable[Entries], capacity: int) -> int:
        """Write one that nobody knows of yet; its number. StorageError, and what `parts` raises."""
        number = next(self._numbers)
        path = self._path(number)
        with storage_errors(path):
            writer = Writer(path, capacity)
            try:
                for part in parts:
                    writer.append(part)
                writer.close()
            except BaseException:
                writer.abandon()
                raise
            self._segments[number] = Segment(path)
        return number

    def _put_manifest(self, manifest: Manifest, number: int | None) -> None:
        """If it fails, the new segment's file goes again, unless the manifest got there all the same."""
        try:
            write_manifest(self.directory, manifest)
        except BaseException:
            if number is not None:
                self._segments.pop(number)
                with suppress(StorageError):  # then the next start does it
                    there = read_manifest(self.directory)
                    if there is None or number not in {one.number for one in there.segments}:
                        self._remove([number])
            raise
        self._manifest = manifest

    def _remove(self, numbers: Iterable[int]) -> None:
        """Lookups under way hold what they use."""
        for number in numbers:
            self._segments.pop(number, None)
            with storage_errors(self.directory):
                self._path(number).unlink(missing_ok=True)

    def _work_off(self) -> float:
        """One merge, if one is due."""
        job = self._job()
        if job is not None:
            with suppress(_GivenUpError):
                self._merge(*job)
        with self._changing:
            self._due = self._job() is not None
            self._changing.notify_all()
            return 0.0 if self._due else float("inf")

    def _job(self) -> tuple[list[Listed], int] | None:
        """Segments, and the level of what they become: neighbours of one size, or one with dead entries."""
        listed = self.segments
        neighbours = job_of(listed)
        if neighbours is not None:
            return neighbours, neighbours[0].level + 1
        for one in listed:
            segment = self._segments[one.number]
            if segment.dead(self._live) * _DEAD_SHARE > len(segment):
                return [one], one.level
        return None

    def _merge(self, job: Sequence[Listed], level: int) -> None:
        segments = [self._segments[one.number] for one in job]

        def parts() -> Iterator[Entries]:
            for part in merged(segments, self._live):
                if self._merger.rest(_PAUSE_S):
                    raise _GivenUpError
                yield part

        total = sum(map(len, segments))
        with self._room(total):
            number = self._write_segment(parts(), total)
            kept = len(self._segments[number])
            with self._changing:
                listed = self.segments
                at = listed.index(job[0])
                fresh = [Listed(number, level)] if kept else []
                changed = [*listed[:at], *fresh, *listed[at + len(job) :]]
                self._put_manifest(msgspec.structs.replace(self._manifest, segments=changed), number)
                self._exchange_tables()
            self.swept += total - kept
            self._remove([*[one.number for one in job], *([] if fresh else [number])])
