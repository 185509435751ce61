"""A shard's snapshot: a head and chunks; checksums are the log's matter. Pure.

Ids that are in dicts stand in it, in order of their hashes; the others in the files of their segments, which
it names. Little endian.

    head    magic (4) | protocol version (1) | MessagePack of Head
    chunk   MessagePack: fences; then holders, (number, name); then the tally's rows (accounts.Tally); then
            ids that are released in segments, (number of the segment, id)
    chunk   ids (4) | ids x hash (8) | ids x second half (8) | ids x stamp (16, segments.STAMP)
    end     no ids (4) | how many there were (8)
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import DEAD, KEY_BYTES, SUBS, Counts
from idregistry.rules.segments import (
    STAMP_DTYPE,
    Cut,
    Layout,
    Merged,
    Rows,
    Segment,
    Source,
    Sub,
)
from idregistry.rules.sharding import Configuration, Prepared
from idregistry.rules.table import IdTable
from photon.core.accounts import window_of
from photon.core.errors import CorruptStateError
from photon.core.ids import ID_BYTES
from photon.core.protocol import is_read, not_read
from photon.raft.port import REPLACE_IT

One = TypeVar("One")

CHUNK_IDS_MAX: Final = 1 << 16
CHUNK_ROWS_MAX: Final = 1 << 10
"""Of holders, fences and all else: at most about 1 MiB."""

_MAGIC: Final = b"PhID"
_HEAD_AT: Final = len(_MAGIC) + 1
_COUNT: Final = struct.Struct("<I")
_END: Final = struct.Struct("<IQ")
_HALF_BYTES: Final = 8
_SUB_SHIFT: Final = np.uint64(56)


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a segment is: in its file; or, while a merge is under way, in others, of buckets from `live`."""

    number: int
    live: int = DEAD
    inputs: tuple["Place", ...] = ()


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a snapshot says first. `ids`: of all. `fences`, `holders`, `tally`, `released`: how many rows of
    each follow, in this order."""

    boundary_us: int
    time_us: int
    latest_us: int
    ids: int
    configuration: Configuration | None
    prepared: Prepared | None
    former: tuple[int, ...]
    fences: int
    holders: int
    tally: int
    released: int
    last_holder: int
    next_segment: int
    segments: tuple[Place, ...]
    protocol: int


def place_of(segment: Segment) -> Place:
    source = segment.source
    if isinstance(source, Merged):
        return Place(segment.number, source.live, tuple(map(place_of, source.inputs)))
    return Place(segment.number)


def released_of(segments: Iterable[Segment]) -> list[tuple[int, bytes]]:
    """What is released of them, and of what they are merged from."""
    found: list[tuple[int, bytes]] = []
    for segment in segments:
        if isinstance(segment.source, Merged):
            found += released_of(segment.source.inputs)
        found += [(segment.number, key) for key in segment.released]
    return found


def pack(head: Head, lists: Sequence[Sequence[Any]], cut: Cut) -> Iterator[bytes]:
    """The chunks, drawn one by one while the state may go on changing. `lists`: fences, holders, tally and
    released, none of which changes any more."""
    yield _MAGIC + bytes((head.protocol,)) + msgspec.msgpack.encode(head)
    for some in lists:
        for start in range(0, len(some), CHUNK_ROWS_MAX):
            yield msgspec.msgpack.encode(some[start : start + CHUNK_ROWS_MAX])
    drawn = 0
    for number in range(SUBS):
        rows = cut.draw(number)
        drawn += len(rows)
        for start in range(0, len(rows), CHUNK_IDS_MAX):
            part = rows.part(start, start + CHUNK_IDS_MAX)
            yield b"".join(
                (_COUNT.pack(len(part)), part.hashes.tobytes(), part.tails.tobytes(), part.stamps.tobytes())
            )
    yield _END.pack(0, drawn)


def unpack(
    chunks: Iterable[bytes], open_file: Callable[[int], Source]
) -> tuple[Head, dict[int, bytes], list[int], IdTable, Counts]:
    """The head, the holders' names, the fences, all ids, and how many each holder has in each bucket.
    `open_file`: a segment's, by its number. CorruptStateError for what `pack` did not write."""
    drawn = iter(chunks)
    head = _unpack_head(next(drawn, b""))
    fences = _unpack_some(drawn, head.fences, list[int])
    names = dict(_unpack_some(drawn, head.holders, list[tuple[int, bytes]]))
    tally = _unpack_some(drawn, head.tally, list[tuple[int, int | None, int, int]])
    released: dict[int, list[bytes]] = {}
    for number, key in _unpack_some(drawn, head.released, list[tuple[int, bytes]]):
        released.setdefault(number, []).append(key)
    counts = Counts()
    counts.tally.move_on(window_of(head.time_us))
    counts.tally.put(tally)
    counts.total = head.ids
    subs: tuple[Sub, ...] = tuple({} for _ in range(SUBS))
    for rows in _unpack_rows(drawn, np.array(sorted(names), np.int64)):
        _put(subs, rows)
    segments = tuple(_segment(place, released, open_file) for place in head.segments)
    return head, names, fences, IdTable(Layout(subs, segments), head.next_segment), counts


def _unpack_head(first: bytes) -> Head:
    magic, form, packed = first[: len(_MAGIC)], first[len(_MAGIC) : _HEAD_AT], first[_HEAD_AT:]
    if magic != _MAGIC or not is_read(ord(form or b"\0")):
        raise _corrupt(f"it is of {not_read(ord(form or bytes(1)))}")
    try:
        return msgspec.msgpack.decode(packed, type=Head)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _corrupt(f"its head can't be read ({error})") from error


def _segment(
    place: Place, released: Mapping[int, list[bytes]], open_file: Callable[[int], Source]
) -> Segment:
    source: Source
    if place.inputs:
        source = Merged([_segment(one, released, open_file) for one in place.inputs], place.live)
    else:
        source = open_file(place.number)
    return Segment(place.number, source, released.get(place.number, ()))


def _put(subs: tuple[Sub, ...], rows: Rows) -> None:
    """The ids into their dicts. Stamps that are alike are one object."""
    distinct, of = np.unique(rows.stamps.view(f"V{STAMP_DTYPE.itemsize}"), return_inverse=True)
    stamps = [one.tobytes() for one in distinct]
    keys = np.empty((len(rows), 2), "<u8")
    keys[:, 0], keys[:, 1] = rows.hashes.byteswap(), rows.tails
    raw = keys.tobytes()
    at = 1
    numbers = (rows.hashes >> _SUB_SHIFT).tolist()
    for number, row in zip(numbers, of.tolist(), strict=True):
        subs[number][raw[at : at + KEY_BYTES]] = stamps[row]
        at += ID_BYTES


def _unpack_some(chunks: Iterator[bytes], count: int, kind: type[list[One]]) -> list[One]:
    found: list[One] = []
    while len(found) < count:
        try:
            some = msgspec.msgpack.decode(next(chunks, b""), type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise _corrupt(f"its fences, holders or accounts can't be read ({error})") from error
        if not some:
            break
        found += some
    if len(found) != count:
        raise _corrupt(f"it holds {len(found)} fences, holders or accounts, its head says {count}")
    return found


def _unpack_rows(chunks: Iterator[bytes], known: npt.NDArray[np.int64]) -> Iterator[Rows]:
    total, last, end = 0, (-1, -1), b""
    for chunk in chunks:
        if chunk[: _COUNT.size] == _COUNT.pack(0):
            end = chunk
            break
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
        yield rows
    if end != _END.pack(0, total) or next(chunks, None) is not None:
        raise _corrupt(f"it holds {total} ids, and its end does not say so")


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
    return CorruptStateError(f"a registry snapshot can't be used: {what}; {REPLACE_IT}")
