"""Ids and their stamps, wherever they are: what is physical about a shard's state, none of its rules. Pure.

One thread changes it. `held` and `cut` may be called from any thread: what they
took of the layout stays whole. Dicts are looked at before segments, as ids only move from the former to the
latter.

Which ids make a segment is decided by commands. `Writing` brings one into its file, piece by piece in another
thread.
"""

import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import is_not
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import DEAD, SUBS, Encoded
from idregistry.rules.segments import (
    GONE,
    Cut,
    Dicts,
    Layout,
    Merged,
    Numbers,
    Rows,
    Segment,
    Source,
    Stamps,
    Subs,
    stamps_of,
    subs_of,
)
from photon.raft.port import FileId

Mask = npt.NDArray[np.bool_]

SEAL_IDS: Final = 1 << 20
"""So many recent ids are sealed at once: 0.1 GB of dicts, and few segments."""

SEAL_IDS_MIN: Final = 1 << 16
SEAL_AFTER_US: Final = 600_000_000
"""Fewer, but SEAL_IDS_MIN at least, are sealed when so much of the leaders' time has passed."""

MERGE_SEGMENTS: Final = 4
"""So many segments of about one size become one."""
MERGE_IDS_MAX: Final = 1 << 28
"""None becomes larger: 9 GB, and as much room on the disk while it is made."""
DEAD_SHARE: Final = 0.5
"""A segment of which so much is dead or released is written anew."""

PART_IDS: Final = 1 << 15
"""About so many are written at a time: no call keeps the raft thread from running for longer than 2 ms, and
snapshots and other groups get their turn between."""
CROWD: Final = 2 * MERGE_SEGMENTS
"""So many segments of about one size pile up only where merges can't keep up."""


HASH_BITS: Final = 64


class Writer(Protocol):
    """Who brings a segment into a file."""

    def write(self, rows: Rows) -> None: ...
    def finish(self) -> None: ...
    def adopt(self) -> Source: ...
    def drop(self) -> None: ...


class SegmentFiles(Protocol):
    """Where the segments of a shard are kept."""

    def writer(self, number: int, ids_max: int) -> Writer: ...
    def open(self, number: int) -> Source:
        """One that is there. CorruptStateError, StorageError."""

    def ids_of(self, sources: Sequence[Source]) -> list[FileId]: ...
    def verify(self, path: Path, file: FileId) -> bool: ...


class Writing:
    """Of one segment. `step` is for a background thread, the rest for the one that changes the table."""

    def __init__(self, segment: Segment, files: SegmentFiles) -> None:
        self.segment = segment
        self.done = False
        self._source = segment.source
        self._files = files
        self._writer: Writer | None = None
        self._parts: deque[tuple[int, int]] = deque()

    def _ranges(self, ids: int) -> Iterator[tuple[int, int]]:
        """From which hash to which: of about PART_IDS, but whole sub-dicts of what is in dicts."""
        bits = (ids // PART_IDS).bit_length()
        if isinstance(self._source, Dicts):
            bits = min(bits, (SUBS - 1).bit_length())
        width = 1 << HASH_BITS - bits
        yield from ((at, at + width) for at in range(0, 1 << HASH_BITS, width))

    def step(self) -> None:
        """Write some more; durable with the last. CorruptStateError, StorageError."""
        if self._writer is None:
            live = self._source.live if isinstance(self._source, Merged) else DEAD
            ids = sum(part.ids - part.dead(live) for part in _parts(self._source))
            self._writer = self._files.writer(self.segment.number, ids)
            self._parts.extend(self._ranges(ids))
        while self._parts:
            rows = self._source.rows(*self._parts.popleft())
            self._writer.write(rows)
            if len(rows) and self._parts:
                return
        self._writer.finish()
        self.done = True

    def put(self) -> None:
        """The file takes the place of what it was made of. StorageError."""
        assert self._writer is not None
        self.segment.source = self._writer.adopt()

    def drop(self) -> None:
        if self._writer is not None:
            self._writer.drop()


def _parts(source: Source) -> list[Source]:
    return [one.source for one in source.inputs] if isinstance(source, Merged) else [source]


def is_written(segment: Segment) -> bool:
    return not isinstance(segment.source, Dicts | Merged)


def files_of(segments: Sequence[Segment]) -> list[Source] | None:
    """All files that segments are in, or are merged from; None where one is not in any yet."""
    found: list[Source] = []
    for segment in segments:
        match segment.source:
            case Dicts():
                return None
            case Merged() as merged:
                below = files_of(merged.inputs)
                if below is None:
                    return None
                found += below
            case source:
                found.append(source)
    return found


def to_merge(segments: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """The numbers of those to merge, of (number, ids, how many of them are dead) in order of age; or none.

    What is wholly dead goes first and at once. Else MERGE_SEGMENTS of about one size, the smallest such; or
    one that has much that is dead.
    """
    if all_dead := tuple(number for number, ids, dead in segments if ids and dead == ids):
        return all_dead
    sizes: dict[int, list[tuple[int, int]]] = {}
    for number, ids, dead in segments:
        sizes.setdefault(_size_class(ids), []).append((number, ids - dead))
    for _, alike in sorted(sizes.items()):
        chosen = alike[:MERGE_SEGMENTS]
        if len(chosen) == MERGE_SEGMENTS and sum(ids for _, ids in chosen) <= MERGE_IDS_MAX:
            return tuple(number for number, _ in chosen)
    much = (number for number, ids, dead in segments if ids >= SEAL_IDS_MIN and dead >= ids * DEAD_SHARE)
    return tuple(much)[:1]


def _size_class(ids: int) -> int:
    return (ids // SEAL_IDS_MIN).bit_length() // 2


class IdTable:
    """Key -> stamp, in dicts while ids are new, in segments later. `held` and `cut` are for any thread, the
    rest for the one that changes it."""

    def __init__(self, layout: Layout | None = None, next_number: int = 1) -> None:
        self._layout = layout or Layout(_new_subs(), ())
        self.next_number = next_number
        """Of the next segment."""
        self._cuts: list[weakref.ref[Cut]] = []
        self._sealed_us: int | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of their numbers. Any thread."""
        return self._layout.segments

    def cut(self, live: int) -> Cut:
        """Of what is alive now. Changes in place that come while it is drawn may show in it."""
        return Cut(self._layout, live)

    def exact_cut(self, live: int) -> Cut:
        """Of what is alive in the dicts now, whatever changes while it is drawn."""
        cut = Cut(Layout(self._layout.subs, ()), live)
        self._cuts = [known for known in self._cuts if known() is not None]
        self._cuts.append(weakref.ref(cut))
        return cut

    def any_sealed(self, batch: Encoded, live: int) -> bool:
        """Whether one of the ids is alive in a segment."""
        return any(True for _ in self._alive(batch, live))

    def sealed(self, batch: Encoded, live: int) -> dict[int, tuple[Segment, bytes]]:
        """Where in segments the ids are that are alive there: place in the batch -> segment and stamp."""
        return {
            place: (segment, stamp.tobytes())
            for segment, places, stamps in self._alive(batch, live)
            for place, stamp in zip(places.tolist(), stamps, strict=True)
        }

    def held(self, batch: Encoded, live: int) -> Stamps:
        """N stamps (a copy), each the id's that is alive where it has one."""
        held = stamps_of(self._layout.subs, batch).copy()
        for _, places, stamps in self._alive(batch, live):
            held[places] = stamps
        return held

    def _alive(self, batch: Encoded, live: int) -> Iterator[tuple[Segment, Numbers, Stamps]]:
        """Each segment that has any of the ids alive, their places in the batch, and their stamps."""
        for segment in self._layout.segments:
            places, stamps = segment.find(batch)
            if not len(places):
                continue
            alive = stamps["bucket"] >= live
            if alive.any():
                yield segment, places[alive], stamps[alive]

    def stamp(self, number: int, key: bytes) -> bytes:
        """An id's stamp in its dict, GONE where there is none."""
        return self._layout.subs[number].get(key, GONE)

    def insert(self, batch: Encoded, stamps: list[bytes]) -> list[bytes]:
        """Give each id without any its stamp; the stamps the ids have now. One C-level pass."""
        return list(map(dict.setdefault, subs_of(self._layout.subs, batch), batch.keys, stamps))

    def put(self, number: int, key: bytes, stamp: bytes) -> None:
        """Give an id a stamp in its dict, whatever it had."""
        sub = self._layout.subs[number]
        old = sub.get(key)
        if old is not None:
            for cut in self._live_cuts():
                cut.note_stamp(number, sub, key, old)
        sub[key] = stamp

    def put_each(self, batch: Encoded, stamps: list[bytes], mask: Mask) -> None:
        """The same of the ids flagged in `mask`, which differ. Python work for those only that have one."""
        flags = mask.tolist()
        subs, keys = bytes(compress(batch.subs, flags)), list(compress(batch.keys, flags))
        given = list(compress(stamps, flags))
        found = list(map(dict.setdefault, map(self._layout.subs.__getitem__, subs), keys, given))
        for row in compress(range(len(given)), map(is_not, found, given)):
            self.put(subs[row], keys[row], given[row])

    def _live_cuts(self) -> Iterator[Cut]:
        for reference in self._cuts:
            cut = reference()
            if cut is not None and not cut.drawn:
                yield cut

    def seal(self, number: int, live: int) -> int:
        """What is alive in the dicts is this segment, if it is the next one; the number of the next."""
        if number == self.next_number:
            subs, segments = self._layout.subs, self._layout.segments
            self._layout = Layout(_new_subs(), (*segments, Segment(number, Dicts(subs, live))))
            self.next_number += 1
        return self.next_number

    def merge(self, number: int, inputs: Sequence[int], live: int) -> int:
        """What is alive of these segments is this one, if it is the next; the number of the next."""
        chosen = [segment for segment in self._layout.segments if segment.number in inputs]
        if number == self.next_number and chosen and len(chosen) == len(inputs):
            left = tuple(segment for segment in self._layout.segments if segment not in chosen)
            self._layout = Layout(self._layout.subs, (*left, Segment(number, Merged(chosen, live))))
            self.next_number += 1
        return self.next_number

    def due(self, time_us: int, live: int) -> tuple[int, ...] | None:
        """The numbers of the segments to merge; none of them: the dicts are to be sealed; None: nothing is
        due. One of each at a time: a merge may take a minute, and dicts are sealed meanwhile."""
        segments = self._layout.segments
        if any(isinstance(segment.source, Dicts) for segment in segments):
            return None
        recent = sum(map(len, self._layout.subs))
        if self._sealed_us is None or recent < SEAL_IDS_MIN:
            self._sealed_us = time_us
        waited = time_us - self._sealed_us >= SEAL_AFTER_US
        if recent >= SEAL_IDS or waited:
            self._sealed_us = None
            return ()
        if not all(map(is_written, segments)):
            return None
        known = []
        for segment in segments:
            ids, dead = segment.source.ids, segment.source.dead(live)
            known.append((segment.number, ids, min(ids, dead + len(segment.released))))
        return to_merge(known) or None

    def pressure(self) -> float:
        """As of port.Filing: by how much of the next segment is there, by those in memory that wait for the
        one at work (a replica that catches up seals faster than it writes), by how many are to be merged."""
        waiting = sum(isinstance(one.source, Dicts) for one in _all_of(self._layout.segments)) - 1
        recent = sum(map(len, self._layout.subs)) / SEAL_IDS
        written = (one.source.ids for one in self._layout.segments if is_written(one))
        to_grow = (ids for ids in written if ids <= MERGE_IDS_MAX // MERGE_SEGMENTS)
        crowd = max(Counter(map(_size_class, to_grow)).values(), default=0)
        return min(1.0, max(recent, waiting, crowd / CROWD))

    def has(self, segment: Segment) -> bool:
        """Whether it is here, or is to be merged."""
        return any(one is segment for one in _all_of(self._layout.segments))

    def unwritten(self) -> Segment | None:
        """The next segment to be written: those in dicts, which take memory, before merges, whose inputs are
        written then; None where all are."""
        waiting = (segment for segment in _all_of(self._layout.segments) if not is_written(segment))
        return min(waiting, key=lambda one: (isinstance(one.source, Merged), one.number), default=None)


def _all_of(segments: Sequence[Segment]) -> list[Segment]:
    """With those that are merged, in the order of their numbers."""
    found: list[Segment] = []
    for segment in segments:
        if isinstance(segment.source, Merged):
            found += _all_of(segment.source.inputs)
        found.append(segment)
    return sorted(found, key=lambda segment: segment.number)


def _new_subs() -> Subs:
    return tuple({} for _ in range(SUBS))
