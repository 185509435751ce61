"""The bytes of a journal segment: pure rules, no IO.

A segment is a header, then records. A record's checksum starts from the segment's salt, so that bytes of
another file (recycled disk blocks, a command that looks like a record) never pass for a record of this one.

A `SYNCED` mark is written after each sync and says: everything before this offset was synced. That tells a
torn tail (never synced, never acknowledged: cut it) from damage to what was acknowledged (stop).
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"PHRAFTJ1"
_HEADER = struct.Struct("<8sQII")  # magic, segment number, salt, crc of these
HEADER_BYTES = _HEADER.size
_RECORD = struct.Struct("<IBIQQ")  # crc of the rest, kind, length of the command, index, term
RECORD_BYTES = _RECORD.size
_MARK_TERM = 0x9E53A7D14CF08B26  # what stands in a mark's term field: something to search for
_MARK_TERM_BYTES = struct.pack("<Q", _MARK_TERM)
COMMAND_BYTES_MAX = 1 << 30


class Kind(IntEnum):
    """What a record says."""

    ENTRY = 1  # the entry `index` of `term` is `command`; the one after the last
    TRUNCATE = 2  # the entries from `index` on are gone
    RESET = 3  # the log is empty but for a place holder at `index` of `term` (a snapshot was installed)
    SYNCED = 4  # everything before `index` (this mark's own offset) was synced
    SEAL = 5  # the segment ends here; segment `index` follows


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read."""

    kind: Kind
    index: int
    term: int
    command: bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """A segment as it was read: a mark says that it was synced up to `synced`; good records end at `end`."""

    records: list[Record]
    synced: int
    end: int
    sealed: bool
    damage: str | None


def pack_header(number: int, salt: int) -> bytes:
    """The first bytes of segment `number`."""
    body = _HEADER.pack(MAGIC, number, salt, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def unpack_header(data: bytes) -> tuple[int, int] | None:
    """(segment number, salt), or None where the bytes are not a header."""
    if len(data) < HEADER_BYTES:
        return None
    magic, number, salt, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or zlib.crc32(data[: HEADER_BYTES - 4]) != crc:
        return None
    return number, salt


def pack_record(salt: int, kind: Kind, index: int, term: int, command: bytes = b"") -> list[bytes]:
    """The record as the pieces to write."""
    body = _RECORD.pack(0, kind, len(command), index, term)[4:]
    crc = zlib.crc32(command, zlib.crc32(body, salt))
    return [struct.pack("<I", crc), body, command]


def pack_mark(salt: int, offset: int) -> bytes:
    """The mark that stands at `offset`."""
    return b"".join(pack_record(salt, Kind.SYNCED, offset, _MARK_TERM))


def scan(data: bytes, salt: int) -> Scan:
    """Read a segment's records.

    `damage` is None when what follows the last good record may be cut (nothing in it was ever synced), else
    says what is wrong.
    """
    records: list[Record] = []
    offset = synced = HEADER_BYTES
    sealed = False
    for record, end in _records(data, salt):
        offset = end
        if record.kind is Kind.SEAL:
            sealed = True
            records.append(record)
            break
        if record.kind is Kind.SYNCED:
            synced = offset
        else:
            records.append(record)
    if offset == len(data):
        return Scan(records, synced, offset, sealed, None)
    if sealed:
        return Scan(records, synced, offset, sealed, f"bytes follow the seal at offset {offset}")
    later = _later_mark(data, offset, salt)
    damage = (
        f"damaged record at offset {offset}, before what was synced at {later}" if later is not None else None
    )
    return Scan(records, synced, offset, sealed, damage)


def _records(data: bytes, salt: int) -> Iterator[tuple[Record, int]]:
    """Each good record with its end, up to the first one that is not good."""
    view = memoryview(data)
    offset = HEADER_BYTES
    while (record := _record_at(view, offset, salt)) is not None:
        offset += RECORD_BYTES + len(record.command)
        yield record, offset


def _record_at(view: memoryview, offset: int, salt: int) -> Record | None:
    if offset + RECORD_BYTES > len(view):
        return None
    crc, kind, length, index, term = _RECORD.unpack_from(view, offset)
    end = offset + RECORD_BYTES + length
    if length > COMMAND_BYTES_MAX or end > len(view) or zlib.crc32(view[offset + 4 : end], salt) != crc:
        return None
    try:
        known = Kind(kind)
    except ValueError:
        return None
    if known is Kind.SYNCED and (index != offset or term != _MARK_TERM):
        return None
    return Record(known, index, term, bytes(view[offset + RECORD_BYTES : end]))


def _later_mark(data: bytes, start: int, salt: int) -> int | None:
    """The offset of a good mark (or seal's mark) at or after `start`, or None."""
    view = memoryview(data)
    at = data.find(_MARK_TERM_BYTES, start)
    while at >= 0:
        offset = at - RECORD_BYTES + len(_MARK_TERM_BYTES)
        if offset >= start:
            record = _record_at(view, offset, salt)
            if record is not None and record.kind is Kind.SYNCED:
                return offset
        at = data.find(_MARK_TERM_BYTES, at + 1)
    return None
