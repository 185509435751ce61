"""Invariant 3: each outcome of each vocabulary ends in one fate, or keeps the event pending."""

import pytest

from photon.core.fates import (
    FATE_OF_VERDICT,
    JOINED_OF_COMMITTED,
    JOINED_OF_FOUND,
    LETTER_REASONS,
    LETTERS,
    RETRIED,
    VERDICT_OF_REGISTERED,
    Committed,
    Fate,
    Found,
    Joined,
    Registered,
    Verdict,
)


@pytest.mark.parametrize("outcome", Joined)
def test_each_answer_of_a_joiner_ends_an_event_or_has_it_tried_again(outcome):
    assert (outcome in FATE_OF_VERDICT) != (outcome in RETRIED)


def test_the_vocabularies_share_no_number_where_they_share_a_column():
    assert not {*Joined} & {*Verdict}


def test_every_fate_but_the_readers_own_comes_from_a_verdict():
    assert {*FATE_OF_VERDICT.values()} == {*Fate} - {Fate.MALFORMED, Fate.PENDING}


def test_what_is_not_joined_and_has_ended_is_kept_with_a_reason():
    assert {*LETTERS} == {*Fate} - {Fate.JOINED, Fate.DUPLICATE, Fate.PENDING}
    assert {*LETTERS} - {*LETTER_REASONS} == {Fate.MALFORMED}  # whose reason is always the parser's


@pytest.mark.parametrize(
    ("table", "outcome", "becomes"),
    [
        (VERDICT_OF_REGISTERED, Registered.ABSENT, Verdict.SEND),
        (VERDICT_OF_REGISTERED, Registered.PRESENT, Verdict.REGISTERED),
        (VERDICT_OF_REGISTERED, Registered.EXPIRED, Verdict.TOO_OLD),
        (VERDICT_OF_REGISTERED, Registered.PENDING, Verdict.UNDER_WAY),
        (JOINED_OF_FOUND, Found.FOUND, Joined.JOINED),
        (JOINED_OF_FOUND, Found.ABSENT, Joined.RETRY_ABSENT),
        (JOINED_OF_FOUND, Found.BEHIND, Joined.RETRY_ABSENT),
        (JOINED_OF_FOUND, Found.UNREADABLE, Joined.RETRY_UNAVAILABLE),
        (JOINED_OF_FOUND, 255, Joined.RETRY_UNAVAILABLE),
        (JOINED_OF_COMMITTED, Committed.WON, Joined.JOINED),
        (JOINED_OF_COMMITTED, Committed.DUPLICATE, Joined.DUPLICATE),
        (JOINED_OF_COMMITTED, Committed.EXPIRED, Joined.EXPIRED),
        (JOINED_OF_COMMITTED, Committed.FENCED, Joined.RETRY_UNAVAILABLE),
        (JOINED_OF_COMMITTED, 255, Joined.RETRY_UNAVAILABLE),
    ],
)
def test_a_column_is_translated_outcome_by_outcome(table, outcome, becomes):
    assert bytes([outcome]).translate(table) == bytes([becomes])
