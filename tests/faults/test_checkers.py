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


def joined(number, text, line=b"{}\n"):
    """One line more."""
    return JoinedLine("east", f"east/joiner-east-000000.jsonl:{number}", text, line)


def changed(line, old, new):
    return JoinedLine(line.datacenter, line.place, line.id, line.line.replace(old, new))


def holds(facts, text, holder):
    """Every replica says so; None: nobody has it."""
    for scan in facts.scans:
        scan.holders.pop(key_of(text), None)
        scan.holders.update({} if holder is None else {key_of(text): holder})


def fated(facts, **fates):
    """What the west counts."""
    facts.ledgers["west"] = with_fates(facts.ledgers["west"], **fates)


VIOLATIONS = {
    "joined again elsewhere": (
        lambda facts: facts.lines.append(line_of(facts.truth, "c0", "west", 2)),
        {"joined_twice"},
    ),
    "joined twice for a moment": (
        lambda facts: facts.repeated.update(c1=["east/a.jsonl:1", "west/b.jsonl:1"]),
        {"joined_twice"},
    ),
    "joined with another query": (
        lambda facts: facts.lines.append(changed(facts.lines.pop(0), b'"id":"q0"', b'"id":"q1"')),
        {"joined_wrong"},
    ),
    "changed by a byte": (
        lambda facts: facts.lines.append(changed(facts.lines.pop(0), b'"ts_us":2', b'"ts_us":3')),
        {"joined_wrong"},
    ),
    "torn": (lambda facts: facts.lines.append(joined(3, None, b'{"id":"c')), {"joined_wrong"}),
    "joined an orphan": (
        lambda facts: (facts.lines.append(joined(3, ORPHAN)), holds(facts, ORPHAN, 7)),
        {"joined_wrong", "wrote_after_fence"},
    ),
    "joined what nobody logged": (
        lambda facts: facts.lines.append(joined(3, "c77")),
        {"joined_wrong", "unregistered"},
    ),
    "lost one": (lambda facts: facts.lines.pop(0), {"lost", "fates_off"}),
    "forgot an event": (lambda facts: fated(facts, duplicate=2), {"fates_off"}),
    "left one pending": (lambda facts: fated(facts, duplicate=2, pending=1), {"fates_off"}),
    "gave up what could be joined": (
        lambda facts: (
            fated(facts, duplicate=2, unjoinable=2),
            facts.letters.append(Letter("west", "unjoinable", "c0")),
        ),
        {"fates_off", "letters_off"},
    ),
    "read a line twice": (
        lambda facts: facts.ledgers.update(east=Ledger(7, {**facts.ledgers["east"].fates, "duplicate": 3})),
        {"fates_off"},
    ),
    "dropped without a letter": (lambda facts: facts.letters.pop(), {"letters_off"}),
    "told everybody that it is joined": (
        lambda facts: facts.ledgers.update(
            {name: with_fates(one, joined=4, duplicate=0) for name, one in facts.ledgers.items()}
        ),
        {"fates_off"},
    ),
    "gave up what nobody logged": (
        lambda facts: (facts.letters.pop(0), facts.letters.append(Letter("east", "unjoinable", "c77"))),
        {"letters_off"},
    ),
    "counted nothing": (lambda facts: facts.ledgers.clear(), {"fates_off"}),
    "asked no replica": (lambda facts: facts.scans.clear(), {"unregistered"}),
    "let a replica forget": (lambda facts: facts.scans[1].holders.pop(key_of("c0")), {"replicas_differ"}),
    "let a replica name another holder": (
        lambda facts: facts.scans[1].holders.update({key_of("c0"): 8}),
        {"replicas_differ"},
    ),
    "joined without registering": (lambda facts: holds(facts, "c2", None), {"unregistered"}),
    "registered for two": (
        lambda facts: facts.scans.append(Scan("r0", 1, {key_of("c0"): 8})),
        {"unregistered"},
    ),
    "registered what nobody logged": (lambda facts: holds(facts, "c77", 7), {"unregistered"}),
    "wrote as a zombie": (
        lambda facts: facts.fences.append(Fenced(7, frozenset({"c0"}))),
        {"wrote_after_fence"},
    ),
}


def test_an_id_may_stand_in_two_shards_for_one_holder(facts):
    """Around the start of a resharding (docs/decisions/008)."""
    facts.scans.append(Scan("r0", 1, {key_of("c0"): 7}))
    assert not check(facts).broken


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_planted_violation_is_found_by_its_rule(facts, name):
    violate, rules = VIOLATIONS[name]
    violate(facts)
    report = check(facts)
    assert set(report.broken) == rules
    with pytest.raises(BrokenError) as caught:
        report.hold()
    assert caught.value.report is report


def test_duplicates_and_losses_are_counted(facts):
    for name in ("joined again elsewhere", "joined twice for a moment"):
        VIOLATIONS[name][0](facts)
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
