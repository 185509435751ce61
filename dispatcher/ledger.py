"""The dispatcher's durable state: one transaction a group of finished batches (paper 3.2; invariant 3).

At every commit: foreign events counted = events with a fate + events that wait for a retry, and the offsets
of the files have passed exactly the counted ones. Dead letters are on disk before the commit that counts
them; at start what a crash left after the last counted one is cut off. So each is there exactly once.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from photon.core.disk import DirectoryLock
from photon.core.errors import CorruptStateError
from photon.core.fates import Fate
from photon.core.lmdb_errors import LmdbFile
from photon.core.logfiles import FileState, pack_file_state, unpack_file_state
from photon.core.logwriter import LogPosition, RotatingLog

FORMAT: Final = 1
DEAD_LETTER_FILE_BYTES_MAX: Final = 64 << 20

_STATE_KEY: Final = b"state"
_COUNTED: Final = tuple(fate for fate in Fate if fate is not Fate.PENDING)


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """All that is counted since the directory was made. `latencies`: counts by latency.EDGES_US."""

    foreign_events: int
    fates: dict[Fate, int]
    wasted_joins: int
    latencies: list[int]

    def plus(self, other: "Totals") -> "Totals":
        return Totals(
            self.foreign_events + other.foreign_events,
            {fate: self.fates.get(fate, 0) + other.fates.get(fate, 0) for fate in _COUNTED},
            self.wasted_joins + other.wasted_joins,
            [a + b for a, b in zip(self.latencies, other.latencies, strict=True)]
            if self.latencies
            else other.latencies,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What one transaction adds: `letters` are whole lines; retries are packed as in retry_entries."""

    files: Sequence[FileState]
    added: Totals
    letters: bytes = b""
    retries_removed: Sequence[bytes] = ()
    retries_due: Callable[[int], list[bytes]] = lambda _: []
    """Keys of the added retries, given the first free sequence number."""
    retries: Sequence[bytes] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    format: int
    commits: int
    sequence: int
    letters: LogPosition
    totals: Totals


def ledger_file(path: Path) -> LmdbFile:
    """The environment in `path`, with the words for what may befall it."""
    return LmdbFile(
        path,
        what="the dispatcher's state",
        setting="dispatcher.state_bytes_max",
        mend="restore it, or delete the directory to read all foreign logs again (what is registered is not "
        "joined twice)",
    )


class Ledger:
    """One process's at a time; usable from several threads.

    LockedError, CorruptStateError, DiskFullError, StorageError on opening; the latter two also later: then
    nothing of the entry is recorded and the same one can be recorded again.
    """

    def __init__(self, directory: Path, dead_letters: Path, bytes_max: int) -> None:
        self.path = directory / "ledger"
        self._file = ledger_file(self.path)
        self._bytes_max = bytes_max
        self._mutex = threading.Lock()
        self._lock = DirectoryLock(directory)
        try:
            self._open()
            self._letters = RotatingLog(dead_letters, "foreign", DEAD_LETTER_FILE_BYTES_MAX)
            self._state = self._load()
            self._letters.truncate(self._state.letters)
        except BaseException:
            self._lock.release()
            raise

    def corrupt(self, why: str) -> CorruptStateError:
        """The error for an entry that is not what was recorded."""
        return self._file.corrupt(why)

    @property
    def totals(self) -> Totals:
        return self._state.totals

    @property
    def pending(self) -> int:
        """Events that wait for a retry or are being retried."""
        totals = self.totals
        return totals.foreign_events - sum(totals.fates.values())

    @property
    def broken(self) -> bool:
        """The dead letters can't be written any more: only a restart can tell what is on disk."""
        return self._letters.broken

    def files(self) -> list[FileState]:
        """The states of all files that are still there as far as is known; the others are forgotten."""
        with self._mutex, self._file.errors(), self._environment.begin(write=True) as txn:
            states = [self._unpack_file(value) for _, value in txn.cursor(self._files_db)]
            for state in states:
                if state.gone:
                    txn.delete(_file_key(state.number), db=self._files_db)
            return [state for state in states if not state.gone]

    def retries_from(
        self, key: bytes, wanted: Callable[[bytes], bool | None], bytes_max: int
    ) -> list[tuple[bytes, bytes]]:
        """Entries from `key` on: those `wanted`, up to the first for which it is None, or to `bytes_max`.

        The entry that reaches `bytes_max` is among them.
        """
        found: list[tuple[bytes, bytes]] = []
        size = 0
        with self._mutex, self._file.errors(), self._environment.begin(db=self._retries_db) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(key)
            while more and size < bytes_max:
                key = cursor.key()
                answer = wanted(key)
                if answer is None:
                    break
                if answer:
                    value = cursor.value()
                    size += len(value)
                    found.append((key, value))
                more = cursor.next()
        return found

    def record(self, entry: Entry) -> list[bytes]:
        """Commit it. The keys of the added retries."""
        with self._mutex:
            position = self._state.letters
            if entry.letters:
                if self._letters.position != position:
                    self._letters.truncate(position)  # an earlier try got so far and no further
                position = self._letters.append(entry.letters)
                self._letters.sync()
            keys = entry.retries_due(self._state.sequence)
            after = dataclasses.replace(
                self._state,
                commits=self._state.commits + 1,
                sequence=self._state.sequence + len(keys),
                letters=position,
                totals=self._state.totals.plus(entry.added),
            )
            self._commit(entry, keys, after)
            self._state = after
            return keys

    def close(self) -> None:
        with self._mutex:
            self._environment.close()
            self._letters.close()
            self._lock.release()

    def _commit(self, entry: Entry, keys: list[bytes], after: _State) -> None:
        try:
            with self._file.errors(), self._environment.begin(write=True) as txn:
                self._write(txn, entry, keys, after)
        except CorruptStateError:
            raise
        except Exception as error:
            if isinstance(error.__cause__, lmdb.PanicError) and self._reopened().commits == after.commits:
                return  # it had got through before the disk failed
            raise

    def _write(self, txn: Any, entry: Entry, keys: list[bytes], after: _State) -> None:
        for state in entry.files:
            txn.put(_file_key(state.number), pack_file_state(state), db=self._files_db)
        delete = txn.delete
        removed = sum([delete(key, db=self._retries_db) for key in entry.retries_removed])
        assert removed == len(entry.retries_removed), "a retry was recorded twice"
        with txn.cursor(self._retries_db) as cursor:
            _, written = cursor.putmulti(list(zip(keys, entry.retries, strict=True)), overwrite=False)
        assert written == len(keys), "a retry's key was not free"
        waiting = txn.stat(self._retries_db)["entries"]
        totals = after.totals
        if totals.foreign_events != sum(totals.fates.values()) + waiting:
            raise self._file.corrupt(
                f"{totals.foreign_events} events read, but {sum(totals.fates.values())} have a fate "
                f"and {waiting} wait",
            )
        txn.put(_STATE_KEY, _pack_state(after), db=self._state_db)

    def _open(self) -> None:
        self._environment = self._file.open(self._bytes_max)
        with self._file.errors():
            self._files_db = self._environment.open_db(b"files")
            self._retries_db = self._environment.open_db(b"retries")
            self._state_db = self._environment.open_db(b"state")

    def _reopened(self) -> _State:
        """LMDB refuses to go on after a failed write of its meta page until it is opened anew."""
        self._environment.close()
        self._open()
        with self._file.errors(), self._environment.begin(db=self._state_db) as txn:
            return self._unpack_state(txn.get(_STATE_KEY))

    def _load(self) -> _State:
        with self._file.errors(), self._environment.begin(write=True) as txn:
            packed = txn.get(_STATE_KEY, db=self._state_db)
            if packed is not None:
                return self._unpack_state(packed)
            # Dead letters that are older than this ledger are not ours to cut.
            self._letters.cut_torn_line()
            state = _State(FORMAT, 0, 0, self._letters.position, NOTHING)
            txn.put(_STATE_KEY, _pack_state(state), db=self._state_db)
            return state

    def _unpack_state(self, packed: bytes | None) -> _State:
        try:
            state = msgspec.msgpack.decode(packed or b"", type=_State)
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"its state: {error}") from error
        if state.format != FORMAT:
            raise self._file.corrupt(f"format {state.format}, this version reads {FORMAT}")
        return state

    def _unpack_file(self, packed: bytes) -> FileState:
        try:
            return unpack_file_state(packed)
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"a file's state: {error}") from error


NOTHING: Final = Totals(0, dict.fromkeys(_COUNTED, 0), 0, [])


def _file_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _pack_state(state: _State) -> bytes:
    return msgspec.msgpack.encode(state)
