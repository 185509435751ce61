"""The log file map on disk: where in the logs an event is, and how far they are read (paper 3.4.2).

LMDB. One transaction holds the entries of a group of chunks, the offsets up to which files are read, the
counts and the position of the dead letters: after a crash all of them are of the same moment.

The map's keys are ids and times, not files: what a deleted log has left there is found by going through
all of it, slowly, while the reader has nothing else to do. Until then it costs room, and lookups pass it by.
"""

import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from eventstore.dense import DenseMap, ExchangedError
from eventstore.rules.entries import (
    LEVEL_PARTS,
    Entries,
    Interval,
    Ints,
    OpenRuns,
    Place,
    Runs,
    files_of,
    levels_of,
    runs_of,
    sparse_entries,
    sparse_latest,
    sparse_place,
    sparse_range,
)
from eventstore.segments import DATA, FORMAT, LOADING, Counts, MapFile, Meta, interval_us_of, new_meta
from photon.core.columns import take_ids
from photon.core.disk import DirectoryLock
from photon.core.errors import SettingsError
from photon.core.ids import opaque_mask
from photon.core.settings import EventStore
from photon.logs.files import FileState, unpack_file_state

__all__ = ["Counts", "LogFileMap", "Rows"]

ENTRIES_A_STEP: Final = 8192
_READERS_MAX: Final = 256


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
        self._interval = Interval(settings.map_interval_bytes, interval_us_of(settings.map_interval_s))
        self._open_runs = OpenRuns(self._interval)
        self._lock = DirectoryLock(directory)
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            shutil.rmtree(directory / LOADING, ignore_errors=True)  # of a load that was killed
            self._file = MapFile(directory, settings.map_bytes_max, max_readers=_READERS_MAX, readahead=False)
            undo.callback(self._file.close)
            self._meta = self._read_meta(identity)
            states = self.states()
            self._gone = {state.number for state in states if state.gone}
            self._live = {state.number for state in states if not state.gone}
            self._dense = DenseMap(self._file, self._live)
            undo.pop_all()
        self._kept: frozenset[int] = frozenset()  # swept, though still listed
        self._sweep: _Sweep | None = None
        self.swept = 0
        """Entries of deleted logs that were swept out by this process."""

    @property
    def counts(self) -> Counts:
        return self._meta.counts

    @property
    def store(self) -> bytes:
        """16 bytes that say which map this is; of a map that was made anew they are others."""
        return self._meta.store

    @property
    def disk_bytes(self) -> int:
        """Size of the files on disk; 0 if somebody has removed them."""
        try:
            return (self.directory / DATA).stat().st_size + self._dense.disk_bytes
        except FileNotFoundError:
            return 0

    @property
    def trouble(self) -> str | None:
        """Why segments of the dense map can't be merged at the moment."""
        return self._dense.trouble

    def entries(self) -> dict[str, int]:
        while True:
            with suppress(ExchangedError), self._file.transaction() as transaction:
                sparse = sum(transaction.stat(db)["entries"] for db in self._file.sparse)
                repeated = transaction.stat(self._file.repeated)["entries"]
                return {"sparse": sparse, "dense": self._dense.entries(transaction), "repeated": repeated}

    def states(self) -> list[FileState]:
        with self._file.transaction() as transaction:
            values = list(transaction.cursor(self._file.files).iternext(keys=False, values=True))
        return list(map(self._unpack_state, values))

    def write(self, rows: Rows | None, states: Iterable[FileState], counts: Counts) -> list[int]:
        """Add events, how far their files are read, and the counts, all or nothing.

        The rows that repeat an opaque id found earlier, in the logs that are still there: those events are
        not the first with their id. StorageError if nothing was written.
        """
        states = list(states)
        self._dense.flush_if_due()
        gone = {state.number for state in states if state.gone}
        self._gone |= gone
        self._live |= {state.number for state in states if not state.gone}
        self._live -= gone
        meta = msgspec.structs.replace(self._meta, counts=counts)
        repeats: list[int] = []
        opened = {}
        with self._file.transaction(write=True) as transaction:
            if rows is not None and rows.ids:
                opaque = opaque_mask(rows.ids)
                if opaque.any():
                    chosen = np.flatnonzero(opaque)
                    part = rows if len(chosen) == len(opaque) else rows.take(chosen)
                    columns = (part.ids, part.files, part.starts, part.lengths)
                    repeats = chosen[self._dense.write(transaction, *columns)].tolist()
                if not opaque.all():
                    opened = self._write_sparse(transaction, rows if not opaque.any() else rows.take(~opaque))
            for state in states:
                self._file.put_state(transaction, state)
            self._file.put_meta(transaction, meta)
        self._meta = meta
        self._open_runs.keep(opened)
        return repeats

    def look_up(self, ids: Sequence[bytes]) -> tuple[list[list[Place]], dict[int, FileState]]:
        """For each id the places, in their order, that may hold its line; and the files these are in.

        No place: the event is in no log that was read. Places of an opaque id are of its very lines: of the
        first, and of those in other logs if that one's is gone.
        """
        opaque = opaque_mask(b"".join(ids)).tolist()
        while True:
            with suppress(ExchangedError), self._file.transaction() as transaction:
                return self._look_up(transaction, ids, opaque)

    def last_files(self, ids: Sequence[bytes]) -> list[int]:
        """The files to which the servers of these photon ids wrote last, as far as the map knows."""
        if not ids:
            return []
        opaque = opaque_mask(b"".join(ids)).tolist()
        servers = {key[:8] for key, is_opaque in zip(ids, opaque, strict=True) if not is_opaque}
        files: dict[int, None] = {}
        with self._file.transaction() as transaction:
            cursors = [transaction.cursor(db) for db in self._file.sparse]
            for server in servers:
                entries = [entry for cursor in cursors if (entry := _last_entry(cursor, server))]
                if entries:
                    files[sparse_place(*max(entries)[1:]).file] = None
        return list(files)

    def sweep_step(self) -> bool:
        """Sweep out a few entries of deleted logs, by the thread that writes. Is there more to do?"""
        if self._sweep is None:
            if not self._gone - self._kept:
                return False
            self._sweep = _Sweep(self._file, self._gone)
        if not self._sweep.done:
            before = self._sweep.swept
            self._sweep.step()
            self.swept += self._sweep.swept - before
            return True
        self._forget_files(self._sweep.gone)
        self._dense.wake(sweep=True)
        self._sweep = None
        return True

    def close(self) -> None:
        """Wait for lookups under way, then close. Lookups after that raise StorageError."""
        self._dense.close()
        if self._file.close():
            self._lock.release()

    def _forget_files(self, swept: frozenset[int]) -> None:
        """The states of files of which nothing is left; but the last number must not be given out again."""
        with self._file.transaction(write=True) as transaction:
            numbers = transaction.cursor(self._file.files).iternext(values=False)
            last = max((int.from_bytes(number, "big") for number in numbers), default=0)
            for number in swept - {last}:
                transaction.delete(number.to_bytes(4, "big"), db=self._file.files)
        self._kept = swept & {last}
        self._gone -= swept - {last}
        self._open_runs.forget(swept)

    def _look_up(
        self, transaction: Any, ids: Sequence[bytes], opaque: list[bool]
    ) -> tuple[list[list[Place]], dict[int, FileState]]:
        dense = self._dense.look_up(transaction, compress(ids, opaque))
        places = [[dense[key]] if key in dense else [] for key in ids] if dense else [[] for _ in ids]
        self._look_up_sparse(transaction, ids, opaque, places)
        states = self._states(transaction, places)
        for row in compress(range(len(ids)), opaque):
            # A segment may still point to logs that were swept out of all the rest.
            found = [place for place in places[row] if place.file in states]
            if not found or states[found[0].file].gone:
                # Its first log is deleted: where it was repeated in others.
                others = sorted(self._dense.repeated(transaction, ids[row]))
                states |= self._states(transaction, [others])
                found += [place for place in others if place.file in states]
            places[row] = found
        return places, states

    def _states(self, transaction: Any, places: Iterable[Iterable[Place]]) -> dict[int, FileState]:
        files = {place.file for found in places for place in found}
        packed = {file: transaction.get(file.to_bytes(4, "big"), db=self._file.files) for file in files}
        return {file: self._unpack_state(value) for file, value in packed.items() if value is not None}

    def _write_sparse(self, transaction: Any, rows: Rows) -> dict[int, Runs]:
        runs = runs_of(rows.ids, rows.files, rows.starts, rows.lengths, self._interval)
        extended, runs, opened = self._open_runs.extend(runs)
        old, new = self._leveled(extended), self._leveled(runs)
        for level in old.keys() | new.keys():
            db = self._file.sparse[level]
            keys, values = new.get(level, ([], []))
            for key in set(old.get(level, ([],))[0]).difference(keys):
                transaction.delete(key, db=db)
            transaction.cursor(db).putmulti(zip(keys, values, strict=True))
        return opened

    def _leveled(self, runs: Runs) -> dict[int, Entries]:
        """Keys and values by level, in the order of the keys."""
        if not len(runs):
            return {}
        records = runs.records()
        levels = levels_of(records, self._meta.interval_us)
        return {level: sparse_entries(records[levels == level]) for level in set(levels.tolist())}

    def _look_up_sparse(
        self, transaction: Any, ids: Sequence[bytes], opaque: list[bool], places: list[list[Place]]
    ) -> None:
        wanted = sorted((key, row) for row, key in enumerate(ids) if not opaque[row])
        for db, part in zip(self._file.sparse, LEVEL_PARTS, strict=True):
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

    def _unpack_state(self, packed: bytes) -> FileState:
        try:
            return unpack_file_state(packed)
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"a file's state: {error}") from error

    def _read_meta(self, identity: str) -> Meta:
        with self._file.transaction() as transaction:
            meta = self._file.meta(transaction) or new_meta(identity, self._interval.us, Counts())
        if meta.format != FORMAT:
            raise self._file.corrupt(f"its format is {meta.format}, not {FORMAT}")
        if meta.identity != identity:
            raise SettingsError(
                f"{self.directory}: written with other ids ({meta.identity}, now {identity}); put the "
                "settings back, or remove the directory: the map is rebuilt from the logs"
            )
        return msgspec.structs.replace(meta, interval_us=max(meta.interval_us, self._interval.us))


class _Sweep:
    """One pass over all tables for the entries of the files that were `gone` when it began."""

    def __init__(self, file: MapFile, gone: Collection[int]) -> None:
        self.gone = frozenset(gone)
        self.swept = 0
        self._gone_column = np.fromiter(self.gone, np.int64, len(self.gone))
        self._file = file
        self._tables = [*file.sparse, file.dense, file.repeated]
        self._next_key = b""

    @property
    def done(self) -> bool:
        return not self._tables

    def step(self) -> None:
        """Look through some thousand entries. StorageError: call again, nothing was swept by this call."""
        table = self._tables[0]
        with self._file.transaction() as transaction:
            cursor = transaction.cursor(table)
            there = cursor.set_range(self._next_key) if self._next_key else cursor.first()
            entries = list(islice(cursor.iternext(), ENTRIES_A_STEP)) if there else []
        if entries:
            gone = np.isin(files_of(entries, table is self._file.dense), self._gone_column)
            if gone.any():
                with self._file.transaction(write=True) as transaction:
                    for key, _ in compress(entries, gone.tolist()):
                        transaction.delete(key, db=table)
                self.swept += int(gone.sum())
            self._next_key = entries[-1][0] + b"\0"
        if len(entries) < ENTRIES_A_STEP:
            self._tables.pop(0)
            self._next_key = b""


def _last_entry(cursor: Any, server: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Of a server's entries in one level the one that begins last: its latest time, key, value."""
    above = (int.from_bytes(server, "big") + 1).to_bytes(9, "big")[1:]
    there = cursor.prev() if cursor.set_range(above) else cursor.last()
    if not there or cursor.key()[:8] != server:
        return None
    key, value = cursor.item()
    return sparse_latest(value), key, value
