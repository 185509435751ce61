"""How the entries of the log file map are packed (paper 3.4.2). Pure.

sparse, at six levels     server key (8) | earliest event time us (8) | file number (4) | offset (8)
                          -> length (4) | latest event time us (8)
dense, for opaque ids     id (16) -> file number (4) | offset (8) | length (4)
repeated, for opaque ids  id (16) | file number (4) | offset (8) -> length (4)

All big endian, so that keys sort by their numbers. A run of little event time goes to a level whose
interval is a quarter of W, a 16th, and so on: a lookup scans just that much of the keys there, a few
entries, where all of W may be thousands. A level without entries costs it nothing.

A run belongs to one file and one server key; it is what falls in one cell of a grid of
`interval.bytes` (M of the paper) in the file by `interval.us` (W) of event time. So it spans at most M bytes
and one line, and less than W of time, in whatever order the events stand in the logs.
"""

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from photon.core.ids import server_keys, timestamps_us

OPEN_FILES_MAX: Final = 1024
OPEN_CELLS_MAX: Final = 256
LEVEL_PARTS: Final = (1, 4, 16, 64, 256, 1024)

_TIME_MAX: Final = (1 << 64) - 1
_SPARSE_KEY: Final = struct.Struct(">QQIQ")
_KEY_BYTES: Final = _SPARSE_KEY.size
_PLACE: Final = struct.Struct(">IQI")
SPARSE_RECORD: Final = np.dtype(
    [
        ("server", ">u8"),
        ("earliest", ">u8"),
        ("file", ">u4"),
        ("start", ">u8"),
        ("length", ">u4"),
        ("latest", ">u8"),
    ]
)
"""A key and its value."""
_REPEATED_KEYS: Final = np.dtype([("high", ">u8"), ("low", ">u8"), ("file", ">u4"), ("offset", ">u8")])
PLACES: Final = np.dtype([("file", ">u4"), ("offset", ">u8"), ("length", ">u4")])

Ints = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]
Entries = tuple[list[bytes], list[bytes]]
"""N keys and N values."""


class Interval(NamedTuple):
    """M and W of the paper: bytes of file, microseconds of event time."""

    bytes: int
    us: int


class Place(NamedTuple):
    """Bytes of a log. Places sort by file, then offset."""

    file: int
    offset: int
    length: int


class Columnar:
    """A dataclass of columns of one length."""

    def all(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(getattr(self, field.name) for field in fields(cast(Any, self)))

    def __len__(self) -> int:
        return len(self.all()[0])

    def take(self, rows: Any) -> Self:
        return type(self)(*[column[rows] for column in self.all()])

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """One after the other; at least one."""
        return cls(*map(np.concatenate, zip(*[part.all() for part in parts], strict=True)))


@dataclass(frozen=True)
class Runs(Columnar):
    """R runs: bytes [start, end) of `file` hold events of `server` from `earliest` to `latest` (us)."""

    file: Ints
    server: npt.NDArray[np.uint64]
    earliest: Ints
    latest: Ints
    start: Ints
    end: Ints

    def of_cells(self, interval: Interval) -> tuple[Self, Ints]:
        """Those of each cell made one, in the order of file and block; and where each of these went."""
        cells: list[npt.NDArray[Any]] = [
            self.file,
            self.start // interval.bytes,
            self.server,
            self.earliest // interval.us,
        ]
        order: Any = slice(None)
        sorted_already, same = _compare_neighbours(cells)
        if not sorted_already:
            order = np.lexsort(cells[::-1])
            _, same = _compare_neighbours([cell[order] for cell in cells])
        runs = self if sorted_already else self.take(order)
        begins = np.concatenate(([True], ~same))
        first = np.flatnonzero(begins)
        went = np.empty(len(self), np.int64)
        went[order] = np.cumsum(begins) - 1
        found = type(self)(
            runs.file[first],
            runs.server[first],
            np.minimum.reduceat(runs.earliest, first),
            np.maximum.reduceat(runs.latest, first),
            np.minimum.reduceat(runs.start, first),
            np.maximum.reduceat(runs.end, first),
        )
        return found, went

    def records(self) -> Records:
        """In the order of their keys."""
        records = records_of(
            server=self.server,
            earliest=self.earliest,
            file=self.file,
            start=self.start,
            length=self.end - self.start,
            latest=self.latest,
        )
        return records[np.lexsort((self.start, self.file, self.earliest, self.server))]


def runs_of(ids: bytes, files: Ints, starts: Ints, lengths: Ints, interval: Interval) -> Runs:
    """N photon ids and the places of their lines (file number, offset, length) -> the runs they fall in."""
    times = timestamps_us(ids)
    return Runs(files, server_keys(ids), times, times, starts, starts + lengths).of_cells(interval)[0]


def _compare_neighbours(keys: list[npt.NDArray[Any]]) -> tuple[bool, npt.NDArray[np.bool_]]:
    """Are the rows in the order of their keys, and which equal the row before them."""
    same = np.ones(len(keys[0]) - 1, np.bool_)
    for key in keys:
        if (same & (key[1:] < key[:-1])).any():
            return False, same
        same &= key[1:] == key[:-1]
    return True, same


class OpenRuns:
    """The last runs of each file, which the next lines of the file may still extend.

    So a log that grows by a line at a time does not get an entry a line. Forgotten at a restart and when
    there are too many: that costs an entry more, nothing else.
    """

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._files: dict[int, Runs] = {}

    def extend(self, fresh: Runs) -> tuple[Runs, Runs, dict[int, Runs]]:
        """The open runs that `fresh` extends, what is to take their place, and what is open then.

        The last is for `keep`, once the rest is on disk.
        """
        files = np.unique(fresh.file)
        parts = [*[self._files[file] for file in files.tolist() if file in self._files], fresh]
        every = Runs.joined(parts)
        joined, went = every.of_cells(self._interval)
        of_open = went[: len(every) - len(fresh)]
        extended = np.zeros(len(joined), np.bool_)
        extended[went[len(of_open) :]] = True
        opened = {}
        bounds = zip(
            files.tolist(),
            np.searchsorted(joined.file, files).tolist(),
            np.searchsorted(joined.file, files, "right").tolist(),
            strict=True,
        )
        for file, low, high in bounds:
            blocks = joined.start[low:high] // self._interval.bytes
            last = low + int(np.searchsorted(blocks, blocks[-1]))
            opened[file] = joined.take(slice(last, high if high - last <= OPEN_CELLS_MAX else last))
        return every.take(np.flatnonzero(extended[of_open])), joined.take(extended), opened

    def keep(self, opened: dict[int, Runs]) -> None:
        for file in opened:
            self._files.pop(file, None)
        self._files |= opened
        for file in list(self._files)[: max(0, len(self._files) - OPEN_FILES_MAX)]:
            del self._files[file]

    def forget(self, files: Collection[int]) -> None:
        """What was open in files that are no more."""
        for file in files:
            self._files.pop(file, None)


def records_of(**columns: Any) -> Records:
    """The columns of SPARSE_RECORD -> N records."""
    records = np.empty(len(columns["file"]), SPARSE_RECORD)
    for name, column in columns.items():
        records[name] = column
    return records


def levels_of(records: Records, interval_us: int) -> npt.NDArray[np.int8]:
    width = records["latest"].astype(np.int64) - records["earliest"].astype(np.int64)
    levels = np.zeros(len(records), np.int8)
    for part in LEVEL_PARTS[1:]:
        levels += width * part <= interval_us
    return levels


def sparse_entries(records: Records) -> Entries:
    rows = np.ascontiguousarray(records).view(np.uint8).reshape(-1, SPARSE_RECORD.itemsize)
    return _split(rows[:, :_KEY_BYTES]), _split(rows[:, _KEY_BYTES:])


def sparse_range(server: bytes, time_us: int, width_us: int) -> tuple[bytes, bytes]:
    """Of the runs no wider than `width_us` that may hold this time: the least key, and one above all."""
    low = server + max(0, time_us - width_us).to_bytes(8, "big")
    return low, server + min(time_us + 1, _TIME_MAX).to_bytes(8, "big")


def sparse_latest(value: bytes) -> bytes:
    """The latest event time of a run, as an id has it in its last 8 bytes."""
    return value[4:]


def sparse_place(key: bytes, value: bytes) -> Place:
    _, _, file, offset = _SPARSE_KEY.unpack(key)
    return Place(file, offset, int.from_bytes(value[:4], "big"))


def dense_entries(
    ids: bytes, files: Ints, starts: Ints, lengths: Ints
) -> tuple[npt.NDArray[np.intp], list[bytes], list[bytes]]:
    """Rows in the order of their ids (the first of equal ones first), and their keys and values."""
    halves = np.frombuffer(ids, ">u8")[::2].astype(np.uint64)
    order = np.argsort(halves, kind="stable")
    places = np.empty(len(order), PLACES)
    places["file"], places["offset"], places["length"] = files[order], starts[order], lengths[order]
    return order, _split(np.frombuffer(ids, "V16")[order]), _split(places)


def dense_place(value: bytes) -> Place:
    return Place(*_PLACE.unpack(value))


def repeated_entry(key: bytes, place: bytes) -> tuple[bytes, bytes]:
    """Of an id and a packed place."""
    return key + place[:12], place[12:]


def repeated_entries(
    high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64], offsets: Any, files: Any, lengths: Any
) -> Entries:
    """N ids, as halves, and places -> their keys and values."""
    keys = np.empty(len(high), _REPEATED_KEYS)
    keys["high"], keys["low"], keys["file"], keys["offset"] = high, low, files, offsets
    return _split(keys), _split(np.asarray(lengths, ">u4"))


def repeated_place(key: bytes, value: bytes) -> Place:
    return dense_place(key[16:] + value)


def files_of(entries: Sequence[tuple[bytes, bytes]], dense: bool) -> npt.NDArray[np.uint32]:
    """Entries of a table -> numbers of the files they point to. All but the dense one have them in keys."""
    numbers = [value[:4] for _, value in entries] if dense else [key[16:20] for key, _ in entries]
    return np.frombuffer(b"".join(numbers), ">u4").astype(np.uint32)


def _split(rows: npt.NDArray[Any]) -> list[bytes]:
    """N packed records, or N rows of bytes -> N bytes objects."""
    width = rows.nbytes // max(1, len(rows))
    return list(struct.unpack(f"{width}s" * len(rows), rows.tobytes()))
