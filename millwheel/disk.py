"""The store on this machine: LMDB, which all workers have open, one transaction and one sync a commit (paper
5.2)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import lmdb
import numpy as np

from millwheel.engine.logged import LoggedStore, put_together
from millwheel.engine.records import SLOTS
from millwheel.errors import ZombieError
from photon.core.disk import LmdbFile

BYTES_MAX: Final = 256 << 30
_FENCES: Final = b"fences"
_SEQUENCER: Final = b"sequencer"


class Disk(LoggedStore):
    """The environment in `<work>/state`."""

    def __init__(self, work: Path) -> None:
        """StorageError."""
        super().__init__()
        self.file = LmdbFile(
            work / "state",
            "MillWheel's state",
            "millwheel.disk.BYTES_MAX",
            "start again in an empty work directory",
        )
        self._env: lmdb.Environment = self.file.open(BYTES_MAX, metasync=True)
        self._mine = np.empty(0, np.int64)
        """Its slots, once it has claimed them."""
        with self.file.errors():
            self._rows = self._env.open_db(b"rows")
            self._log = self._env.open_db(b"log")
            self._meta = self._env.open_db(b"meta")

    def scan(self, prefix: bytes, behind: Sequence[bytes] = (b"",)) -> Iterator[tuple[bytes, bytes]]:
        with self.file.errors(), self._env.begin(db=self._rows) as txn, txn.cursor() as cursor:
            for start in [prefix + one for one in behind]:
                if not cursor.set_range(start):
                    return
                for row, value in cursor:
                    if not row.startswith(start):
                        break
                    yield bytes(row), bytes(value)

    def numbers(self, row: bytes, value: bytes | None = None) -> bytes | None:
        with self.file.errors(), self._env.begin(write=value is not None, db=self._meta) as txn:
            if value is not None:
                txn.put(row, value)
            found: bytes | None = txn.get(row)
            return found

    def close(self) -> None:
        self._env.close()

    def _take(self, slots: Sequence[int], me: int, workers: int) -> int:
        with self.file.errors(), self._env.begin(write=True) as txn:
            self._env.reader_check()
            sequencer = int(txn.get(_SEQUENCER, b"0", db=self._meta)) + 1
            txn.put(_SEQUENCER, b"%d" % sequencer, db=self._meta)
            fences = self._fences(txn)
            self._mine = np.array(slots)
            fences[self._mine] = sequencer
            txn.put(_FENCES, fences.tobytes(), db=self._meta)
            lanes = {int.from_bytes(key[:2], "big") for key, _ in txn.cursor(self._log)}
            for lane in sorted(lanes):
                if lane % workers == me:
                    self._write(txn, lane, {})
        return sequencer

    def _blobs(self) -> list[bytes]:
        with self.file.errors(), self._env.begin(db=self._log) as txn, txn.cursor() as cursor:
            return [bytes(blob) for _, blob in cursor]

    def _get(self, rows: Sequence[bytes]) -> list[bytes | None]:
        with self.file.errors(), self._env.begin(db=self._rows) as txn:
            return list(map(txn.get, rows))

    def _append(self, blob: bytes) -> None:
        with self.file.errors(), self._env.begin(write=True) as txn:
            self._check(txn)
            key = self._lane.to_bytes(2, "big") + self._next.to_bytes(8, "big")
            txn.put(key, blob, db=self._log, append=False)

    def _fold(self, changes: Mapping[bytes, bytes | None]) -> None:
        with self.file.errors(), self._env.begin(write=True) as txn:
            self._check(txn)
            self._write(txn, self._lane, changes)

    def _check(self, txn: lmdb.Transaction) -> None:
        if (self._fences(txn)[self._mine] != self._sequencer).any():
            raise ZombieError("another worker has the key intervals of this one by now")

    def _fences(self, txn: lmdb.Transaction) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        packed = txn.get(_FENCES, b"\0" * 8 * SLOTS, db=self._meta)
        return np.frombuffer(packed, np.uint64).copy()

    def _write(self, txn: lmdb.Transaction, lane: int, more: Mapping[bytes, bytes | None]) -> None:
        """The rows of a log, and these, to the table, in the order of their names; the log is empty then."""
        blobs: list[bytes] = []
        with txn.cursor(self._log) as cursor:
            start = lane.to_bytes(2, "big")
            found = cursor.set_range(start)
            while found and bytes(cursor.key()).startswith(start):
                blobs.append(bytes(cursor.value()))
                found = cursor.delete()
        rows = put_together(blobs, more, self.file.path)
        with txn.cursor(self._rows) as cursor:
            cursor.putmulti(sorted((row, value) for row, value in rows.items() if value is not None))
            for row in sorted(row for row, value in rows.items() if value is None):
                if cursor.set_key(row):
                    cursor.delete()
