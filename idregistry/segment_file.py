"""Segments on disk: files of sorted ids that never change, and a filter of each in memory.

    file      rows | cells | sums of blocks | filter | buckets | footer
    row       hash (8) | second half (8) | stamp (16, rules.segments.STAMP), in order of (hash, second half)
    cells     where each 2^n-th part of the range of hashes begins, and the end: row numbers (4 each)
    sums      CRC-32 of each BLOCK_ROWS rows (4 each)
    buckets   bucket (4), how many rows are of it (8)
    footer    _FOOTER; `index` is the CRC-32 of all between the rows and the footer

Little endian. The same ids give the same bytes on every replica. What an answer rests on is verified: the
index when the file is opened, a block of rows once it is first looked at. Lookups go through the filter, and
past it through a memory map; whole stretches are read. A row takes 32 bytes, the rest of it three at most, of
which the two of the filter are held in memory.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from idregistry.rules.filters import Filter
from idregistry.rules.packing import Encoded, Hashes
from idregistry.rules.segments import STAMP_DTYPE, Numbers, Rows, Source, Stamps
from photon.core.disk import make_directory, replace, storage_errors, sync_data
from photon.core.errors import CorruptStateError
from photon.raft.journal import DamagedError
from photon.raft.port import FileId

ROW: Final = np.dtype([("hash", "<u8"), ("tail", "<u8"), ("stamp", STAMP_DTYPE)])
BLOCK_ROWS: Final = 1 << 7
"""A page."""
_BUCKET: Final = np.dtype([("bucket", "<i4"), ("rows", "<u8")])
_MAGIC: Final = b"PhIDseg1"
_FOOTER: Final = struct.Struct("<8sQQQIIII")
"""Magic, number, rows, ids the filter is for, bits of a cell, buckets, CRC of the index, CRC of the rest."""
_CELL_IDS: Final = 4
_CELL_BITS_MIN: Final = 8
_HASH_BITS: Final = 64
_NO_STAMPS: Final = np.empty(0, STAMP_DTYPE)


def name_of(number: int) -> str:
    """The name of a segment's file."""
    return f"{number:012d}.ids"


class SegmentFile:
    """One that is whole. Any thread. CorruptStateError where what is read is damaged."""

    def __init__(self, path: Path, number: int) -> None:
        """CorruptStateError, StorageError."""
        self.path = path
        self.number = number
        with storage_errors(path):
            self._file = path.open("rb")
            self.size = os.fstat(self._file.fileno()).st_size
            self._map = mmap.mmap(self._file.fileno(), self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        if self.size < _FOOTER.size:
            raise self._damaged("it is cut short")
        footer = self._map[-_FOOTER.size :]
        magic, known, self.ids, filtered, bits, buckets, index_crc, self.crc = _FOOTER.unpack(footer)
        if magic != _MAGIC or known != number or zlib.crc32(footer[:-4]) != self.crc:
            raise self._damaged("its end is damaged")
        self.filter = Filter(filtered)
        self._shift = np.uint64(_HASH_BITS - bits)
        self._blocks = -(-self.ids // BLOCK_ROWS)
        at = self.ids * ROW.itemsize
        sizes = [4 * ((1 << bits) + 1), 4 * self._blocks, self.filter.bytes, _BUCKET.itemsize * buckets]
        if at + sum(sizes) + _FOOTER.size != self.size:
            raise self._damaged("its size is not what its end says")
        with memoryview(self._map) as whole:
            if zlib.crc32(whole[at : self.size - _FOOTER.size]) != index_crc:
                raise self._damaged("its index is damaged")
        self._rows: npt.NDArray[np.void] = np.ndarray((self.ids,), ROW, self._map)
        self._cells = self._column("<u4", (1 << bits) + 1, at)
        self._sums = self._column("<u4", self._blocks, at + sizes[0])
        self.filter.bits[:] = self._column("u1", self.filter.bytes, at + sizes[0] + sizes[1])
        self._buckets = self._column(_BUCKET, buckets, at + sum(sizes[:3])).copy()
        self._verified = np.zeros(self._blocks, np.bool_)
        self._map.madvise(mmap.MADV_RANDOM)
        self._map.madvise(mmap.MADV_DONTNEED)  # what was verified is read again where it is needed

    def _column(self, kind: Any, count: int, at: int) -> npt.NDArray[Any]:
        return np.ndarray((count,), kind, self._map, at)

    @property
    def id(self) -> FileId:
        return FileId(name_of(self.number), self.size, self.crc)

    def dead(self, live: int) -> int:
        """How many of the rows are of buckets before `live`."""
        return int(self._buckets["rows"][self._buckets["bucket"] < live].sum())

    def find(self, batch: Encoded) -> tuple[Numbers, Stamps]:
        """As of rules.segments.Source."""
        places = self.filter.maybe(batch)
        if not len(places) or not self.ids:
            return places[:0], _NO_STAMPS
        hashes, tails = batch.hashes[places], batch.tails[places]
        rows = self._find(hashes, tails)
        found = rows >= 0
        return places[found], self._rows["stamp"][rows[found]]

    def _find(self, hashes: Hashes, tails: Hashes) -> Numbers:
        """The row of each id, -1 where there is none."""
        first = self._cells[hashes >> self._shift].astype(np.intp)
        known, seconds, last = self._rows["hash"], self._rows["tail"], self.ids - 1
        at = np.minimum(first, last)
        # Ids of one hash stand side by side, in order of their second halves.
        while True:
            here = known[at]
            less = (here < hashes) | ((here == hashes) & (seconds[at] < tails))
            less &= at < last
            if not less.any():
                break
            at += less
        self._verify(np.concatenate((np.minimum(first, last), at)))
        return np.where((known[at] == hashes) & (seconds[at] == tails), at, -1)

    def _verify(self, rows: Numbers) -> None:
        """The blocks of these rows, and with two of a search those between them, which are few."""
        blocks = rows // BLOCK_ROWS
        doubtful = blocks[~self._verified[blocks]]
        for block in np.unique(doubtful).tolist():
            self._read(block, block + 1)

    def _read(self, block: int, end: int) -> npt.NDArray[np.void]:
        """The rows of blocks, verified."""
        start = block * BLOCK_ROWS
        count = min(end * BLOCK_ROWS, self.ids) - start
        with storage_errors(self.path):
            data = os.pread(self._file.fileno(), count * ROW.itemsize, start * ROW.itemsize)
        if len(data) != count * ROW.itemsize:
            raise self._damaged("it is cut short")
        size = BLOCK_ROWS * ROW.itemsize
        view = memoryview(data)
        for number in range(block, end):
            at = (number - block) * size
            if zlib.crc32(view[at : at + size]) != int(self._sums[number]):
                raise self._damaged(f"rows {number * BLOCK_ROWS} and following are damaged")
        self._verified[block:end] = True
        return np.frombuffer(data, ROW)

    def rows(self, low: int, high: int) -> Rows:
        """As of rules.segments.Source."""
        shift = int(self._shift)
        start, end = self._cells[low >> shift], self._cells[(high - 1 >> shift) + 1]
        if start >= end:
            return _as_rows(np.empty(0, ROW))
        block = int(start) // BLOCK_ROWS
        found = self._read(block, -(-int(end) // BLOCK_ROWS))
        known = found["hash"]
        first = int(known.searchsorted(np.uint64(low), "left"))
        return _as_rows(found[first : int(known.searchsorted(np.uint64(high - 1), "right"))])

    def verify(self) -> None:
        """All of it. CorruptStateError."""
        step = 1 << 8
        for block in range(0, self._blocks, step):
            self._read(block, min(block + step, self._blocks))

    def _damaged(self, why: str) -> CorruptStateError:
        return DamagedError(self.path, f"a registry's segment file can't be used: {why}")


def _as_rows(rows: npt.NDArray[np.void]) -> Rows:
    return Rows(rows["hash"].copy(), rows["tail"].copy(), rows["stamp"].copy())


class SegmentFiles:
    """Those of one replica of a shard: as of rules.state.SegmentFiles."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def writer(self, number: int, ids_max: int) -> "SegmentWriter":
        """StorageError."""
        return SegmentWriter(self._directory, number, ids_max)

    def open(self, number: int) -> SegmentFile:
        """CorruptStateError, StorageError."""
        return SegmentFile(self._directory / name_of(number), number)

    def ids_of(self, sources: Sequence[Source]) -> list[FileId]:
        return [source.id for source in sources if isinstance(source, SegmentFile)]

    def verify(self, path: Path, file: FileId) -> bool:
        """Whether it is whole, and that file. StorageError."""
        try:
            opened = SegmentFile(path, int(file.name.partition(".")[0]))
            opened.verify()
        except (CorruptStateError, ValueError):
            return False
        return opened.id == file


class SegmentWriter:
    """Rows in order; `finish` makes the file durable under another name, `adopt` gives it its own."""

    def __init__(self, directory: Path, number: int, ids_max: int) -> None:
        """`ids_max`: more will not come. StorageError."""
        self._path = directory / name_of(number)
        self._temporary = directory / f"{name_of(number)}.tmp"
        self._number = number
        self._ids_max = ids_max
        self._bits = max(_CELL_BITS_MIN, (ids_max // _CELL_IDS).bit_length())
        self._counts = np.zeros((1 << self._bits) + 1, np.uint32)
        self._filter = Filter(ids_max)
        self._sums: list[int] = []
        self._buckets: dict[int, int] = {}
        self._waiting = np.empty(0, ROW)
        self._ids = 0
        self._made: SegmentFile | None = None
        with storage_errors(self._temporary):
            make_directory(directory)  # durably
            self._file = self._temporary.open("wb")

    def write(self, rows: Rows) -> None:
        """StorageError."""
        if not len(rows):
            return
        whole = np.empty(len(rows), ROW)
        whole["hash"], whole["tail"], whole["stamp"] = rows.hashes, rows.tails, rows.stamps
        self._filter.add(rows.hashes)
        cells = (rows.hashes >> np.uint64(_HASH_BITS - self._bits)).astype(np.intp)
        self._counts[int(cells[0]) + 1 : int(cells[-1]) + 2] += np.bincount(cells - cells[0]).astype(
            np.uint32
        )
        for bucket, count in zip(*np.unique(rows.stamps["bucket"], return_counts=True), strict=True):
            self._buckets[int(bucket)] = self._buckets.get(int(bucket), 0) + int(count)
        self._ids += len(rows)
        waiting = np.concatenate((self._waiting, whole)) if len(self._waiting) else whole
        blocks = len(waiting) // BLOCK_ROWS * BLOCK_ROWS
        self._put(waiting[:blocks])
        self._waiting = waiting[blocks:]

    def _put(self, rows: npt.NDArray[np.void]) -> None:
        if not len(rows):
            return
        data = memoryview(rows.tobytes())
        size = BLOCK_ROWS * ROW.itemsize
        self._sums += [zlib.crc32(data[at : at + size]) for at in range(0, len(data), size)]
        with storage_errors(self._temporary):
            self._file.write(data)
            self._file.flush()
            sync_data(self._file.fileno())  # a little at a time: nobody else's sync waits for all of it

    def finish(self) -> None:
        """CorruptStateError, StorageError."""
        self._put(self._waiting)
        assert self._ids <= self._ids_max
        cells = np.cumsum(self._counts, dtype=np.uint32)
        buckets = np.array(sorted(self._buckets.items()), _BUCKET)
        sums = np.array(self._sums, "<u4")
        parts = [cells.astype("<u4"), sums, self._filter.bits, buckets]
        crc = 0
        with storage_errors(self._temporary):
            for part in parts:
                data = part.tobytes()
                crc = zlib.crc32(data, crc)
                self._file.write(data)
            footer = _FOOTER.pack(
                _MAGIC, self._number, self._ids, self._ids_max, self._bits, len(buckets), crc, 0
            )[:-4]
            self._file.write(footer + struct.pack("<I", zlib.crc32(footer)))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._made = SegmentFile(self._temporary, self._number)

    def adopt(self) -> SegmentFile:
        """The finished file, durably in place. StorageError."""
        assert self._made is not None, "it is finished first"
        with storage_errors(self._path):
            replace(self._temporary, self._path)
        self._made.path = self._path
        return self._made

    def drop(self) -> None:
        """It is not needed, or can't be written."""
        with suppress(OSError):  # what is left in its buffer finds no room either
            self._file.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)
