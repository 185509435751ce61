"""A joiner that marks primary events: matched and unmatched exclude each other (photon.core.ids)."""

import pytest

from photon.core.fates import Found
from photon.core.ids import MARK_ADDRESSES, MATCHED, UNMATCHED, decided_token, mark_ids, parse_token
from tests.joiner.fakes import (
    Crash,
    batch_of,
    crash_at,
    fates,
    joined_line,
    lines_of,
    output_lines,
    packed_id,
)

LATE = "its primary event was said to be unmatched before"


@pytest.fixture
def worker(make):
    return make(mark_matched=True)


def mark(name):
    return mark_ids(packed_id(name))


def test_what_is_joined_is_marked_first_and_what_is_called_unmatched_is_not_joined(
    worker, registry, tmp_path
):
    registry.tokens[mark("q-b")] = UNMATCHED
    answer = worker.join(batch_of("abcbb"))
    assert fates(answer) == ["JOINED", "LATE", "JOINED", "LATE", "LATE"]
    assert answer.reasons == dict.fromkeys((1, 3, 4), LATE)
    assert output_lines(tmp_path) == lines_of("ac")
    marks = {mark("q-a"): MATCHED, mark("q-b"): UNMATCHED, mark("q-c"): MATCHED}
    assert registry.tokens.keys() == {packed_id("a"), packed_id("c"), *marks}
    assert registry.tokens.items() >= marks.items()


def test_many_events_of_one_primary_event_find_it_matched(worker, tmp_path):
    for names in ("ab", "cd"):
        assert fates(worker.join(batch_of(names, ["q", "q"]))) == ["JOINED", "JOINED"]
    assert output_lines(tmp_path) == {joined_line(name, "q"): 1 for name in "abcd"}


def test_a_primary_event_is_marked_only_for_what_is_joined_with_it(worker, store, registry):
    store.lacks = {"q-a": Found.ABSENT}
    registry.tokens[mark("q-a")] = UNMATCHED
    registry.expired = {mark("q-c")}
    answer = worker.join(batch_of("abc"))
    assert fates(answer) == ["RETRY_ABSENT", "JOINED", "LATE"]
    assert answer.reasons == {2: "its primary event is older than the registry remembers"}


def test_without_a_time_a_primary_event_can_not_be_marked(worker, tmp_path):
    opaque = "\N{EURO SIGN}"
    answer = worker.join(batch_of("ab", [opaque, "q-b"]))
    assert fates(answer) == ["ADAPTER_ERROR", "JOINED"]
    assert "'ts_us' is missing" in answer.reasons[0]
    assert output_lines(tmp_path) == lines_of("b")


def test_while_the_registry_does_not_answer_nothing_is_joined(worker, registry, tmp_path):
    registry.down = True
    assert fates(worker.join(batch_of("aab"))) == ["RETRY_UNAVAILABLE"] * 3
    assert worker.status()["unresolved"] == 0
    registry.down = False
    assert fates(worker.join(batch_of("ab"))) == ["JOINED", "JOINED"]
    assert output_lines(tmp_path) == lines_of("ab")


def test_a_joiner_that_ends_between_mark_and_event_has_lost_nothing(make, registry, tmp_path):
    with pytest.raises(Crash):
        make(mark_matched=True, checkpoint=crash_at("marked"), name="east").join(batch_of("a"))
    assert registry.tokens == {mark("q-a"): MATCHED}
    assert fates(make(mark_matched=True, name="west").join(batch_of("a"))) == ["JOINED"]
    assert output_lines(tmp_path) == lines_of("a")


def test_without_the_setting_nothing_is_marked(make, registry):
    registry.tokens[mark("q-a")] = UNMATCHED
    assert fates(make().join(batch_of("a"))) == ["JOINED"]
    assert registry.tokens.keys() == {packed_id("a"), mark("q-a")}


def test_a_marks_token_is_of_no_joiner():
    assert {
        parse_token(token).address for token in (MATCHED, UNMATCHED, decided_token("east"))
    } == MARK_ADDRESSES
