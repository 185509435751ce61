"""A shard's state as chunks of bytes, for snapshots. Pure; checksums are the log's matter.

    head    magic (4) | version (1) | bucket us (8) | boundary us (8) | leader time us (8) | ids (8)
    chunk   parts (4) | tokens (4) | ids (4) | parts x (bucket number (8), ids (4)) | tokens x length (4)
            | tokens | ids x token index (4) | ids x 16

Little endian. A chunk has its own table of the distinct tokens of its ids.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from idregistry.buckets import BUCKET_US, Cut
from photon.core.errors import CorruptStateError
from photon.core.ids import ID_BYTES

VERSION: Final = 1
CHUNK_IDS_MAX: Final = 16_384

_MAGIC: Final = b"PhID"
_HEAD: Final = struct.Struct("<4sBqqqQ")
_CHUNK: Final = struct.Struct("<III")
_PART: Final = struct.Struct("<qI")

Part = tuple[int, bytes, list[bytes]]
"""Bucket number, ids (16 x N), N tokens."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a snapshot says before its ids. `ids` is how many follow."""

    boundary_us: int
    time_us: int
    ids: int


def pack(head: Head, cuts: list[Cut]) -> Iterator[bytes]:
    """The chunks, drawn one by one while the state may go on changing."""
    yield _HEAD.pack(_MAGIC, VERSION, BUCKET_US, head.boundary_us, head.time_us, head.ids)
    parts: list[Part] = []
    waiting = 0
    for cut in cuts:
        for part in cut.parts(CHUNK_IDS_MAX):
            if waiting + len(part[2]) > CHUNK_IDS_MAX:
                yield _pack_chunk(parts)
                parts, waiting = [], 0
            parts.append(part)
            waiting += len(part[2])
    if parts:
        yield _pack_chunk(parts)


def _pack_chunk(parts: list[Part]) -> bytes:
    tokens = [token for _, _, of_part in parts for token in of_part]
    distinct = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return b"".join(
        (
            _CHUNK.pack(len(parts), len(distinct), len(tokens)),
            *(_PART.pack(number, len(of_part)) for number, _, of_part in parts),
            np.fromiter(map(len, distinct), "<u4", len(distinct)).tobytes(),
            *distinct,
            np.fromiter(map(distinct.__getitem__, tokens), "<u4", len(tokens)).tobytes(),
            *(ids for _, ids, _ in parts),
        )
    )


def unpack(chunks: Iterable[bytes]) -> tuple[Head, Iterator[Part]]:
    """The head, and the parts as they are drawn. CorruptStateError where a chunk is not what pack wrote."""
    drawn = iter(chunks)
    head = _unpack_head(next(drawn, b""))
    return head, _unpack_parts(drawn, head.ids)


def _unpack_head(chunk: bytes) -> Head:
    if len(chunk) != _HEAD.size:
        raise _corrupt(f"its head has {len(chunk)} bytes, expected {_HEAD.size}")
    magic, version, bucket_us, boundary_us, time_us, ids = _HEAD.unpack(chunk)
    if (magic, version, bucket_us) != (_MAGIC, VERSION, BUCKET_US):
        raise _corrupt(f"it is of form {magic!r} {version}, this program reads {_MAGIC!r} {VERSION}")
    return Head(boundary_us, time_us, ids)


def _unpack_parts(chunks: Iterator[bytes], expected: int) -> Iterator[Part]:
    shared: dict[bytes, bytes] = {}  # one object a token, though each chunk names it anew
    total = 0
    for chunk in chunks:
        try:
            parts = list(_unpack_chunk(chunk, shared))
        except (struct.error, ValueError, IndexError) as error:
            raise _corrupt(f"a chunk of {len(chunk)} bytes can't be read ({error})") from error
        total += sum(len(tokens) for _, _, tokens in parts)
        yield from parts
    if total != expected:
        raise _corrupt(f"it holds {total} ids, its head says {expected}")


def _unpack_chunk(chunk: bytes, shared: dict[bytes, bytes]) -> Iterator[Part]:
    parts, distinct, total = _CHUNK.unpack_from(chunk)
    sizes_at = _CHUNK.size + parts * _PART.size
    table = [_PART.unpack_from(chunk, at) for at in range(_CHUNK.size, sizes_at, _PART.size)]
    tokens_at = sizes_at + distinct * 4
    sizes = np.frombuffer(chunk, "<u4", distinct, sizes_at).tolist()
    ends = list(accumulate(sizes, initial=tokens_at))
    tokens = [shared.setdefault(chunk[a:b], chunk[a:b]) for a, b in pairwise(ends)]
    ids_at = ends[-1] + total * 4
    if len(chunk) != ids_at + total * ID_BYTES or sum(count for _, count in table) != total:
        raise ValueError("its lengths do not add up")
    rows = list(map(tokens.__getitem__, np.frombuffer(chunk, "<u4", total, ends[-1]).tolist()))
    row = 0
    for number, count in table:
        at = ids_at + row * ID_BYTES
        yield number, chunk[at : at + count * ID_BYTES], rows[row : row + count]
        row += count


def _corrupt(what: str) -> CorruptStateError:
    return CorruptStateError(
        f"a registry snapshot can't be used: {what}; remove the replica's directory to let it be rebuilt "
        "from its peers, provided that a majority of them is healthy"
    )
