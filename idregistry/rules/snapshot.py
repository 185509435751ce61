"""A shard's state as chunks of bytes, for snapshots. Pure; checksums are the log's matter.

    head    magic (4) | version (1) | MessagePack of Head
    chunk   ids (4) | ids x hash (8) | ids x second half (8) | ids x stamp (16, segments.STAMP)

Little endian. Ids come in order of their hashes, so a snapshot of one state is the same bytes on all
replicas, whatever of it each keeps in dicts and what in segments.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from idregistry.rules.packing import BUCKET_US, DEAD, NOBODY, SUBS, BucketCounts
from idregistry.rules.segments import STAMP_DTYPE, Columns, Cut, Rows
from idregistry.rules.sharding import Configuration, Prepared
from photon.core.errors import CorruptStateError

VERSION: Final = 5
CHUNK_IDS_MAX: Final = 1 << 16

_MAGIC: Final = b"PhID"
_FORM: Final = _MAGIC + bytes((VERSION,))
_COUNT: Final = struct.Struct("<I")
_HALF_BYTES: Final = 8


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a snapshot says before its ids. `ids` is how many follow."""

    boundary_us: int
    time_us: int
    latest_us: int
    ids: int
    configuration: Configuration | None
    prepared: Prepared | None
    fences: list[int]
    holders: list[bytes]
    bucket_us: int = BUCKET_US


def pack(head: Head, cut: Cut) -> Iterator[bytes]:
    """The chunks, drawn one by one while the state may go on changing."""
    yield _FORM + msgspec.msgpack.encode(head)
    drawn = 0
    for number in range(SUBS):
        rows = cut.draw(number)
        drawn += len(rows)
        for start in range(0, len(rows), CHUNK_IDS_MAX):
            yield _pack_chunk(rows.part(start, start + CHUNK_IDS_MAX))
    assert drawn == head.ids, f"a cut of {head.ids} ids has {drawn}"


def _pack_chunk(rows: Rows) -> bytes:
    return _COUNT.pack(len(rows)) + rows.hashes.tobytes() + rows.tails.tobytes() + rows.stamps.tobytes()


def unpack(chunks: Iterable[bytes]) -> tuple[Head, Iterator[Rows]]:
    """The head, and the rows as they are drawn. CorruptStateError where a chunk is not what pack wrote."""
    drawn = iter(chunks)
    first = next(drawn, b"")
    if not first.startswith(_FORM):
        raise corrupt(f"it is of form {first[: len(_FORM)]!r}, this program reads {_FORM!r}")
    try:
        head = msgspec.msgpack.decode(first[len(_FORM) :], type=Head)
    except msgspec.DecodeError as error:
        raise corrupt(f"its head can't be read ({error})") from error
    if head.bucket_us != BUCKET_US:
        raise corrupt(f"its buckets span {head.bucket_us} us, this program's {BUCKET_US}")
    return head, _unpack_rows(drawn, head)


def _unpack_rows(chunks: Iterator[bytes], head: Head) -> Iterator[Rows]:
    total = 0
    last = (-1, -1)
    for chunk in chunks:
        try:
            rows = _unpack_chunk(chunk)
        except (struct.error, ValueError) as error:
            raise corrupt(f"a chunk of {len(chunk)} bytes can't be read ({error})") from error
        if (int(rows.hashes[0]), int(rows.tails[0])) <= last or not _ascends(rows):
            raise corrupt("its ids are not in order")
        holders = rows.stamps["holder"]
        impossible = (holders == NOBODY) | (holders > len(head.holders)) | (rows.stamps["bucket"] == DEAD)
        if impossible.any():
            raise corrupt("an id has a token or a bucket that can't be")
        last = (int(rows.hashes[-1]), int(rows.tails[-1]))
        total += len(rows)
        if total > head.ids:
            break
        yield rows
    if total != head.ids:
        raise corrupt(f"it holds {total} ids, its head says {head.ids}")


def gather(head: Head, parts: Iterable[Rows]) -> tuple[Columns, BucketCounts]:
    """All rows in columns, and how many each bucket has."""
    try:
        columns = Columns(head.ids)
    except (MemoryError, ValueError, OverflowError) as error:
        raise corrupt(f"its head says {head.ids} ids, more than memory holds") from error
    counts = BucketCounts()
    for rows in parts:
        columns.extend(rows.hashes, rows.tails, rows.stamps)
        counts.add_each(rows.stamps["bucket"])
    columns.index_all()
    return columns, counts


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


def corrupt(what: str) -> CorruptStateError:
    """A snapshot that can't be restored, and the mend."""
    return CorruptStateError(
        f"a registry snapshot can't be used: {what}; remove the replica's directory to let it be rebuilt "
        "from its peers, provided that a majority of them is healthy"
    )
