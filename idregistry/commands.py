"""The commands in a shard's log, in bytes. Pure.

    COMMIT    version | kind | leader time us (8) | segments (4) | ids (4)
              | segments x (ids (4), token bytes (4)) | tokens | ids x 16 | ids x 8 (times us)
    BOUNDARY  version | kind | leader time us (8) | boundary us (8)
    COLLECT   version | kind | ids at most (4)

Little endian. The columns of all segments stand together, so that a batch of many small requests is applied
as one. Decoding is strict: what is not exactly a command is a CommandError.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from idregistry.messages import TIME_BYTES
from photon.core.errors import CorruptStateError
from photon.core.ids import ID_BYTES

VERSION: Final = 1
_COMMIT: Final = 1
_BOUNDARY: Final = 2
_COLLECT: Final = 3

_COMMIT_HEAD: Final = struct.Struct("<BBqII")
_BOUNDARY_BODY: Final = struct.Struct("<BBqq")
_COLLECT_BODY: Final = struct.Struct("<BBI")
_SEGMENT: Final = struct.Struct("<II")


class CommandError(CorruptStateError):
    """Bytes in the log that are no command of this version: the replica stops rather than guess."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Insert the ids that are absent, segment by segment (paper 2.1).

    `tokens[i]` is for the next `counts[i]` ids; `ids` is 16 x N, `times` 8 x N bytes, N the sum of `counts`.
    """

    time_us: int
    tokens: Sequence[bytes]
    counts: Sequence[int]
    ids: bytes
    times: bytes


@dataclass(frozen=True, slots=True)
class Boundary:
    """Raise the garbage collection boundary to `boundary_us`; it never goes back (paper 2.3)."""

    time_us: int
    boundary_us: int


@dataclass(frozen=True, slots=True)
class Collect:
    """Delete up to `ids_max` ids older than the boundary (paper 2.3)."""

    ids_max: int


Command = Commit | Boundary | Collect


def encode(command: Command) -> bytes:
    """A command -> its bytes."""
    match command:
        case Commit(time_us, tokens, counts, ids, times):
            assert len(ids) == sum(counts) * ID_BYTES, "the ids do not match the counts"
            assert len(times) == sum(counts) * TIME_BYTES, "the times do not match the counts"
            table = b"".join(map(_SEGMENT.pack, counts, map(len, tokens)))
            head = _COMMIT_HEAD.pack(VERSION, _COMMIT, time_us, len(counts), sum(counts))
            return b"".join((head, table, *tokens, ids, times))
        case Boundary(time_us, boundary_us):
            return _BOUNDARY_BODY.pack(VERSION, _BOUNDARY, time_us, boundary_us)
        case Collect(ids_max):
            return _COLLECT_BODY.pack(VERSION, _COLLECT, ids_max)


def decode(data: bytes) -> Command:
    """The reverse of encode. CommandError on anything else."""
    if len(data) < 2 or data[0] != VERSION:
        raise CommandError(
            f"a registry command of version {data[0] if data else 'none'} in the log, this program knows "
            f"{VERSION}: run the program that wrote it"
        )
    kind = data[1]
    if kind == _COMMIT:
        return _decode_commit(data)
    if kind == _BOUNDARY:
        _expect(len(data), _BOUNDARY_BODY.size, "a BOUNDARY")
        return Boundary(*_BOUNDARY_BODY.unpack(data)[2:])
    if kind == _COLLECT:
        _expect(len(data), _COLLECT_BODY.size, "a COLLECT")
        return Collect(*_COLLECT_BODY.unpack(data)[2:])
    raise CommandError(f"a registry command of unknown kind {kind} in the log")


def _decode_commit(data: bytes) -> Commit:
    if len(data) < _COMMIT_HEAD.size:
        raise CommandError(f"a COMMIT command of {len(data)} bytes is shorter than its head")
    _, _, time_us, segments, total = _COMMIT_HEAD.unpack_from(data)
    tokens_at = _COMMIT_HEAD.size + segments * _SEGMENT.size
    if len(data) < tokens_at:
        raise CommandError(f"a COMMIT command of {len(data)} bytes is shorter than its {segments} segments")
    table = list(_SEGMENT.iter_unpack(memoryview(data)[_COMMIT_HEAD.size : tokens_at]))
    counts = [count for count, _ in table]
    ends = list(accumulate((size for _, size in table), initial=tokens_at))
    ids_at = ends[-1]
    times_at = ids_at + total * ID_BYTES
    _expect(len(data), times_at + total * TIME_BYTES, "a COMMIT")
    if sum(counts) != total or any(size == 0 for _, size in table):
        raise CommandError(f"a COMMIT command's segments hold {sum(counts)} ids, its head says {total}")
    tokens = [data[start:end] for start, end in pairwise(ends)]
    return Commit(time_us, tokens, counts, data[ids_at:times_at], data[times_at:])


def _expect(size: int, wanted: int, what: str) -> None:
    if size != wanted:
        raise CommandError(f"{what} command of {size} bytes, expected {wanted}")
