"""The checkers of the fault tests: each finds the violation that is planted, and none in a good run."""

import copy
from collections import Counter

import pytest

from photon.core.fates import Fate
from photon.core.ids import IdPacker
from tests.faults.kit.checkers import (
    AT_ANY_INSTANT,
    BrokenError,
    Facts,
    Fenced,
    JoinedLine,
    Ledger,
    Letter,
    Scan,
    check,
    ledger_of,
    read_dead_letters,
    read_joined,
)
from tests.faults.kit.feeder import Truth

CLICKS, ORPHAN = ("c0", "c1", "c2"), "c9"


def key_of(text):
    return IdPacker().pack([text])


def line_of(truth, text, datacenter="east", number=1):
    line = truth.clicks[text][:-1] + b',"primary":' + truth.queries[truth.pairs[text]] + b"}\n"
    return JoinedLine(datacenter, f"{datacenter}/joiner-{datacenter}-000000.jsonl:{number}", text, line)


@pytest.fixture
def facts():
    """Three clicks, one of them logged twice, an orphan, a malformed line; two datacenters, two replicas."""
    truth = Truth(
        queries={f"q{n}": b'{"id":"q%d","ts_us":1}' % n for n in range(3)},
        clicks={t: b'{"id":"%s","primary_id":"q%s","ts_us":2}' % (t.encode(), t[1:].encode())
                for t in (*CLICKS, ORPHAN)},
        pairs={text: f"q{text[1:]}" for text in CLICKS},
        orphans=Counter([ORPHAN]),
        malformed=1,
        repeated=1,
    )  # fmt: skip
    fates = {"unjoinable": 1, "malformed": 1, "pending": 0, "filtered": 0, "expired": 0}
    holders = {key_of("c0"): 7, key_of("c1"): 7, key_of("c2"): 8}
    return Facts(
        truth,
        lines=[line_of(truth, "c0"), line_of(truth, "c1", number=2), line_of(truth, "c2", "west")],
        letters=[
            Letter(datacenter, fate, text)
            for datacenter in ("east", "west")
            for fate, text in (("unjoinable", ORPHAN), ("malformed", None))
        ],
        ledgers={
            "east": Ledger(6, {**fates, "joined": 2, "duplicate": 2}),
            "west": Ledger(6, {**fates, "joined": 1, "duplicate": 3}),
        },
        scans=[Scan("r0", 0, holders), Scan("r1", 0, copy.copy(holders))],
        fences=[Fenced(7, frozenset({"c0", "c1"}))],
    )


def with_fates(ledger, **changed):
    return Ledger(ledger.foreign_events, {**ledger.fates, **changed})


def test_a_good_run_breaks_nothing(facts):
    report = check(facts).hold()
    assert (report.events_in, report.joined, report.duplicates, report.lost) == (12, 3, 0, 0)


def joined_again_elsewhere(facts):
    facts.lines.append(line_of(facts.truth, "c0", "west", 2))


def joined_twice_for_a_moment(facts):
    facts.repeated["c1"] = ["east/a.jsonl:1", "west/b.jsonl:1"]


def joined_with_another_query(facts):
    at = facts.lines[0]
    facts.lines[0] = JoinedLine(at.datacenter, at.place, at.id, at.line.replace(b'"id":"q0"', b'"id":"q1"'))


def changed_by_a_byte(facts):
    at = facts.lines[0]
    facts.lines[0] = JoinedLine(at.datacenter, at.place, at.id, at.line.replace(b'"ts_us":2', b'"ts_us":3'))


def torn(facts):
    facts.lines.append(JoinedLine("east", "east/joiner-east-000000.jsonl:3", None, b'{"id":"c'))


def joined_an_orphan(facts):
    facts.lines.append(JoinedLine("east", "east/joiner-east-000000.jsonl:3", ORPHAN, b"{}\n"))
    for scan in facts.scans:
        scan.holders[key_of(ORPHAN)] = 7


def joined_what_nobody_logged(facts):
    facts.lines.append(JoinedLine("east", "east/joiner-east-000000.jsonl:3", "c77", b"{}\n"))


def lost_one(facts):
    del facts.lines[0]


def forgot_an_event(facts):
    facts.ledgers["west"] = with_fates(facts.ledgers["west"], duplicate=2)


def left_one_pending(facts):
    facts.ledgers["west"] = with_fates(facts.ledgers["west"], duplicate=2, pending=1)


def gave_up_what_could_be_joined(facts):
    facts.ledgers["west"] = with_fates(facts.ledgers["west"], duplicate=2, unjoinable=2)
    facts.letters.append(Letter("west", "unjoinable", "c0"))


def read_a_line_twice(facts):
    east = facts.ledgers["east"]
    facts.ledgers["east"] = Ledger(7, {**east.fates, "duplicate": 3})


def dropped_without_a_letter(facts):
    facts.letters.pop()


def told_everybody_that_it_is_joined(facts):
    for name in facts.ledgers:
        facts.ledgers[name] = with_fates(facts.ledgers[name], joined=4, duplicate=0)


def gave_up_what_nobody_logged(facts):
    facts.letters[0] = Letter("east", "unjoinable", "c77")


def counted_nothing(facts):
    facts.ledgers.clear()


def asked_no_replica(facts):
    facts.scans.clear()


def let_a_replica_forget(facts):
    del facts.scans[1].holders[key_of("c0")]


def let_a_replica_name_another_holder(facts):
    facts.scans[1].holders[key_of("c0")] = 8


def joined_without_registering(facts):
    for scan in facts.scans:
        del scan.holders[key_of("c2")]


def registered_for_two(facts):
    facts.scans.append(Scan("r0", 1, {key_of("c0"): 8}))


def registered_what_nobody_logged(facts):
    for scan in facts.scans:
        scan.holders[key_of("c77")] = 7


def wrote_as_a_zombie(facts):
    facts.fences[0] = Fenced(7, frozenset({"c0"}))


def test_an_id_may_stand_in_two_shards_for_one_holder(facts):
    """Around the start of a resharding (docs/decisions/008)."""
    facts.scans.append(Scan("r0", 1, {key_of("c0"): 7}))
    assert not check(facts).broken


@pytest.mark.parametrize(
    ("violate", "rules"),
    [
        (joined_again_elsewhere, {"joined_twice"}),
        (joined_twice_for_a_moment, {"joined_twice"}),
        (joined_with_another_query, {"joined_wrong"}),
        (changed_by_a_byte, {"joined_wrong"}),
        (torn, {"joined_wrong"}),
        (joined_an_orphan, {"joined_wrong", "wrote_after_fence"}),
        (joined_what_nobody_logged, {"joined_wrong", "unregistered"}),
        (lost_one, {"lost", "fates_off"}),
        (forgot_an_event, {"fates_off"}),
        (left_one_pending, {"fates_off"}),
        (gave_up_what_could_be_joined, {"fates_off", "letters_off"}),
        (read_a_line_twice, {"fates_off"}),
        (dropped_without_a_letter, {"letters_off"}),
        (told_everybody_that_it_is_joined, {"fates_off"}),
        (gave_up_what_nobody_logged, {"letters_off"}),
        (counted_nothing, {"fates_off"}),
        (asked_no_replica, {"unregistered"}),
        (let_a_replica_forget, {"replicas_differ"}),
        (let_a_replica_name_another_holder, {"replicas_differ"}),
        (joined_without_registering, {"unregistered"}),
        (registered_for_two, {"unregistered"}),
        (registered_what_nobody_logged, {"unregistered"}),
        (wrote_as_a_zombie, {"wrote_after_fence"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_violation_is_found_by_its_rule(facts, violate, rules):
    violate(facts)
    report = check(facts)
    assert set(report.broken) == rules
    with pytest.raises(BrokenError) as caught:
        report.hold()
    assert caught.value.report is report


def test_duplicates_and_losses_are_counted(facts):
    joined_again_elsewhere(facts)
    joined_twice_for_a_moment(facts)
    del facts.lines[2]
    report = check(facts)
    assert (report.duplicates, report.lost) == (2, 1)


def test_while_it_runs_what_is_not_joined_yet_breaks_nothing(facts):
    facts.lines.pop()
    assert check(facts, AT_ANY_INSTANT).hold().lost == 0


def test_lines_and_letters_are_read_as_they_stand(tmp_path):
    joined = tmp_path / "joined" / "east"
    joined.mkdir(parents=True)
    (joined / "joiner-east-000000.jsonl").write_bytes(b'{"id":"a","primary":{"id":"q"}}\n{"id": 5}\n{"id":')
    letters = tmp_path / "dead-letters" / "east"
    letters.mkdir(parents=True)
    (letters / "foreign-000000.jsonl").write_bytes(
        b'{"fate":"malformed","reason":"no","event":"x","file":"f","offset":0}\n'
        b'{"fate":"unjoinable","reason":"no","event":{"id":"b"},"file":"f","offset":2}\n'
    )
    lines = read_joined(tmp_path)
    assert [(line.datacenter, line.id) for line in lines] == [("east", "a"), ("east", "5"), ("east", None)]
    assert [line.id for line in read_joined(tmp_path, grows=True)] == ["a", "5"]
    assert read_dead_letters(tmp_path) == [
        Letter("east", "malformed", None),
        Letter("east", "unjoinable", "b"),
    ]


def test_a_ledger_has_what_is_pending_among_its_fates():
    ledger = ledger_of({"foreign_events": 3, "fates": {"joined": 2}, "pending": 1})
    assert ledger == Ledger(3, {"joined": 2, Fate.PENDING.value: 1})
