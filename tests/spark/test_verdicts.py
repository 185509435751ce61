"""The report: what adds up, what is broken, what a person sees."""

from spark.verification.rules import Total, Verdict, as_table, make_report

TOTALS = [
    Total(Verdict.JOINED, events=5, lines=7, joined=5, letters=1),
    Total(Verdict.UNJOINABLE, events=2, lines=2, joined=0, letters=3),
    Total(Verdict.MALFORMED, events=1, lines=2, joined=0, letters=2),
    Total(Verdict.UNREADABLE, events=1, lines=4, joined=0, letters=0),
    Total(Verdict.OTHER_INPUTS, events=3, lines=0, joined=0, letters=3),
]


def test_every_line_of_the_inputs_is_counted_once():
    counts = make_report(TOTALS, primaries_given=True).counts
    assert counts["foreign_events"] == 15
    assert (counts["malformed"], counts["repeated"], counts["joined"], counts["unjoinable"]) == (6, 2, 5, 2)


def test_malformed_lines_and_dead_letters_of_other_inputs_break_nothing():
    report = make_report(TOTALS, primaries_given=True)
    assert report.broken == []
    assert report.as_document()["ok"] is True
    assert as_table(report).endswith("every invariant holds")


def test_a_broken_count_is_marked_and_an_id_named():
    report = make_report([*TOTALS, Total(Verdict.ALIEN, 2, 0, 2, 0, "x\n")], primaries_given=False)
    assert report.as_document()["broken"] == ["alien"]
    assert report.as_document()["examples"] == {"alien": "x\n"}
    table = as_table(report).splitlines()
    assert [line.split()[1] for line in table if line.startswith("!")] == ["alien"]
    assert any(line.endswith(r"such as 'x\n'") for line in table)
    assert table[-1] == "broken: alien"


def test_joined_lines_that_cannot_be_read_are_broken():
    report = make_report([Total(Verdict.UNREADABLE, 1, 0, 1, 1)], primaries_given=False)
    assert report.broken == ["joined_unreadable", "dead_letters_unreadable"]


def test_a_note_stands_in_the_table_and_the_document_and_breaks_nothing():
    report = make_report(TOTALS, primaries_given=True, note="the adapter a:B makes its own joined lines")
    assert "note: the adapter a:B makes its own joined lines" in as_table(report).splitlines()
    assert (report.as_document()["note"], report.broken) == (report.note, [])


def test_counts_that_need_the_primary_logs_are_not_told_without_them():
    told = make_report(TOTALS, primaries_given=True).counts.keys()
    less = make_report(TOTALS, primaries_given=False).counts.keys()
    assert told - less == {"lost_pending", "lost_unjoinable", "altered_primary"}
