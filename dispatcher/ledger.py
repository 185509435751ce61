"""A worker's durable state: one transaction a group of finished batches (paper 3.2; invariant 3).

At every commit: foreign events counted = events with a fate + events that wait for a retry, and the offsets
of the files have passed exactly the counted ones. Dead letters are on disk before the commit that counts
them; at start what a crash left after the last counted one is cut off. So each is there exactly once.

In LMDB:
    state   b"state" -> State
    files   number (8) -> FileState
    retries due us (8) | sequence (8) -> an event (rules/events)
    letters number (8) -> where dead letters stand (rules/letters), of a share that may move

Events that wait for their retry (3.2.1) are on disk in the order they fall due. In memory are only the keys
of those being sent, so that none is sent twice at a time, and of those that an arrival would wake
(rules/awaited).
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dispatcher.rules.awaited import AWAITED_MAX, Awaited
from dispatcher.rules.events import (
    Events,
    RetryBatch,
    due_us_of,
    pack_keys,
    unpack_id,
    unpack_primary_id,
    unpack_time,
    unpack_values,
)
from dispatcher.rules.letters import LetterPlace, letters_stem, with_more
from dispatcher.rules.verdicts import NOTHING, Totals
from photon.core.columns import split_ids
from photon.core.disk import DirectoryLock, LmdbFile, stays
from photon.core.errors import CorruptStateError, StorageError
from photon.logs.files import FileState, pack_file_state, unpack_file_state
from photon.logs.writer import DeadLetter, LogPosition, RotatingLog

DEAD_LETTER_FILE_BYTES_MAX: Final = 64 << 20

_STATE_KEY: Final = b"state"
_DATABASES: Final = ("state", "files", "retries", "letters")

GATHER_US: Final = 5_000
"""Entries that fall due so soon after each other are sent together."""
WAITING_SHARE: Final = 0.75
"""Of the file's bytes, for events that wait."""
SOONEST_BYTES_MAX: Final = 1 << 20
"""Of those that are shown as the ones that are tried next."""
SCANNED_MAX: Final = 16_384
"""Entries looked through in a read transaction: a long one would keep old pages from being used again."""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """`sequence`: of the next retry; `letters`: dead letters are counted to here; `commits`: so far."""

    letters: LogPosition
    totals: Totals = NOTHING
    sequence: int = 0
    commits: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What one transaction adds: `letters` are whole lines; `retries` are values as in rules/events, `due_us`
    (N,) says when each is due; `placed`: dead letters whose places are kept."""

    files: Sequence[FileState]
    added: Totals
    letters: bytes = b""
    retries_removed: Sequence[bytes] = ()
    due_us: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    retries: Sequence[bytes] = ()
    placed: Sequence[DeadLetter] = ()


class Rows:
    """One transaction's view. CorruptStateError where a row is not what was written."""

    def __init__(self, txn: Any, databases: dict[str, Any], file: LmdbFile) -> None:
        self._txn = txn
        self._db = databases
        self._file = file

    def state(self) -> State | None:
        packed = self._txn.get(_STATE_KEY, db=self._db["state"])
        if packed is None:
            return None
        try:
            return msgspec.msgpack.decode(packed, type=State)
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"its state: {error}") from error

    def put_state(self, state: State) -> None:
        self._txn.put(_STATE_KEY, msgspec.msgpack.encode(state), db=self._db["state"])

    def files(self) -> list[FileState]:
        try:
            with self._txn.cursor(self._db["files"]) as cursor:
                return [unpack_file_state(packed) for _, packed in cursor]
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"a file's state: {error}") from error

    def put_file(self, state: FileState) -> None:
        """How far it is read; of one that is gone nothing is kept."""
        if state.gone:
            self._txn.delete(_number_key(state.number), db=self._db["files"])
        else:
            self._txn.put(_number_key(state.number), pack_file_state(state), db=self._db["files"])

    def letters(self) -> dict[int, bytes]:
        with self._txn.cursor(self._db["letters"]) as cursor:
            return {int.from_bytes(key, "big"): packed for key, packed in cursor}

    def put_letters(self, before: Mapping[int, bytes], after: Mapping[int, bytes]) -> None:
        """What differs of them."""
        for number in before.keys() - after.keys():
            self._txn.delete(_number_key(number), db=self._db["letters"])
        for number, packed in after.items():
            if before.get(number) != packed:
                self._txn.put(_number_key(number), packed, db=self._db["letters"])

    def waiting(self) -> int:
        """Events that wait for their retry."""
        entries: int = self._txn.stat(self._db["retries"])["entries"]
        return entries

    def waiting_bytes(self) -> int:
        """What these take on the disk."""
        stat = self._txn.stat(self._db["retries"])
        pages: int = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages * int(stat["psize"])

    def retries(self) -> Any:
        """A cursor over the entries; to be closed."""
        return self._txn.cursor(self._db["retries"])

    def retry(self, key: bytes) -> bytes | None:
        value: bytes | None = self._txn.get(key, db=self._db["retries"])
        return value

    def drop_retry(self, key: bytes) -> bool:
        dropped: bool = self._txn.delete(key, db=self._db["retries"])
        return dropped


class LedgerFile:
    """The environment. Usable from several threads. `readonly`: beside the process that writes."""

    def __init__(self, directory: Path, bytes_max: int, readonly: bool = False) -> None:
        self.path = directory / "ledger"
        self._file = LmdbFile(
            self.path,
            what="the dispatcher's state",
            setting="dispatcher.state_bytes_max",
            mend="restore it, or delete the directory to read all foreign logs again (what is registered is "
            "not joined twice)",
        )
        self.bytes_max = bytes_max
        self._readonly = readonly
        self._mutex = threading.Lock()  # over the environment; a writer leaves the readers be
        self._write_mutex = threading.Lock()
        self._open()

    def corrupt(self, why: str) -> CorruptStateError:
        return self._file.corrupt(why)

    @contextlib.contextmanager
    def read(self) -> Iterator[Rows]:
        with self._mutex, self._file.errors(), self._environment.begin() as txn:
            yield Rows(txn, self._databases, self._file)

    @contextlib.contextmanager
    def write(self) -> Iterator[Rows]:
        """Commits at the end, or nothing if that raises. One writer at a time."""
        with self._write_mutex, self._file.errors(), self._environment.begin(write=True) as txn:
            yield Rows(txn, self._databases, self._file)

    def sync(self) -> None:
        """What was committed stays so in a power cut, the last transaction too. StorageError."""
        with self._write_mutex, self._file.errors():
            self._environment.sync(True)

    def reopen(self) -> None:
        """LMDB refuses to go on after a failed write of its meta page until it is opened anew."""
        with self._write_mutex, self._mutex:
            self._environment.close()
            self._open()

    def close(self) -> None:
        with self._write_mutex, self._mutex:
            self._environment.close()

    def _open(self) -> None:
        self._environment = self._file.open(self.bytes_max, readonly=self._readonly)
        with self._file.errors():
            self._environment.reader_check()  # what killed ones read could not be overwritten
            self._databases = {
                name: self._environment.open_db(name.encode(), create=not self._readonly)
                for name in _DATABASES
            }


class Ledger:
    """Usable from several threads.

    LockedError, CorruptStateError, DiskFullError, StorageError on opening; the latter two also later: then
    nothing of the entry is recorded and the same one can be recorded again.
    """

    def __init__(
        self, directory: Path, dead_letters: Path, bytes_max: int, worker: int = 0, process: int = 0
    ) -> None:
        """`directory`: this worker's own; `dead_letters`: of all of the datacenter that are on the machine,
        each of whose processes has another number."""
        self.worker, self.process = worker, process
        self._mutex = threading.Lock()
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(DirectoryLock(directory))
            self.file = LedgerFile(directory, bytes_max)
            undo.callback(self.file.close)
            self._letters = RotatingLog(
                dead_letters, letters_stem(worker, process), DEAD_LETTER_FILE_BYTES_MAX
            )
            undo.callback(self._letters.close)
            self.waiting_bytes = 0
            """What waiting events take on the disk, as of the last transaction."""
            self.placed: Mapping[int, bytes] = {}
            """Where dead letters stand, as of the last transaction."""
            self._state = self._enter()
            self._letters.truncate(self._state.letters)
            undo.pop_all()

    @property
    def totals(self) -> Totals:
        """As of the last transaction."""
        return self._state.totals

    @property
    def letters(self) -> LogPosition:
        """Where the dead letters end, as of the last transaction."""
        return self._state.letters

    @property
    def pending(self) -> int:
        """Events that wait for a retry or are being retried."""
        return self._state.totals.waiting

    @property
    def full(self) -> bool:
        """Whether no more events may wait: the rest of the file is for what is under way."""
        return self.waiting_bytes >= WAITING_SHARE * self.file.bytes_max

    @property
    def broken(self) -> bool:
        """The dead letters can't be written any more: only a restart can tell what is on disk."""
        return self._letters.broken

    def files(self) -> list[FileState]:
        """The states of the files that are there as far as is known."""
        with self.file.read() as rows:
            return rows.files()

    def find_waiting(self, ids: bytes) -> list[dict[str, Any] | None]:
        """16 x N ids -> of each that waits, what its entry says; None of others.

        Looks through all entries: about a second a million. CorruptStateError for one that is no entry.
        """
        asked = split_ids(ids)
        distinct = set(asked)
        found: dict[bytes, dict[str, Any]] = {}
        for key, value in self.waiting():
            if (id_ := unpack_id(value)) in distinct and id_ not in found:
                found[id_] = self._described(key, value)
                if len(found) == len(distinct):
                    break
        return [found.get(id_) for id_ in asked]

    def soonest(self, count: int) -> list[dict[str, Any]]:
        """What entries say, of at most so many: those that fall due first. CorruptStateError as above."""
        told, size = [], 0
        for key, value in itertools.islice(self.waiting(), count):
            told.append(self._described(key, value))
            size += len(value)
            if size >= SOONEST_BYTES_MAX:
                break
        return told

    def oldest_waiting_us(self, from_us: int) -> int | None:
        """The least time of an event that waits, of those from `from_us` on; None if none does. Looks through
        all entries, as `find_waiting`."""
        times = (unpack_time(value) for _, value in self.waiting())
        return min((time_us for time_us in times if time_us >= from_us), default=None)

    def waiting(self) -> Iterator[tuple[bytes, bytes]]:
        """All entries, the soonest first, SCANNED_MAX in a transaction, in which its user is, too.
        StorageError."""
        position = b""
        scanned = SCANNED_MAX
        while scanned == SCANNED_MAX:
            scanned = 0
            with self.file.read() as rows, rows.retries() as cursor:
                if cursor.set_range(position) if position else cursor.first():
                    for key, value in itertools.islice(cursor, SCANNED_MAX):
                        scanned, position = scanned + 1, key + b"\0"  # behind it
                        yield key, value

    def unpack(self, values: Sequence[bytes]) -> Events:
        """The events of entries. CorruptStateError for one that is no entry."""
        try:
            return unpack_values(values)
        except ValueError as error:  # UnicodeDecodeError too
            raise self.file.corrupt(f"a retry entry: {error}") from error

    def _described(self, key: bytes, value: bytes) -> dict[str, Any]:
        event = self.unpack([value])
        return {
            "waiting_since_us": int(event.first_seen[0]),
            "tries": int(event.tries[0]),
            "sends": int(event.sends[0]),
            "due_us": due_us_of(key),
            "file": event.name(0),
            "offset": int(event.offsets[0]),
            "worker": self.worker,
            "line": event.lines[0].decode("utf-8", "replace"),
        }

    def record(self, entry: Entry) -> list[bytes]:
        """Commit it. The keys of the added retries."""
        with self._mutex:
            state = self._state
            position = state.letters
            if entry.letters:
                if self._letters.position != position:
                    self._letters.truncate(position)  # an earlier try got so far and no further
                position = self._letters.append(entry.letters)
                self._letters.sync()
            keys = pack_keys(entry.due_us, state.sequence)
            placed = self.placed
            if entry.placed:
                placed = with_more(placed, map(LetterPlace.of, entry.placed))
            after = dataclasses.replace(
                state,
                letters=position,
                totals=state.totals.plus(entry.added),
                sequence=state.sequence + len(keys),
                commits=state.commits + 1,
            )
            try:
                with self.file.write() as rows:
                    self._write(rows, after, entry, keys)
                    if placed is not self.placed:
                        rows.put_letters(self.placed, placed)
            except CorruptStateError:
                raise
            except StorageError as error:
                if not stays(error) or not self._got_through(after):
                    raise
            self._state, self.placed = after, placed
            return keys

    def close(self) -> None:
        with self._mutex:
            self.file.close()
            self._letters.close()
            self._lock.release()

    def _enter(self) -> State:
        """What an earlier process left."""
        with self.file.write() as rows:
            state = rows.state()
            if state is None:
                # Dead letters that are older than this ledger are not ours to cut.
                self._letters.cut_torn_line()
                state = State(self._letters.position)
                rows.put_state(state)
            self.waiting_bytes = rows.waiting_bytes()
            self.placed = rows.letters()
        return state

    def _write(self, rows: Rows, after: State, entry: Entry, keys: list[bytes]) -> None:
        rows.put_state(after)
        for state in entry.files:
            rows.put_file(state)
        removed = sum(map(rows.drop_retry, entry.retries_removed))
        assert removed == len(entry.retries_removed), "a retry was recorded twice"
        with rows.retries() as cursor:
            _, written = cursor.putmulti(list(zip(keys, entry.retries, strict=True)), overwrite=False)
        assert written == len(keys), "a retry's key was not free"
        self.waiting_bytes = rows.waiting_bytes()
        totals, waiting = after.totals, rows.waiting()
        if totals.waiting != waiting:
            fated = totals.foreign_events - totals.waiting
            raise self.file.corrupt(
                f"{totals.foreign_events} events read, but {fated} have a fate and {waiting} wait",
            )

    def _got_through(self, after: State) -> bool:
        """Whether the transaction was committed before the disk failed."""
        self.file.reopen()
        with self.file.read() as rows:
            state = rows.state()
        return state is not None and state.commits == after.commits


class RetryQueue:
    """Takes what is due out of a ledger. Usable from several threads."""

    def __init__(self, ledger: Ledger, delay_us_max: int, bytes_max: int) -> None:
        """`bytes_max` bounds the values of a batch (the one that reaches it is in)."""
        self._ledger = ledger
        # An entry due later than any delay allows was written before the clock was set back.
        self._wait_us_max = 2 * delay_us_max + GATHER_US
        self._bytes_max = bytes_max
        self._mutex = threading.Lock()
        self._in_flight: dict[bytes, bytes] = {}
        """Key -> primary id."""
        self._awaited: Awaited[bytes] = Awaited()
        self._woken: dict[bytes, None] = {}
        self.woken_events = 0
        """Taken because their primary events had arrived."""
        self._position = b""  # before it, all is in flight
        self.next_due_us: int | None = 0
        """When to ask again, not later than the next entry falls due; None while nothing waits."""

    def take(self, now_us: int, count_max: int, early: bool = False) -> RetryBatch | None:
        """At most `count_max` events, soonest first: those that are due, or (`early`) due or not.

        They are in flight until `settled`.
        """
        due_us = self.next_due_us
        if not early and (due_us is None or 0 < due_us - now_us <= self._wait_us_max):
            return None
        with self._mutex:
            next_due_us: int | None = None
            found, size = list[tuple[bytes, bytes]](), 0
            with self._ledger.file.read() as rows, rows.retries() as cursor:
                more = cursor.set_range(self._position) if self._position else cursor.first()
                while more and size < self._bytes_max:
                    key: bytes = cursor.key()
                    if key not in self._in_flight:
                        due_us = due_us_of(key)
                        due = early or not GATHER_US < due_us - now_us <= self._wait_us_max
                        if not due or len(found) == count_max:
                            next_due_us = due_us
                            break
                        found.append(cursor.item())
                        size += len(found[-1][1])
                    self._position = key
                    more = cursor.next()
            if found and next_due_us is None:
                next_due_us = 0  # stopped by the bytes, or at the end: the next call finds out
            self.next_due_us = next_due_us
            if not found:
                return None
            self._fly(found)
        return RetryBatch([key for key, _ in found], self._unpack(found), early)

    def take_woken(self, count_max: int) -> RetryBatch | None:
        """Likewise, of those whose primary events have arrived, due or not."""
        with self._mutex:
            found, size = list[tuple[bytes, bytes]](), 0
            while self._woken and not found:
                with self._ledger.file.read() as rows:
                    for key in list(itertools.islice(self._woken, count_max)):
                        del self._woken[key]
                        if key not in self._in_flight and (value := rows.retry(key)) is not None:
                            found.append((key, value))
                            size += len(value)
                            if size >= self._bytes_max:
                                break
            if not found:
                return None
            self._fly(found)
            self.woken_events += len(found)
        return RetryBatch([key for key, _ in found], self._unpack(found), early=True, woken=True)

    def arrive(self, primary_ids: Sequence[bytes]) -> bool:
        """These can be found now. True if events wait for them, which `take_woken` gives then."""
        with self._mutex:
            self._wake(self._awaited.arrive(primary_ids))
            return bool(self._woken)

    def _wake(self, keys: Sequence[bytes]) -> None:
        self._woken.update(dict.fromkeys(keys[: AWAITED_MAX - len(self._woken)]))

    def _fly(self, found: Sequence[tuple[bytes, bytes]]) -> None:
        self._in_flight.update((key, unpack_primary_id(value)) for key, value in found)

    def _unpack(self, found: Sequence[tuple[bytes, bytes]]) -> Events:
        return self._ledger.unpack([value for _, value in found])

    def settled(self, removed: Iterable[bytes], added: Sequence[bytes], values: Sequence[bytes]) -> None:
        """The ledger has recorded what became of these, and has new ones: keys and values."""
        with self._mutex:
            for key in removed:
                self._awaited.drop(key, self._in_flight.pop(key))
            self._wake(self._awaited.add(added, list(map(unpack_primary_id, values))))
            first = min(added, default=None)
            if first is None:
                return
            self._position = min(self._position, first)
            due_us = due_us_of(first)
            if self.next_due_us is None or due_us < self.next_due_us:
                self.next_due_us = due_us


def _number_key(number: int) -> bytes:
    return number.to_bytes(8, "big")
