"""Foreign events on their way: columns, entries of the ledger, batches, and how far files are read. Pure.

An event that waits for its retry is an entry of the ledger:

    key     due us (8) | sequence (8), big endian, so that entries stand in the order they fall due
    value   a fixed head, the file name, the line

The offset of a file moves only over the unbroken run of finished batches at its front, though batches finish
in any order: one that finished early is held back until then, so that what is counted and what the offset
has passed are always the same events.
"""

import bisect
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.columns import take_ids, take_times
from photon.core.fates import Differing, Fate
from photon.core.ids import ID_BYTES
from photon.logs.writer import DeadLetter

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Events:
    """N foreign events in columns; row i of each is event i.

    ids, primary_ids: 16 x N bytes; times: 8 x N bytes; lines: N, without newlines;
    tries (N,) uint32: number of "primary absent" answers; sends (N,) uint32: number of sends (early retries
    that failed count in neither);
    first_seen (N,) int64: when it was first read, us; files (N,) uint32, offsets (N,) int64: the number of
    its file, and where in it its line is;
    names: file names; name_from: row i stood in names[j], j the last with name_from[j] <= i.
    """

    ids: bytes
    primary_ids: bytes
    times: bytes
    lines: list[bytes]
    tries: npt.NDArray[np.uint32]
    sends: npt.NDArray[np.uint32]
    first_seen: npt.NDArray[np.int64]
    files: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    names: Sequence[str]
    name_from: Sequence[int]

    def __len__(self) -> int:
        return len(self.lines)

    def name(self, row: int) -> str:
        return self.names[bisect.bisect_right(self.name_from, row) - 1]

    def letter(self, row: int, fate: Fate, reason: str) -> DeadLetter:
        place = self.name(row), int(self.offsets[row]), int(self.files[row])
        return DeadLetter(fate, reason, self.lines[row], *place)

    @property
    def newest_us(self) -> int:
        """The latest time of an event, 0 at least."""
        return int(np.frombuffer(self.times, "<i8").max(initial=0))

    def take(self, rows: Rows) -> "Events":
        """The chosen rows, ascending."""
        if len(rows) == len(self):
            return self
        chosen = rows.tolist()
        return Events(
            take_ids(self.ids, rows),
            take_ids(self.primary_ids, rows),
            take_times(self.times, rows),
            take_lines(self.lines, chosen),
            self.tries[rows],
            self.sends[rows],
            self.first_seen[rows],
            self.files[rows],
            self.offsets[rows],
            [self.name(row) for row in chosen] if len(self.names) > 1 else self.names,
            range(len(chosen)) if len(self.names) > 1 else self.name_from,
        )


def concat(parts: Sequence[Events]) -> Events:
    """The events of one part after the other."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *map(len, parts)])[:-1].tolist()
    return Events(
        b"".join([part.ids for part in parts]),
        b"".join([part.primary_ids for part in parts]),
        b"".join([part.times for part in parts]),
        [line for part in parts for line in part.lines],
        np.concatenate([part.tries for part in parts]),
        np.concatenate([part.sends for part in parts]),
        np.concatenate([part.first_seen for part in parts]),
        np.concatenate([part.files for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        [name for part in parts for name in part.names],
        [start + row for start, part in zip(starts, parts, strict=True) for row in part.name_from],
    )


def take_lines(lines: list[bytes], rows: list[int]) -> list[bytes]:
    """The chosen rows."""
    if len(rows) < 2:
        return [lines[row] for row in rows]
    return list(itemgetter(*rows)(lines))


_NO_COUNTS: Final = np.zeros(0, np.uint32)
_NO_TIMES: Final = np.zeros(0, np.int64)
NO_EVENTS: Final = Events(
    b"", b"", b"", [], _NO_COUNTS, _NO_COUNTS, _NO_TIMES, _NO_COUNTS, _NO_TIMES, [""], [0]
)


KEY_BYTES: Final = 16

_KEY: Final = np.dtype([("due_us", ">u8"), ("sequence", ">u8")])
_HEAD: Final = np.dtype(
    [
        ("id", f"V{ID_BYTES}"),
        ("primary_id", f"V{ID_BYTES}"),
        ("time", "<i8"),
        ("first_seen", "<i8"),
        ("offset", "<i8"),
        ("file", "<u4"),
        ("tries", "<u4"),
        ("sends", "<u4"),
        ("name_bytes", "<u4"),
    ]
)
HEAD_BYTES: Final = _HEAD.itemsize


def pack_keys(due_us: npt.NDArray[np.int64], sequence: int) -> list[bytes]:
    """Keys of N entries; they take the numbers from `sequence` on."""
    keys = np.empty(len(due_us), _KEY)
    keys["due_us"] = np.maximum(due_us, 0)
    keys["sequence"] = np.arange(sequence, sequence + len(due_us), dtype=np.uint64)
    return _split(keys, KEY_BYTES)


def due_us_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def unpack_id(value: bytes) -> bytes:
    return value[:ID_BYTES]


def unpack_primary_id(value: bytes) -> bytes:
    return value[ID_BYTES : 2 * ID_BYTES]


def unpack_time(value: bytes) -> int:
    return int.from_bytes(value[2 * ID_BYTES : 2 * ID_BYTES + 8], "little", signed=True)


def pack_values(events: Events) -> list[bytes]:
    """Values of N entries."""
    count = len(events)
    names = [name.encode() for name in events.names]
    row_names = names * count if len(names) == 1 else [events.name(row).encode() for row in range(count)]
    head = np.empty(count, _HEAD)
    head["id"] = np.frombuffer(events.ids, f"V{ID_BYTES}")
    head["primary_id"] = np.frombuffer(events.primary_ids, f"V{ID_BYTES}")
    head["time"] = np.frombuffer(events.times, "<i8")
    head["first_seen"] = events.first_seen
    head["offset"] = events.offsets
    head["file"] = events.files
    head["tries"] = events.tries
    head["sends"] = events.sends
    head["name_bytes"] = np.fromiter(map(len, row_names), np.uint32, count)
    return list(map(b"".join, zip(_split(head, HEAD_BYTES), row_names, events.lines, strict=True)))


def unpack_places(values: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Of N values of entries: Events.files and .offsets."""
    head = np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), _HEAD)
    return head["file"].copy(), head["offset"].copy()


def unpack_values(values: Sequence[bytes]) -> Events:
    """The reverse of pack_values. ValueError if one is too short to be an entry."""
    if min(map(len, values), default=HEAD_BYTES) < HEAD_BYTES:
        raise ValueError("a retry entry is cut short")
    head = np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), _HEAD)
    ends = (HEAD_BYTES + head["name_bytes"].astype(np.int64)).tolist()
    return Events(
        ids=head["id"].tobytes(),
        primary_ids=head["primary_id"].tobytes(),
        times=head["time"].tobytes(),
        lines=[value[end:] for value, end in zip(values, ends, strict=True)],
        tries=head["tries"].copy(),
        sends=head["sends"].copy(),
        first_seen=head["first_seen"].copy(),
        files=head["file"].copy(),
        offsets=head["offset"].copy(),
        names=[value[HEAD_BYTES:end].decode() for value, end in zip(values, ends, strict=True)],
        name_from=range(len(values)),
    )


def _split(rows: npt.NDArray[np.void], width: int) -> list[bytes]:
    return list(struct.unpack(f"{width}s" * len(rows), rows.tobytes()))


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a file that a batch covers."""

    file: int
    start: int
    end: int


class OffsetTracker:
    """Which finished batches may be recorded, and the offset of each file after them.

    A batch may cover several files; batches are sent in one order, so those that wait for each other
    never form a ring. Not for several threads at once.
    """

    def __init__(self, offsets: Mapping[int, int]) -> None:
        self._offsets = dict(offsets)
        self._sent_to = dict(offsets)
        self._spans: dict[int, tuple[Span, ...]] = {}
        self._fronts: dict[int, deque[int]] = {}
        self._finished: set[int] = set()
        self._gone: set[int] = set()

    def offset(self, file: int) -> int:
        """Every byte before it is in a batch that was given out by `finished`; 0 for a new file."""
        return self._offsets.get(file, 0)

    def sent(self, batch: int, spans: Iterable[Span]) -> None:
        """A batch is under way. Its spans go on where those sent before ended, or behind what was skipped."""
        kept = tuple(spans)
        for span in kept:
            assert self._sent_to.get(span.file, 0) <= span.start <= span.end, (span, self._sent_to)
            self._sent_to[span.file] = span.end
            self._fronts.setdefault(span.file, deque()).append(batch)
        self._spans[batch] = kept

    def forget(self, file: int) -> None:
        """Nothing more of it will be sent."""
        if file in self._fronts:
            self._gone.add(file)
        else:
            self._gone.discard(file)
            self._offsets.pop(file, None)
            self._sent_to.pop(file, None)

    def finished(self, batch: int) -> list[int]:
        """The batches that can be recorded now that this one is finished, in the order they were sent."""
        self._finished.add(batch)
        ready = []
        candidates = {batch}
        while candidates:
            candidate = min(candidates)
            candidates.remove(candidate)
            if self._is_next(candidate):
                ready.append(candidate)
                candidates |= self._pass_over(candidate)
        return ready

    def _is_next(self, batch: int) -> bool:
        return batch in self._finished and all(
            self._fronts[span.file][0] == batch for span in self._spans[batch]
        )

    def _pass_over(self, batch: int) -> set[int]:
        """Move the offsets; the finished batches that have come to the front of a file."""
        fronts = set()
        self._finished.remove(batch)
        for span in self._spans.pop(batch):
            self._offsets[span.file] = span.end
            front = self._fronts[span.file]
            front.popleft()
            if not front:
                del self._fronts[span.file]
                if span.file in self._gone:
                    self.forget(span.file)
            elif front[0] in self._finished:
                fronts.add(front[0])
        return fronts


@dataclass(frozen=True, slots=True)
class FreshBatch:
    """Events read for the first time. `spans`: the bytes of the files that they and `malformed` stood in."""

    number: int
    events: Events
    malformed: list[DeadLetter]
    spans: Sequence[Span]

    @property
    def count(self) -> int:
        """Of its events and malformed lines."""
        return len(self.events) + len(self.malformed)

    @property
    def size(self) -> int:
        """Bytes of the files that it covers."""
        return sum(span.end - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class RetryBatch:
    """Events that waited; `keys`: their entries in the ledger, row by row. `early`: not due yet;
    `woken`: early because their primary events have arrived."""

    keys: list[bytes]
    events: Events
    early: bool = False
    woken: bool = False

    @property
    def size(self) -> int:
        """Bytes of its lines."""
        return sum(map(len, self.events.lines))

    @property
    def due_us(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(b"".join(self.keys), _KEY)["due_us"].astype(np.int64)


Batch = FreshBatch | RetryBatch


@dataclass(frozen=True, slots=True)
class Resolved:
    """What became of a batch: each event has a fate or is in `retries`, to be sent again at its `due_us`.

    `fates` counts; `letters` are the events of all fates but joined and duplicate, and the duplicates that
    `differing` counts (rules/copies); `latencies` (2, BUCKETS) counts the joined ones as in Totals; `hedged`:
    some waited for their home datacenter.
    """

    fates: dict[Fate, int]
    wasted_joins: int
    latencies: npt.NDArray[np.int64]
    letters: list[DeadLetter]
    retries: Events | None
    due_us: npt.NDArray[np.int64]
    hedged: bool = False
    differing: Mapping[Differing, int] = field(default_factory=dict)
