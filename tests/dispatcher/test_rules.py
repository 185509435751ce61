"""The rules of a batch, all pure: waits, verdicts, and offsets though batches finish in any order."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.rules import verdicts as pipeline
from dispatcher.rules.events import OffsetTracker, Span, concat, pack_values
from dispatcher.rules.verdicts import AGE_JITTER, AgeBackoff, Backoffs
from photon.core.clock import Backoff
from photon.core.errors import UnavailableError
from photon.core.fates import FATE_OF_VERDICT, LETTERS, RETRIED, Fate, Joined, Registered, Verdict
from photon.core.settings import Settings
from photon.core.status import AGE_EDGES_US, EDGES_US
from tests.dispatcher.fakes import some_events

HOUR_US = 3_600_000_000
BACKOFFS = Backoffs(AgeBackoff(1_000, 8_000), Backoff(0.001, 0.008))
DEFAULTS = Backoffs.of(Settings().dispatcher)


@given(
    st.integers(1, 3_600_000_000),
    st.integers(0, 86_400_000_000),
    st.lists(st.tuples(st.integers(-(10**14), 10**14), st.integers(1, 2**32 - 1)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_what_waits_for_its_primary_waits_about_half_its_age_within_bounds(least, more, events, rng):
    ages, tries = (np.array(column) for column in zip(*events, strict=True))
    delays = AgeBackoff(least, least + more).delays_us(ages, tries.astype(np.uint32), rng.uniform)
    assert delays.dtype == np.int64
    for delay, age, tried in zip(delays.tolist(), ages.tolist(), tries.tolist(), strict=True):
        doubled, slowest = (least * factor ** min(tried - 1, 39) for factor in (2.0, 1.2))
        assert least <= delay <= least + more
        assert delay <= max(least, doubled) + 1
        assert delay <= max(age / 2, slowest, least) + 1
        about_half = (1 - AGE_JITTER) * 0.91 * age / 2
        assert delay >= min(about_half, doubled, least + more) - 1
        assert delay >= min(slowest, least + more) - 1, "the clock was set back: rarer and rarer all the same"


def resolved_of(events, verdicts, at_us, due_us=None, reasons={}, backoffs=BACKOFFS):
    """What becomes of them; `at_us`: when the verdicts came."""
    uniform, at = random.Random(1).uniform, np.full(len(events), at_us)
    return pipeline.resolve(events, np.array(verdicts, np.uint8), reasons, backoffs, at, uniform, due_us)


def test_events_of_about_the_same_age_travel_together_and_other_batches_at_other_moments():
    backoff, rng = AgeBackoff(20_000, 3_600_000_000), random.Random(3).uniform
    ages, tries = 10_000_000 + np.arange(4096) * 100, np.full(4096, 20, np.uint32)
    draws = [backoff.delays_us(ages, tries, rng) for _ in range(100)]
    assert all(len(np.unique(delays)) <= 2 for delays in draws)
    assert len({int(delays[0]) for delays in draws}) > 90


def test_a_retry_in_vain_before_it_was_due_counts_for_nothing_and_a_failed_one_does():
    events = some_events(4, tries=12)
    events.sends[:] = 14
    verdicts = [Joined.JOINED, Joined.RETRY_ABSENT, Joined.RETRY_UNAVAILABLE, Joined.RETRY_ABSENT]
    resolved = resolved_of(events, verdicts, 10_000, np.array([70_000, 50_000, 60_000, 90_000]))
    assert resolved.retries.lines == events.lines[1:]
    assert resolved.retries.tries.tolist() == [12, 12, 12]
    assert resolved.retries.sends.tolist() == [14, 15, 14]
    assert resolved.due_us[[0, 2]].tolist() == [50_000, 90_000]
    assert 12_000 <= resolved.due_us[1] <= 14_000, "the third failure"


@pytest.mark.parametrize(("early_us", "tries_max"), [
    (HOUR_US // 1200, 19), (HOUR_US // 60, 25), (HOUR_US, 35), (6 * HOUR_US, 41), (24 * HOUR_US, 61),
])  # fmt: skip
def test_an_early_event_takes_few_tries_and_is_joined_half_as_long_after_its_primary(early_us, tries_max):
    rng = random.Random(1).uniform
    for _ in range(50):
        events, now_us, tries = some_events(1), 0, 0
        events.first_seen[:] = 0
        while now_us < early_us:
            absent = np.array([Joined.RETRY_ABSENT], np.uint8)
            resolved = pipeline.resolve(events, absent, {}, DEFAULTS, np.array([now_us]), rng)
            events, now_us, tries = resolved.retries, int(resolved.due_us[0]), tries + 1
        assert now_us - early_us <= min(early_us / 2, HOUR_US)
        assert tries <= tries_max


def test_an_event_that_was_hardly_tried_when_all_stopped_for_hours_is_tried_soon():
    resolved = resolved_of(some_events(1, tries=3), [Joined.RETRY_ABSENT], 8 * HOUR_US, backoffs=DEFAULTS)
    assert resolved.due_us[0] - 8 * HOUR_US <= 160_000


def test_what_failed_waits_by_its_failures_and_never_longer_than_a_minute():
    events = some_events(2, tries=20)
    events.sends[:] = [20, 60]
    resolved = resolved_of(events, [Joined.RETRY_UNAVAILABLE] * 2, 0, backoffs=DEFAULTS)
    assert resolved.retries.tries.tolist() == [20, 20]
    assert resolved.due_us[0] <= 20_000 and 30_000_000 <= resolved.due_us[1] <= 60_000_000


def test_a_joined_event_counts_from_when_it_was_read_and_from_its_own_time():
    """Paper 4.1 counts from the event: log shipping, and the wait for its primary, are included."""
    events = some_events(1)
    events.first_seen[:] = 7_000_000
    event_us = int(np.frombuffer(events.times, "<i8")[0])
    resolved = resolved_of(events, [Joined.JOINED], 9_000_000)
    since_read, since_event = resolved.latencies
    assert EDGES_US[since_read.argmax() - 1] < 2_000_000 <= EDGES_US[since_read.argmax()]
    assert AGE_EDGES_US[since_event.argmax() - 1] < 9_000_000 - event_us <= AGE_EDGES_US[since_event.argmax()]


@given(
    st.lists(st.sampled_from([*Joined, Verdict.REGISTERED, Verdict.TOO_OLD]), max_size=40),
    st.integers(0, 3),
)
def test_each_event_has_one_fate_or_one_retry(verdicts, tries):
    events = some_events(len(verdicts), tries=tries)
    events.first_seen[:] = 5_000
    resolved = resolved_of(events, verdicts, 10_000)
    dead = [row for row, v in enumerate(verdicts) if FATE_OF_VERDICT.get(v) in LETTERS]
    again = [row for row, v in enumerate(verdicts) if v in RETRIED]
    assert sum(resolved.fates.values()) + len(again) == len(verdicts)
    assert resolved.fates.get(Fate.JOINED, 0) == verdicts.count(Joined.JOINED)
    too_old = verdicts.count(Joined.EXPIRED) + verdicts.count(Verdict.TOO_OLD)
    assert resolved.fates.get(Fate.EXPIRED, 0) == too_old
    assert resolved.latencies.sum(axis=1).tolist() == [verdicts.count(Joined.JOINED)] * 2
    assert resolved.wasted_joins == verdicts.count(Joined.DUPLICATE)
    assert [letter.event for letter in resolved.letters] == [events.lines[row] for row in dead]
    assert [(x.name, x.offset) for x in resolved.letters] == [
        (events.name(row), events.offsets[row]) for row in dead
    ]
    assert all(letter.reason for letter in resolved.letters)
    if not again:
        assert resolved.retries is None
        return
    assert resolved.retries.lines == [events.lines[row] for row in again]
    assert resolved.retries.tries.tolist() == [
        tries + (verdicts[row] == Joined.RETRY_ABSENT) for row in again
    ]
    assert set(resolved.retries.sends.tolist()) == {1}
    half_age_or_doubled = min(2_500, 1_000 << tries)
    bounds = {Joined.RETRY_ABSENT: (1_000, half_age_or_doubled), Joined.RETRY_UNAVAILABLE: (500, 1_000)}
    for row, due_us in zip(again, resolved.due_us.tolist(), strict=True):
        low, high = bounds[verdicts[row]]
        assert low <= due_us - 10_000 <= high


def test_the_joiners_reason_stands_in_the_dead_letter_of_its_row():
    verdicts = [Joined.JOINED, Joined.FILTERED, Joined.FILTERED]
    resolved = resolved_of(some_events(3), verdicts, 0, reasons={2: "a robot"})
    assert [letter.reason for letter in resolved.letters] == ["the adapter skipped it", "a robot"]


@pytest.mark.parametrize("answer", [b"", b"\x00", b"\x00\x00\x00", b"\x00\x63"])
def test_an_answer_that_is_not_understood_is_no_answer(answer):
    with pytest.raises(UnavailableError, match="same version"):
        pipeline.judge_join(answer, bytes(32))
    with pytest.raises(UnavailableError, match="same version"):
        pipeline.judge_lookup(answer, 2)


def test_an_id_that_stands_twice_and_is_joined_once_was_not_joined_in_vain():
    ids = b"".join(bytes([id]) * 16 for id in (1, 2, 1, 3, 2))
    said = bytes([Joined.JOINED, Joined.DUPLICATE, Joined.DUPLICATE, Joined.JOINED, Joined.DUPLICATE])
    verdicts = pipeline.judge_join(said, ids)
    assert [*verdicts] == [*said[:2], Verdict.REGISTERED, *said[3:]]


def test_what_the_registry_has_or_no_longer_remembers_is_not_sent():
    verdicts = pipeline.judge_lookup(bytes([Registered.ABSENT, Registered.PRESENT, Registered.EXPIRED]), 3)
    assert verdicts.tolist() == [Verdict.SEND, Verdict.REGISTERED, Verdict.TOO_OLD]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5))
def test_events_one_part_after_the_other_stay_in_step(sizes):
    parts = [
        some_events(count, names=min(names, count), first=100 * n) for n, (count, names) in enumerate(sizes)
    ]
    whole = concat(parts)
    assert pack_values(whole) == [value for part in parts for value in pack_values(part)]


def test_chosen_rows_of_events_stay_in_step():
    events = some_events(9, names=3)
    events.tries[:], events.sends[:], events.first_seen[:] = range(9), range(9, 18), range(18, 27)
    for rows in ([], [4], [0, 8], [1, 2, 3, 5, 6], list(range(9))):
        taken = events.take(np.array(rows, np.intp))
        assert taken.lines == [events.lines[row] for row in rows]
        assert taken.ids == b"".join(events.ids[16 * row : 16 * row + 16] for row in rows)
        assert taken.primary_ids == b"".join(events.primary_ids[16 * row : 16 * row + 16] for row in rows)
        assert taken.times == b"".join(events.times[8 * row : 8 * row + 8] for row in rows)
        assert taken.tries.tolist() == rows
        assert taken.sends.tolist() == [row + 9 for row in rows]
        assert taken.first_seen.tolist() == [row + 18 for row in rows]
        assert taken.offsets.tolist() == [row * 100 for row in rows]
        names = [taken.name(row) for row in range(len(rows))]
        assert names == [events.name(row) for row in rows]


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


def test_a_file_that_is_gone_is_forgotten_when_none_of_its_batches_is_under_way():
    tracker = OffsetTracker({})
    for number in range(2):
        tracker.sent(number, [Span(7, number * 10, number * 10 + 10)])
    tracker.forget(7)
    assert (tracker.finished(1), tracker.offset(7)) == ([], 0)
    assert (tracker.finished(0), tracker.offset(7)) == ([0, 1], 0)
    tracker.sent(2, [Span(8, 0, 10)])
    tracker.finished(2)
    tracker.forget(8)
    assert tracker.offset(8) == 0
