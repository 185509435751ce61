"""Packed columns: the shape in which batches travel and are worked on (no Python statement per event)."""

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from photon.core.ids import ID_BYTES

_NEWLINE = np.uint8(10)
_MIX = np.uint64(0x9E3779B97F4A7C15)


# Few: a Struct holds 32 bytes an id, and sizes vary without end; building one again costs 0.02 us an id.
@lru_cache(maxsize=64)
def _ids_struct(count: int) -> struct.Struct:
    return struct.Struct(f"{ID_BYTES}s" * count)


def split_ids(ids: bytes) -> tuple[bytes, ...]:
    """16 x N bytes -> N keys of 16 bytes."""
    return _ids_struct(len(ids) // ID_BYTES).unpack(ids)


def pack_times(times_us: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """N times -> 8 x N bytes, little endian signed. OverflowError if one does not fit."""
    return np.asarray(times_us, dtype="<i8").tobytes()


def unpack_times(times: bytes) -> npt.NDArray[np.int64]:
    """8 x N bytes -> N times (a read-only view)."""
    return np.frombuffer(times, "<i8")


def take_ids(ids: bytes, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> bytes:
    """The chosen rows of a 16-byte column."""
    return np.frombuffer(ids, f"V{ID_BYTES}")[rows].tobytes()


def take_times(times: bytes, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> bytes:
    """The chosen rows of an 8-byte column."""
    return np.frombuffer(times, "<i8")[rows].tobytes()


def join_lines(lines: Sequence[bytes]) -> bytes:
    """N lines without newlines in them -> one newline after each; b"" for none."""
    return b"\n".join(lines) + b"\n" if lines else b""


def count_lines(column: bytes) -> int:
    """Newlines in it; five times as fast as `bytes.count`, which goes byte by byte."""
    return int(np.count_nonzero(np.frombuffer(column, np.uint8) == _NEWLINE))


def split_lines(column: bytes) -> list[bytes]:
    """The reverse of join_lines."""
    lines = column.split(b"\n")
    lines.pop()
    return lines


def hash_ids(ids: bytes) -> npt.NDArray[np.uint64]:
    """A deterministic 64-bit hash of each id. Part of the format: shards are computed from it for ever."""
    halves = np.frombuffer(ids, "<u8")
    mixed: npt.NDArray[np.uint64] = (halves[0::2] * _MIX) ^ halves[1::2]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX
    mixed ^= mixed >> np.uint64(29)
    return mixed
