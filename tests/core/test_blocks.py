"""Blocks: columns in, the same columns out, and what damage does to them and not to their neighbours."""

import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core import blocks, blocks_header
from photon.core.blocks import encode_foreign, encode_primary
from photon.core.blocks_header import HEADER_BYTES, MAGIC, fields_digest, pack_header, unpack_header
from photon.core.columns import pack_times
from photon.core.formats import ForeignBatch, Formats, JsonLines
from photon.core.framing import BLOCKS, LINES, framing_of, pieces
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary


def formats(key: bytes = b"photon", **fields: str) -> Formats:
    return Formats(Primary(), Foreign(**fields), IdPacker(key))


FORMATS = formats()


def foreign_lines(count: int, stem: str = "c", payload: str = "") -> bytes:
    return b"".join(
        json.dumps({"id": f"{stem}{n}", "primary_id": f"q{n}", "ts_us": n, "payload": payload}).encode()
        + b"\n"
        for n in range(count)
    )


def foreign_block(count: int, stem: str = "c", payload: str = "", of: Formats = FORMATS) -> bytes:
    return encode_foreign(of.lines.parse_foreign(foreign_lines(count, stem, payload)), of.labels)


def columns(batch: ForeignBatch) -> tuple:
    return batch.ids, batch.primary_ids, batch.times, batch.lines


ids = st.uuids().map(str) | st.builds(
    lambda server, time: f"10.0.0.{server}:7:{time}", st.integers(0, 9), st.integers(0, 10**17)
)
events = st.fixed_dictionaries(
    {"id": ids, "primary_id": ids, "ts_us": st.integers(-(2**63), 2**63 - 1), "text": st.text(max_size=9)}
)
event_lines = st.builds(
    lambda event, ascii: json.dumps(event, ensure_ascii=ascii).encode("utf-8", "surrogatepass"),
    events,
    st.booleans(),
).filter(lambda line: b"\xed\xa0" not in line)
chunks = st.lists(event_lines, min_size=1, max_size=20).map(lambda lines: b"\n".join(lines) + b"\n")


@given(st.lists(chunks, max_size=4))
def test_blocks_give_the_columns_of_the_lines_they_were_made_from(parts: list[bytes]) -> None:
    batches = [FORMATS.lines.parse_foreign(part) for part in parts]
    data = b"".join(encode_foreign(batch, FORMATS.labels) for batch in batches)
    assert BLOCKS.whole(data) == len(data)
    read = FORMATS.blocks.parse_foreign(data)
    assert columns(read) == columns(FORMATS.lines.parse_foreign(b"".join(parts)))
    assert not read.malformed
    assert read.units is not None and len(read.units) == len(parts)
    for line, start in zip(read.lines, read.starts.tolist(), strict=True):
        assert data[start - 1 : start + len(line) + 1] == b"\n" + line + b"\n"


@given(chunks)
def test_primary_blocks_likewise(part: bytes) -> None:
    batch = FORMATS.lines.parse_primary(part)
    data = encode_primary(batch, FORMATS.labels)
    read = FORMATS.of("x.pblk").parse_primary(data)
    assert (read.ids, read.lines, read.malformed) == (batch.ids, batch.lines, [])
    for line, start in zip(read.lines, read.starts.tolist(), strict=True):
        assert data[start - 1 : start + len(line) + 1] == b"\n" + line + b"\n"


def test_lines_cut_out_of_a_block_parse_as_lines_and_its_columns_are_no_events() -> None:
    """A short read finds an event in a stretch of the file that begins and ends anywhere."""
    data = foreign_block(40) + foreign_block(40, "d")
    everything = FORMATS.lines.parse_primary(data)
    assert len(everything.lines) == 80
    starts = FORMATS.blocks.parse_foreign(data).starts
    part = FORMATS.lines.parse_primary(data[int(starts[30]) : int(starts[50])])
    assert part.ids == IdPacker().pack([f"c{n}" for n in range(30, 40)] + [f"d{n}" for n in range(10)])


def test_the_suffix_says_the_format_whatever_the_compression() -> None:
    for name in ("a.pblk", "dir.jsonl/a.pblk.gz", "a.pblk.zst"):
        assert framing_of(name) is BLOCKS and FORMATS.of(name) is FORMATS.blocks
    for name in ("a.jsonl", "a.log.gz", "dir.pblk/a", "pblk", "a.pblk.1"):
        assert framing_of(name) is LINES and FORMATS.of(name) is FORMATS.lines


def test_lines_are_whole_up_to_the_last_newline() -> None:
    assert [LINES.whole(data) for data in (b"", b"a", b"a\nb\nc", b"a\n")] == [0, 0, 4, 2]
    assert LINES.length(b"a\nb\n") is None


@given(st.integers(1, 3), st.data())
def test_a_half_written_block_is_left_until_it_is_whole(count: int, data: st.DataObject) -> None:
    before = foreign_block(count)
    last = foreign_block(2, "last")
    cut = data.draw(st.integers(0, len(last) - 1))
    assert BLOCKS.whole(before + last[:cut]) == len(before)
    assert BLOCKS.length(last[:cut]) == (len(last) if cut >= HEADER_BYTES else None)


# What may stand in a file: sound blocks, and what crashed writers, bad disks and wrong tools leave there.
good_blocks = st.integers(1, 5).map(lambda count: foreign_block(count, f"s{count}-"))
torn_blocks = st.builds(lambda share: foreign_block(5, "t")[: 1 + int(share * 500)], st.floats(0, 1))
junk = st.sampled_from([b"x", b"{}\n", MAGIC[:7], MAGIC[:1] * 3, bytes(100), b"\xff" * 60, MAGIC])
flipped_blocks = st.builds(
    lambda at: (lambda block: block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :])(foreign_block(4, "f")),
    st.integers(0, len(foreign_block(4, "f")) - 1),
)


@given(
    st.lists(st.tuples(st.booleans(), good_blocks, torn_blocks | junk | flipped_blocks), max_size=6),
    st.integers(600, 3000),
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
)
def test_sound_blocks_are_read_exactly_once_whatever_stands_between_them(
    parts: list[tuple[bool, bytes, bytes]], step: int, growth: list[int]
) -> None:
    """However the file is cut into chunks, while it grows by bits: as read_chunk does."""
    file = b"".join(good if sound else bad for sound, good, bad in parts) + foreign_block(1, "end")
    expected = [
        line for sound, good, _ in parts if sound for line in FORMATS.blocks.parse_foreign(good).lines
    ]
    expected += FORMATS.blocks.parse_foreign(foreign_block(1, "end")).lines
    lines, position, size, turns, passed = [], 0, 0, 0, 0
    while position < len(file):
        size = min(len(file), size + growth[turns % len(growth)])
        turns += 1
        data = file[position : min(size, position + step)]
        whole = BLOCKS.whole(data)
        if not whole and (length := BLOCKS.length(data)) is not None:
            data = file[position : min(size, position + length)]
            whole = BLOCKS.whole(data)
        assert whole or size < len(file), "reading stands still at the end"
        batch = FORMATS.blocks.parse_foreign(data[:whole])
        lines += batch.lines
        passed += len(batch.malformed)
        position += whole
    assert lines == expected
    assert passed or all(sound for sound, _, _ in parts)


@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda rest: MAGIC + rest))
def test_any_bytes_are_cut_into_pieces_that_cover_them(data: bytes) -> None:
    found = list(pieces(data))
    assert [piece.start for piece in found] == [0, *[piece.end for piece in found]][: len(found)]
    assert 0 <= BLOCKS.whole(data) <= len(data)
    batch = FORMATS.blocks.parse_foreign(data)
    assert not batch.lines


@given(st.integers(0, len(foreign_block(4, "f")) - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(at: int, bit: int) -> None:
    block = bytearray(foreign_block(4, "f"))
    block[at] ^= 1 << bit
    batch = FORMATS.blocks.parse_foreign(foreign_block(3) + bytes(block) + foreign_block(2, "d"))
    assert len(batch.lines) == 5
    assert batch.malformed and batch.malformed[0].start == len(foreign_block(3))


def test_a_damaged_block_is_malformed_with_its_offset_reason_and_beginning() -> None:
    first, block = foreign_block(3), bytearray(foreign_block(100, payload="x" * 50))
    block[-10] ^= 1
    (bad,) = FORMATS.blocks.parse_foreign(first + bytes(block)).malformed
    assert bad.start == len(first)
    assert bad.reason == f"the block is damaged (crc); {len(block)} bytes are passed over"
    assert bad.line == bytes(block[: blocks.DAMAGED_BYTES_KEPT])


def test_a_block_cut_short_that_seems_to_end_where_another_begins_hides_none() -> None:
    long, short = foreign_block(9), foreign_block(2, "d")
    data = long[: len(long) - len(short)] + short + foreign_block(1, "e")
    assert [piece.end for piece in pieces(data)] == [len(long), len(data)]
    batch = FORMATS.blocks.parse_foreign(data)
    assert len(batch.lines) == 3 and len(batch.malformed) == 1
    assert BLOCKS.whole(data) == len(data)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (foreign_block(2, of=formats(b"other")), "made with another 'ids.key'"),
        (foreign_block(2, of=formats(time_unit="ms")), "other fields or another time unit than [foreign]"),
        (
            encode_primary(FORMATS.lines.parse_primary(foreign_lines(1)), FORMATS.labels),
            "a block of primary events in a log of foreign ones",
        ),
        (foreign_block(2)[:200], "cut short"),
        (b"\x00" * 80, "no block begins here"),
    ],
)
def test_a_block_that_is_not_ours_to_read_says_why(block: bytes, reason: str) -> None:
    batch = FORMATS.blocks.parse_foreign(block + foreign_block(1))
    assert [reason in bad.reason for bad in batch.malformed] == [True]
    assert len(batch.lines) == 1


def test_a_block_of_a_later_version_is_told_from_a_damaged_one() -> None:
    block = bytearray(foreign_block(1))
    block[16] = 2
    block[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack("<I", zlib.crc32(block[: HEADER_BYTES - 4]))
    assert "version 2; this Photon reads version 1" in str(unpack_header(bytes(block)))


@pytest.mark.parametrize(
    ("first", "lines"),
    [
        (7, b'{"a":1}\n{"b":2}\n{"c":3}\n'),
        (7, b'{"a":1}{"b":22222}\n'),
        (7, b"[1,2,3]\n[1,2,3,4]\n"),
        (2, b"{}}{}\n{}\n"),
        (2, b"{}\n{}}{}?"),
    ],
)
def test_columns_that_do_not_fit_the_lines_are_no_block(first: int, lines: bytes) -> None:
    """A crc says that the bytes are the writer's, not that the writer knew the format."""
    body = bytes(2 * 40) + struct.pack("<2I", first, len(lines) - first - 2) + b"\n" + lines
    header = blocks_header.Header(
        blocks_header.FOREIGN, 2, len(lines), zlib.crc32(body), *_labels_of_foreign()
    )
    (bad,) = FORMATS.blocks.parse_foreign(pack_header(header) + body).malformed
    assert "not written by Photon" in bad.reason


def _labels_of_foreign() -> tuple[bytes, bytes]:
    return FORMATS.labels.key, FORMATS.labels.fields[blocks_header.FOREIGN]


def test_a_block_holds_no_more_events_than_a_reader_takes_at_a_time() -> None:
    batch = FORMATS.lines.parse_foreign(foreign_lines(5000))
    for wanted, expected in ((10, [10] * 500), (1_000_000, [4096, 904])):
        data = encode_foreign(batch, FORMATS.labels, wanted)
        assert [piece.header.events for piece in pieces(data)] == expected
        assert FORMATS.blocks.parse_foreign(data).lines == batch.lines


def test_long_lines_make_short_blocks_and_a_very_long_one_has_its_own() -> None:
    lines = foreign_lines(5, payload="x" * 200_000) + foreign_lines(1, payload="y" * 2_000_000)
    batch = FORMATS.lines.parse_foreign(lines + foreign_lines(3))
    data = encode_foreign(batch, FORMATS.labels)
    assert [piece.header.events for piece in pieces(data)] == [2, 2, 1, 1, 3]
    assert columns(FORMATS.blocks.parse_foreign(data)) == columns(batch)


def test_lines_can_be_had_of_blocks_made_with_any_key_and_fields() -> None:
    data = foreign_block(2, of=formats(b"other")) + encode_primary(
        FORMATS.lines.parse_primary(foreign_lines(1)), formats(time_unit="s").labels
    )
    lines, malformed = blocks.BlockFormat(None).read_lines(data + b"junk")
    assert lines == [*foreign_lines(2).splitlines(), *foreign_lines(1).splitlines()]
    assert len(malformed) == 1


def test_times_that_spell_the_magic_are_put_into_blocks_of_their_own() -> None:
    """Whoever writes the times of the events must not be able to hide the blocks behind them."""
    wanted = b"".join(
        json.dumps({"id": f"c{n}", "primary_id": "q", "ts_us": time}).encode() + b"\n"
        for n, time in enumerate([1, *struct.unpack("<2q", MAGIC), 2])
    )
    batch = FORMATS.lines.parse_foreign(wanted)
    assert MAGIC in batch.times
    data = encode_foreign(batch, FORMATS.labels)
    read = FORMATS.blocks.parse_foreign(data)
    assert columns(read) == columns(batch) and not read.malformed


def test_nothing_makes_no_block_and_no_columns() -> None:
    empty = FORMATS.blocks.parse_foreign(b"")
    assert encode_foreign(empty, FORMATS.labels) == b""
    assert (empty.lines, empty.malformed, empty.starts.dtype, empty.ids) == ([], [], np.int64, b"")
    assert FORMATS.blocks.parse_primary(b"").lines == []


def test_blocks_never_change_from_one_release_to_the_next() -> None:
    batch = ForeignBatch(b"i" * 16, b"p" * 16, pack_times([5]), [b'{"a":1}'], np.zeros(1, np.int64), [], None)
    labels = blocks.Labels(b"keykeyke", (fields_digest(("id",)), fields_digest(("id", "p", "t", "us"))))
    data = encode_foreign(batch, labels)
    assert len(data) == 52 + 44 + 1 + 8
    assert data[:52].hex() == (
        "fcfefffefcfcfffcfefffefefcfffffe"
        "01010000"
        "01000000"
        "08000000"
        "dc67f1a2"
        "6b65796b65796b65"
        "52aa8af075932b81"
        "25511579"
    )
    assert data[52:] == b"i" * 16 + b"p" * 16 + b"\5" + bytes(7) + b"\7\0\0\0" + b'\n{"a":1}\n'


def test_names_of_the_key_do_not_give_the_key_away_and_differ() -> None:
    assert IdPacker(b"one").key_digest != IdPacker(b"other").key_digest
    assert b"one" not in IdPacker(b"one").key_digest


def test_json_lines_are_the_format_of_all_else() -> None:
    assert isinstance(FORMATS.of("whatever.log"), JsonLines)
