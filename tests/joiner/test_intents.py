"""The intent journal: what is durable is found again, a torn tail is cut, damage stops the start."""

import errno
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from joiner.intents import Intent, IntentJournal, Left, Range
from photon.core.accounts import WINDOW_US
from photon.core.columns import join_lines, pack_times
from photon.core.errors import CorruptStateError, DiskFullError, OverloadedError
from photon.core.ids import Token
from photon.core.journal import HEADER_BYTES, MARK_BYTES
from photon.logs.writer import LogPosition
from tests.in_memory import memory_directory
from tests.joiner.fakes import FailingWrites


def token(number):
    return Token("joiner:1", 1, number * WINDOW_US).pack()


def draft(number, events=2):
    ids = b"".join(bytes([number % 256, row]) * 8 for row in range(events))
    lines = join_lines([f'{{"n":{number},"row":{row}}}'.encode() for row in range(events)])
    return Intent(token(number), ids, pack_times([number] * events), lines)


def append(journal, number, events=2, synced=True):
    intent = draft(number, events)
    journal.append(intent, lambda: LogPosition(0, number))
    if synced:
        journal.sync(intent)
    return intent


def reopened(directory, **options):
    journal = IntentJournal(directory, fsync=True, **options)
    intents, left = journal.take_over()
    journal.close()
    return intents, left


def end(journal, intent, start, stop):
    """With its lines there, durably."""
    lines = Range(0, start, stop)
    journal.written(intent, lines, {})
    journal.synced(lines)


def segments(directory):
    return sorted(directory.glob("*.log"))


def test_intents_without_an_end_are_found_again_whole_and_in_order(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True)
    intents = [append(journal, number, events=number) for number in range(1, 5)]
    end(journal, intents[1], 10, 20)
    journal.close()
    found, left = reopened(tmp_path)
    assert found == [intents[0], intents[2], intents[3]]
    assert found[1].token == token(3)
    assert found[1].position == LogPosition(0, 3)
    assert len(found[1]) == 3
    assert left == Left(LogPosition(0, 20), LogPosition(0, 20))


def test_what_was_taken_over_is_handed_out_once(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True)
    append(journal, 1)
    journal.close()
    journal = IntentJournal(tmp_path, fsync=True)
    assert journal.open_count == 1
    assert len(journal.take_over()[0]) == 1
    assert journal.take_over()[0] == []
    journal.close()


def test_a_tail_torn_at_any_byte_is_cut_and_the_rest_is_kept(tmp_path):
    journal = IntentJournal(tmp_path / "whole", fsync=True)
    ends, intents = [], []
    for number in range(3):
        intents.append(append(journal, number, synced=False))
        ends.append(segments(tmp_path / "whole")[0].stat().st_size)
    journal.close()
    data = segments(tmp_path / "whole")[0].read_bytes()
    for size in range(len(data)):
        directory = tmp_path / "torn"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        (directory / "intents-000000000001.log").write_bytes(data[:size])
        found, _ = reopened(directory)
        whole = sum(end <= size for end in ends)
        assert found == intents[:whole]
        # A batch may stay without the record that makes an intent of it.
        kept = segments(directory)[0].stat().st_size
        assert [HEADER_BYTES, *ends][whole] <= kept <= max(HEADER_BYTES, size + MARK_BYTES)


def test_a_damaged_record_that_was_synced_stops_the_start(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True)
    append(journal, 1)
    end = segments(tmp_path)[0].stat().st_size
    append(journal, 2)
    journal.close()
    path = segments(tmp_path)[0]
    data = path.read_bytes()
    for place in range(end):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CorruptStateError, match=r"is damaged|damaged record at offset"):
            IntentJournal(tmp_path, fsync=True)
    path.write_bytes(data)
    assert len(reopened(tmp_path)[0]) == 2


def test_damage_in_an_older_segment_stops_the_start(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True, segment_bytes=1)
    append(journal, 1)
    append(journal, 2)
    journal.close()
    first, _ = segments(tmp_path)
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CorruptStateError, match=r"000002\.log: this journal segment ends before its seal"):
        IntentJournal(tmp_path, fsync=True)


def test_segments_are_deleted_when_all_before_them_is_done(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True, segment_bytes=1)
    intents = [append(journal, number) for number in range(4)]
    assert len(segments(tmp_path)) == 4
    journal.ended(intents[1])
    assert len(segments(tmp_path)) == 4
    journal.ended(intents[0])
    assert [p.name[8:20] for p in segments(tmp_path)] == ["000000000004", "000000000005"]
    journal.close()
    assert reopened(tmp_path)[0] == intents[2:]


def test_segments_go_only_when_the_ends_of_their_intents_are_durable(tmp_path, monkeypatch):
    """Without these ends, the next start would cut the lines of what went off with those of what is left."""
    journal = IntentJournal(tmp_path, fsync=True, segment_bytes=1)
    first, second = append(journal, 0), append(journal, 0)
    append(journal, 0, synced=False)
    journal.written(second, Range(0, 0, 10), {})
    journal.written(first, Range(0, 10, 20), {})
    there = segments(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr("photon.core.disk.sync_data", fail)
        journal.synced(Range(0, 10, 20))
    assert segments(tmp_path) == there
    journal.close()


def fail(_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_no_sequence_comes_twice_after_all_segments_before_are_gone(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True, segment_bytes=1)
    sequences = []
    for number in range(3):
        intent = append(journal, number)
        sequences.append(intent.sequence)
        journal.ended(intent)
    journal._log.roll()
    journal.close()
    for path in segments(tmp_path)[:-1]:
        path.unlink()
    journal = IntentJournal(tmp_path, fsync=True)
    assert append(journal, 9).sequence > max(sequences)
    journal.close()


def test_a_journal_at_its_bound_refuses_and_takes_again_when_intents_end(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True, segment_bytes=1, bytes_max=300)
    intents = []
    with pytest.raises(OverloadedError, match="bring the IdRegistry back"):
        for number in range(100):
            intents.append(append(journal, number))
    assert 1 < len(intents) < 10
    for intent in intents:
        journal.ended(intent)
    append(journal, 100)
    journal.close()


def test_an_intent_that_could_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    journal = IntentJournal(tmp_path, fsync=True)
    first = append(journal, 1)
    size = segments(tmp_path)[0].stat().st_size
    with monkeypatch.context() as full:
        FailingWrites(full, "/intents-")
        with pytest.raises(DiskFullError, match="no space left"):
            append(journal, 2)
        end(journal, first, 1, 2)  # its record waits for space
        assert journal.needed_from(lambda: LogPosition(0, 2)) == LogPosition(0, 1)
    assert segments(tmp_path)[0].stat().st_size == size
    third = append(journal, 3)
    journal.close()
    assert reopened(tmp_path) == ([third], Left(LogPosition(0, 3), LogPosition(0, 3)))


STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3)),
    st.tuples(st.just("done"), st.integers(0, 9)),
    st.tuples(st.just("reopen"), st.integers(0, 60)),
)


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.lists(STEP, max_size=25), st.sampled_from([1, 150, 1 << 20]))
def test_the_journal_holds_what_a_model_says(steps, segment_bytes):
    """`reopen n`: crash with the last n bytes of what was not synced torn off, then start again."""
    with memory_directory() as directory:
        journal = IntentJournal(directory, fsync=True, segment_bytes=segment_bytes)
        opened: list[Intent] = []
        for number, (what, value) in enumerate(steps):
            if what == "append":
                opened.append(append(journal, number, events=value))
            elif what == "done" and opened:
                intent = opened.pop(value % len(opened))
                journal.ended(intent)
                journal._log.sync()
            elif what == "reopen":
                torn = append(journal, number, synced=False)
                journal.close()
                path = segments(directory)[-1]
                cut = 1 + value  # less than the intent is long
                path.write_bytes(path.read_bytes()[:-cut])
                journal = IntentJournal(directory, fsync=True, segment_bytes=segment_bytes)
                assert torn not in opened
                assert journal.take_over()[0] == opened
        journal.close()
        assert reopened(directory)[0] == opened


COURSE = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.just(0)),
        st.tuples(st.just("write"), st.integers(0, 9)),
        st.tuples(st.just("sync"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
    ),
    max_size=25,
)


@hypothesis_settings(max_examples=50, deadline=None)
@given(COURSE, st.integers(0, 1000), st.sampled_from([1, 200, 1 << 20]))
def test_one_place_parts_the_lines_of_what_has_an_end_from_all_others(steps, torn, segment_bytes):
    """Batches are written in any order and wait for their syncs; a power cut takes what was not synced."""
    with memory_directory() as directory:
        journal = IntentJournal(directory, fsync=True, segment_bytes=segment_bytes)
        position, upto, opened, placed = 0, 0, [], []
        for number, (what, value) in enumerate(steps):
            if what == "append":
                intent = draft(number)
                journal.append(intent, lambda: LogPosition(0, position))
                journal.sync(intent)
                opened.append(intent)
            elif what == "write" and opened:
                lines = Range(0, position, position + 10)
                placed.append((opened.pop(value % len(opened)), lines))
                journal.written(*placed[-1], {})
                position += 10
            elif what == "sync" and placed:
                lines = placed[value % len(placed)][1]
                journal.synced(lines)
                upto = max(upto, lines.end)
            elif what == "end" and opened:
                journal.ended(opened.pop(value % len(opened)))
        synced = journal._log.synced
        journal.close()
        last = segments(directory)[-1]
        data = last.read_bytes()
        kept = max(synced.offset if synced.segment == journal._log.number else 0, len(data) - torn)
        last.write_bytes(data[:kept])
        left_open, left = reopened(directory)
        numbers = {intent.sequence for intent in left_open}
        later = [intent for intent, lines in placed if lines.end > upto]
        assert numbers >= {intent.sequence for intent in [*opened, *later]}
        assert torn or len(numbers) == len(opened) + len(later)
        for intent, lines in placed:
            if intent.sequence in numbers:
                assert left.cut <= LogPosition(0, lines.start)
            elif left.cut is not None:
                assert LogPosition(0, lines.end) <= left.cut


def test_an_intent_that_lacks_a_line_stops_the_start(tmp_path):
    journal = IntentJournal(tmp_path, fsync=True)
    intent = draft(1)
    intent.lines = intent.lines.splitlines(keepends=True)[0]
    journal.append(intent, lambda: LogPosition(0, 0))
    journal.close()
    with pytest.raises(CorruptStateError, match="1 lines for 2 events"):
        IntentJournal(tmp_path, fsync=True)
