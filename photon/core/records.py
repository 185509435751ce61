"""The bytes of a journal's segment: pure rules, no IO.

A segment is a header, then records. A record's checksum starts from the segment's salt, so that bytes of
another file (recycled disk blocks, a payload that looks like a record) never pass for a record of this one.

A `SYNCED` mark is written after each sync and says up to where. That tells a torn tail (never synced, never
promised: cut it) from damage to what was promised (stop). What other kinds of records mean is their writer's.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"PHJOURN2"
_HEADER = struct.Struct("<8sQII")  # magic, segment number, salt, crc of these
HEADER_BYTES: Final = _HEADER.size
_RECORD = struct.Struct("<IBI")  # crc of the rest, kind, length of the payload
RECORD_BYTES: Final = _RECORD.size
_CRC = struct.Struct("<I")
PAYLOAD_BYTES_MAX: Final = 1 << 30

SYNCED: Final = 0  # everything before some offset was synced
SEAL: Final = 255  # the segment ends here; another one follows
_MARK = struct.Struct("<QQQ")  # the mark's own offset, the offset that was synced, something to search for
_MARK_WORD: Final = 0x9E53A7D14CF08B26
_MARK_WORD_BYTES: Final = _MARK_WORD.to_bytes(8, "little")
MARK_BYTES: Final = RECORD_BYTES + _MARK.size
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read; the payload is a view of the segment's bytes."""

    kind: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Scan:
    """A segment as it was read: a mark says that it was synced up to `synced`; good records end at `end`.

    `damage` is None where what follows `end` may be cut: nothing in it was ever synced.
    """

    records: list[Record]
    synced: int
    end: int
    sealed: bool
    damage: str | None


def pack_header(number: int, salt: int) -> bytes:
    """The first bytes of segment `number`."""
    body = _HEADER.pack(MAGIC, number, salt, 0)[: -_CRC.size]
    return body + _CRC.pack(zlib.crc32(body))


def unpack_header(data: bytes) -> tuple[int, int] | None:
    """(segment number, salt), or None where the bytes are not a header."""
    if len(data) < HEADER_BYTES:
        return None
    magic, number, salt, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or zlib.crc32(data[: HEADER_BYTES - _CRC.size]) != crc:
        return None
    return number, salt


def pack_record(salt: int, kind: int, *payload: bytes) -> list[bytes]:
    """The record as the pieces to write; so is its payload given."""
    head = _RECORD.pack(0, kind, sum(map(len, payload)))[_CRC.size :]
    crc = zlib.crc32(head, salt)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return [_CRC.pack(crc), head, *payload]


def pack_mark(salt: int, offset: int, synced: int) -> bytes:
    """The mark that stands at `offset`."""
    return b"".join(pack_record(salt, SYNCED, _MARK.pack(offset, synced, _MARK_WORD)))


def pack_seal(salt: int, following: int) -> bytes:
    """The last record of a segment, which names the one after it."""
    return b"".join(pack_record(salt, SEAL, _NUMBER.pack(following)))


def scan(data: bytes, salt: int) -> Scan:
    """Read a segment's records; marks and the seal are not among them."""
    records: list[Record] = []
    end = synced = HEADER_BYTES
    sealed = False
    for record, record_end in _records(data, salt):
        end = record_end
        if record.kind == SEAL:
            sealed = True
            break
        if record.kind == SYNCED:
            synced = max(synced, _MARK.unpack(record.payload)[1])
        else:
            records.append(record)
    return Scan(records, synced, end, sealed, _damage(data, salt, end, sealed))


def _damage(data: bytes, salt: int, end: int, sealed: bool) -> str | None:
    if end == len(data):
        return None
    if sealed:
        return f"bytes follow the seal at offset {end}"
    promised = _synced_later(data, end, salt)
    return f"damaged record at offset {end}, before what was synced ({promised})" if promised > end else None


def _records(data: bytes, salt: int) -> Iterator[tuple[Record, int]]:
    """Each good record with its end, up to the first one that is not good."""
    view = memoryview(data)
    offset = HEADER_BYTES
    while (record := _record_at(view, offset, salt)) is not None:
        offset += RECORD_BYTES + len(record.payload)
        yield record, offset


def _record_at(view: memoryview, offset: int, salt: int) -> Record | None:
    if offset + RECORD_BYTES > len(view):
        return None
    crc, kind, length = _RECORD.unpack_from(view, offset)
    end = offset + RECORD_BYTES + length
    if length > PAYLOAD_BYTES_MAX or end > len(view):
        return None
    if zlib.crc32(view[offset + _CRC.size : end], salt) != crc:
        return None
    record = Record(kind, view[offset + RECORD_BYTES : end])
    return None if kind == SYNCED and not _is_mark(record, offset) else record


def _is_mark(record: Record, offset: int) -> bool:
    if len(record.payload) != _MARK.size:
        return False
    own, _, word = _MARK.unpack(record.payload)
    return bool(own == offset and word == _MARK_WORD)


def _synced_later(data: bytes, start: int, salt: int) -> int:
    """The largest offset that a good mark after `start` says was synced; 0 where there is none."""
    view = memoryview(data)
    synced = 0
    at = data.find(_MARK_WORD_BYTES, start)
    while at >= 0:
        offset = at + len(_MARK_WORD_BYTES) - MARK_BYTES
        record = _record_at(view, offset, salt) if offset >= start else None
        if record is not None and record.kind == SYNCED:
            synced = max(synced, _MARK.unpack(record.payload)[1])
        at = data.find(_MARK_WORD_BYTES, at + 1)
    return synced
