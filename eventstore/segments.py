"""What the log file map is on disk: an LMDB file, and sorted segments of its dense part beside it.

A segment is immutable: an entry for each opaque id, found by binary search. It is columns, little endian,
each of `capacity` places of which the first `count` are used:

    head (64): magic, capacity (8), count (8) | high halves of ids (8) | low halves (8)
    | offsets (8) | file numbers (4) | lengths (4)

in the order of the high halves. Ids are digests, so that these are even and hardly ever equal.
"""

import os
import secrets
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from eventstore.rules.entries import LEVEL_PARTS, PLACES, Columnar, Ints, Place
from photon.core.disk import LmdbFile, sync_directory
from photon.core.errors import StorageError
from photon.core.settings import Settings
from photon.logs.files import FileState, pack_file_state
from photon.logs.writer import LogPosition

FORMAT: Final = 2
DATA: Final = "data.mdb"
LOADING: Final = "loading"
"""Beside the map: a load that is under way, or was killed; of no use to anybody else."""
LOADED_LETTERS: Final = "primary-000000.jsonl"
LOADING_LETTERS: Final = f"{LOADED_LETTERS}.loading"
"""Among the dead letters: likewise."""
_STORE_BYTES: Final = 16
_META_KEY: Final = b"meta"
_SEGMENTS_KEY: Final = b"segments"
_SPARSE_TABLES: Final = tuple(b"sparse" if part == 1 else b"sparse/%d" % part for part in LEVEL_PARTS)
_TABLES: Final = (b"dense", b"repeated", b"files", b"meta")
_CLOSE_WAIT_S: Final = 5.0


class Counts(msgspec.Struct, frozen=True):
    """What was read of the primary logs so far, and where the next dead letter goes."""

    primary_events: int = 0
    malformed: int = 0
    dead_letter_file: int = 0
    dead_letter_offset: int = 0
    lost_bytes: int = 0

    @property
    def dead_letters(self) -> LogPosition:
        return LogPosition(self.dead_letter_file, self.dead_letter_offset)


class Meta(msgspec.Struct, frozen=True):
    """`interval_us`: the greatest W that the map was written with, which lookups must scan.

    `store`: random, so that caches of a map that was removed are not taken for this one's.
    """

    format: int
    identity: str
    store: bytes
    interval_us: int
    counts: Counts


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A segment in the list, which is oldest first. Those of one level are of about one size."""

    number: int
    level: int


def new_meta(identity: str, interval_us: int, counts: Counts) -> Meta:
    """Of a map that is made anew."""
    return Meta(FORMAT, identity, secrets.token_bytes(_STORE_BYTES), interval_us, counts)


def identity_of(settings: Settings) -> str:
    """By which settings ids are made of log lines: a map of other ids is refused."""
    return f"[primary] id = {settings.primary.id!r}, [ids] key = {settings.ids.key!r}"


def interval_us_of(interval_s: float) -> int:
    return max(1, round(interval_s * 1e6))


def segment_name(number: int) -> str:
    return f"dense-{number:08d}"


class MapFile:
    """The LMDB file: one thread at a time writes, any may read meanwhile. StorageError throughout."""

    def __init__(self, directory: Path, bytes_max: int, mend: str = "", **options: Any) -> None:
        """`mend`: what to do when it is damaged, but to remove it. `options`: of lmdb.open."""
        self.directory = directory
        self.bytes_max = bytes_max
        self.lmdb = LmdbFile(
            directory,
            what="the log file map",
            setting="eventstore.map_bytes_max",
            mend=mend or f"remove {directory}: the map is rebuilt from the logs",
        )
        self.errors = self.lmdb.errors
        self.corrupt = self.lmdb.corrupt
        self._idle = threading.Condition()
        self._active = 0
        self._closed = False
        self._env = self.lmdb.open(bytes_max, **options)
        try:
            with self.errors():
                self._open_tables()
        except BaseException:
            self._env.close()
            raise

    def _open_tables(self) -> None:
        last_page = self._env.info()["last_pgno"]
        whole = (last_page + 1) * self._env.stat()["psize"]
        if last_page > 1 and (self.directory / DATA).stat().st_size < whole:
            raise self.corrupt("its file was cut short")
        with self._env.begin() as transaction:
            names = set(transaction.cursor().iternext(keys=True, values=False))
        if not names <= {*_SPARSE_TABLES, *_TABLES}:
            raise self.corrupt("it holds something else")
        self.sparse = [self._env.open_db(name) for name in _SPARSE_TABLES]
        self.dense, self.repeated, self.files, self._metas = map(self._env.open_db, _TABLES)

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[Any]:
        with self._in_use(), self._env.begin(write=write) as transaction:
            yield transaction

    def sync(self) -> None:
        """The last transaction too survives a power cut after this."""
        with self._in_use():
            self._env.sync(True)

    def close(self) -> bool:
        """Refuse transactions, wait for those under way, then close. False if they take too long."""
        with self._idle:
            self._closed = True
            if not self._idle.wait_for(lambda: self._active == 0, _CLOSE_WAIT_S):
                return False  # closing under a reader would end the process; its end closes the file as well
        self._env.close()
        return True

    def meta(self, transaction: Any) -> Meta | None:
        value = transaction.get(_META_KEY, db=self._metas)
        return None if value is None else self._decoded(value, Meta)

    def put_meta(self, transaction: Any, meta: Meta) -> None:
        transaction.put(_META_KEY, msgspec.msgpack.encode(meta), db=self._metas)

    def segments(self, transaction: Any) -> list[Listed]:
        """The dense map's, oldest first."""
        value = transaction.get(_SEGMENTS_KEY, db=self._metas)
        return [] if value is None else self._decoded(value, list[Listed], "the list of its segments: ")

    def put_segments(self, transaction: Any, listed: Sequence[Listed]) -> None:
        transaction.put(_SEGMENTS_KEY, msgspec.msgpack.encode(listed), db=self._metas)

    def put_state(self, transaction: Any, state: FileState) -> None:
        transaction.put(state.number.to_bytes(4, "big"), pack_file_state(state), db=self.files)

    def _decoded(self, value: bytes, kind: Any, what: str = "") -> Any:
        try:
            return msgspec.msgpack.decode(value, type=kind)
        except msgspec.DecodeError as error:
            raise self.corrupt(f"{what}{error}") from error

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._idle:
            if self._closed:
                raise StorageError(f"{self.directory}: the log file map is closed")
            self._active += 1
        try:
            with self.errors():
                yield
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()


Halves = npt.NDArray[np.uint64]

_MAGIC: Final = b"photon dense 1\n\0"
_HEAD: Final = struct.Struct("<16sQQ32x")
_DTYPES: Final = ("<u8", "<u8", "<u8", "<u4", "<u4")
ENTRY_BYTES: Final = 32
_PART_ENTRIES: Final = 1 << 18


@dataclass(frozen=True)
class Columns(Columnar):
    """N entries, in the order of `high`."""

    high: Halves
    low: Halves
    offset: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint32]


def columns_of(keys: bytes, values: bytes) -> Columns:
    """Packed ids in order and their packed places (eventstore.entries) -> columns."""
    halves = np.frombuffer(keys, ">u8").astype(np.uint64)
    places = np.frombuffer(values, PLACES)
    return Columns(
        halves[0::2],
        halves[1::2],
        places["offset"].astype(np.uint64),
        places["file"].astype(np.uint32),
        places["length"].astype(np.uint32),
    )


class Segment:
    """A file, mapped into memory. For many threads at once; valid while it is held, even if unlinked."""

    def __init__(self, path: Path) -> None:
        """OSError; ValueError if it is no whole segment."""
        with path.open("rb") as file:
            head = file.read(_HEAD.size).ljust(_HEAD.size, b"\0")
        self.count: int
        magic, capacity, self.count = _HEAD.unpack(head)
        expected = _HEAD.size + capacity * ENTRY_BYTES
        if magic != _MAGIC or self.count > capacity or path.stat().st_size != expected:
            raise ValueError(f"{path.name} is not the segment that was written")
        mapped = np.memmap(path, np.uint8, "r")
        columns = []
        start = _HEAD.size
        for dtype in _DTYPES:
            end = start + capacity * np.dtype(dtype).itemsize
            columns.append(np.asarray(mapped[start:end]).view(dtype)[: self.count])
            start = end
        self.columns = Columns(*columns)

    @property
    def disk_bytes(self) -> int:
        return Writer.bytes_of(self.count)

    def place(self, row: int) -> Place:
        columns = self.columns
        return Place(int(columns.file[row]), int(columns.offset[row]), int(columns.length[row]))

    def find(self, high: Halves, low: Halves) -> Ints:
        """N halves of ids -> N rows, -1 where an id is not here."""
        rows = np.full(len(high), -1, np.int64)
        if not self.count:
            return rows
        at = np.searchsorted(self.columns.high, high)
        asked = np.flatnonzero(at < self.count)
        at = at[asked]
        while len(asked):
            same = self.columns.high[at] == high[asked]
            asked, at = asked[same], at[same]
            hit = self.columns.low[at] == low[asked]
            rows[asked[hit]] = at[hit]
            # Where just the high halves are equal the next entry may be the one.
            asked, at = asked[~hit], at[~hit] + 1
            asked, at = asked[at < self.count], at[at < self.count]
        return rows


class Writer:
    """Writes a segment part by part; `close` makes it durable under its name."""

    def __init__(self, path: Path, capacity: int) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._capacity = capacity
        self._file: BinaryIO = self._partial.open("wb")
        self._file.truncate(_HEAD.size + capacity * ENTRY_BYTES)
        self.count = 0

    @staticmethod
    def bytes_of(entries: int) -> int:
        return _HEAD.size + entries * ENTRY_BYTES

    def append(self, part: Columns) -> None:
        """Entries that come after those before."""
        start = _HEAD.size
        for column, dtype in zip(part.all(), _DTYPES, strict=True):
            width = np.dtype(dtype).itemsize
            self._file.seek(start + self.count * width)
            self._file.write(np.ascontiguousarray(column, dtype).tobytes())
            start += self._capacity * width
        self.count += len(part)

    def close(self) -> None:
        self._file.seek(0)
        self._file.write(_HEAD.pack(_MAGIC, self._capacity, self.count))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        sync_directory(self._path.parent)

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def merged(segments: Sequence[Segment], live: Ints) -> Iterator[Columns]:
    """Entries of all, in order, a part at a time: of an id twice the one in the later segment.

    `live`: numbers of the files that are still there, sorted; entries of others are left out.
    """
    greatest = max(segments, key=lambda segment: segment.count).columns.high
    total = sum(segment.count for segment in segments)
    step = max(1, len(greatest) * _PART_ENTRIES // max(1, total))
    bounds = np.unique(np.asarray(greatest[step::step]))
    cuts = [
        [0, *np.searchsorted(segment.columns.high, bounds).tolist(), segment.count] for segment in segments
    ]
    for part in range(len(bounds) + 1):
        # The latest first, and a stable sort: of equal ids the latest comes first.
        pieces = [
            segment.columns.take(slice(cut[part], cut[part + 1]))
            for segment, cut in zip(reversed(segments), reversed(cuts), strict=True)
        ]
        joined = Columns.joined(pieces)
        ordered = joined.take(np.argsort(joined.high, kind="stable"))
        again = (ordered.high[1:] == ordered.high[:-1]) & (ordered.low[1:] == ordered.low[:-1])
        kept = np.isin(ordered.file, live)
        kept[1:] &= ~again
        yield ordered.take(kept)
