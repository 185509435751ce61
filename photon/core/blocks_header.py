"""The head of a block: what makes a file of blocks readable from any place (docs/formats.md)."""

import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

MAGIC: Final = bytes.fromhex("fcfefffefcfcfffcfefffefefcfffffe")
"""Bytes that stand nowhere else in a file of blocks: they are no UTF-8, so in no line; a photon id has a byte
below 0x0e in every 16; and the writer cuts a block in which two times happen to spell them. Python's search
passes over text in steps of 16, for JSON has no bytes that are like these in their lower six bits."""

VERSION: Final = 1
EVENTS_MAX: Final = 4096
"""In a block: what is read ahead and sent at a time."""
LINES_BYTES_MAX: Final = 1 << 30
_DIGEST_BYTES: Final = 8

PRIMARY: Final = 0
FOREIGN: Final = 1

_FIELDS: Final = struct.Struct("<16sBBHIII8s8s")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CRC.size
_COLUMN_BYTES: Final = {PRIMARY: 16 + 4, FOREIGN: 16 + 16 + 8 + 4}


class Header(NamedTuple):
    """`lines_bytes`: of the lines, each with its newline. `body_crc`: over all that follows the header.

    `key` and `fields` are digests: what the ids were made with, and from which fields of the lines.
    """

    kind: int
    events: int
    lines_bytes: int
    body_crc: int
    key: bytes
    fields: bytes

    @property
    def length(self) -> int:
        """Bytes of the whole block."""
        return HEADER_BYTES + _COLUMN_BYTES[self.kind] * self.events + 1 + self.lines_bytes


def fields_digest(names: Sequence[str]) -> bytes:
    """Names the fields that ids and times were read from."""
    return blake2b("\0".join(names).encode("utf-8"), digest_size=_DIGEST_BYTES).digest()


def pack_header(header: Header) -> bytes:
    """HEADER_BYTES bytes."""
    fields = _FIELDS.pack(MAGIC, VERSION, header.kind, 0, *header[1:])
    return fields + _CRC.pack(zlib.crc32(fields))


def unpack_header(data: bytes, start: int = 0) -> Header | str:
    """The header at `start`, where HEADER_BYTES bytes are; or why there is none."""
    magic, version, kind, _, *rest = _FIELDS.unpack_from(data, start)
    if magic != MAGIC:
        return "no block begins here"
    (crc,) = _CRC.unpack_from(data, start + _FIELDS.size)
    if zlib.crc32(data[start : start + _FIELDS.size]) != crc:
        return "the head of the block is damaged (crc)"
    if version != VERSION:
        return f"a block of version {version}; this Photon reads version {VERSION}"
    header = Header(kind, *rest)
    sane = kind in _COLUMN_BYTES and 0 < header.events <= EVENTS_MAX
    if not sane or header.lines_bytes > LINES_BYTES_MAX:
        return "the head of the block makes no sense: it was not written by Photon"
    return header
