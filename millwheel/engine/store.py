"""The port to what is durable, and what its rows are called (paper 5.2, 6.2).

A worker's turn changes rows of many keys and key intervals; `commit` makes all of it durable at once, or
nothing, and only while no other worker has claimed one of its key intervals.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from millwheel.computation import Tag
from millwheel.engine.due import Pending
from millwheel.engine.records import SLOTS
from millwheel.errors import ZombieError

Changes = dict[bytes, bytes | None]
"""Rows to be put; None: to be deleted."""

_KEY_BYTES_MAX: Final = 400
STATE, TIMERS, HEARD, FRAME, POSITION, LANE, LINES, SINK, NAMES, LATENESS, GIVEN, TAKEN_UP, SERVER, COPIES = (
    b"s",
    b"t",
    b"h",
    b"f",
    b"p",
    b"w",
    b"l",
    b"o",
    b"n",
    b"q",
    b"g",
    b"y",
    b"v",
    b"c",
)
_encode: Final = msgspec.msgpack.encode


class Store(Protocol):
    """What a worker that has claimed its slots and lanes does with them. StorageError if the disk fails."""

    def read(self, rows: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, prefix: bytes, behind: Sequence[bytes] = (b"",)) -> Iterator[tuple[bytes, bytes]]:
        """Rows whose name starts so, and has one of these behind that, which ascend and are of one length;
        ascending. For the start: what is committed meanwhile may be missing."""
        ...

    def commit(self, changes: Mapping[bytes, bytes | None]) -> None:
        """All of it, durably. ZombieError if a slot was claimed by somebody else: then nothing of it."""
        ...


def _two(number: int) -> bytes:
    return number.to_bytes(2, "big")


def key_row(table: bytes, node: int, slot: int, key: str) -> bytes:
    """The row of a key of a computation."""
    name = key.encode("utf-8", "surrogatepass")
    if len(name) > _KEY_BYTES_MAX:
        name = b"\xff" + hashlib.blake2b(name, digest_size=32).digest()
    return node_rows(table, node) + _two(slot) + name


def node_rows(table: bytes, node: int) -> bytes:
    """What the rows of all keys of a computation start with."""
    return table + _two(node)


def slot_of_row(row: bytes) -> int:
    """Of a key's row."""
    return int.from_bytes(row[3:5], "big")


def rows_of_slots(slots: Iterable[int]) -> list[bytes]:
    """What is behind that in the names of the rows of these slots; to be scanned for."""
    return [_two(slot) for slot in sorted(slots)]


def pack_timers(key: str, timers: Pending) -> bytes:
    return _encode([key, [[clock, tag, time] for (clock, tag), time in timers.items()]])


_floors: Final = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode
_timers: Final = msgspec.msgpack.Decoder(tuple[str, list[tuple[int, Tag, int]]]).decode


def unpack_timers(packed: bytes) -> tuple[str, Pending]:
    key, timers = _timers(packed)
    return key, {(clock, tag): time for clock, tag, time in timers}


def frame_rows(lane: int) -> bytes:
    """What the rows of all frames of a lane start with."""
    return FRAME + _two(lane)


def frame_row(lane: int, number: int) -> bytes:
    return frame_rows(lane) + number.to_bytes(8, "big")


def heard_row(lane: int, mine: int) -> bytes:
    return HEARD + _two(lane) + _two(mine)


def lane_of_row(row: bytes) -> int:
    """Of a lane's own row, and of what was heard of it."""
    return int.from_bytes(row[1:3], "big")


def lane_row(lane: int) -> bytes:
    return LANE + _two(lane)


def position_row(injector: int, number: int) -> bytes:
    return POSITION + _two(injector) + number.to_bytes(8, "big")


def lateness_row(injector: int, worker: int) -> bytes:
    return LATENESS + _two(injector) + _two(worker)


def sink_row(sink: int, lane: int) -> bytes:
    return SINK + _two(sink) + _two(lane)


def lines_row(sink: int, lane: int, number: int) -> bytes:
    return LINES + _two(sink) + _two(lane) + number.to_bytes(8, "big")


def pack_floors(floors: npt.NDArray[np.int64]) -> bytes:
    """What each slot has consumed of a lane: (SLOTS,) numbers, few of them different."""
    return _encode(
        [(number, np.packbits(floors == number).tobytes()) for number in np.unique(floors).tolist()]
    )


def unpack_floors(packed: bytes) -> npt.NDArray[np.int64]:
    floors = np.zeros(SLOTS, np.int64)
    for number, slots in _floors(packed):
        floors[np.unpackbits(np.frombuffer(slots, np.uint8)).astype(np.bool_)] = number
    return floors


def weak_lane(worker: int) -> int:
    """Of its frames that leave before a commit; the others have the worker's own number."""
    return SLOTS + worker


def keeper(lane: int, workers: int) -> int:
    """The worker that has a lane now."""
    return lane % SLOTS % workers


class Lane(msgspec.Struct, array_like=True):
    """What one worker keeps of itself: the next number of its frames and lines, marks, counts."""

    frame: int = 1
    line: int = 1
    marks: dict[str, int] = {}
    counts: dict[str, dict[str, int]] = {}


class MemoryStore:
    """For tests and `millwheel.testing`: rows in a dict that workers share; `claim` as the disk's."""

    def __init__(self, rows: dict[bytes, bytes] | None = None, fences: list[int] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self.fences = [0] * SLOTS if fences is None else fences
        self._mine: Sequence[int] = ()
        self._sequencer = 0

    def claim(self, slots: Sequence[int], sequencer: int) -> "MemoryStore":
        """The same rows as another worker sees them."""
        if any(self.fences[slot] > sequencer for slot in slots):
            raise ZombieError(f"sequencer {sequencer} is not the newest")
        for slot in slots:
            self.fences[slot] = sequencer
        mine = MemoryStore(self.rows, self.fences)
        mine._mine, mine._sequencer = slots, sequencer
        return mine

    def read(self, rows: Sequence[bytes]) -> list[bytes | None]:
        return [self.rows.get(row) for row in rows]

    def scan(self, prefix: bytes, behind: Sequence[bytes] = (b"",)) -> Iterator[tuple[bytes, bytes]]:
        starts = tuple(prefix + one for one in behind)
        return iter(sorted((row, value) for row, value in self.rows.items() if row.startswith(starts)))

    def commit(self, changes: Mapping[bytes, bytes | None]) -> None:
        if any(self.fences[slot] != self._sequencer for slot in self._mine):
            raise ZombieError("another worker has these key intervals")
        for row, value in changes.items():
            if value is None:
                self.rows.pop(row, None)
            else:
                self.rows[row] = value


def plain(value: Any) -> Any:
    """A value for a JSON line: what JSON has not, as text."""
    return msgspec.to_builtins(value, str_keys=True)
