"""The log file map on disk: where in the logs an event is, and how far they are read (paper 3.4.2).

LMDB. One transaction holds the entries of a group of chunks, the offsets up to which files are read, the
counts and the position of the dead letters: after a crash all of them are of the same moment.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from eventstore.entries import (
    LEVEL_PARTS,
    Place,
    dense_entries,
    dense_place,
    level_of,
    sparse_entries,
    sparse_key,
    sparse_latest,
    sparse_place,
    sparse_range,
)
from eventstore.runs import Interval, Ints, OpenRuns, runs_of
from photon.core.columns import take_ids
from photon.core.disk import DirectoryLock
from photon.core.errors import SettingsError, StorageError
from photon.core.ids import opaque_mask
from photon.core.lmdb_errors import LmdbFile
from photon.core.logfiles import FileState, pack_file_state, unpack_file_state
from photon.core.logwriter import LogPosition
from photon.core.settings import EventStore

_FORMAT: Final = 1
_META_KEY: Final = b"meta"
_READERS_MAX: Final = 256
_CLOSE_WAIT_S: Final = 5.0


class Counts(msgspec.Struct, frozen=True):
    """What was read of the primary logs so far, and where the next dead letter goes."""

    primary_events: int = 0
    malformed: int = 0
    dead_letter_file: int = 0
    dead_letter_offset: int = 0

    @property
    def dead_letters(self) -> LogPosition:
        return LogPosition(self.dead_letter_file, self.dead_letter_offset)


class _Meta(msgspec.Struct, frozen=True):
    """`interval_us`: the greatest W that the map was written with, which lookups must scan."""

    format: int
    identity: str
    interval_us: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Rows:
    """N events in the order they were read: packed ids, and file number, offset and length of their lines."""

    ids: bytes
    files: Ints
    starts: Ints
    lengths: Ints

    def take(self, rows: Any) -> "Rows":
        return Rows(take_ids(self.ids, rows), self.files[rows], self.starts[rows], self.lengths[rows])


class LogFileMap:
    """One process at a time writes it (LockedError); any of its threads may look up while it does.

    `identity` says by which settings ids are made of log lines: a map of other ids is refused.
    """

    def __init__(self, directory: Path, settings: EventStore, identity: str = "") -> None:
        self.directory = directory
        self._settings = settings
        interval = Interval(settings.map_interval_bytes, max(1, round(settings.map_interval_s * 1e6)))
        self._interval = interval
        self._open_runs = OpenRuns(interval)
        self._idle = threading.Condition()
        self._active = 0
        self._closed = False
        self._file = LmdbFile(
            directory,
            what="the log file map",
            setting="eventstore.map_bytes_max",
            mend=f"remove {directory}: the map is rebuilt from the logs",
        )
        self._lock = DirectoryLock(directory)
        self._env: Any = None
        try:
            self._open()
            self._meta = self._read_meta(identity)
        except BaseException:
            if self._env is not None:
                self._env.close()
            self._lock.release()
            raise
        self._gone = {state.number for state in self.states() if state.gone}

    @property
    def counts(self) -> Counts:
        return self._meta.counts

    @property
    def disk_bytes(self) -> int:
        """Size of the file on disk."""
        return (self.directory / "data.mdb").stat().st_size

    def entries(self) -> dict[str, int]:
        """How many entries there are of each kind."""
        with self._transaction() as transaction:
            sparse = sum(transaction.stat(db)["entries"] for db in self._sparse)
            return {"sparse": sparse, "dense": transaction.stat(self._dense)["entries"]}

    def states(self) -> list[FileState]:
        """What is known of every log file."""
        with self._transaction() as transaction:
            values = list(transaction.cursor(self._files).iternext(keys=False, values=True))
        return list(map(self._unpack_state, values))

    def write(self, rows: Rows | None, states: Iterable[FileState], counts: Counts) -> list[int]:
        """Add events, how far their files are read, and the counts, all or nothing.

        The rows that repeat an opaque id found earlier, in the logs that are still there: those events are
        not the first with their id. StorageError if nothing was written.
        """
        states = list(states)
        self._gone |= {state.number for state in states if state.gone}
        meta = msgspec.structs.replace(self._meta, counts=counts)
        repeats: list[int] = []
        opened = {}
        with self._transaction(write=True) as transaction:
            if rows is not None and rows.ids:
                opaque = opaque_mask(rows.ids)
                if opaque.any():
                    repeats = self._write_dense(transaction, rows, np.flatnonzero(opaque))
                if not opaque.all():
                    opened = self._write_sparse(transaction, rows if not opaque.any() else rows.take(~opaque))
            for state in states:
                transaction.put(state.number.to_bytes(4, "big"), pack_file_state(state), db=self._files)
            transaction.put(_META_KEY, msgspec.msgpack.encode(meta), db=self._metas)
        self._meta = meta
        self._open_runs.keep(opened)
        return repeats

    def look_up(self, ids: Sequence[bytes]) -> tuple[list[list[Place]], dict[int, FileState]]:
        """For each id the places, in their order, that may hold its line; and the files these are in.

        No place: the event is in no log that was read. An opaque id has at most one place, of its very line.
        """
        places: list[list[Place]] = [[] for _ in ids]
        opaque = opaque_mask(b"".join(ids)).tolist()
        with self._transaction() as transaction:
            self._look_up_dense(transaction, ids, opaque, places)
            self._look_up_sparse(transaction, ids, opaque, places)
            files = {place.file for found in places for place in found}
            states = {file: self._state(transaction, file) for file in files}
        return places, states

    def close(self) -> None:
        """Wait for lookups under way, then close. Lookups after that raise StorageError."""
        with self._idle:
            self._closed = True
            if not self._idle.wait_for(lambda: self._active == 0, _CLOSE_WAIT_S):
                return  # closing under a reader would end the process; its end closes the file as well
        self._env.close()
        self._lock.release()

    def _write_dense(self, transaction: Any, rows: Rows, opaque: Ints) -> list[int]:
        chosen = rows if len(opaque) == len(rows.files) else rows.take(opaque)
        order, keys, values = dense_entries(chosen.ids, chosen.files, chosen.starts, chosen.lengths)
        cursor = transaction.cursor(self._dense)
        _, added = cursor.putmulti(zip(keys, values, strict=True), overwrite=False)
        if added == len(keys):
            return []
        stored = dict(cursor.getmulti(keys))
        repeats = []
        for row, key, value in zip(order.tolist(), keys, values, strict=True):
            if stored[key] == value:
                continue
            if dense_place(stored[key]).file in self._gone:
                transaction.put(key, value, db=self._dense)  # what was there first can't be read any more
                stored[key] = value
            else:
                repeats.append(int(opaque[row]))
        return repeats

    def _write_sparse(self, transaction: Any, rows: Rows) -> dict[int, Any]:
        runs = runs_of(rows.ids, rows.files, rows.starts, rows.lengths, self._interval)
        extended, opened = self._open_runs.extend(runs)
        interval_us = self._meta.interval_us
        for old, new in extended:
            if (level_of(old, interval_us), sparse_key(old)) != (level_of(new, interval_us), sparse_key(new)):
                transaction.delete(sparse_key(old), db=self._sparse[level_of(old, interval_us)])
        for db, (keys, values) in zip(self._sparse, sparse_entries(runs, interval_us), strict=True):
            if keys:
                transaction.cursor(db).putmulti(zip(keys, values, strict=True))
        return opened

    def _look_up_dense(
        self, transaction: Any, ids: Sequence[bytes], opaque: list[bool], places: list[list[Place]]
    ) -> None:
        wanted = sorted({key for key, is_opaque in zip(ids, opaque, strict=True) if is_opaque})
        if not wanted:
            return
        found = dict(transaction.cursor(self._dense).getmulti(wanted))
        for row, key in enumerate(ids):
            if key in found:
                places[row].append(dense_place(found[key]))

    def _look_up_sparse(
        self, transaction: Any, ids: Sequence[bytes], opaque: list[bool], places: list[list[Place]]
    ) -> None:
        wanted = sorted((key, row) for row, key in enumerate(ids) if not opaque[row])
        for db, part in zip(self._sparse, LEVEL_PARTS, strict=True):
            width_us = self._meta.interval_us // part
            cursor = transaction.cursor(db)
            for key, row in wanted:
                time = key[8:]
                low, high = sparse_range(key[:8], int.from_bytes(time, "big"), width_us)
                if not cursor.set_range(low):
                    break  # no keys from here on, nor for the later ids
                for entry, value in cursor.iternext():
                    if entry >= high:
                        break
                    if sparse_latest(value) >= time:
                        places[row].append(sparse_place(entry, value))
        for _, row in wanted:
            places[row].sort()

    def _state(self, transaction: Any, file: int) -> FileState:
        value = transaction.get(file.to_bytes(4, "big"), db=self._files)
        assert value is not None
        return self._unpack_state(value)

    def _unpack_state(self, packed: bytes) -> FileState:
        try:
            return unpack_file_state(packed)
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"a file's state: {error}") from error

    def _open(self) -> None:
        with self._file.errors():
            self._env = self._file.open(
                self._settings.map_bytes_max, max_readers=_READERS_MAX, readahead=False
            )
            last_page = self._env.info()["last_pgno"]
            if self.disk_bytes < (last_page + 1) * self._env.stat()["psize"] and last_page > 1:
                raise self._file.corrupt("its file was cut short")
            with self._env.begin() as transaction:
                names = set(transaction.cursor().iternext(keys=True, values=False))
            sparse = [b"sparse" if part == 1 else b"sparse/%d" % part for part in LEVEL_PARTS]
            if names and not names <= {*sparse, b"dense", b"files", b"meta"}:
                raise self._file.corrupt("it holds something else")
            self._sparse = [self._env.open_db(name) for name in sparse]
            self._dense, self._files, self._metas = map(self._env.open_db, (b"dense", b"files", b"meta"))

    def _read_meta(self, identity: str) -> _Meta:
        with self._transaction() as transaction:
            value = transaction.get(_META_KEY, db=self._metas)
        if value is None:
            meta = _Meta(_FORMAT, identity, self._interval.us, Counts())
        else:
            try:
                meta = msgspec.msgpack.decode(value, type=_Meta)
            except msgspec.DecodeError as error:
                raise self._file.corrupt(str(error)) from error
            if meta.format != _FORMAT:
                raise self._file.corrupt(f"its format is {meta.format}, not {_FORMAT}")
            if meta.identity != identity:
                raise SettingsError(
                    f"{self.directory}: written with other ids ({meta.identity}, now {identity}); put the "
                    "settings back, or remove the directory: the map is rebuilt from the logs"
                )
        return msgspec.structs.replace(meta, interval_us=max(meta.interval_us, self._interval.us))

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[Any]:
        with self._idle:
            if self._closed:
                raise StorageError(f"{self.directory}: the log file map is closed")
            self._active += 1
        try:
            with self._file.errors(), self._env.begin(write=write) as transaction:
                yield transaction
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()
