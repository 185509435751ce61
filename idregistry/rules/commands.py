"""The commands in a shard's log, in bytes. Pure.

    COMMIT     version | kind | leader time us (8) | segments (4) | ids (4)
               | segments x (ids (4), token bytes (4)) | tokens | ids x 16 | ids x 8 (times us)
    BOUNDARY   version | kind | leader time us (8) | boundary us (8)
    RELEASE    as COMMIT
    FENCE      version | kind | leader time us (8) | first (8) | incarnations x 8
    PREPARE    version | kind | leader time us (8) | configuration version (8) | start us (8)
    CONFIGURE  version | kind | leader time us (8) | configuration (idregistry.configuration)

Little endian. The columns of all segments stand together, so that a batch of many small requests is applied
as one. Decoding is strict: what is not exactly a command is a CommandError.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from idregistry.rules.packing import TIME_BYTES
from idregistry.rules.sharding import Configuration, unpack_configuration
from photon.core.errors import CorruptStateError
from photon.core.ids import ID_BYTES

VERSION: Final = 2
_COMMIT: Final = 1
_BOUNDARY: Final = 2
_RELEASE: Final = 4
_FENCE: Final = 6
_PREPARE: Final = 7
_CONFIGURE: Final = 8

_ANY_HEAD: Final = struct.Struct("<BBq")
_IDS_HEAD: Final = struct.Struct("<BBqII")
_BOUNDARY_BODY: Final = struct.Struct("<BBqq")
_FENCE_HEAD: Final = struct.Struct("<BBqQ")
_PREPARE_BODY: Final = struct.Struct("<BBqQq")
_SEGMENT: Final = struct.Struct("<II")
_INCARNATION_BYTES: Final = 8


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
class Release:
    """Take out the ids that a fenced incarnation's token holds, as they would be absent (paper 3.3.3)."""

    time_us: int
    tokens: Sequence[bytes]
    counts: Sequence[int]
    ids: bytes
    times: bytes


@dataclass(frozen=True, slots=True)
class Fence:
    """The incarnations that stand at `first` and after it in the directory's list of fences."""

    time_us: int
    first: int
    incarnations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """A configuration of this version may come, with an interval from `start_us`: register nothing there."""

    time_us: int
    version: int
    start_us: int


@dataclass(frozen=True, slots=True)
class Configure:
    """The sharding configuration as the directory has it."""

    time_us: int
    configuration: Configuration


Command = Commit | Boundary | Release | Fence | Prepare | Configure


def encode(command: Command) -> bytes:
    """A command -> its bytes."""
    match command:
        case Commit(time_us, tokens, counts, ids, times):
            return _encode_ids(_COMMIT, time_us, tokens, counts, ids, times)
        case Release(time_us, tokens, counts, ids, times):
            return _encode_ids(_RELEASE, time_us, tokens, counts, ids, times)
        case _:
            return _encode_rare(command)


def _encode_rare(command: Boundary | Fence | Prepare | Configure) -> bytes:
    match command:
        case Boundary(time_us, boundary_us):
            return _BOUNDARY_BODY.pack(VERSION, _BOUNDARY, time_us, boundary_us)
        case Fence(time_us, first, incarnations):
            head = _FENCE_HEAD.pack(VERSION, _FENCE, time_us, first)
            return head + np.array(incarnations, "<u8").tobytes()
        case Prepare(time_us, version, start_us):
            return _PREPARE_BODY.pack(VERSION, _PREPARE, time_us, version, start_us)
        case Configure(time_us, configuration):
            return _ANY_HEAD.pack(VERSION, _CONFIGURE, time_us) + configuration.pack()


def _encode_ids(
    kind: int, time_us: int, tokens: Sequence[bytes], counts: Sequence[int], ids: bytes, times: bytes
) -> bytes:
    assert len(ids) == sum(counts) * ID_BYTES, "the ids do not match the counts"
    assert len(times) == sum(counts) * TIME_BYTES, "the times do not match the counts"
    table = b"".join(map(_SEGMENT.pack, counts, map(len, tokens)))
    head = _IDS_HEAD.pack(VERSION, kind, time_us, len(counts), sum(counts))
    return b"".join((head, table, *tokens, ids, times))


def decode(data: bytes) -> Command:
    """The reverse of encode. CommandError on anything else."""
    if len(data) < 2 or data[0] != VERSION:
        raise CommandError(
            f"a registry command of version {data[0] if data else 'none'} in the log, this program knows "
            f"{VERSION}: run the program that wrote it"
        )
    kind = data[1]
    if kind == _COMMIT:
        return Commit(*_decode_ids(data, "a COMMIT"))
    if kind == _RELEASE:
        return Release(*_decode_ids(data, "a RELEASE"))
    return _decode_rare(kind, data)


def _decode_rare(kind: int, data: bytes) -> Command:
    if kind == _BOUNDARY:
        _expect(len(data), _BOUNDARY_BODY.size, "a BOUNDARY")
        return Boundary(*_BOUNDARY_BODY.unpack(data)[2:])
    if kind == _PREPARE:
        _expect(len(data), _PREPARE_BODY.size, "a PREPARE")
        return Prepare(*_PREPARE_BODY.unpack(data)[2:])
    if kind == _FENCE:
        count = max(0, len(data) - _FENCE_HEAD.size) // _INCARNATION_BYTES
        _expect(len(data), _FENCE_HEAD.size + count * _INCARNATION_BYTES, "a FENCE")
        _, _, time_us, first = _FENCE_HEAD.unpack_from(data)
        return Fence(time_us, first, tuple(np.frombuffer(data, "<u8", count, _FENCE_HEAD.size).tolist()))
    if kind == _CONFIGURE:
        try:
            time_us = _ANY_HEAD.unpack_from(data)[2]
            return Configure(time_us, unpack_configuration(data[_ANY_HEAD.size :]))
        except (ValueError, struct.error) as error:
            raise CommandError(f"a CONFIGURE command in the log can't be read ({error})") from error
    raise CommandError(f"a registry command of unknown kind {kind} in the log")


def _decode_ids(data: bytes, what: str) -> tuple[int, list[bytes], list[int], bytes, bytes]:
    """(leader time, tokens, counts, ids, times)."""
    if len(data) < _IDS_HEAD.size:
        raise CommandError(f"{what} command of {len(data)} bytes is shorter than its head")
    _, _, time_us, segments, total = _IDS_HEAD.unpack_from(data)
    tokens_at = _IDS_HEAD.size + segments * _SEGMENT.size
    if len(data) < tokens_at:
        raise CommandError(f"{what} command of {len(data)} bytes is shorter than its {segments} segments")
    table = list(_SEGMENT.iter_unpack(memoryview(data)[_IDS_HEAD.size : tokens_at]))
    counts = [count for count, _ in table]
    ends = list(accumulate((size for _, size in table), initial=tokens_at))
    ids_at = ends[-1]
    times_at = ids_at + total * ID_BYTES
    _expect(len(data), times_at + total * TIME_BYTES, what)
    if sum(counts) != total or any(size == 0 for _, size in table):
        raise CommandError(f"{what} command's segments hold {sum(counts)} ids, its head says {total}")
    tokens = [data[start:end] for start, end in pairwise(ends)]
    return time_us, tokens, counts, data[ids_at:times_at], data[times_at:]


def _expect(size: int, wanted: int, what: str) -> None:
    if size != wanted:
        raise CommandError(f"{what} command of {size} bytes, expected {wanted}")
