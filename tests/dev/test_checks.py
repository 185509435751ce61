"""The checks and the summary at the end of `photon dev`: what is wrong, what could not be checked."""

import pytest

from photon.cluster.topology import Pipeline, Topology
from photon.core.settings import Settings
from photon.dev import checks as dev_checks
from photon.dev.checks import (
    Check,
    Course,
    counts_add_up,
    lines_are_there,
    logs_are_joined,
    print_dev_summary,
    summary_of,
)
from photon.dev.plan import logs_of
from tests.spark.kit import joined
from tests.system import write_lines

NAMES = ("east", "west")
CLICKS = [{"id": f"c{n}", "primary_id": f"q{n}", "ts_us": 2} for n in range(3)]
QUERIES = [{"id": f"q{n}", "ts_us": 1} for n in range(3)]
LINES = [joined(click, query) + b"\n" for click, query in zip(CLICKS, QUERIES, strict=True)]


def ledger(events, joined, duplicate=0):
    fates = {"joined": joined, "duplicate": duplicate}
    return {"foreign_events": events, "fates": fates, "pending": events - joined - duplicate}


LEDGERS = {"east": ledger(4, 2, 2), "west": ledger(4, 1, 3)}


def test_counts_that_add_up_and_lines_that_are_there_are_well():
    assert counts_add_up(LEDGERS, {}) == Check(True, "every event read has one fate (east 4, west 4)")
    assert lines_are_there(LEDGERS, 3).ok


def test_counts_that_do_not_add_up_are_found():
    check = counts_add_up(LEDGERS | {"west": {**ledger(4, 1, 3), "pending": 1}}, {})
    assert check.ok is False and "the fates of west do not add up" in check.text


def test_events_in_hand_at_the_end_that_are_not_decided_are_told():
    check = counts_add_up(LEDGERS, {"west": 11, "east": None})
    assert check.ok is None and "7 events were in hand and not decided (west 7)" in check.text
    assert counts_add_up(LEDGERS, {"west": 4}).ok  # they were decided while it stopped


def test_lines_that_are_missing_are_found_by_number():
    check = lines_are_there(LEDGERS, 2)
    assert check.ok is False and "1 events are told to be joined and are not in the output" in check.text


class Run:
    """Three clicks in the logs of two datacenters, one of them twice; east has joined two and west one."""

    def __init__(self, home):
        self.work, self.out = home / "work", home / "out"
        for name in NAMES:
            write_lines(logs_of(self.work, name) / "clicks" / "a.jsonl", [*CLICKS, CLICKS[0]])
            write_lines(logs_of(self.work, name) / "queries" / "a.jsonl", QUERIES)
        self.joins("east", *LINES[:2])
        self.joins("west", *LINES[2:])

    def joins(self, name, *lines):
        write_lines(self.out / "joined" / name / f"joiner-{name}-000000.jsonl", lines)

    @property
    def topology(self):
        logs = {name: str(logs_of(self.work, name)) for name in NAMES}
        pipelines = [
            Pipeline(
                datacenter=name,
                directory=str(self.work / name),
                primary=(f"{logs[name]}/queries/*.jsonl",),
                foreign=(f"{logs[name]}/clicks/*.jsonl",),
            )
            for name in NAMES
        ]
        return Topology(Settings(), [], [], str(self.out), "", False, [], pipelines)

    def check(self, complete=True):
        return logs_are_joined(self.topology, self.work, complete)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_events_that_are_joined_once_each_are_well(run):
    assert run.check() == Check(True, "3 events are joined, each once and with the event it names")


def in_both_datacenters(run):
    run.joins("west", *LINES[:1], *LINES[2:])


def with_a_query_that_it_does_not_name(run):
    run.joins("west", joined(CLICKS[2], QUERIES[1]) + b"\n")


def with_another_time(run):
    run.joins("west", joined({**CLICKS[2], "ts_us": 3}, QUERIES[2]) + b"\n")


def that_nobody_logged(run):
    run.joins("west", LINES[2], joined({**CLICKS[2], "id": "c9"}, QUERIES[2]) + b"\n")


def by_nobody(run):
    run.joins("west")


@pytest.mark.parametrize(
    ("join", "told"),
    [
        (in_both_datacenters, "1 joined twice or more; such as 'c0'"),
        (
            with_a_query_that_it_does_not_name,
            "1 joined with none, or another than the primary event they name",
        ),
        (with_another_time, "1 the rest of the line is no line of the inputs; such as 'c2'"),
        (that_nobody_logged, "1 joined, but not in the inputs"),
        (by_nobody, "1 in no output, not registered, and no dispatcher waits with them"),
    ],
)
def test_what_is_wrong_with_the_output_is_found(run, join, told):
    join(run)
    check = run.check()
    assert check.ok is False and told in check.text


def waits(run, click):
    """In an inbox, whose events its dispatcher has yet to read."""
    for name in NAMES:
        write_lines(logs_of(run.work, name) / "clicks" / "late.jsonl", [click])
    write_lines(run.work / "east" / "dispatcher" / "inbox" / "a.jsonl", [click])
    (run.work / "west").mkdir()


def test_events_that_wait_when_all_is_written_and_nobody_is_down_are_found(run):
    waits(run, {"id": "c7", "primary_id": "q1", "ts_us": 2})
    check = run.check()
    assert check.ok is False
    assert "1 in no output yet, though their primary event is in the logs" in check.text
    assert run.check(complete=False) == Check(
        None, "3 events are joined, each once and with the event it names; 1 have no fate yet"
    )


@pytest.mark.parametrize("has_quorum", [True, False])
def test_events_that_wait_for_a_registry_without_a_quorum_are_not_wrong(run, has_quorum):
    waits(run, {"id": "c7", "primary_id": "q1", "ts_us": 2})
    summary = summary_of(run.topology, run.work, 0, Course(6.0, has_quorum=has_quorum))
    check = summary["checks"][-1]
    assert check["ok"] is (False if has_quorum else None)
    reason = "1 have no fate yet: the registry had no quorum; the same command goes on with them"
    assert check["text"].endswith(reason) != has_quorum


def test_clicks_on_queries_that_a_killed_run_held_back_may_wait(run):
    waits(run, {"id": "c7", "primary_id": "q7", "ts_us": 2})
    check = run.check()
    assert check.ok and "1 wait for events that are in no log" in check.text


def test_logs_that_are_not_there_or_too_large_are_not_verified(run, monkeypatch):
    monkeypatch.setattr(dev_checks, "HERE_BYTES_MAX", 1)
    assert run.check() == Check(None, "the logs are too large to be verified here; `photon verify` can")
    for name in NAMES:
        (logs_of(run.work, name) / "clicks" / "a.jsonl").unlink()
    check = run.check()
    assert check.ok is None and "nothing to verify: no file matches" in check.text


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, "in 0.0 s (-)"), (2.0, "in 2.0 s (500/s)")])
def test_a_run_of_no_time_has_no_rate(seconds, shown, capsys):
    print_dev_summary(
        {
            "datacenters": {},
            "joined": 1000,
            "seconds": seconds,
            "joined_per_s": 12_577_825.0 if not seconds else 500.0,
            "restarts": 0,
            "killed": [],
            "checks": [],
        }
    )
    assert f"joined 1,000 {shown}" in capsys.readouterr().out


def test_a_feeder_that_failed_is_a_check_that_is_not_ok_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(dev_checks, "logs_are_joined", lambda *_: Check(None, "there are none"))
    (tmp_path / "joined").mkdir()
    topology = Topology(Settings(), [], [], str(tmp_path), "", True, [], [])
    assert summary_of(topology, tmp_path, 0, Course(6.0))["ok"]
    failed = summary_of(topology, tmp_path, 0, Course(6.0, feeder_failed="the feeder was killed by signal 9"))
    assert not failed["ok"]
    assert [one["ok"] for one in failed["checks"]] == [True, True, None, False]
    assert failed["checks"][-1]["text"] == "the feeder was killed by signal 9"
