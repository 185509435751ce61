"""Every verdict, from hand-written logs."""

import json
from collections import Counter

import pytest

from photon.core.settings import Adapter, Foreign, Primary, Settings
from spark.verification.rules import as_table
from tests.spark.kit import WrittenLogs, foreign, joined, letter, primary

Q = primary("q")
EVENTS = {
    name: foreign(name, "q")
    for name in (
        *("joined", "repeated", "joined_elsewhere", "twice", "twice_in_one", "altered", "lost_unjoinable"),
        *("joinable", "filtered", "adapter_error", "expired", "late", "unsure", "too_long"),
        *("other_time", "less", "more", "spaced"),
    )
}
ORPHANS = {name: foreign(name, "gone") for name in ("unjoinable", "pending", "of_no_log")}
WRONG = foreign("wrong", "q")
NONE = foreign("none", "q")
TWO_NAMES = [foreign("two_names", "gone"), foreign("two_names", "q")]
BAD_LINES = [b"no json", b'{"id":"x"}', b'{"primary_id":"q"}', b"\xff"]


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory):
    """A run in which everything went wrong that can."""
    logs = WrittenLogs(tmp_path_factory.mktemp("broken"))
    logs.primary(Q, primary("q", note="again"), primary("other"), b"no json", primary("unused"))
    logs.foreign(*EVENTS.values(), EVENTS["repeated"], EVENTS["repeated"], *BAD_LINES[:2], name="a.jsonl")
    logs.foreign(*ORPHANS.values(), WRONG, NONE, *TWO_NAMES, b"", *BAD_LINES[2:], name="b.jsonl")
    events = EVENTS | ORPHANS
    logs.joined(
        "dc1",
        *(joined(events[name], Q) for name in ("joined", "joined_elsewhere", "twice")),
        joined(events["repeated"], primary("q", note="again")),
        joined(events["twice_in_one"], Q),
        joined(events["twice_in_one"], Q),
        b'{"id":"torn',
    )
    logs.joined(
        "dc2",
        joined(events["twice"], Q),
        joined(WRONG, primary("other")),
        NONE,
        joined(events["altered"], {**Q, "payload": {}}),
        joined(TWO_NAMES[1], Q),
        joined({**events["other_time"], "ts_us": 3}, Q),
        joined({"id": "less"}, Q),
        joined({**events["more"], "note": ""}, Q),
        joined(events["spaced"], Q).replace(b",", b" ,", 1),
        joined(foreign("alien", "q"), Q),
        joined(events["of_no_log"], primary("gone")),
    )
    logs.letters(
        "dc1",
        *(
            letter(fate, events[fate])
            for fate in ("filtered", "adapter_error", "expired", "late", "unjoinable")
        ),
        letter("unjoinable", events["joined_elsewhere"]),
        letter("unjoinable", events["lost_unjoinable"]),
        letter("unjoinable", events["unsure"]),
        letter("malformed", BAD_LINES[0].decode()),
        letter("malformed", json.dumps(events["too_long"])),
        letter("unjoinable", foreign("stranger", "q")),
        b'{"fate":"unjoinable","reason":',
        letter("no such fate", events["pending"]),
    )
    logs.letters("dc2", letter("filtered", events["unsure"]))
    logs.letters("dc1", letter("malformed", json.dumps(foreign("pending", "gone"))), stem="primary")
    return logs


@pytest.fixture(scope="module")
def answer(place, broken_run):
    return broken_run.ask(place)


@pytest.mark.parametrize(
    ("event", "verdict"),
    [
        ("joined", "joined"),
        ("repeated", "joined"),
        ("joined_elsewhere", "joined"),
        ("two_names", "joined"),
        ("twice", "joined_twice"),
        ("twice_in_one", "joined_twice"),
        ("wrong", "wrong_primary"),
        ("none", "wrong_primary"),
        ("altered", "altered_primary"),
        ("of_no_log", "altered_primary"),
        *((name, "altered_foreign") for name in ("other_time", "less", "more", "spaced")),
        ("alien", "alien"),
        ("stranger", "other_inputs"),
        ("unjoinable", "unjoinable"),
        ("filtered", "filtered"),
        ("unsure", "filtered"),
        ("adapter_error", "adapter_error"),
        ("expired", "expired"),
        ("late", "late"),
        ("pending", "pending"),
        ("joinable", "pending_joinable"),
        ("lost_unjoinable", "lost_unjoinable"),
        ("too_long", "malformed"),
    ],
)
def test_each_event_gets_its_verdict(answer, event, verdict):
    assert answer[1][event] == verdict


def test_the_report_adds_up_to_the_lines_of_the_inputs(answer):
    counts = answer[0].counts
    assert counts["foreign_events"] == len(EVENTS) + len(ORPHANS) + 2 + 2 + 2 + len(BAD_LINES)
    assert counts["malformed"] == len(BAD_LINES) + 1
    assert (counts["repeated"], counts["differing"]) == (2, 1)
    assert counts["joined_unreadable"] == 1
    assert counts["dead_letters_unreadable"] == 2
    outside = ("foreign_events", "alien", "other_inputs", "joined_unreadable", "dead_letters_unreadable")
    inside = sum(count for name, count in counts.items() if name not in outside)
    assert counts["foreign_events"] == inside


def test_what_is_broken_is_named_with_an_example(answer):
    assert answer[0].broken == [
        *("lost_unjoinable", "joined_twice", "wrong_primary", "altered_primary", "altered_foreign", "alien"),
        *("joined_unreadable", "dead_letters_unreadable"),
    ]
    assert answer[0].examples["lost_unjoinable"] == "lost_unjoinable"
    assert answer[0].examples["alien"] == "alien"
    assert answer[0].examples["differing"] == "two_names", "though it breaks nothing"


def test_without_the_primary_logs_nothing_is_called_lost_or_altered(place, broken_run):
    report, _ = broken_run.ask(place, primary=())
    assert not {"pending_joinable", "lost_unjoinable", "altered_primary"} & report.counts.keys()
    assert report.counts["unjoinable"] == 2
    assert report.counts["pending"] == 2
    assert report.counts["joined"] == 6
    assert report.broken == [
        *("joined_twice", "wrong_primary", "altered_foreign", "alien"),
        *("joined_unreadable", "dead_letters_unreadable"),
    ]


def test_a_run_with_other_field_names_and_ids_as_numbers_holds(place, tmp_path):
    settings = Settings(
        primary=Primary(id="query"), foreign=Foreign(id="click", primary_id="of..query", time="at")
    )
    logs = WrittenLogs(tmp_path)
    clicks = [{"click": n, "of.query": n % 3, "at": 1.5, "primary": "theirs"} for n in range(9)]
    queries = [{"query": str(n), "id": "no"} for n in range(2)]
    logs.primary(*queries)
    logs.foreign(*clicks)
    lines = [(c, queries[c["of.query"]]) for c in clicks if c["of.query"] < 2]
    logs.joined(
        "dc1",
        *(
            (json.dumps(c)[:-1] + ',"primary":' + json.dumps(q) + "}").encode()  # a key that stands twice
            for c, q in lines
        ),
    )
    logs.letters("dc1", *(letter("unjoinable", c) for c in clicks if c["of.query"] == 2))
    report, verdicts = logs.ask(place, settings)
    assert report.broken == []
    assert Counter(verdicts.values()) == {"joined": 6, "unjoinable": 3}


def test_an_adapter_may_change_or_drop_the_primary_but_not_swap_it(place, tmp_path):
    logs = WrittenLogs(tmp_path)
    logs.primary(Q, primary("other"))
    logs.foreign(foreign("dropped", "q"), foreign("changed", "q"), foreign("swapped", "q"))
    logs.joined(
        "dc1",
        {"id": "dropped", "price": 3},
        {"id": "changed", "primary": {"id": "q"}},
        joined(foreign("swapped", "q"), primary("other")),
    )
    report, verdicts = logs.ask(place, Settings(adapter=Adapter(use="mine:Mine")))
    assert report.note.startswith("the adapter mine:Mine can't be loaded here")
    assert f"note: {report.note}" in as_table(report).splitlines()
    assert report.as_document()["note"] == report.note
    assert verdicts == {"dropped": "joined", "changed": "joined", "swapped": "wrong_primary"}


def test_an_adapter_that_makes_its_own_lines_is_noted(tmp_path, monkeypatch):
    from spark.verification.verify import note_of

    (tmp_path / "noted.py").write_text(
        "from joiner.adapter import Adapter\n"
        "class Plain(Adapter): pass\n"
        "class Other(Adapter):\n    def join(self, primary, foreign): return {'sum': 3}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert [note_of(Adapter(use=use)) for use in ("", "noted:Plain")] == [""] * 2
    assert "noted:Other makes its own joined lines" in note_of(Adapter(use="noted:Other"))


def test_an_event_asked_for_by_one_line_may_be_joined_by_what_another_names(place, tmp_path):
    from spark.options import Span

    first, second, alone = (
        foreign("rep", "q", ts_us=1_000_000),
        foreign("rep", "q2", ts_us=10_000_000),
        foreign("alone", "q", ts_us=1_000_000),
    )
    logs = WrittenLogs(tmp_path)
    logs.primary(primary("q"), primary("q2"))
    logs.foreign(first, second, alone)
    logs.joined("dc1", joined(first, primary("q")), joined(alone, primary("q")))
    report, _ = logs.ask(place, span=Span(9_000_000))
    assert report.broken == []
    assert (report.counts["foreign_events"], report.counts["joined"]) == (1, 1)


def test_nothing_out_yet_means_that_all_is_pending(place, tmp_path):
    logs = WrittenLogs(tmp_path)
    logs.foreign(*(foreign(n, "q") for n in range(5)))
    report, verdicts = logs.ask(place, primary=())
    assert report.broken == []
    assert Counter(verdicts.values()) == {"pending": 5}


def test_events_joined_while_the_logs_are_read_never_seem_to_come_from_nowhere(place, tmp_path, monkeypatch):
    from spark.verification import facts as sources

    logs = WrittenLogs(tmp_path)
    clicks = logs.foreign(foreign("before", "q"))
    output = logs.joined("dc1", joined(foreign("before", "q"), Q))
    foreign_logs = sources.foreign_logs

    def and_meanwhile(*arguments):
        with open(clicks, "a") as inputs, open(output, "a") as outputs:
            inputs.writelines(json.dumps(foreign(name, "q")) + "\n" for name in ("next", "late"))
            outputs.write(joined(foreign("late", "q"), Q).decode() + "\n")
        return foreign_logs(*arguments)

    monkeypatch.setattr(sources, "foreign_logs", and_meanwhile)
    report, verdicts = logs.ask(place, primary=())
    assert report.broken == []
    assert verdicts["before"] == "joined"
