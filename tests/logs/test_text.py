"""The growth of several files as one text: each line is traced to its file and place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from photon.logs.files import Chunk, FileState
from photon.logs.text import Text

parts = st.lists(
    st.tuples(st.integers(0, 1_000), st.lists(st.binary(max_size=5).map(lambda b: b.replace(b"\n", b"")))),
    min_size=1,
    max_size=6,
)


@given(parts)
def test_each_line_is_traced_to_its_file_and_place(made):
    chunks, expected, last = [], [], []
    for number, (start, lines) in enumerate(made):
        data = b"".join(line + b"\n" for line in lines)
        state = FileState(number, f"/{number}", f"/{number}", 1, number)
        chunks.append((state, Chunk(start, start + len(data), data)))
        at = start
        for line in lines:
            expected.append((number, at))
            at += len(line) + 1
        last.append(len(expected) - 1 if lines else None)
    text = Text(chunks)
    ends = np.cumsum([len(line) + 1 for _, lines in made for line in lines], dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(ends)]
    assert list(zip(text.parts_of(starts).tolist(), text.offsets(starts).tolist(), strict=True)) == expected
    assert [text.origin(int(start)) for start in starts] == [(f"/{part}", at) for part, at in expected]
    assert text.last_rows(starts) == last
    covered = sum(end - start for _, start, end in text.spans(0, len(text.data)))
    assert covered == len(text.data)
