"""What stands in the ledger's LMDB, row by row; one process or several have it open.

state   b"state" -> State, one row for all workers
workers slot (2) -> Worker
claims  device (8) | inode (8) of a log file -> the slot (2) that reads it
files   number (8) -> FileState
retries slot (2) | due us (8) | sequence (8) -> an event (retry_entries)
"""

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from dispatcher.assignment import Source
from dispatcher.retry_entries import SLOT_BYTES, slot_prefix
from dispatcher.totals import NOTHING, Totals
from photon.core.errors import CorruptStateError
from photon.core.lmdb_errors import LmdbFile
from photon.logs.files import FileState, pack_file_state, unpack_file_state
from photon.logs.writer import LogPosition

FORMAT: Final = 2

_STATE_KEY: Final = b"state"
_SOURCE: Final = struct.Struct(">QQ")
_WORD: Final = (1 << 64) - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class State:
    """Of all workers together.

    `epoch` grows whenever somebody comes or goes or lets go of a file: who reads what is thought over then.
    """

    format: int
    totals: Totals = NOTHING
    epoch: int = 0
    sequence: int = 0
    next_file: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """Of a slot. `incarnation`: the life of the process that may write for it; 0: none.

    `letters`: its dead letters are counted to here; `commits` grows by one with each transaction of its own;
    `until`: end of its lease, seconds of CLOCK_BOOTTIME of boot `boot`; `rested`: at this epoch it had read
    all there was for it.
    """

    letters: LogPosition
    incarnation: int = 0
    commits: int = 0
    boot: str = ""
    until: float = 0.0
    rested: int = -1
    name: str = ""
    pid: int = 0


class Rows:
    """One transaction's view. CorruptStateError where a row is not what was written."""

    def __init__(self, txn: Any, databases: dict[str, Any], file: LmdbFile) -> None:
        self.txn = txn
        self._db = databases
        self._file = file

    def state(self) -> State | None:
        packed = self.txn.get(_STATE_KEY, db=self._db["state"])
        if packed is None:
            return None
        state = self._decode(packed, State, "its state")
        if state.format != FORMAT:
            raise self._file.corrupt(f"format {state.format}, this version reads {FORMAT}")
        return state

    def known_state(self) -> State:
        """The state of a ledger that was opened before."""
        state = self.state()
        if state is None:
            raise self._file.corrupt("its state is gone")
        return state

    def put_state(self, state: State) -> None:
        self.txn.put(_STATE_KEY, msgspec.msgpack.encode(state), db=self._db["state"])

    def worker(self, slot: int) -> Worker | None:
        packed = self.txn.get(slot_prefix(slot), db=self._db["workers"])
        return None if packed is None else self._decode(packed, Worker, f"slot {slot}")

    def put_worker(self, slot: int, worker: Worker) -> None:
        self.txn.put(slot_prefix(slot), msgspec.msgpack.encode(worker), db=self._db["workers"])

    def workers(self) -> dict[int, Worker]:
        with self.txn.cursor(self._db["workers"]) as cursor:
            return {
                int.from_bytes(key, "big"): self._decode(packed, Worker, "a slot") for key, packed in cursor
            }

    def live(self) -> list[int]:
        """Slots that somebody writes for."""
        return [slot for slot, worker in self.workers().items() if worker.incarnation]

    def claims(self) -> dict[Source, int]:
        with self.txn.cursor(self._db["claims"]) as cursor:
            return {_SOURCE.unpack(key): int.from_bytes(slot, "big") for key, slot in cursor}

    def claim(self, source: Source) -> int | None:
        slot = self.txn.get(_source_key(source), db=self._db["claims"])
        return None if slot is None else int.from_bytes(slot, "big")

    def put_claim(self, source: Source, slot: int) -> None:
        self.txn.put(_source_key(source), slot_prefix(slot), db=self._db["claims"])

    def drop_claim(self, source: Source) -> None:
        self.txn.delete(_source_key(source), db=self._db["claims"])

    def drop_claims(self, slot: int) -> None:
        for source, holder in self.claims().items():
            if holder == slot:
                self.drop_claim(source)

    def files(self) -> list[FileState]:
        with self.txn.cursor(self._db["files"]) as cursor:
            return [self._unpack_file(packed) for _, packed in cursor]

    def file(self, number: int) -> FileState | None:
        packed = self.txn.get(_file_key(number), db=self._db["files"])
        return None if packed is None else self._unpack_file(packed)

    def put_file(self, state: FileState) -> None:
        self.txn.put(_file_key(state.number), pack_file_state(state), db=self._db["files"])

    def drop_file(self, number: int) -> None:
        self.txn.delete(_file_key(number), db=self._db["files"])

    def waiting(self) -> int:
        """Entries of all workers that wait for their retry."""
        entries: int = self.txn.stat(self._db["retries"])["entries"]
        return entries

    def retries(self) -> Any:
        """A cursor over the entries; to be closed."""
        return self.txn.cursor(self._db["retries"])

    def drop_retry(self, key: bytes) -> bool:
        dropped: bool = self.txn.delete(key, db=self._db["retries"])
        return dropped

    def retry_slots(self) -> list[int]:
        """Slots under which entries stand."""
        slots: list[int] = []
        with self.retries() as cursor:
            more = cursor.first()
            while more:
                slots.append(int.from_bytes(cursor.key()[:SLOT_BYTES], "big"))
                more = slots[-1] < (1 << 8 * SLOT_BYTES) - 1 and cursor.set_range(slot_prefix(slots[-1] + 1))
        return slots

    def _decode(self, packed: bytes, kind: type[T], what: str) -> T:
        try:
            return msgspec.msgpack.decode(packed, type=kind)
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"{what}: {error}") from error

    def _unpack_file(self, packed: bytes) -> FileState:
        try:
            return unpack_file_state(packed)
        except msgspec.DecodeError as error:
            raise self._file.corrupt(f"a file's state: {error}") from error


class LedgerFile:
    """The environment, once a process. Usable from several threads."""

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        writing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`writing`: entered around every write, from before its lock is asked for."""
        self.path = directory / "ledger"
        self._file = LmdbFile(
            self.path,
            what="the dispatcher's state",
            setting="dispatcher.state_bytes_max",
            mend="restore it, or delete the directory to read all foreign logs again (what is registered is "
            "not joined twice)",
        )
        self._bytes_max = bytes_max
        self._mutex = threading.Lock()  # over the environment; a writer leaves the readers be
        self._write_mutex = threading.Lock()
        self._writing = writing
        self._open()

    def corrupt(self, why: str) -> CorruptStateError:
        return self._file.corrupt(why)

    @contextlib.contextmanager
    def read(self) -> Iterator[Rows]:
        """What is committed."""
        with self._mutex, self._file.errors(), self._environment.begin() as txn:
            yield Rows(txn, self._databases, self._file)

    @contextlib.contextmanager
    def write(self) -> Iterator[Rows]:
        """Commits at the end, or nothing if that raises. One writer at a time, over all processes."""
        with self._write_mutex, self._file.errors(), self._writing(), self._begin_write() as txn:
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

    def sweep_readers(self) -> None:
        """Forget readers that were killed: what they read could not be overwritten."""
        with self._mutex, self._file.errors():
            self._environment.reader_check()

    def close(self) -> None:
        with self._write_mutex, self._mutex:
            self._environment.close()

    def _begin_write(self) -> Any:
        return self._environment.begin(write=True)

    def _open(self) -> None:
        self._environment = self._file.open(self._bytes_max)
        with self._file.errors(), self._writing():
            names = ("state", "workers", "claims", "files", "retries")
            self._databases = {name: self._environment.open_db(name.encode()) for name in names}


def _source_key(source: Source) -> bytes:
    return _SOURCE.pack(source[0] & _WORD, source[1] & _WORD)


def _file_key(number: int) -> bytes:
    return number.to_bytes(8, "big")
