"""Backoff, latency histogram and the rules of a batch: all pure."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.rules import verdicts as pipeline
from dispatcher.rules.verdicts import AGE_JITTER, AgeBackoff, Backoffs
from photon.core.clock import Backoff
from photon.core.errors import UnavailableError
from photon.core.fates import Fate, Joined, Registered, Verdict
from photon.core.status import BUCKETS, EDGES_US, count_latencies
from tests.dispatcher.fakes import some_events


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


def test_events_of_about_the_same_age_travel_together_and_other_batches_at_other_moments():
    backoff, rng = AgeBackoff(20_000, 3_600_000_000), random.Random(3).uniform
    ages, tries = 10_000_000 + np.arange(4096) * 100, np.full(4096, 20, np.uint32)
    draws = [backoff.delays_us(ages, tries, rng) for _ in range(100)]
    assert all(len(np.unique(delays)) <= 2 for delays in draws)
    assert len({int(delays[0]) for delays in draws}) > 90


def test_a_retry_in_vain_before_it_was_due_counts_for_nothing_and_a_failed_one_does():
    events = some_events(4, tries=12)
    events.sends[:] = 14
    verdicts = np.array(
        [Joined.JOINED, Joined.RETRY_ABSENT, Joined.RETRY_UNAVAILABLE, Joined.RETRY_ABSENT], np.uint8
    )
    backoffs = Backoffs(AgeBackoff(1_000, 8_000), Backoff(0.001, 0.008))
    due_us = np.array([70_000, 50_000, 60_000, 90_000])
    resolved = pipeline.resolve(
        events, verdicts, {}, backoffs, np.full(len(events), 10_000), random.Random(1).uniform, due_us
    )
    assert resolved.retries.lines == events.lines[1:]
    assert resolved.retries.tries.tolist() == [12, 12, 12]
    assert resolved.retries.sends.tolist() == [14, 15, 14]
    assert resolved.due_us[[0, 2]].tolist() == [50_000, 90_000]
    assert 12_000 <= resolved.due_us[1] <= 14_000, "the third failure"


def test_latencies_fall_into_the_bucket_whose_upper_edge_is_next():
    counts = count_latencies(np.array([0, -5, 100, 101, int(EDGES_US[-1]) + 1]))
    assert len(counts) == BUCKETS == len(EDGES_US) + 1
    assert (counts[0], counts[1], counts[-1], counts.sum()) == (3, 1, 1, 5)


@given(
    st.lists(st.sampled_from([*Joined, Verdict.REGISTERED, Verdict.TOO_OLD]), max_size=40),
    st.integers(0, 3),
)
def test_each_event_has_one_fate_or_one_retry(verdicts, tries):
    events = some_events(len(verdicts), tries=tries)
    column = np.array(verdicts, np.uint8)
    backoffs = Backoffs(AgeBackoff(1_000, 8_000), Backoff(0.001, 0.008))
    events.first_seen[:] = 5_000
    resolved = pipeline.resolve(
        events, column, {}, backoffs, np.full(len(events), 10_000), random.Random(1).uniform
    )
    dead = [row for row, v in enumerate(verdicts) if v in (2, 3, 4, Verdict.TOO_OLD)]
    again = [row for row, v in enumerate(verdicts) if v in (5, 6)]
    assert sum(resolved.fates.values()) + len(again) == len(verdicts)
    assert resolved.fates.get(Fate.JOINED, 0) == verdicts.count(Joined.JOINED) == resolved.latencies.sum()
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
    events = some_events(3)
    verdicts = np.array([Joined.JOINED, Joined.FILTERED, Joined.FILTERED], np.uint8)
    resolved = pipeline.resolve(
        events,
        verdicts,
        {2: "a robot"},
        Backoffs(AgeBackoff(1, 1), Backoff(1e-6, 1e-6)),
        np.zeros(3, np.int64),
        random.Random(1).uniform,
    )
    assert [letter.reason for letter in resolved.letters] == ["the adapter skipped it", "a robot"]


@pytest.mark.parametrize("answer", [b"", b"\x00", b"\x00\x00\x00", b"\x00\x63"])
def test_an_answer_that_is_not_understood_is_no_answer(answer):
    with pytest.raises(UnavailableError, match="same version"):
        pipeline.judge_join(answer, 2)
    with pytest.raises(UnavailableError, match="same version"):
        pipeline.judge_lookup(answer, 2)


def test_what_the_registry_has_or_no_longer_remembers_is_not_sent():
    verdicts = pipeline.judge_lookup(bytes([Registered.ABSENT, Registered.PRESENT, Registered.EXPIRED]), 3)
    assert verdicts.tolist() == [Verdict.SEND, Verdict.REGISTERED, Verdict.TOO_OLD]
