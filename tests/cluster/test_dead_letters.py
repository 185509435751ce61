"""Dead letters: read, counted, put into an inbox once."""

import json
from types import SimpleNamespace

import pytest

from photon.cluster import dead_letters
from photon.cluster.dead_letters import REPLAYED, Filter, count_letters, read_letters
from photon.core.errors import LockedError, StorageError
from photon.core.fates import Fate
from photon.logs.writer import DeadLetter, dead_letter_lines

GONE = DeadLetter(
    Fate.UNJOINABLE, "its primary event is not in the logs", b'{"id":"c1","x":{"id":7}}', "a.jsonl", 0
)
SKIPPED = DeadLetter(Fate.FILTERED, "not paid", b'{ "id" : "c2" }', "a.jsonl", 40)
TORN = DeadLetter(Fate.MALFORMED, "not JSON", b'{"id":"c3', "a.jsonl", 80)
DEEP = DeadLetter(Fate.MALFORMED, "too deep", b'{"id":' + b"[" * 100_000, "a.jsonl", 85)
BYTES = DeadLetter(Fate.MALFORMED, "not UTF-8", b"\xff\xfe", "a.jsonl", 90)


@pytest.fixture
def letters(tmp_path):
    """A datacenter's directory with four letters in the files of two workers."""
    (tmp_path / "foreign-000000.jsonl").write_bytes(dead_letter_lines([GONE, TORN]))
    (tmp_path / "foreign-w1-000000.jsonl").write_bytes(dead_letter_lines([SKIPPED, BYTES]))
    return tmp_path


def replay(*given, **more):
    return sum(dead_letters.replay(*given, **more))


def events(inbox):
    return sorted(line for path in inbox.glob("*.jsonl") for line in path.read_bytes().splitlines())


def test_letters_of_all_workers_are_counted_by_fate_and_reason(letters):
    (letters / "primary-000000.jsonl").write_bytes(dead_letter_lines([TORN]))
    rows = count_letters(letters, Filter())
    kinds = {(row["log"], row["fate"], row["reason"], row["count"]) for row in rows}
    assert kinds == {
        ("foreign", letter.fate.value, letter.reason, 1) for letter in (GONE, TORN, SKIPPED, BYTES)
    } | {("primary", "malformed", "not JSON", 1)}


def test_numbers_in_a_reason_make_no_kind_of_their_own(tmp_path):
    reasons = ["no primary event after 3 tries in 5.1 s", "no primary event after 12 tries in 86,400 s"]
    letters = [DeadLetter(Fate.UNJOINABLE, reason, b'{"id":1}', "a", n) for n, reason in enumerate(reasons)]
    (tmp_path / "foreign-000000.jsonl").write_bytes(dead_letter_lines(letters))
    (row,) = count_letters(tmp_path, Filter())
    assert (row["reason"], row["count"]) == ("no primary event after N tries in N s", 2)


def test_more_reasons_than_can_be_kept_count_together(letters, monkeypatch):
    monkeypatch.setattr(dead_letters, "REASONS_MAX", 2)
    counts = [(row["reason"], row["count"]) for row in count_letters(letters, Filter())]
    assert counts[0] == ("(others)", 1) or ("(others)", 1) in counts
    assert sum(count for _, count in counts) == 4


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (Filter(fates=(Fate.MALFORMED,)), [TORN, BYTES]),
        (Filter(reason="paid"), [SKIPPED]),
        (Filter(id="c2"), [SKIPPED]),
        (Filter(id="7", id_path="x.id"), [GONE]),
        (Filter(id="c9"), []),
    ],
)
def test_letters_are_chosen_by_fate_reason_and_id(letters, chosen, found):
    taken = [letter.line() for _, letter in read_letters(letters) if chosen.takes(letter)]
    assert sorted(taken) == sorted(letter.event for letter in found)


def test_letters_are_chosen_by_an_id_in_a_field_with_a_dot_in_its_name(tmp_path):
    dotted = DeadLetter(Fate.FILTERED, "not paid", b'{"x":{"http.id":"c1"}}', "a.jsonl", 0)
    (tmp_path / "foreign-000000.jsonl").write_bytes(dead_letter_lines([dotted]))
    (row,) = count_letters(tmp_path, Filter(id="c1", id_path="x.http..id"))
    assert row["count"] == 1


def test_a_letter_of_a_line_nested_too_deeply_to_be_parsed_has_no_id(tmp_path):
    (tmp_path / "foreign-000000.jsonl").write_bytes(dead_letter_lines([DEEP, SKIPPED]))
    assert [row["fate"] for row in count_letters(tmp_path, Filter(id="c2"))] == ["filtered"]


def test_what_is_replayed_is_the_event_byte_for_byte_and_once(letters, tmp_path):
    inbox = tmp_path / "inbox"
    assert replay(letters, inbox, "one", Filter(REPLAYED)) == 2
    assert events(inbox) == sorted([GONE.event, SKIPPED.event])
    assert replay(letters, inbox, "two", Filter(REPLAYED)) == 0
    assert replay(letters, inbox, "three", Filter()) == 2  # the malformed ones, now that all are meant
    assert events(inbox) == sorted([GONE.event, SKIPPED.event, TORN.event, BYTES.event])
    assert sorted(path.name for path in inbox.iterdir()) == ["one-000000.jsonl", "three-000000.jsonl"]
    assert [row["replayed"] for row in count_letters(letters, Filter())] == [1, 1, 1, 1]
    assert replay(letters, inbox, "four", Filter(), again=True) == 4


def test_a_replay_that_failed_brings_its_event_once_more_not_twice(letters, tmp_path):
    inbox = tmp_path / "inbox"
    for turn in range(3):
        assert replay(letters, inbox, f"{turn}", Filter(REPLAYED)) == 2
        failed = [DeadLetter(one.fate, one.reason, one.event, f"{turn}.jsonl", 0) for one in (GONE, SKIPPED)]
        with (letters / "foreign-000000.jsonl").open("ab") as file:
            file.write(dead_letter_lines(failed))
    assert replay(letters, inbox, "all", Filter(REPLAYED), again=True) == 2


def test_a_letter_that_comes_later_is_replayed_alone(letters, tmp_path):
    replay(letters, tmp_path / "inbox", "one", Filter())
    late = DeadLetter(GONE.fate, GONE.reason, b'{"id":"c4"}', "inbox/one.jsonl", 0)
    with (letters / "foreign-000000.jsonl").open("ab") as file:
        file.write(dead_letter_lines([late]) + b'{"fate":"unjo')  # and one that is being written
    assert replay(letters, tmp_path / "inbox", "two", Filter()) == 1
    assert (tmp_path / "inbox" / "two-000000.jsonl").read_bytes() == late.event + b"\n"


def test_a_replay_that_failed_leaves_nothing_in_the_inbox_and_can_be_done_again(
    letters, tmp_path, monkeypatch
):
    inbox = tmp_path / "inbox"
    inbox.mkdir()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(dead_letters.os, "fsync", full)
        with pytest.raises(StorageError, match="no space"):
            replay(letters, inbox, "one", Filter())
    assert list(inbox.iterdir()) == []
    assert replay(letters, inbox, "one", Filter()) == 4


def test_a_torn_index_costs_one_replay_more_and_no_later_one(letters, tmp_path):
    replay(letters, tmp_path / "inbox", "one", Filter())
    index = letters / dead_letters.INDEX_FILE
    index.write_bytes(index.read_bytes()[:-3])
    assert replay(letters, tmp_path / "inbox", "two", Filter()) == 1
    assert replay(letters, tmp_path / "inbox", "three", Filter()) == 0


def test_part_by_part_what_is_in_the_inbox_is_noted_and_what_fails_again_waits_for_the_next_replay(
    letters, tmp_path
):
    inbox = tmp_path / "inbox"
    parts = dead_letters.replay(letters, inbox, "one", Filter(), most=1)
    assert next(parts) == 1
    assert sum(row["replayed"] for row in count_letters(letters, Filter())) == 1
    with pytest.raises(LockedError, match="another replay"):
        replay(letters, inbox, "two", Filter())
    with (letters / "foreign-w1-000000.jsonl").open("ab") as file:
        file.write(dead_letter_lines([DeadLetter(GONE.fate, "again", b'{"id":"c9"}', "one.jsonl", 0)]))
    assert next(parts) == 1
    parts.close()  # cut off
    assert replay(letters, inbox, "three", Filter(), most=2) == 3
    found = [GONE.event, TORN.event, SKIPPED.event, BYTES.event, b'{"id":"c9"}']
    assert events(inbox) == sorted(found)


def test_what_comes_while_it_is_replayed_is_for_the_next_one(letters, tmp_path):
    parts = dead_letters.replay(letters, tmp_path / "inbox", "one", Filter(), most=1)
    next(parts)
    with (letters / "foreign-w1-000000.jsonl").open("ab") as file:
        file.write(dead_letter_lines([DeadLetter(GONE.fate, "again", b'{"id":"c9"}', "one.jsonl", 0)]))
    assert sum(parts) == 3


def test_a_rate_is_kept(letters, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(dead_letters.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(dead_letters.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(dead_letters, "replay", lambda *_: iter([3, 3, 2]))
    topology = SimpleNamespace(pipeline=lambda _: SimpleNamespace(home=lambda _: tmp_path))
    took = [now[0] for _ in dead_letters.replay_in(topology, letters, Filter(), rate=3)]
    assert took == [100.0, 101.0, 102.0] and now == [102.0]


def test_two_replays_at_a_time_are_refused(letters, tmp_path):
    with dead_letters._locked_index(letters), pytest.raises(LockedError, match="another replay"):
        replay(letters, tmp_path / "inbox", "one", Filter())


def test_a_line_that_is_no_letter_is_told_with_its_file(letters):
    (letters / "foreign-000001.jsonl").write_text(json.dumps({"fate": "lost"}) + "\n")
    with pytest.raises(StorageError, match=r"foreign-000001\.jsonl"):
        count_letters(letters, Filter())
