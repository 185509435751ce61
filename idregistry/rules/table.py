"""Ids and their stamps, wherever they are: what is physical about a shard's state, none of its rules. Pure.

One thread changes it. `present` and `cut` may be called from any thread: they take the layout once, and what
they took stays whole. Dicts are looked at before segments, as ids only move from the former to the latter.

Freezing makes recent ids packed rows, and small segments one larger, in small steps. It changes no answer, so
each replica does it when it has time. It goes sub-dict by sub-dict: the rows that were there when the work
began, and the rows of the merged segments that belong to it, go to the new columns in order; a new dict with
the rest takes the old one's place. What is dead is left behind.

A snapshot is a head and chunks of ids; checksums are the log's matter. Little endian. Ids come in order of
their hashes, so a snapshot of one state is the same bytes on all replicas, whatever of it each keeps in dicts
and what in segments.

    head    magic (4) | protocol version (1) | MessagePack of Head
    chunk   MessagePack: fences; then holders, (number, name)
    chunk   ids (4) | ids x hash (8) | ids x second half (8) | ids x stamp (16, segments.STAMP)
"""

import struct
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice
from operator import is_not
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import (
    BUCKET_US,
    DEAD,
    SUBS,
    Counts,
    Encoded,
)
from idregistry.rules.segments import (
    GONE,
    STAMP_DTYPE,
    Columns,
    Cut,
    Layout,
    Numbers,
    Rows,
    Segment,
    Stamps,
    Sub,
    in_order,
    rows_of,
    stamps_of,
    subs_of,
)
from idregistry.rules.sharding import Configuration, Prepared
from photon.core.accounts import window_of
from photon.core.errors import CorruptStateError
from photon.core.protocol import is_read, not_read

One = TypeVar("One")
Mask = npt.NDArray[np.bool_]

FREEZE_IDS: Final = 1 << 20
"""So many recent ids are frozen at once: 0.1 GB of dicts, and few segments."""

FREEZE_IDS_MIN: Final = 1 << 16
FREEZE_AFTER_US: Final = 600_000_000
"""Fewer, but FREEZE_IDS_MIN at least, are frozen when so much of the leaders' time has passed."""

STEP_IDS: Final = 8_192
"""Ids moved in a step, or one sub-dict's where it has more: 3 ms, 10 ms for ten million ids."""

SUB_IDS_MAX: Final = 16_384
"""Ids taken from one sub-dict at a time: who could not tidy for long catches up in steps as short as any."""

DEAD_SHARE: Final = 0.25
"""A segment of which so much is dead is written anew."""


class Freezing:
    """Freezes the ids that are in the dicts of `layout`, if `recent`, and merges `inputs` with them.

    Of more than SUB_IDS_MAX in a dict, the first.
    """

    def __init__(self, layout: Layout, inputs: tuple[Segment, ...], recent: bool) -> None:
        self._lengths = [min(len(sub), SUB_IDS_MAX) if recent else 0 for sub in layout.subs]
        self._inputs = inputs
        self._others = tuple(segment for segment in layout.segments if segment not in inputs)
        self._bounds = [segment.bounds() for segment in inputs]
        self._columns = Columns(sum(self._lengths) + sum(segment.ids for segment in inputs))
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == SUBS

    def step(self, layout: Layout, first_live: int) -> Layout:
        """Move the next ids, at least STEP_IDS if there are so many; the layout that says so."""
        subs = list(layout.subs)
        moved = 0
        while moved < STEP_IDS and not self.done:
            moved += self._move(subs, first_live)
        made = Segment(self._columns, 0, self._next, 0, self._columns.filled)
        segments = (*self._others, *self._left(), made)
        return Layout(tuple(subs), tuple(segment for segment in segments if segment.ids))

    def _move(self, subs: list[Sub], first_live: int) -> int:
        """The ids of the next sub-dict; how many there were."""
        number = self._next
        sub, count = subs[number], self._lengths[number]
        parts = [
            segment.columns.rows(bounds[number], bounds[number + 1])
            for segment, bounds in zip(self._inputs, self._bounds, strict=True)
            if bounds[number] < bounds[number + 1]
        ]
        if count:
            parts.append(rows_of(number, list(islice(sub, count)), islice(sub.values(), count)))
            subs[number] = dict(islice(sub.items(), count, None))
        self._next = number + 1
        self._columns.append(number, in_order(parts, first_live))
        return sum(map(len, parts))

    def _left(self) -> tuple[Segment, ...]:
        """What is not moved yet."""
        return tuple(
            Segment(segment.columns, self._next, SUBS, bounds[self._next], segment.stop)
            for segment, bounds in zip(self._inputs, self._bounds, strict=True)
        )


def to_merge(segments: tuple[Segment, ...], ids: int) -> tuple[Segment, ...]:
    """The segments to merge with `ids` new ones: while the next is no larger than all before together."""
    chosen: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: segment.ids):
        if segment.ids > ids:
            break
        chosen.append(segment)
        ids += segment.ids
    return tuple(chosen)


class IdTable:
    """Key -> stamp, in dicts while ids are new, in segments later. `present` and `cut` are for any thread,
    the rest for the one that changes it.
    """

    def __init__(self, frozen: Columns | None = None) -> None:
        """`frozen`: ids that are there from the beginning."""
        segments = (Segment(frozen, 0, SUBS, 0, frozen.filled),) if frozen and frozen.filled else ()
        self._layout = Layout(tuple({} for _ in range(SUBS)), segments)
        self._cuts: list[weakref.ref[Cut]] = []
        self._freezing: Freezing | None = None
        self._frozen_us: int | None = None
        self._to_check: list[Segment] = []
        self._checked_live: int | None = None

    def present(self, batch: Encoded, live: int) -> Mask:
        """Which ids have a stamp that is alive."""
        layout = self._layout
        present: Mask = stamps_of(layout.subs, batch)["bucket"] >= live
        for segment in layout.segments:
            present |= segment.live(segment.find(batch.hashes, batch.tails), live)
        return present

    def cut(self, live: int) -> Cut:
        """Of what is alive now. Changes in place that come while it is drawn may show in it."""
        return Cut(self._layout, live)

    def exact_cut(self, live: int) -> Cut:
        """Of what is alive now, whatever changes while it is drawn."""
        cut = self.cut(live)
        self._cuts = [known for known in self._cuts if known() is not None]
        self._cuts.append(weakref.ref(cut))
        return cut

    def any_frozen(self, batch: Encoded, live: int) -> bool:
        """Whether one of the ids is alive in a segment."""
        return any(True for _ in self._alive(batch, live))

    def frozen(self, batch: Encoded, live: int) -> dict[int, tuple[Segment, int]]:
        """Where in segments the ids are that are alive there: place in the batch -> segment and row."""
        return {
            place: (segment, row)
            for segment, places, rows in self._alive(batch, live)
            for place, row in zip(places.tolist(), rows.tolist(), strict=True)
        }

    def held(self, batch: Encoded, live: int) -> Stamps:
        """N stamps (a copy), each the id's that is alive where it has one."""
        held = stamps_of(self._layout.subs, batch).copy()
        for segment, places, rows in self._alive(batch, live):
            held[places] = segment.columns.stamps(rows)
        return held

    def _alive(self, batch: Encoded, live: int) -> Iterator[tuple[Segment, Numbers, Numbers]]:
        """Each segment that has any of the ids alive, their places in the batch, and their rows."""
        for segment in self._layout.segments:
            rows = segment.find(batch.hashes, batch.tails)
            places = np.flatnonzero(segment.live(rows, live))
            if len(places):
                yield segment, places, rows[places]

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

    def release_frozen(self, number: int, segment: Segment, row: int) -> None:
        """Take out an id that is in a segment."""
        for cut in self._live_cuts():
            cut.note_row(number, segment.columns, row)
        segment.columns.release(row)

    def _live_cuts(self) -> Iterator[Cut]:
        for reference in self._cuts:
            cut = reference()
            if cut is not None and not cut.drawn:
                yield cut

    def tidy(self, time_us: int, live: int) -> bool:
        """One step of freezing recent ids and dropping dead ones; whether more is to be done."""
        if self._freezing is None:
            self._freezing = self._due_freezing(time_us) or self._due_rewriting(live)
        if self._freezing is None:
            return bool(self._to_check)
        self._layout = self._freezing.step(self._layout, live)
        if self._freezing.done:
            self._freezing, self._frozen_us = None, time_us
            self._checked_live = None
        return True

    def _due_freezing(self, time_us: int) -> Freezing | None:
        layout = self._layout
        recent = sum(map(len, layout.subs))
        if self._frozen_us is None or not recent:
            self._frozen_us = time_us
        waited = time_us - self._frozen_us >= FREEZE_AFTER_US
        if recent < FREEZE_IDS and not (waited and recent >= FREEZE_IDS_MIN):
            return None
        return Freezing(layout, to_merge(layout.segments, recent), recent=True)

    def _due_rewriting(self, live: int) -> Freezing | None:
        """Look at one segment; whether it is worth while to write it anew without what is dead."""
        if self._checked_live != live:
            self._checked_live = live
            self._to_check = list(self._layout.segments)
        if not self._to_check:
            return None
        segment = self._to_check.pop()
        buckets = segment.columns.buckets[segment.start : segment.stop]
        dead = np.count_nonzero(buckets < live)  # 4 ms for ten million
        if dead == segment.ids:
            left = tuple(other for other in self._layout.segments if other is not segment)
            self._layout = Layout(self._layout.subs, left)
            return None
        if dead < segment.ids * DEAD_SHARE:
            return None
        return Freezing(self._layout, (segment,), recent=False)


CHUNK_IDS_MAX: Final = 1 << 16
CHUNK_NAMES_MAX: Final = 1 << 10
"""Of holders or fences: at most about 1 MiB."""

_MAGIC: Final = b"PhID"
_HEAD_AT: Final = len(_MAGIC) + 1
_COUNT: Final = struct.Struct("<I")
_HALF_BYTES: Final = 8


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a snapshot says first. `fences`, `holders`, `ids`: how many follow, in this order."""

    boundary_us: int
    time_us: int
    latest_us: int
    ids: int
    configuration: Configuration | None
    prepared: Prepared | None
    fences: int
    holders: int
    last_holder: int
    protocol: int
    bucket_us: int = BUCKET_US


def pack(head: Head, names: Mapping[int, bytes], fences: Sequence[int], cut: Cut) -> Iterator[bytes]:
    """The chunks, drawn one by one while the state may go on changing. `names`: of holders, by number."""
    yield _MAGIC + bytes((head.protocol,)) + msgspec.msgpack.encode(head)
    for some in (fences, list(names.items())):
        for start in range(0, len(some), CHUNK_NAMES_MAX):
            yield msgspec.msgpack.encode(some[start : start + CHUNK_NAMES_MAX])
    drawn = 0
    for number in range(SUBS):
        rows = cut.draw(number)
        drawn += len(rows)
        for start in range(0, len(rows), CHUNK_IDS_MAX):
            yield _pack_chunk(rows.part(start, start + CHUNK_IDS_MAX))
    assert drawn == head.ids, f"a cut of {head.ids} ids has {drawn}"


def _pack_chunk(rows: Rows) -> bytes:
    return _COUNT.pack(len(rows)) + rows.hashes.tobytes() + rows.tails.tobytes() + rows.stamps.tobytes()


def unpack(chunks: Iterable[bytes]) -> tuple[Head, dict[int, bytes], list[int], Columns, Counts]:
    """The head, the holders' names, the fences, all ids, and how many each holder has in each bucket.
    CorruptStateError for what `pack` did not write."""
    drawn = iter(chunks)
    first = next(drawn, b"")
    magic, form, packed = first[: len(_MAGIC)], first[len(_MAGIC) : _HEAD_AT], first[_HEAD_AT:]
    if magic != _MAGIC or not is_read(ord(form or b"\0")):
        raise _corrupt(f"it is of {not_read(ord(form or bytes(1)))}")
    try:
        head = msgspec.msgpack.decode(packed, type=Head)
    except (msgspec.DecodeError, ValueError) as error:
        raise _corrupt(f"its head can't be read ({error})") from error
    if head.bucket_us != BUCKET_US:
        raise _corrupt(f"its buckets span {head.bucket_us} us, this program's {BUCKET_US}")
    try:
        columns = Columns(head.ids)
    except (MemoryError, ValueError, OverflowError) as error:
        raise _corrupt(f"its head says {head.ids} ids, more than memory holds") from error
    fences = _unpack_some(drawn, head.fences, list[int])
    names = dict(_unpack_some(drawn, head.holders, list[tuple[int, bytes]]))
    counts = Counts()
    counts.tally.move_on(window_of(head.time_us))
    for rows in _unpack_rows(drawn, head, np.array(sorted(names), np.int64)):
        columns.extend(rows)
        stamps = rows.stamps
        counts.add_each(stamps["bucket"], stamps["holder"], stamps["time_us"], rows.hashes)
    columns.index_all()
    return head, names, fences, columns, counts


def _unpack_some(chunks: Iterator[bytes], count: int, kind: type[list[One]]) -> list[One]:
    found: list[One] = []
    while len(found) < count:
        try:
            some = msgspec.msgpack.decode(next(chunks, b""), type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise _corrupt(f"its fences or holders can't be read ({error})") from error
        if not some:
            break
        found += some
    if len(found) != count:
        raise _corrupt(f"it holds {len(found)} fences or holders, its head says {count}")
    return found


def _unpack_rows(chunks: Iterator[bytes], head: Head, known: npt.NDArray[np.int64]) -> Iterator[Rows]:
    total = 0
    last = (-1, -1)
    for chunk in chunks:
        try:
            rows = _unpack_chunk(chunk)
        except (struct.error, ValueError) as error:
            raise _corrupt(f"a chunk of {len(chunk)} bytes can't be read ({error})") from error
        if (int(rows.hashes[0]), int(rows.tails[0])) <= last or not _ascends(rows):
            raise _corrupt("its ids are not in order")
        nobodys = ~np.isin(rows.stamps["holder"], known)
        if (nobodys | (rows.stamps["bucket"] == DEAD)).any():
            raise _corrupt("an id has a token or a bucket that can't be")
        last = (int(rows.hashes[-1]), int(rows.tails[-1]))
        total += len(rows)
        if total > head.ids:
            break
        yield rows
    if total != head.ids:
        raise _corrupt(f"it holds {total} ids, its head says {head.ids}")


def _unpack_chunk(chunk: bytes) -> Rows:
    (count,) = _COUNT.unpack_from(chunk)
    tails_at = _COUNT.size + count * _HALF_BYTES
    stamps_at = tails_at + count * _HALF_BYTES
    if count == 0 or len(chunk) != stamps_at + count * STAMP_DTYPE.itemsize:
        raise ValueError(f"it says that it has {count} ids")
    return Rows(
        np.frombuffer(chunk, "<u8", count, _COUNT.size),
        np.frombuffer(chunk, "<u8", count, tails_at),
        np.frombuffer(chunk, STAMP_DTYPE, count, stamps_at),
    )


def _ascends(rows: Rows) -> bool:
    hashes, tails = rows.hashes, rows.tails
    after = (hashes[1:] > hashes[:-1]) | ((hashes[1:] == hashes[:-1]) & (tails[1:] > tails[:-1]))
    return bool(after.all())


def _corrupt(what: str) -> CorruptStateError:
    """A snapshot that can't be restored, and the mend."""
    return CorruptStateError(
        f"a registry snapshot can't be used: {what}; remove the replica's directory to let it be rebuilt "
        "from its peers, provided that a majority of them is healthy"
    )
