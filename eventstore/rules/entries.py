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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from photon.core.ids import server_keys, timestamps_us

OPEN_FILES_MAX: Final = 1024
OPEN_CELLS_MAX: Final = 256

Ints = npt.NDArray[np.int64]


class Interval(NamedTuple):
    """M and W of the paper: bytes of file, microseconds of event time."""

    bytes: int
    us: int


class Run(NamedTuple):
    """Bytes [start, end) of `file` hold events of `server` from `earliest` to `latest` (us)."""

    file: int
    server: int
    earliest: int
    latest: int
    start: int
    end: int


@dataclass(slots=True)
class Runs:
    """R runs as columns, those of one file together and in the order of its blocks."""

    file: Ints
    server: npt.NDArray[np.uint64]
    earliest: Ints
    latest: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.file)

    def rows(self, low: int, high: int) -> list[Run]:
        columns = (self.file, self.server, self.earliest, self.latest, self.start, self.end)
        return list(map(Run._make, zip(*[column[low:high].tolist() for column in columns], strict=True)))

    def replace(self, row: int, run: Run) -> None:
        self.earliest[row], self.latest[row] = run.earliest, run.latest
        self.start[row], self.end[row] = run.start, run.end


def runs_of(ids: bytes, files: Ints, starts: Ints, lengths: Ints, interval: Interval) -> Runs:
    """N photon ids and the places of their lines (file number, offset, length) -> the runs they fall in."""
    times = timestamps_us(ids)
    servers = server_keys(ids)
    keys: list[npt.NDArray[Any]] = [files, starts // interval.bytes, servers, times // interval.us]
    ends = starts + lengths
    sorted_already, same = _compare_neighbours(keys)
    if not sorted_already:
        order = np.lexsort(keys[::-1])
        keys = [key[order] for key in keys]
        times, starts, ends = times[order], starts[order], ends[order]
        _, same = _compare_neighbours(keys)
    first = np.flatnonzero(np.concatenate(([True], ~same)))
    return Runs(
        keys[0][first],
        keys[2][first],
        np.minimum.reduceat(times, first),
        np.maximum.reduceat(times, first),
        np.minimum.reduceat(starts, first),
        np.maximum.reduceat(ends, first),
    )


def _compare_neighbours(keys: list[npt.NDArray[Any]]) -> tuple[bool, npt.NDArray[np.bool_]]:
    """Are the rows in the order of their keys, and which equal the row before them."""
    same = np.ones(len(keys[0]) - 1, np.bool_)
    for key in keys:
        if (same & (key[1:] < key[:-1])).any():
            return False, same
        same &= key[1:] == key[:-1]
    return True, same


Cells = dict[tuple[int, int], Run]


class OpenRuns:
    """The last runs of each file, which the next lines of the file may still extend.

    So a log that grows by a line at a time does not get an entry a line. Forgotten at a restart and when
    there are too many: that costs an entry more, nothing else.
    """

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._files: dict[int, tuple[int, Cells]] = {}

    def extend(self, runs: Runs) -> tuple[list[tuple[Run, Run]], dict[int, tuple[int, Cells]]]:
        """Let `runs` (changed in place) take in the open ones of their cells.

        Pairs (old, new) of what was extended, and what is open now: for `keep`, once it is on disk.
        """
        extended: list[tuple[Run, Run]] = []
        opened: dict[int, tuple[int, Cells]] = {}
        bounds = np.flatnonzero(np.diff(runs.file, prepend=-1, append=-1)).tolist()
        blocks = runs.start // self._interval.bytes
        for low, high in pairwise(bounds):
            file, first_block, last_block = int(runs.file[low]), int(blocks[low]), int(blocks[high - 1])
            open_block, cells = self._files.get(file, (-1, {}))
            if first_block == open_block:
                stop = low + int(np.searchsorted(blocks[low:high], open_block, "right"))
                extended += self._extend_cells(runs, low, stop, cells)
            start = low + int(np.searchsorted(blocks[low:high], last_block))
            kept = dict(cells) if last_block == open_block else {}
            if high - start <= OPEN_CELLS_MAX:
                kept |= {self._cell(run): run for run in runs.rows(start, high)}
            opened[file] = (last_block, kept if len(kept) <= OPEN_CELLS_MAX else {})
        return extended, opened

    def keep(self, opened: dict[int, tuple[int, Cells]]) -> None:
        for file in opened:
            self._files.pop(file, None)
        self._files |= opened
        for file in list(self._files)[: max(0, len(self._files) - OPEN_FILES_MAX)]:
            del self._files[file]

    def forget(self, files: Collection[int]) -> None:
        """What was open in files that are no more."""
        for file in files:
            self._files.pop(file, None)

    def _extend_cells(self, runs: Runs, low: int, high: int, cells: Cells) -> list[tuple[Run, Run]]:
        extended = []
        for row, fresh in enumerate(runs.rows(low, high), low):
            new = fresh
            old = cells.get(self._cell(new))
            if old is not None:
                new = new._replace(
                    earliest=min(old.earliest, new.earliest),
                    latest=max(old.latest, new.latest),
                    start=min(old.start, new.start),
                    end=max(old.end, new.end),
                )
                runs.replace(row, new)
                extended.append((old, new))
        return extended

    def _cell(self, run: Run) -> tuple[int, int]:
        return run.server, run.earliest // self._interval.us


LEVEL_PARTS: Final = (1, 4, 16, 64, 256, 1024)

_TIME_MAX: Final = (1 << 64) - 1
_SPARSE_KEY: Final = struct.Struct(">QQIQ")
_DENSE_VALUE: Final = struct.Struct(">IQI")
_KEYS: Final = np.dtype([("server", ">u8"), ("earliest", ">u8"), ("file", ">u4"), ("start", ">u8")])
_VALUES: Final = np.dtype([("length", ">u4"), ("latest", ">u8")])
_REPEATED_KEYS: Final = np.dtype([("high", ">u8"), ("low", ">u8"), ("file", ">u4"), ("offset", ">u8")])
PLACES: Final = np.dtype([("file", ">u4"), ("offset", ">u8"), ("length", ">u4")])


class Place(NamedTuple):
    """Bytes of a log. Places sort by file, then offset."""

    file: int
    offset: int
    length: int


def level_of(run: Run, interval_us: int) -> int:
    width = run.latest - run.earliest
    return sum(width * part <= interval_us for part in LEVEL_PARTS[1:])


def sparse_key(run: Run) -> bytes:
    return _SPARSE_KEY.pack(run.server, run.earliest, run.file, run.start)


def sparse_entries(runs: Runs, interval_us: int) -> list[tuple[list[bytes], list[bytes]]]:
    """Keys and values for each level, in the order of the keys."""
    order = np.lexsort((runs.earliest, runs.server))
    keys = np.empty(len(runs), _KEYS)
    keys["server"], keys["earliest"] = runs.server[order], runs.earliest[order]
    keys["file"], keys["start"] = runs.file[order], runs.start[order]
    values = np.empty(len(runs), _VALUES)
    values["length"], values["latest"] = (runs.end - runs.start)[order], runs.latest[order]
    width = (runs.latest - runs.earliest)[order]
    levels = sum((width * part <= interval_us).astype(np.int8) for part in LEVEL_PARTS[1:])
    return [
        (_split(keys[levels == level]), _split(values[levels == level])) for level in range(len(LEVEL_PARTS))
    ]


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


def sparse_files(entries: Sequence[tuple[bytes, bytes]]) -> Ints:
    """Entries -> numbers of the files they point to."""
    return np.frombuffer(b"".join([key for key, _ in entries]), _KEYS)["file"].astype(np.int64)


def dense_files(entries: Sequence[tuple[bytes, bytes]]) -> Ints:
    """The same of dense ones."""
    return np.frombuffer(b"".join([value for _, value in entries]), PLACES)["file"].astype(np.int64)


def dense_place(value: bytes) -> Place:
    return Place(*_DENSE_VALUE.unpack(value))


def _split(column: npt.NDArray[np.void]) -> list[bytes]:
    """N packed records -> N bytes objects."""
    return list(struct.unpack(f"{column.itemsize}s" * len(column), column.tobytes()))


def repeated_entry(key: bytes, place: bytes) -> tuple[bytes, bytes]:
    """Of an id and a packed place."""
    return key + place[:12], place[12:]


def repeated_entries(
    high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64], files: Any, starts: Any, lengths: Any
) -> tuple[list[bytes], list[bytes]]:
    """N ids, as halves, and places -> their keys and values."""
    keys = np.empty(len(high), _REPEATED_KEYS)
    keys["high"], keys["low"], keys["file"], keys["offset"] = high, low, files, starts
    return _split(keys), _split(np.asarray(lengths, ">u4").view("V4"))


def repeated_place(key: bytes, value: bytes) -> Place:
    return Place(*_DENSE_VALUE.unpack(key[16:] + value))


def repeated_files(entries: Sequence[tuple[bytes, bytes]]) -> Ints:
    """Entries -> numbers of the files they point to."""
    return np.frombuffer(b"".join([key[16:20] for key, _ in entries]), ">u4").astype(np.int64)
