"""Offsets of files whose batches finish in any order."""

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.rules.events import OffsetTracker, Span


@st.composite
def sendings(draw):
    """Batches over a few files, each going on where the last one ended, and an order of finishing."""
    ends = {file: draw(st.integers(0, 50)) for file in range(3)}
    start = dict(ends)
    batches = []
    for _ in range(draw(st.integers(1, 12))):
        spans = []
        for file in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
            length = draw(st.integers(1, 9))
            spans.append(Span(file, ends[file], ends[file] + length))
            ends[file] += length
        batches.append(spans)
    return start, batches, draw(st.permutations(range(len(batches))))


def unbroken_end(start, batches, finished, file):
    end = start[file]
    for number, spans in enumerate(batches):
        for span in spans:
            if span.file == file:
                if number not in finished:
                    return end
                end = span.end
    return end


@given(sendings())
def test_an_offset_never_skips_and_never_goes_back_and_each_batch_is_given_out_once(sending):
    start, batches, order = sending
    tracker = OffsetTracker(start)
    for number, spans in enumerate(batches):
        tracker.sent(number, spans)
    recorded: list[int] = []
    finished: set[int] = set()
    last = dict(start)
    for number in order:
        finished.add(number)
        recorded += tracker.finished(number)
        assert set(recorded) <= finished
        for file in start:
            covered = [s.end for n in recorded for s in batches[n] if s.file == file]
            assert tracker.offset(file) == max(covered, default=start[file]) >= last[file]
            assert tracker.offset(file) <= unbroken_end(start, batches, finished, file)
            last[file] = tracker.offset(file)
    assert sorted(recorded) == list(range(len(batches)))
    for file in start:
        mine = [n for n in recorded if any(s.file == file for s in batches[n])]
        assert mine == sorted(mine)


@given(st.permutations(range(8)))
def test_batches_of_one_file_are_recorded_as_far_as_all_before_them_are_finished(order):
    tracker = OffsetTracker({})
    for number in range(8):
        tracker.sent(number, [Span(7, number * 10, number * 10 + 10)])
    finished = set()
    for number in order:
        finished.add(number)
        tracker.finished(number)
        run = next((n for n in range(8) if n not in finished), 8)
        assert tracker.offset(7) == run * 10


def test_a_slow_batch_of_one_file_does_not_hold_back_another_file():
    tracker = OffsetTracker({})
    tracker.sent(0, [Span(0, 0, 10)])
    tracker.sent(1, [Span(1, 0, 10)])
    tracker.sent(2, [Span(0, 10, 20), Span(1, 10, 20)])
    assert tracker.finished(1) == [1]
    assert tracker.finished(2) == []
    assert (tracker.offset(0), tracker.offset(1)) == (0, 10)
    assert tracker.finished(0) == [0, 2]
    assert (tracker.offset(0), tracker.offset(1)) == (20, 20)
