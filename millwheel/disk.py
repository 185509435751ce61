"""The store on this machine: LMDB, which all workers have open, one transaction and one sync a commit (paper
5.2).

A commit is one blob, put at the end of the worker's log, whatever the number of rows in it; rows are written
to their table when a log has grown, in the order of their names, those that came and went in between never. A
worker that starts writes what is left of the logs of its lanes to the table, in the transaction in which it
claims its slots: from there on no former owner can commit.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import lmdb
import msgspec
import numpy as np

from millwheel.engine.store import Changes
from millwheel.errors import ZombieError
from photon.core.disk import LmdbFile
from photon.core.errors import CorruptStateError
from photon.logs.shares import SLOTS

BYTES_MAX: Final = 256 << 30
_LOG_ROWS_MAX: Final = 50_000
_LOG_BYTES_MAX: Final = 16 << 20
_FENCES: Final = b"fences"
_SEQUENCER: Final = b"sequencer"
_encode: Final = msgspec.msgpack.encode
_blob: Final = msgspec.msgpack.Decoder(dict[bytes, bytes | None]).decode


class Disk:
    """The environment in `<work>/state`. `commit` may run in another thread than the rest."""

    def __init__(self, work: Path, opened: "Disk | None" = None) -> None:
        """`opened`: another one of the same process on the same directory. StorageError."""
        self.file = LmdbFile(
            work / "state",
            "MillWheel's state",
            "millwheel.disk.BYTES_MAX",
            "start again in an empty work directory",
        )
        self._env: lmdb.Environment = opened._env if opened else self.file.open(BYTES_MAX, metasync=True)
        with self.file.errors():
            self._rows = self._env.open_db(b"rows")
            self._log = self._env.open_db(b"log")
            self._meta = self._env.open_db(b"meta")
        self._slots: Sequence[int] = ()
        self._sequencer = 0
        self._lane = b""
        self._next = 0
        self._recent: Changes = {}
        """What is in the log of this worker and not in the table."""
        self._bytes = 0

    def claim(self, slots: Sequence[int], me: int, workers: int) -> int:
        """Own these slots, and the logs of the lanes that fall to worker `me`; the newest sequencer."""
        with self.file.errors(), self._env.begin(write=True) as txn:
            self._env.reader_check()
            self._sequencer = int(txn.get(_SEQUENCER, b"0", db=self._meta)) + 1
            txn.put(_SEQUENCER, b"%d" % self._sequencer, db=self._meta)
            fences = self._fences(txn)
            fences[list(slots)] = self._sequencer
            txn.put(_FENCES, fences.tobytes(), db=self._meta)
            lanes = {bytes(key)[0] for key, _ in txn.cursor(self._log)}
            for lane in sorted(lanes):
                if lane % workers == me:
                    self._fold(txn, bytes((lane,)))
        self._slots, self._lane = slots, bytes((me,))
        self._recent, self._bytes, self._next = {}, 0, 0
        return self._sequencer

    def read(self, rows: Sequence[bytes]) -> list[bytes | None]:
        recent = self._recent
        with self.file.errors(), self._env.begin(db=self._rows) as txn:
            get = txn.get
            return [recent[row] if row in recent else get(row) for row in rows]

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self.file.errors(), self._env.begin(db=self._rows) as txn, txn.cursor() as cursor:
            if not cursor.set_range(prefix):
                return
            for row, value in cursor:
                if not row.startswith(prefix):
                    return
                yield bytes(row), bytes(value)

    def commit(self, changes: Mapping[bytes, bytes | None]) -> None:
        """As the port says; DiskFullError, StorageError: then nothing of it is there."""
        blob = _encode(changes)
        whole = len(self._recent) > _LOG_ROWS_MAX or self._bytes + len(blob) > _LOG_BYTES_MAX
        with self.file.errors(), self._env.begin(write=True) as txn:
            fences = self._fences(txn)
            if (fences[list(self._slots)] != self._sequencer).any():
                raise ZombieError("another worker has the key intervals of this one by now")
            if whole:
                self._fold(txn, self._lane, changes)
            else:
                txn.put(self._lane + self._next.to_bytes(8, "big"), blob, db=self._log, append=False)
        if whole:
            self._recent, self._bytes = {}, 0
        else:
            self._recent.update(changes)
            self._bytes += len(blob)
        self._next += 1

    def numbers(self, row: bytes, value: bytes | None = None) -> bytes | None:
        """A row of the run as a whole, which no worker changes: put it, if a value is given, and get it."""
        with self.file.errors(), self._env.begin(write=value is not None, db=self._meta) as txn:
            if value is not None:
                txn.put(row, value)
            found: bytes | None = txn.get(row)
            return found

    def close(self) -> None:
        self._env.close()

    def _fences(self, txn: lmdb.Transaction) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        packed = txn.get(_FENCES, b"\0" * 8 * SLOTS, db=self._meta)
        return np.frombuffer(packed, np.uint64).copy()

    def _fold(
        self, txn: lmdb.Transaction, lane: bytes, more: Mapping[bytes, bytes | None] | None = None
    ) -> None:
        """Write the rows of a log, and these, to the table; the log is empty then."""
        rows: Changes = {}
        with txn.cursor(self._log) as cursor:
            found = cursor.set_range(lane)
            while found and bytes(cursor.key()).startswith(lane):
                try:
                    rows.update(_blob(cursor.value()))
                except msgspec.DecodeError as error:
                    raise CorruptStateError(f"{self.file.path}: a commit can't be read ({error})") from error
                found = cursor.delete()
        rows.update(more or {})
        with txn.cursor(self._rows) as cursor:
            cursor.putmulti(sorted((row, value) for row, value in rows.items() if value is not None))
            for row in sorted(row for row, value in rows.items() if value is None):
                if cursor.set_key(row):
                    cursor.delete()
