"""The dense log file map: an entry for each opaque id (docs/decisions/002-event-ids.md).

Log-structured. New entries are in an LMDB table; when it holds FLUSH_ENTRIES they become a sorted segment,
a file of its own, and the table is emptied: a tree that takes keys in random order is fast while it is small
only. Segments are merged by a thread (eventstore.merging). Which there are is in LMDB, in the transaction
that empties the table or exchanges merged ones: a file that it does not name is removed at start. A power
cut may bring back the list before the last: files go only after the list without them is synced.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from eventstore.entries import Place, dense_entries, dense_place, repeated_entry, repeated_place
from eventstore.map_format import SEGMENTS_KEY, Listed, segment_name
from eventstore.runs import Ints
from eventstore.segments import Columns, Segment, Writer, columns_of
from eventstore.sweeping import Transaction
from photon.core.errors import DiskFullError, StorageError
from photon.core.lmdb_errors import LmdbFile

FLUSH_ENTRIES: Final = 1 << 18


class ExchangedError(Exception):
    """A segment was merged away since the transaction began: look again in a new one."""


class DenseMap:
    """One thread writes, any may look up. `live`: numbers of the files that are there, kept by the owner."""

    def __init__(
        self,
        file: LmdbFile,
        transaction: Transaction,
        sync: Callable[[], None],
        table: Any,
        repeated: Any,
        metas: Any,
        live: Collection[int],
        bytes_max: int,
    ) -> None:
        """`sync`: the last transaction too survives a power cut after it.

        CorruptStateError if a segment is missing or damaged.
        """
        self.file = file
        self.transaction = transaction
        self._sync = sync
        self.live = live
        self._table = table
        self._repeated = repeated
        self._metas = metas
        self._bytes_max = bytes_max
        self._segments: dict[int, Segment] = {}
        with transaction() as reading:
            listed = self.listed(reading)
        names = {segment_name(segment.number) for segment in listed}
        with file.errors():
            unlisted = [path for path in file.path.glob("dense-*") if path.name not in names]
        if unlisted:
            sync()  # the list may be of a process that was killed before it could do so
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

    @property
    def disk_bytes(self) -> int:
        """Of all segments."""
        return sum(segment.disk_bytes for segment in list(self._segments.values()))

    def entries(self, transaction: Any) -> int:
        """How many, those of deleted logs among them until they are swept or merged away. ExchangedError."""
        in_table: int = transaction.stat(self._table)["entries"]
        return in_table + sum(self.segment(one.number).count for one in self.listed(transaction))

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
        cursor = transaction.cursor(self._table)
        _, added = cursor.putmulti(zip(keys, values, strict=True), overwrite=False)
        stored = dict(cursor.getmulti(keys)) if added < len(keys) else {}
        for row, key, value in zip(order.tolist(), keys, values, strict=True) if stored else ():
            if stored[key] == value:
                continue
            first = dense_place(stored[key])
            if first.file not in self.live:
                transaction.put(key, value, db=self._table)  # what was there first can't be read any more
                stored[key] = value
            else:
                repeats.append((row, key, value, first))
        elsewhere = [
            repeated_entry(key, value)
            for _, key, value, first in repeats
            if dense_place(value).file != first.file
        ]
        if elsewhere:
            transaction.cursor(self._repeated).putmulti(elsewhere)
        return [row for row, _, value, first in repeats if dense_place(value) != first]

    def repeated(self, transaction: Any, key: bytes) -> list[Place]:
        """Where else than in the first log an opaque id stands."""
        places: list[Place] = []
        if not transaction.stat(self._repeated)["entries"]:
            return places
        cursor = transaction.cursor(self._repeated)
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
        found = {key: dense_place(value) for key, value in transaction.cursor(self._table).getmulti(wanted)}
        rest = [key for key in wanted if key not in found] if found else wanted
        return found | {rest[n]: place for n, place in self._find(transaction, rest).items()}

    def flush_if_due(self) -> bool:
        """Make a segment of the table if it is great enough; by the thread that writes. StorageError."""
        with self.transaction() as transaction:
            if transaction.stat(self._table)["entries"] < FLUSH_ENTRIES:
                return False
            keys = b"".join(transaction.cursor(self._table).iternext(keys=True, values=False))
            values = b"".join(transaction.cursor(self._table).iternext(keys=False, values=True))
        number = self.write_segment([columns_of(keys, values)], len(keys) // 16)
        assert number is not None
        with self._listing(number) as transaction:
            transaction.drop(self._table, delete=False)
            self._put_list(transaction, [*self.listed(transaction), Listed(number, 0)])
        return True

    def listed(self, transaction: Any) -> list[Listed]:
        """The segments, oldest first."""
        value = transaction.get(SEGMENTS_KEY, db=self._metas)
        try:
            return msgspec.msgpack.decode(value, type=list[Listed]) if value is not None else []
        except msgspec.DecodeError as error:
            raise self.file.corrupt(f"the list of its segments: {error}") from error

    def segment(self, number: int) -> Segment:
        """ExchangedError."""
        try:
            return self._segments[number]
        except KeyError as error:
            raise ExchangedError(f"segment {number} was merged away") from error

    def write_segment(self, parts: Iterable[Columns | None], capacity: int) -> int | None:
        """Write one that nobody knows of yet; its number, or None if a part was None. StorageError."""
        if self.disk_bytes + Writer.bytes_of(capacity) > self._bytes_max:
            raise DiskFullError(
                f"{self.file.path}: {self.file.what} is full; raise '{self.file.setting}' and start again, "
                "nothing is lost"
            )
        number = next(self._numbers)
        with self.file.errors():
            writer = Writer(self._path(number), capacity)
            try:
                for part in parts:
                    if part is None:
                        writer.abandon()
                        return None
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
            listed = self.listed(transaction)
            at = listed.index(old[0])
            assert listed[at : at + len(old)] == list(old), "only the merger takes segments away"
            fresh = [Listed(number, level)] if self._segments[number].count else []
            self._put_list(transaction, [*listed[:at], *fresh, *listed[at + len(old) :]])
        self._merged_away += [segment.number for segment in old] + ([] if fresh else [number])
        self._remove_merged_away()

    def _remove_merged_away(self) -> None:
        """What could not be removed is removed with the next ones, or at the next start."""
        self._sync()
        while self._merged_away:
            # Lookups under way hold what they use; those that come to it now look again.
            self._segments.pop(self._merged_away[-1], None)
            with self.file.errors():
                self._path(self._merged_away[-1]).unlink(missing_ok=True)
            self._merged_away.pop()

    @contextmanager
    def _listing(self, number: int) -> Iterator[Any]:
        """The transaction that puts a new segment on the list. If it fails, the segment's file goes again."""
        try:
            with self.transaction(write=True) as transaction:
                yield transaction
        except BaseException:
            with suppress(StorageError):  # then the next start does it
                self._remove_unlisted(number)
            raise

    def _remove_unlisted(self, number: int) -> None:
        with self.transaction() as transaction:
            if number in {segment.number for segment in self.listed(transaction)}:
                return
        del self._segments[number]
        with self.file.errors():
            self._path(number).unlink(missing_ok=True)

    def _find(self, transaction: Any, keys: Sequence[bytes]) -> dict[int, Place]:
        """Of sorted ids those that are in a segment, by their row: where their lines are."""
        found: dict[int, Place] = {}
        listed = self.listed(transaction)
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
        transaction.put(SEGMENTS_KEY, msgspec.msgpack.encode(listed), db=self._metas)

    def _path(self, number: int) -> Path:
        return self.file.path / segment_name(number)
