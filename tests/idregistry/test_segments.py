"""Segments in files: every id is found, and no other; filters pass on little that is absent."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry import segment_file
from idregistry.rules import filters
from idregistry.rules.filters import Filter
from idregistry.rules.packing import FEW, Encoded, Hashes, unhash_ids
from idregistry.rules.segments import STAMP_DTYPE, Rows, in_order
from idregistry.segment_file import SegmentFile, SegmentFiles
from photon.core.columns import hash_ids
from photon.core.errors import DiskFullError

END = (1 << 64) - 1
EDGES = st.sampled_from([0, 1, (1 << 56) - 1, 1 << 56, (1 << 63) | 5, END - 1, END])
HALVES = st.integers(0, END) | EDGES
IDS = st.lists(st.tuples(HALVES, HALVES), unique=True, max_size=40)


def halves(ids: list[tuple[int, int]]):
    return np.array([h for h, _ in ids], np.uint64), np.array([t for _, t in ids], np.uint64)


def pairs(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.hashes.tolist(), rows.tails.tolist(), strict=True))


def written(directory: Path, ids: list[tuple[int, int]], pieces: int = 1) -> SegmentFile:
    stamps = np.zeros(len(ids), STAMP_DTYPE)
    stamps["holder"] = np.arange(len(ids))
    rows = in_order([Rows(*halves(ids), stamps)], 0)
    writer = SegmentFiles(directory).writer(7, len(ids))
    for part in range(pieces):
        writer.write(rows.part(len(ids) * part // pieces, len(ids) * (part + 1) // pieces))
    writer.finish()
    writer.adopt()
    return SegmentFiles(directory).open(7)


@settings(deadline=None)
@given(IDS, IDS, st.integers(1, 4), st.integers(1, 5))
@pytest.mark.parametrize("times", [1, FEW + 1])
def test_every_row_is_found_and_nothing_else(
    times: int, ids: list[tuple[int, int]], others: list[tuple[int, int]], pieces: int, block: int
) -> None:
    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_file, "BLOCK_ROWS", block)
        file = written(Path(root), ids, pieces)
        for wanted in [*ids, *others, (END, 7), (END, 0)]:
            batch = Encoded(unhash_ids(*halves([wanted] * times)))
            places, stamps = file.find(batch)
            expected = [ids.index(wanted)] * times if wanted in ids else []
            assert stamps["holder"].tolist() == expected
            assert places.tolist() == list(range(len(expected)))
        half = file.rows(0, 1 << 63), file.rows(1 << 63, 1 << 64)
        assert [*pairs(half[0]), *pairs(half[1])] == sorted(ids)
        assert len(half[0]) == sum(h < 1 << 63 for h, _ in ids)


def batch(hashes: Hashes) -> Encoded:
    """Of ids that have these hashes."""
    return Encoded(unhash_ids(hashes, hashes))


@pytest.mark.parametrize("regions", [0, 3])
def test_the_filter_passes_on_what_is_there_and_little_else(
    monkeypatch: pytest.MonkeyPatch, regions: int
) -> None:
    """0.06 % by the book, where the bits of an id are as good as thrown by dice."""
    count = 200_000
    monkeypatch.setattr(filters, "REGION_IDS", count >> regions)
    rng = np.random.default_rng(1)
    there, absent = (np.sort(rng.integers(0, END, count, np.uint64, endpoint=True)) for _ in range(2))
    one = Filter(count)
    assert (one.region_bits, one.bytes) == (regions, 2 * count)
    for part in np.array_split(there, 7):
        one.add(part)
    assert len(one.maybe(batch(there))) == count
    passed = len(one.maybe(batch(absent)))
    assert 0.0003 * count < passed < 0.0009 * count


def test_ids_of_servers_that_count_are_told_apart_as_well() -> None:
    """The first halves are alike, the second follow each other."""
    column = np.empty((40_000, 2), "<u8")
    column[:, 0], column[:, 1] = 5, np.arange(40_000)
    hashes = hash_ids(column.tobytes())
    there, absent = np.sort(hashes[::2]), hashes[1::2]
    one = Filter(20_000)
    one.add(there)
    assert len(one.maybe(batch(absent))) < 40


def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path: Path) -> None:
    writer = SegmentFiles(tmp_path).writer(1, 100)
    writer._file.close()
    writer._file = Path("/dev/full").open("wb")  # noqa: SIM115
    stamps = np.zeros(3, STAMP_DTYPE)
    writer.write(Rows(*halves([(1, 1), (2, 2), (3, 3)]), stamps))
    with pytest.raises(DiskFullError, match="no space left"):
        writer.finish()
    writer.drop()
    assert list(tmp_path.iterdir()) == []
