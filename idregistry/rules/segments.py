"""Where ids are: new ones in 256 dicts, later in sorted segments, each in a file that never changes. Pure.

    stamp = holder (4) | token time us (8) | bucket (4), little endian; one object for all ids of a request
            that are of one bucket

Nothing is ever deleted from a dict in place: a released id keeps its place with the stamp GONE, so that the
first n rows of a dict are the same ids for as long as the dict lives. Cuts rest on that. One dict of millions
of ids stops everything while it grows (0.5 s at 5.6 M); 256 of them grow one by one.

A Segment is a part of the log's truth: which ids are in it is decided by the commands alone (commands.Seal,
commands.Merge), alike on all replicas. Where a replica has them is its own matter: at first in the dicts that
were sealed, or in the segments that are to be merged; once it is written, in a file, whose bytes are the same
everywhere. What is released later is noted beside it, until the next merge leaves it out.

A Cut is the state as it was at one moment, drawn later, in another thread, while commands go on. It copies
nothing but references and lengths. What is new stands behind those lengths; a stamp that changes in place is
noted in the cut first (`note_stamp`), and whoever draws reads first and looks at the notes afterwards: a
change that was seen has been noted. Each read of a dict is one C call, in which no other Python code runs, so
that inserts never disturb it.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import (
    DEAD,
    SUBS,
    Encoded,
    Hashes,
    bucket_of,
    buckets_of,
    split_keys,
    unhash_ids,
)
from photon.core.columns import hash_ids, split_ids, unpack_times

Sub = dict[bytes, bytes]
Subs = tuple[Sub, ...]

STAMP: Final = struct.Struct("<Iqi")
STAMP_DTYPE: Final = np.dtype([("holder", "<u4"), ("time_us", "<i8"), ("bucket", "<i4")])
GONE: Final = STAMP.pack(0, 0, DEAD)

assert STAMP_DTYPE.itemsize == STAMP.size


def subs_of(subs: Subs, batch: Encoded) -> Iterator[Sub]:
    """The sub-dict of each id."""
    return map(subs.__getitem__, batch.subs)


def stamps_of(subs: Subs, batch: Encoded) -> npt.NDArray[np.void]:
    """N stamps (STAMP_DTYPE), GONE where there is none. Any thread: each step is one under the GIL."""
    return np.frombuffer(b"".join(map(dict.get, subs_of(subs, batch), batch.keys, repeat(GONE))), STAMP_DTYPE)


def new_stamps(
    holders: Sequence[tuple[int, int]], counts: Sequence[int], times: bytes, low_us: int, high_us: int
) -> list[bytes]:
    """N fresh stamps, for each segment its (holder, token time) with the buckets of its `counts[i]` ids.

    `low_us` and `high_us` are the least and the greatest of `times`. Each stamp is an object that was not
    there before.
    """
    bucket = bucket_of(low_us)
    if bucket == bucket_of(high_us):
        stamps = [STAMP.pack(holder, time_us, bucket) for holder, time_us in holders]
        return list(chain.from_iterable(map(repeat, stamps, counts)))
    segments = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    distinct, rows = np.unique(
        (segments << 32) + (buckets_of(unpack_times(times)) - DEAD), return_inverse=True
    )
    stamps = [STAMP.pack(*holders[pair >> 32], (pair & 0xFFFF_FFFF) + DEAD) for pair in distinct.tolist()]
    return list(map(stamps.__getitem__, rows.tolist()))


Numbers = npt.NDArray[np.intp]
"""Places in a batch, or rows."""
Stamps = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Rows:
    """N ids and their stamps, in order of the ids."""

    hashes: Hashes
    tails: Hashes
    stamps: Stamps

    def __len__(self) -> int:
        return len(self.hashes)

    def part(self, start: int, end: int) -> "Rows":
        """The rows `start` to `end` - 1."""
        return Rows(self.hashes[start:end], self.tails[start:end], self.stamps[start:end])


class Source(Protocol):
    """Ids of a segment, wherever they are. Any thread."""

    def find(self, batch: Encoded) -> tuple[Numbers, Stamps]:
        """The places of the ids that are there, in order, and their stamps."""

    def rows(self, low: int, high: int) -> Rows:
        """Those whose hashes are `low` to `high` - 1, in order. Dicts give only whole sub-dicts."""

    @property
    def ids(self) -> int:
        """How many there are at most."""

    def dead(self, live: int) -> int:
        """How many of these are known to be of buckets before `live`."""


class Dicts:
    """Ids in dicts that change no more: those of buckets from `live` on."""

    def __init__(self, subs: Subs, live: int) -> None:
        self._subs = subs
        self._live = live

    @property
    def ids(self) -> int:
        """The same on all replicas: what is dead some have let go already."""
        return sum(_alive(sub, self._live) for sub in self._subs if sub)

    def dead(self, live: int) -> int:
        return 0

    def find(self, batch: Encoded) -> tuple[Numbers, Stamps]:
        stamps = stamps_of(self._subs, batch)
        places = np.flatnonzero(stamps["bucket"] >= self._live)
        return places, stamps[places]

    def rows(self, low: int, high: int) -> Rows:
        numbers = range(low >> _SUB_SHIFT, high >> _SUB_SHIFT)
        subs = ((number, self._subs[number]) for number in numbers)
        return in_order([rows_of(number, list(sub), sub.values()) for number, sub in subs if sub], self._live)


def _alive(sub: Sub, live: int) -> int:
    stamps = np.frombuffer(b"".join(sub.values()), STAMP_DTYPE)
    return int(np.count_nonzero(stamps["bucket"] >= live))


class Segment:
    """Number `number` of the log. One thread changes it, the rest is for any."""

    def __init__(self, number: int, source: Source, released: Iterable[bytes] = ()) -> None:
        self.number = number
        self.source = source
        """Replaced by another one of the same ids."""
        self.released: dict[bytes, None] = dict.fromkeys(released)
        """Ids that are not there any more. It only grows."""

    def find(self, batch: Encoded) -> tuple[Numbers, Stamps]:
        """As of Source, without those that are released."""
        places, stamps = self.source.find(batch)
        if not self.released or not len(places):
            return places, stamps
        kept = [batch.id(place) not in self.released for place in places.tolist()]
        return places[kept], stamps[kept]

    def rows(self, low: int, high: int, released: int) -> Rows:
        """As of Source, without the first so many that were released."""
        rows = self.source.rows(low, high)
        if not released or not len(rows):
            return rows
        gone = list(islice(self.released, released))
        maybe = np.flatnonzero(np.isin(rows.hashes, hash_ids(b"".join(gone))))
        ids = split_ids(unhash_ids(rows.hashes[maybe], rows.tails[maybe]))
        kept = np.ones(len(rows), np.bool_)
        kept[maybe] = list(map(set(ids).difference(gone).__contains__, ids))
        return Rows(rows.hashes[kept], rows.tails[kept], rows.stamps[kept])


class Merged:
    """What of some segments was alive when their merge was decided: the ids of buckets from `live` on, and
    not those that were released by then. No more are released in them from then on.
    """

    def __init__(self, inputs: Sequence[Segment], live: int) -> None:
        self.inputs = tuple(inputs)
        self.live = live

    @property
    def ids(self) -> int:
        return sum(segment.source.ids for segment in self.inputs)

    def dead(self, live: int) -> int:
        return sum(segment.source.dead(live) for segment in self.inputs)

    def find(self, batch: Encoded) -> tuple[Numbers, Stamps]:
        found = [segment.find(batch) for segment in self.inputs]
        places = np.concatenate([some for some, _ in found])
        stamps = np.concatenate([some for _, some in found])
        order = np.argsort(places, kind="stable")
        order = order[stamps["bucket"][order] >= self.live]
        return places[order], stamps[order]

    def rows(self, low: int, high: int) -> Rows:
        parts = [segment.rows(low, high, len(segment.released)) for segment in self.inputs]
        return in_order(parts, self.live)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where all ids are: each alive in one sub-dict or one segment. Replaced as a whole, never changed."""

    subs: Subs
    segments: tuple[Segment, ...]


_SUB_SHIFT: Final = 56
_NOTHING: Final[Sub] = {}
_NO_ROWS: Final = Rows(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, STAMP_DTYPE))


class Cut:
    """The ids of a layout that are alive at the moment it is made. The thread that changes the state notes
    what it is about to change; the thread that draws draws.
    """

    def __init__(self, layout: Layout, first_live: int) -> None:
        self._subs: list[Sub] = list(layout.subs)
        self._lengths = list(map(len, self._subs))
        self._segments = [(segment, len(segment.released)) for segment in layout.segments]
        self._first_live = first_live
        self._drawn = 0
        self._stamps: list[dict[bytes, bytes]] = [{} for _ in range(SUBS)]

    @property
    def drawn(self) -> bool:
        """Whether all of it is drawn. Any thread."""
        return self._drawn == SUBS

    def note_stamp(self, number: int, sub: Sub, key: bytes, stamp: bytes) -> None:
        """The stamp of `key` in a sub-dict is about to be replaced; it was `stamp`."""
        # Another dict may stand in its place by now: the one the cut holds does not change any more.
        if number >= self._drawn and self._subs[number] is sub:
            self._stamps[number].setdefault(key, stamp)

    def draw(self, number: int) -> Rows:
        """The ids of one sub-dict. Each is drawn once, in order: what is drawn is let go."""
        assert number == self._drawn, "sub-dicts are drawn in their order"
        parts = [self._draw_sub(number)] if self._lengths[number] else []
        edges = number << _SUB_SHIFT, number + 1 << _SUB_SHIFT  # of its hashes: from, and up to but without
        parts += [rows for one, gone in self._segments if len(rows := one.rows(*edges, gone))]
        self._drawn = number + 1
        self._subs[number], self._stamps[number] = _NOTHING, {}
        return in_order(parts, self._first_live)

    def _draw_sub(self, number: int) -> Rows:
        sub, count = self._subs[number], self._lengths[number]
        # Each list by one call, iterator and all: between two, the dict may grow, and an iterator breaks.
        keys = list(sub)[:count]
        stamps = list(sub.values())[:count]
        changed = self._stamps[number].copy()
        if changed:
            stamps = list(map(changed.get, keys, stamps))
        return rows_of(number, keys, stamps)


def rows_of(number: int, keys: list[bytes], stamps: Iterable[bytes]) -> Rows:
    """What is in sub-dict `number`, or in some of it."""
    return Rows(*split_keys(number, keys), np.frombuffer(b"".join(stamps), STAMP_DTYPE))


def together(parts: list[Rows]) -> Rows:
    """All rows of the parts, one after the other."""
    if not parts:
        return _NO_ROWS
    return Rows(
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.tails for part in parts]),
        np.concatenate([part.stamps for part in parts]),
    )


def in_order(parts: list[Rows], first_live: int) -> Rows:
    """What of the parts is alive, sorted by hash, and by second half where hashes are equal."""
    if not parts:
        return _NO_ROWS
    all_rows = together(parts)
    hashes, tails, stamps = all_rows.hashes, all_rows.tails, all_rows.stamps
    live = np.flatnonzero(stamps["bucket"] >= first_live)
    order = live[np.argsort(hashes[live])]
    ordered = hashes[order]
    if (ordered[1:] == ordered[:-1]).any():  # rare: sorting by both is slower
        order = live[np.lexsort((tails[live], hashes[live]))]
        ordered = hashes[order]
    return Rows(ordered, tails[order], stamps[order])
