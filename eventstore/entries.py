"""How the entries of the log file map are packed (paper 3.4.2). Pure.

sparse, at six levels     server key (8) | earliest event time us (8) | file number (4) | offset (8)
                          -> length (4) | latest event time us (8)
dense, for opaque ids     id (16) -> file number (4) | offset (8) | length (4)
repeated, for opaque ids  id (16) | file number (4) | offset (8) -> length (4)

All big endian, so that keys sort by their numbers. A run of little event time goes to a level whose
interval is a quarter of W, a 16th, and so on: a lookup scans just that much of the keys there, a few
entries, where all of W may be thousands. A level without entries costs it nothing.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from eventstore.runs import Ints, Run, Runs

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
