"""The rules of recovery: who may be recovered, what is refused, what a plan needs next."""

from dataclasses import replace

import pytest

from photon.core.fates import Released
from photon.recovery.rules import (
    GONE_EVENTS_MAX,
    Held,
    Life,
    Report,
    Step,
    after_release,
    as_text,
    fenced_now,
    life_of,
    refusal,
    reread_refusal,
    seen_again,
)
from spark.losses import Loss, Survey

LOSS = Loss("10.0.0.1:70", 7, lost=5, young=2, doubtful=0, oldest_us=1_700_000_000_000_000)
SURVEY = Survey(registered=100, untold=0, damaged=0, losses=[LOSS])


@pytest.mark.parametrize(
    ("fenced", "expires_in_s", "life"),
    [(True, 0.0, Life.FENCED), (False, 0.0, Life.OVER), (False, 3.0, Life.ALIVE)],
)
def test_the_life_of_an_incarnation_is_what_its_lease_says(fenced, expires_in_s, life):
    assert life_of(LOSS, fenced, expires_in_s, named=True, gone=False).life is life
    assert life_of(LOSS, fenced, expires_in_s, named=False, gone=True).life is life
    backfill = replace(LOSS, address="backfill/east")
    assert life_of(backfill, fenced, expires_in_s, named=True, gone=True).life is life


def test_of_who_can_write_no_more_young_events_are_lost_too_and_of_others_they_are_in_flight():
    assert Held(LOSS, Life.OVER).lost == Held(LOSS, Life.FENCED).lost == 7
    assert Held(LOSS, Life.ALIVE).lost == 5
    report = Report(False, SURVEY, [Held(LOSS, Life.ALIVE)], "inbox")
    assert (report.lost, report.in_flight, report.recoverable, report.status) == (5, 2, 0, 1)


@pytest.mark.parametrize(
    ("address", "named", "life", "said"),
    [
        ("backfill/east", True, Life.BACKFILL, "with --abandon"),
        ("10.0.0.1:70", False, Life.UNNAMED, "its output is not named"),
    ],
)
def test_what_may_be_in_somebody_elses_hands_is_left_and_told_with_what_mends_it(address, named, life, said):
    held = life_of(replace(LOSS, address=address), False, 0.0, named, gone=False)
    assert (held.life, held.recoverable, held.wanted) == (life, False, False)
    report = Report(True, SURVEY, [held], "inbox")
    assert report.status == 1
    assert said in as_text(report)
    assert "--gone-for-good" in as_text(report)


def test_only_the_fence_makes_an_incarnation_recoverable():
    one = fenced_now(Held(LOSS, Life.OVER), False, 4.0)  # it came back meanwhile
    assert (one.life, one.lease_s, one.recoverable) == (Life.ALIVE, 4.0, False)
    one = fenced_now(Held(LOSS, Life.ALIVE, 2.0), True, 0.0)
    assert (one.life, one.recoverable) == (Life.FENCED, True)


def test_what_may_stand_in_a_file_that_was_taken_away_is_refused_unless_the_user_says_it_is_gone():
    doubtful = Held(Loss("a:1", 7, 5, 0, 3, 0), Life.FENCED)
    assert "x.jsonl" in (refusal(SURVEY, [doubtful], ["x.jsonl"], False) or "")
    assert refusal(SURVEY, [doubtful], ["x.jsonl"], True) is None
    assert refusal(SURVEY, [Held(LOSS, Life.FENCED)], ["x.jsonl"], False) is None
    alive = Held(Loss("a:1", 7, 5, 0, 3, 0), Life.ALIVE)
    assert refusal(SURVEY, [alive], ["x.jsonl"], False) is None  # nothing is to be released


def test_lines_that_do_not_tell_their_event_are_refused_whatever_the_user_says():
    survey = Survey(100, 2, 0, [LOSS])
    assert "2 joined lines" in (refusal(survey, [Held(LOSS, Life.FENCED)], [], True) or "")
    assert "1 joined lines" in (reread_refusal(1, []) or "")


@pytest.mark.parametrize("gone", [False, True])
def test_joined_ids_that_the_registry_does_not_know_are_refused_as_of_other_settings(gone):
    held = [Held(LOSS, Life.FENCED)]
    assert "ids.key" in (refusal(replace(SURVEY, joined=100, known=9), held, [], gone) or "")
    alive = [Held(LOSS, Life.ALIVE)]  # nor is a sound joiner fenced
    assert "ids.key" in (refusal(replace(SURVEY, joined=100, known=9), alive, [], gone) or "")
    assert refusal(replace(SURVEY, joined=100, known=10), held, [], gone) is None
    assert refusal(replace(SURVEY, joined=100, known=0), [], [], gone) is None


def test_so_much_that_an_output_must_be_missing_is_refused():
    loss = Loss("a:1", 7, GONE_EVENTS_MAX + 1, 0, 0, 0)
    held = [Held(loss, Life.FENCED)]
    small, large = Survey(20_000, 0, 0, [loss]), Survey(10_000_000, 0, 0, [loss])
    assert "name all of them with --out" in (refusal(small, held, [], False) or "")
    assert refusal(small, held, [], True) is None
    assert refusal(large, held, [], False) is None


def test_a_file_that_is_taken_away_while_the_logs_are_read_stops_it():
    assert reread_refusal(0, []) is None
    assert "x.jsonl was taken away" in (reread_refusal(0, ["x.jsonl"]) or "")


@pytest.mark.parametrize(
    ("outcomes", "step"),
    [
        ([Released.RELEASED, Released.RELEASED], Step.INJECT),
        ([Released.RELEASED, Released.NOT_FENCED], Step.RELEASE),
        ([Released.ABSENT, Released.OTHER], Step.INJECT),
        ([Released.OTHER, Released.OTHER], Step.FORGET),
    ],
)
def test_lines_are_injected_once_every_release_has_its_end(outcomes, step):
    assert after_release(bytes(outcomes)) is step


def test_what_the_second_reading_finds_joined_is_lost_no_more():
    one = seen_again(Held(LOSS, Life.FENCED), {7: 1}, {7: 3})
    report = Report(True, SURVEY, [one], "inbox", recovered=3, no_input=1, done={7: 3})
    assert (report.lost, report.remaining, report.status) == (4, 1, 1)
    assert "1 lost events are in none of the inputs" in as_text(report)


def test_the_report_says_what_to_do():
    text = as_text(Report(False, SURVEY, [Held(LOSS, Life.OVER)], "inbox"))
    assert "0000000000000007  10.0.0.1:70" in text
    assert "2023-11-14 22:13:20Z" in text
    assert "7 events can be joined again: --apply does it" in text
    text = as_text(Report(True, SURVEY, [Held(LOSS, Life.ALIVE, 4.0)], "inbox"))
    assert "is alive, its lease runs for 4.0 s: stop or restart that joiner" in text
    assert as_text(Report(True, Survey(3, 0, 0, []), [], "inbox")) == "nothing is lost"


def test_the_report_never_offers_what_it_refuses_and_says_who_joins_what_was_released():
    refused = Report(False, SURVEY, [Held(LOSS, Life.OVER)], "inbox", refused="name it with --out")
    assert "--apply" not in as_text(refused)
    assert "nothing is released: name it with --out" in as_text(refused)
    done = Report(True, SURVEY, [Held(LOSS, Life.FENCED)], "inbox", recovered=7, done={7: 7}, ended=True)
    assert "run the join again: it joins them" in as_text(done)
    assert "run the join again" not in as_text(replace(done, ended=False))
