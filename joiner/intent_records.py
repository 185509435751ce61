"""The bytes of the intent journal: pure rules, no IO (design: "Beyond the paper").

A segment is records one after the other, little endian. A record is a head and a body, each with a CRC-32:

    INTENT  head.start: place in the joined log before which none of its lines can stand (file, offset)
            body: token length u16 | events u32 | token | ids 16 x N | times 8 x N | lines, newline-closed
    DONE    head.start, head.end: the range of the joined log that holds the lines that won; no body

`synced` in a head says how much of its segment was durable when it was written: it tells a torn tail, that
no one was promised (cut it), from damage to what was (stop).
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from photon.core.columns import split_lines
from photon.core.ids import ID_BYTES
from photon.core.logwriter import LogPosition

# Not UTF-8: no event can hold it.
_MAGIC: Final = b"\xffPI1"
# magic, crc of the rest of the head, kind, body length, body crc, sequence, synced, file, start, end
_HEAD: Final = struct.Struct("<4sIBIIQQIQQ")
HEAD_BYTES: Final = _HEAD.size
_CRC_FROM: Final = 8
_BODY: Final = struct.Struct("<HI")
_TIME_BYTES: Final = 8


class Kind(IntEnum):
    INTENT = 1
    DONE = 2


@dataclass(frozen=True, slots=True)
class Intent:
    """A batch that is going to be registered and written: N ids, their times, and their joined lines."""

    sequence: int
    token: bytes
    ids: bytes
    times: bytes
    lines: bytes
    position: LogPosition

    def __len__(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `start` to `end` of one file of the joined log."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read. `at` and `to`: its place in the segment's bytes."""

    kind: Kind
    sequence: int
    place: Range
    at: int
    to: int


@dataclass(frozen=True, slots=True)
class Scan:
    """A segment as it was read: `end` is the offset after the last good record.

    `damage` is None where what follows `end` is a torn tail (or nothing); else it says what is wrong.
    """

    records: list[Record]
    end: int
    damage: str | None


class Draft:
    """An INTENT record but for its head: what can be made ready without the journal's lock."""

    def __init__(self, token: bytes, ids: bytes, times: bytes, lines: bytes) -> None:
        parts = [_BODY.pack(len(token), len(ids) // ID_BYTES), token, ids, times, lines]
        self.token, self.ids, self.times, self.lines = token, ids, times, lines
        self._parts = parts
        self._length = sum(map(len, parts))
        self._crc = 0
        for part in parts:
            self._crc = zlib.crc32(part, self._crc)

    def record(self, sequence: int, position: LogPosition, synced: int) -> bytes:
        place = Range(position.file, position.offset, 0)
        return b"".join([_head(Kind.INTENT, self._length, self._crc, sequence, synced, place), *self._parts])

    def intent(self, sequence: int, position: LogPosition) -> Intent:
        return Intent(sequence, self.token, self.ids, self.times, self.lines, position)


def done_record(sequence: int, written: Range, synced: int) -> bytes:
    """The record that ends an intent."""
    return _head(Kind.DONE, 0, 0, sequence, synced, written)


def decode_intent(segment: bytes, record: Record) -> Intent:
    """The whole intent of a record that `scan` gave. ValueError if it does not hold what its head says."""
    body = segment[record.at + HEAD_BYTES : record.to]
    token_bytes, count = _BODY.unpack_from(body)
    ids_at = _BODY.size + token_bytes
    times_at = ids_at + ID_BYTES * count
    lines_at = times_at + _TIME_BYTES * count
    lines = body[lines_at:]
    if len(split_lines(lines)) != count:
        raise ValueError(f"intent {record.sequence} holds {len(split_lines(lines))} lines for {count} events")
    return Intent(
        record.sequence,
        body[_BODY.size : ids_at],
        body[ids_at:times_at],
        body[times_at:lines_at],
        lines,
        LogPosition(record.place.file, record.place.start),
    )


def scan(segment: bytes, last: bool) -> Scan:
    """Read a segment's records. Only the `last` one may end in a torn tail; the others are synced whole."""
    records = list(_records(segment))
    end = records[-1].to if records else 0
    if end == len(segment):
        return Scan(records, end, None)
    if not last:
        return Scan(records, end, f"damaged record at offset {end}")
    promised = _synced_later(segment, end)
    damage = (
        None if promised <= end else f"damaged record at offset {end}, before what was synced ({promised})"
    )
    return Scan(records, end, damage)


def _head(kind: Kind, length: int, body_crc: int, sequence: int, synced: int, place: Range) -> bytes:
    head = _HEAD.pack(_MAGIC, 0, kind, length, body_crc, sequence, synced, place.file, place.start, place.end)
    crc = zlib.crc32(head[_CRC_FROM:])
    return b"".join([_MAGIC, crc.to_bytes(4, "little"), head[_CRC_FROM:]])


def _records(segment: bytes) -> Iterator[Record]:
    view = memoryview(segment)
    at = 0
    while (head := _head_at(view, at)) is not None:
        _, _, kind, length, body_crc, sequence, _, file, start, end = head
        to = at + HEAD_BYTES + length
        if to > len(view) or zlib.crc32(view[at + HEAD_BYTES : to]) != body_crc:
            return
        yield Record(Kind(kind), sequence, Range(file, start, end), at, to)
        at = to


def _head_at(view: memoryview, at: int) -> tuple[bytes, int, int, int, int, int, int, int, int, int] | None:
    if at + HEAD_BYTES > len(view):
        return None
    head = _HEAD.unpack_from(view, at)
    crc = zlib.crc32(view[at + _CRC_FROM : at + HEAD_BYTES])
    return head if head[0] == _MAGIC and head[1] == crc and head[2] in (1, 2) else None


def _synced_later(segment: bytes, start: int) -> int:
    """The largest `synced` of the heads that stand after `start`."""
    view = memoryview(segment)
    promised = 0
    at = segment.find(_MAGIC, start)
    while at >= 0:
        head = _head_at(view, at)
        if head is not None:
            promised = max(promised, head[6])
        at = segment.find(_MAGIC, at + 1)
    return promised
