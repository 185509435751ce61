"""The dense log file map: an entry for each opaque id (docs/decisions/002-event-ids.md).

Log-structured. New entries are in an LMDB table; when it holds FLUSH_ENTRIES they become a sorted segment,
a file of its own, and the table is emptied: a tree that takes keys in random order is fast while it is small
only. A thread merges segments. Which there are is in LMDB, in the transaction that empties the table or
exchanges merged ones: a file that it does not name is removed at start. A power cut may bring back the list
before the last: files go only after the list without them is synced.
"""

import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from eventstore.rules.entries import Ints, Place, dense_entries, dense_place, repeated_entry, repeated_place
from eventstore.segments import (
    Columns,
    Listed,
    MapFile,
    Segment,
    Writer,
    columns_of,
    merged,
    segment_name,
)
from photon.core.clock import Background, Backoff
from photon.core.errors import StorageError

FLUSH_ENTRIES: Final = 1 << 18
FAN: Final = 4
"""So many segments of a level become one of the next."""
SEGMENTS_MAX: Final = 64
"""With more the reader waits for the merges."""
_MERGE_WAIT_S: Final = 60.0
_DEAD_SHARE: Final = 8
"""A segment is written anew when an eighth of it points to logs that are gone."""
_RETRIES: Final = Backoff(10.0, 10.0)
_PAUSE_S: Final = 0.002  # between parts: lookups go first
_LOOKED_AT_ONCE: Final = 1 << 20


class _GivenUpError(Exception):
    """The merger is stopping."""


class ExchangedError(Exception):
    """A segment was merged away since the transaction began: look again in a new one."""


class DenseMap:
    """One thread writes, any may look up, one merges; that one starts with the first `wake`.

    `live`: numbers of the files that are there, kept by the owner.
    """

    def __init__(self, file: MapFile, live: Collection[int]) -> None:
        """CorruptStateError if a segment is missing or damaged."""
        self._file = file
        self.live = live
        self._segments: dict[int, Segment] = {}
        listed = self.all_listed()
        names = {segment_name(segment.number) for segment in listed}
        with file.errors():
            unlisted = [path for path in file.directory.glob("dense-*") if path.name not in names]
        if unlisted:
            file.sync()  # the list may be of a process that was killed before it could do so
        with file.errors():
            for path in unlisted:
                path.unlink()
        for segment in listed:
            try:
                self._segments[segment.number] = Segment(self._path(segment.number))
            except (OSError, ValueError) as error:
                raise file.corrupt(str(error)) from error
        self._numbers = itertools.count(max(self._segments, default=-1) + 1)
        self._merged_away: list[int] = []
        self._changed = threading.Condition()
        self._due = False
        self._sweeps = 0
        self._swept = 0
        self._started = False
        self._work = Background("dense-merger", self._work_off, _RETRIES)

    @property
    def disk_bytes(self) -> int:
        return sum(segment.disk_bytes for segment in list(self._segments.values()))

    def entries(self, transaction: Any) -> int:
        """How many, those of deleted logs among them until they are swept or merged away. ExchangedError."""
        in_table: int = transaction.stat(self._file.dense)["entries"]
        return in_table + sum(self.segment(one.number).count for one in self._file.segments(transaction))

    def write(self, transaction: Any, ids: bytes, files: Ints, starts: Ints, lengths: Ints) -> list[int]:
        """Add N opaque ids. The rows that repeat one found earlier, in logs that are still there.

        Of those the places in other logs than the first are kept apart, should it be deleted before them.
        """
        order, keys, values = dense_entries(ids, files, starts, lengths)
        known = self._find(transaction, keys)
        older = {n: place for n, place in known.items() if place.file in self.live}
        repeats = [(int(order[n]), keys[n], values[n], place) for n, place in older.items()]
        if older:
            rest = [n for n in range(len(keys)) if n not in older]
            order, keys, values = order[rest], [keys[n] for n in rest], [values[n] for n in rest]
        cursor = transaction.cursor(self._file.dense)
        _, added = cursor.putmulti(zip(keys, values, strict=True), overwrite=False)
        stored = dict(cursor.getmulti(keys)) if added < len(keys) else {}
        for row, key, value in zip(order.tolist(), keys, values, strict=True) if stored else ():
            if stored[key] == value:
                continue
            first = dense_place(stored[key])
            if first.file not in self.live:
                transaction.put(key, value, db=self._file.dense)  # the first can't be read any more
                stored[key] = value
            else:
                repeats.append((row, key, value, first))
        elsewhere = [
            repeated_entry(key, value)
            for _, key, value, first in repeats
            if dense_place(value).file != first.file
        ]
        if elsewhere:
            transaction.cursor(self._file.repeated).putmulti(elsewhere)
        return [row for row, _, value, first in repeats if dense_place(value) != first]

    def repeated(self, transaction: Any, key: bytes) -> list[Place]:
        """Where else than in the first log an opaque id stands."""
        places: list[Place] = []
        if not transaction.stat(self._file.repeated)["entries"]:
            return places
        cursor = transaction.cursor(self._file.repeated)
        if cursor.set_range(key):
            for entry, value in cursor.iternext():
                if not entry.startswith(key):
                    break
                places.append(repeated_place(entry, value))
        return places

    def look_up(self, transaction: Any, ids: Iterable[bytes]) -> dict[bytes, Place]:
        """Where the lines of those are that are known. ExchangedError."""
        wanted = sorted(set(ids))
        if not wanted:
            return {}
        entries = transaction.cursor(self._file.dense).getmulti(wanted)
        found = {key: dense_place(value) for key, value in entries}
        rest = [key for key in wanted if key not in found] if found else wanted
        return found | {rest[n]: place for n, place in self._find(transaction, rest).items()}

    def flush_if_due(self) -> None:
        """Make a segment of the table if it is great enough; by the thread that writes. StorageError.

        Waits a while where there are more than SEGMENTS_MAX: the writer is faster than the merges.
        """
        with self._file.transaction() as transaction:
            if transaction.stat(self._file.dense)["entries"] < FLUSH_ENTRIES:
                return
            keys = b"".join(transaction.cursor(self._file.dense).iternext(keys=True, values=False))
            values = b"".join(transaction.cursor(self._file.dense).iternext(keys=False, values=True))
        number = self.write_segment([columns_of(keys, values)], len(keys) // 16)
        with self._listing(number) as transaction:
            transaction.drop(self._file.dense, delete=False)
            self._put_list(transaction, [*self._file.segments(transaction), Listed(number, 0)])
        self.wake()
        if len(self.all_listed()) > SEGMENTS_MAX:
            with self._changed:
                self._changed.wait_for(lambda: len(self.all_listed()) <= SEGMENTS_MAX, _MERGE_WAIT_S)

    def all_listed(self) -> list[Listed]:
        """The segments, oldest first."""
        with self._file.transaction() as transaction:
            return self._file.segments(transaction)

    def segment(self, number: int) -> Segment:
        """ExchangedError."""
        try:
            return self._segments[number]
        except KeyError as error:
            raise ExchangedError(f"segment {number} was merged away") from error

    def write_segment(self, parts: Iterable[Columns], capacity: int) -> int:
        """Write one that nobody knows of yet; its number. StorageError, and what `parts` raises."""
        if self.disk_bytes + Writer.bytes_of(capacity) > self._file.bytes_max:
            raise self._file.lmdb.full()
        number = next(self._numbers)
        with self._file.errors():
            writer = Writer(self._path(number), capacity)
            try:
                for part in parts:
                    writer.append(part)
                writer.close()
            except BaseException:
                writer.abandon()
                raise
            self._segments[number] = Segment(self._path(number))
        return number

    def exchange(self, old: Sequence[Listed], number: int, level: int) -> None:
        """Put a merged segment in the place of those it was made of, and remove these. StorageError."""
        with self._listing(number) as transaction:
            listed = self._file.segments(transaction)
            at = listed.index(old[0])
            assert listed[at : at + len(old)] == list(old), "only the merger takes segments away"
            fresh = [Listed(number, level)] if self._segments[number].count else []
            self._put_list(transaction, [*listed[:at], *fresh, *listed[at + len(old) :]])
        self._merged_away += [segment.number for segment in old] + ([] if fresh else [number])
        self._remove_merged_away()

    def _remove_merged_away(self) -> None:
        """What could not be removed is removed with the next ones, or at the next start."""
        self._file.sync()
        while self._merged_away:
            self._remove(self._merged_away[-1])
            self._merged_away.pop()

    def _remove(self, number: int) -> None:
        """Lookups under way hold what they use; those that come to it now look again."""
        self._segments.pop(number, None)
        with self._file.errors():
            self._path(number).unlink(missing_ok=True)

    @contextmanager
    def _listing(self, number: int) -> Iterator[Any]:
        """The transaction that puts a new segment on the list. If it fails, the segment's file goes again."""
        try:
            with self._file.transaction(write=True) as transaction:
                yield transaction
        except BaseException:
            with suppress(StorageError):  # then the next start does it
                if number not in {one.number for one in self.all_listed()}:
                    self._remove(number)
            raise

    def _find(self, transaction: Any, keys: Sequence[bytes]) -> dict[int, Place]:
        """Of sorted ids those that are in a segment, by their row: where their lines are."""
        found: dict[int, Place] = {}
        listed = self._file.segments(transaction)
        if not listed or not keys:
            return found
        halves = np.frombuffer(b"".join(keys), ">u8").astype(np.uint64)
        high, low = halves[0::2], halves[1::2]
        for segment in reversed([self.segment(one.number) for one in listed]):
            rows = segment.find(high, low)
            for n in np.flatnonzero(rows >= 0).tolist():
                # The latest counts: it came since what was first could not be read any more.
                if n not in found:
                    found[n] = segment.place(int(rows[n]))
        return found

    def _put_list(self, transaction: Any, listed: Sequence[Listed]) -> None:
        self._file.put_segments(transaction, listed)

    def _path(self, number: int) -> Path:
        return self._file.directory / segment_name(number)

    @property
    def trouble(self) -> str | None:
        """Why the last merge failed; it is tried again."""
        return self._work.trouble

    def wake(self, sweep: bool = False) -> None:
        """Look for merges to do. `sweep`: logs were deleted, so look for segments that point to them."""
        with self._changed:
            self._due = True
            self._sweeps += sweep
            if not self._started and not self._work.stopping:
                self._started = True
                self._work.start()
        self._work.wake()

    def settle(self, timeout_s: float) -> bool:
        """Wait until there is nothing left to do (tests, benchmarks)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._due, timeout_s)

    def close(self) -> None:
        """A merge under way is given up: the segments it was made of are all still there."""
        self._work.stop()

    def _work_off(self) -> float:
        """One merge, or the sweep if one is due."""
        sweeps = self._sweeps
        if not self._step() and self._swept != sweeps:
            self._rewrite_dead()
            self._swept = sweeps
        with self._changed:
            self._due = self._swept != self._sweeps or job_of(self.all_listed()) is not None
            self._changed.notify_all()
            return 0.0 if self._due else float("inf")

    def _step(self) -> bool:
        job = job_of(self.all_listed())
        return job is not None and self._merge(job, job[0].level + 1)

    def _merge(self, job: Sequence[Listed], level: int) -> bool:
        segments = [self.segment(one.number) for one in job]
        # After the segments were chosen: what is live then and in them is live now, or was deleted.
        live = np.sort(np.fromiter(list(self.live), np.int64))

        def parts() -> Iterator[Columns]:
            for part in merged(segments, live):
                if self._work.rest(_PAUSE_S):
                    raise _GivenUpError
                yield part

        try:
            number = self.write_segment(parts(), sum(segment.count for segment in segments))
        except _GivenUpError:
            return False
        self.exchange(job, number, level)
        return True

    def _rewrite_dead(self) -> None:
        for one in self.all_listed():
            segment = self.segment(one.number)
            live = np.fromiter(list(self.live), np.int64)
            dead = 0
            for start in range(0, segment.count, _LOOKED_AT_ONCE):
                part = segment.columns.file[start : start + _LOOKED_AT_ONCE]
                dead += len(part) - int(np.isin(part, live).sum())
                if self._work.rest(_PAUSE_S):
                    return
            if dead * _DEAD_SHARE > segment.count:
                self._merge([one], one.level)


def job_of(listed: Sequence[Listed]) -> list[Listed] | None:
    """The segments to merge next: the oldest FAN neighbours of the least level that has so many. Pure."""
    groups = [list(group) for _, group in groupby(listed, key=lambda segment: segment.level)]
    full = [group[:FAN] for group in groups if len(group) >= FAN]
    return full[-1] if full else None
