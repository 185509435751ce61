"""The binary format: blocks of columns, read without parsing anything (docs/formats.md).

    header | ids 16 x N | [primary ids 16 x N | times 8 x N] | lengths 4 x N | newline | N lines, each closed

What stands in brackets is in foreign blocks only. The columns are what JSON lines would have given for the
same lines: whoever writes a block has parsed them once, for all who read it.
"""

import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from photon.core.blocks_header import (
    EVENTS_MAX,
    FOREIGN,
    HEADER_BYTES,
    MAGIC,
    PRIMARY,
    Header,
    fields_digest,
    pack_header,
)
from photon.core.formats_batches import ForeignBatch, Malformed, PrimaryBatch
from photon.core.formats_lines import in_braces
from photon.core.framing import pieces
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary

DAMAGED_BYTES_KEPT: Final = 1024
"""Of a damaged block, in its Malformed."""

BLOCK_EVENTS: Final = 1024
BLOCK_LINES_BYTES: Final = 1 << 19
"""Of one block, unless a single line is longer: a reader takes several blocks at a time."""

_Void = npt.NDArray[np.void]
_KINDS: Final = {PRIMARY: "primary", FOREIGN: "foreign"}


class _Body(NamedTuple):
    """What is in one block; `starts` are offsets in the chunk."""

    ids: bytes
    primary_ids: bytes
    times: bytes
    lines: list[bytes]
    starts: npt.NDArray[np.int64]


class Labels(NamedTuple):
    """What blocks of a system are made with, by kind: the digests in their headers."""

    key: bytes
    fields: tuple[bytes, bytes]


def labels_of(primary: Primary, foreign: Foreign, packer: IdPacker) -> Labels:
    """Times have a digest of the unit too: the field is read with it."""
    named = (foreign.id, foreign.primary_id, foreign.time, foreign.time_unit)
    return Labels(packer.key_digest, (fields_digest((primary.id,)), fields_digest(named)))


class BlockFormat:
    """Chunks of whole blocks to columns. A block that can't be used is malformed as a whole."""

    def __init__(self, labels: Labels | None) -> None:
        """Without labels, blocks are taken whatever they were made with: for their lines only."""
        self._labels = labels

    def parse_primary(self, chunk: bytes) -> PrimaryBatch:
        bodies, _, malformed = self._bodies(chunk, PRIMARY)
        ids = b"".join([body.ids for body in bodies])
        return PrimaryBatch(ids, _lines(bodies), _starts(bodies), malformed)

    def parse_foreign(self, chunk: bytes) -> ForeignBatch:
        bodies, units, malformed = self._bodies(chunk, FOREIGN)
        return ForeignBatch(
            b"".join([body.ids for body in bodies]),
            b"".join([body.primary_ids for body in bodies]),
            b"".join([body.times for body in bodies]),
            _lines(bodies),
            _starts(bodies),
            malformed,
            np.array(units, np.int64),
        )

    def read_lines(self, chunk: bytes) -> tuple[list[bytes], list[Malformed]]:
        """The lines of blocks of any kind."""
        bodies, _, malformed = self._bodies(chunk, None)
        return _lines(bodies), malformed

    def _bodies(self, chunk: bytes, kind: int | None) -> tuple[list[_Body], list[int], list[Malformed]]:
        """The sound blocks; where all pieces of the chunk begin; and those that are none."""
        found = self._look(chunk, kind, False)
        return self._look(chunk, kind, True) if found[2] else found

    def _look(
        self, chunk: bytes, kind: int | None, closely: bool
    ) -> tuple[list[_Body], list[int], list[Malformed]]:
        bodies, units, malformed = [], [], []
        for start, end, header, _ in pieces(chunk, closely):
            units.append(start)
            found = header if isinstance(header, str) else self._body(chunk, start, end, header, kind)
            if isinstance(found, str):
                kept = chunk[start : min(end, start + DAMAGED_BYTES_KEPT)]
                malformed.append(Malformed(start, kept, f"{found}; {end - start} bytes are passed over"))
            else:
                bodies.append(found)
        return bodies, units, malformed

    def _strange(self, header: Header, kind: int | None) -> str:
        """Why a block is not for this system, or not for this log; "" if it is."""
        if kind is not None and header.kind != kind:
            return f"a block of {_KINDS[header.kind]} events in a log of {_KINDS[kind]} ones"
        if self._labels is not None and header.key != self._labels.key:
            return "the ids of the block were made with another 'ids.key'; convert the lines again"
        if self._labels is not None and header.fields != self._labels.fields[header.kind]:
            named = _KINDS[header.kind]
            other = f"other fields or another time unit than [{named}] names"
            return f"the block was made with {other}; convert the lines again"
        return ""

    def _body(self, chunk: bytes, start: int, end: int, header: Header, kind: int | None) -> _Body | str:
        """One block, or why it can't be used."""
        strange = self._strange(header, kind)
        if strange:
            return strange
        at = start + HEADER_BYTES
        if zlib.crc32(memoryview(chunk)[at:end]) != header.body_crc:
            return "the block is damaged (crc)"
        count, columns = header.events, []
        for width in (16, 16, 8, 4) if header.kind == FOREIGN else (16, 4):
            columns.append(chunk[at : at + width * count])
            at += width * count
        lengths = np.frombuffer(columns.pop(), "<u4").astype(np.int64)
        lines = chunk[at + 1 : end - 1].split(b"\n")
        starts = np.cumsum(lengths + 1)
        starts += at + 1 - (lengths + 1)
        agree = len(lines) == count and int(starts[-1] + lengths[-1]) == end - 1 and lengths.all()
        if not agree or not _closed(chunk, starts, end) or not in_braces(chunk, starts, lengths):
            return "the lines of the block are not what its columns say: it was not written by Photon"
        ids, primary_ids, times = columns if header.kind == FOREIGN else (columns[0], b"", b"")
        return _Body(ids, primary_ids, times, lines, starts)


def _closed(chunk: bytes, starts: npt.NDArray[np.int64], end: int) -> bool:
    """Whether a newline stands before each line and after the last."""
    before = np.frombuffer(chunk, np.uint8)[starts - 1]
    return bool((before == ord("\n")).all() and chunk[end - 1] == ord("\n"))


def _lines(bodies: Sequence[_Body]) -> list[bytes]:
    return [line for body in bodies for line in body.lines] if len(bodies) != 1 else bodies[0].lines


def _starts(bodies: Sequence[_Body]) -> npt.NDArray[np.int64]:
    return np.concatenate([body.starts for body in bodies]) if bodies else np.zeros(0, np.int64)


def encode_primary(batch: PrimaryBatch, labels: Labels, events_max: int = BLOCK_EVENTS) -> bytes:
    """Blocks of at most `events_max` events. The batch comes from a LogFormat with the same settings."""
    columns = [np.frombuffer(batch.ids, "V16")]
    return _encode(PRIMARY, columns, batch.lines, labels, events_max)


def encode_foreign(batch: ForeignBatch, labels: Labels, events_max: int = BLOCK_EVENTS) -> bytes:
    """As encode_primary."""
    columns = [np.frombuffer(batch.ids, "V16"), np.frombuffer(batch.primary_ids, "V16")]
    columns.append(np.frombuffer(batch.times, "V8"))
    return _encode(FOREIGN, columns, batch.lines, labels, events_max)


def _encode(
    kind: int, columns: Sequence[_Void], lines: list[bytes], labels: Labels, events_max: int
) -> bytes:
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    ends = np.cumsum(lengths + 1)
    blocks, low, done = [], 0, 0
    while low < len(lines):
        fits = int(np.searchsorted(ends, done + BLOCK_LINES_BYTES, "right"))
        high = max(low + 1, min(fits, low + min(events_max, EVENTS_MAX)))
        part = [column[low:high] for column in columns]
        blocks.append(_block(kind, part, lines[low:high], lengths[low:high], labels))
        low, done = high, int(ends[high - 1])
    return b"".join(blocks)


def _block(
    kind: int, columns: Sequence[_Void], lines: list[bytes], lengths: npt.NDArray[np.int64], labels: Labels
) -> bytes:
    count, lines_bytes = len(lines), int(lengths.sum()) + len(lines)
    parts = [*[column.tobytes() for column in columns], lengths.astype("<u4").tobytes()]
    body = b"".join([*parts, b"\n", b"\n".join(lines), b"\n"])
    header = Header(kind, count, lines_bytes, zlib.crc32(body), labels.key, labels.fields[kind])
    block = pack_header(header) + body
    if block.find(MAGIC, 1) < 0:
        return block
    middle = count // 2  # some events spell the magic together, and none alone
    low = _block(kind, [column[:middle] for column in columns], lines[:middle], lengths[:middle], labels)
    return low + _block(
        kind, [column[middle:] for column in columns], lines[middle:], lengths[middle:], labels
    )
