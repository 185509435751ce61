"""An id's form in memory: nothing of it is lost, and in segments every one is found and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.rules.packing import FEW, SUBS
from idregistry.rules.segments import STAMP_DTYPE, Columns, Rows, Segment, in_order

END = (1 << 64) - 1
EDGES = st.sampled_from([0, 1, (1 << 56) - 1, 1 << 56, (1 << 63) | 5, END - 1, END])
HALVES = st.integers(0, END) | EDGES
IDS = st.lists(st.tuples(HALVES, HALVES), unique=True, max_size=40)


def segment_of(ids: list[tuple[int, int]]) -> Segment:
    """Filled sub by sub, and followed by garbage."""
    hashes, tails = halves(ids)
    rows = in_order([Rows(hashes, tails, np.zeros(len(ids), STAMP_DTYPE))], 0)
    columns = Columns(len(ids))
    subs = rows.hashes >> np.uint64(56)
    for sub in range(SUBS):
        mine = subs == sub
        columns.append(sub, Rows(rows.hashes[mine], rows.tails[mine], rows.stamps[mine]))
    columns.tails[-1] = 7
    return Segment(columns, 0, SUBS, 0, columns.filled)


def halves(ids: list[tuple[int, int]]):
    return np.array([h for h, _ in ids], np.uint64), np.array([t for _, t in ids], np.uint64)


@settings(deadline=None)
@given(IDS, IDS)
@pytest.mark.parametrize("times", [1, FEW + 1])
def test_every_row_is_found_and_nothing_else(
    times: int, ids: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    segment = segment_of(ids)
    for wanted in [*ids, *others, (END, 7), (END, 0)]:
        rows = segment.find(*halves([wanted] * times)).tolist()
        found = [
            (int(segment.columns.hashes[row]), int(segment.columns.tails[row])) for row in rows if row >= 0
        ]
        assert found == ([wanted] * times if wanted in ids else [])


IDS = st.lists(st.binary(min_size=16, max_size=16), max_size=3 * FEW).map(b"".join)
