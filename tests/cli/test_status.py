"""What `photon status` ends with."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from photon.cli import status
from photon.cluster import statuses

DISPATCHER = {"datacenter": "east", "fates": {"joined": 2}, "pending": 0, "foreign_events": 2}


@pytest.mark.parametrize(
    ("account", "ends"),
    [
        ({}, 0),
        ({"unwritten": 3}, 1),
        ({"gone": 3, "missing_file": "/out/joined/east/joiner-east-000000.jsonl"}, 0),
    ],
)
def test_a_joiner_that_registered_what_stands_in_no_output_is_told_of_and_ends_it_with_1(
    monkeypatch, tmp_path, account, ends
):
    """Complete files are their readers' to take away."""
    told = {"unwritten": 0, "gone": 0, "missing_file": None, "unknown": 0, "trouble": None} | account
    sample = statuses.Sample(0.0, {"joiner-east": {"account": told}, "dispatcher-east": DISPATCHER})
    reader = SimpleNamespace(read=lambda: sample, close=lambda: None, why_silent={})
    monkeypatch.setattr(status, "StatusReader", lambda _: reader)
    monkeypatch.setattr(status, "find_system", lambda *_: None)
    config = tmp_path / "photon.toml"
    config.touch()
    done = CliRunner().invoke(status.command, ["--config", str(config)])
    assert done.exit_code == ends, done.output
    assert ("registered 3 events that stand in no output" in done.output) == (ends == 1)
    assert ("000000.jsonl" in done.output) == ("gone" in account)
    first = done.output.splitlines()[0]
    if ends:
        assert first.startswith("NOT WELL: joiner-east: registered 3 events that stand in no output")
    else:
        assert first == "all well: 2 processes answer, 0 events wait to be joined"


REPLICA = {
    "directory": {"has_quorum": True, "leader": "r0"},
    "shards": [{"shard": 0, "has_quorum": True}, {"shard": 1, "has_quorum": True}],
    "shards_expected": [0, 1],
    "gone_joiners": [],
}
FINE = {
    "registry-r0": REPLICA,
    "joiner-east": {"lease": None},
    "dispatcher-east": {**DISPATCHER, "paused": None},
}


@pytest.mark.parametrize(
    ("name", "told", "said"),
    [
        ("joiner-east", None, "joiner-east does not answer"),
        ("registry-r0", {**REPLICA, "shards": REPLICA["shards"][:1]}, "the registry has no quorum"),
        (
            "registry-r1",
            {**REPLICA, "directory": {"has_quorum": False, "leader": None}},
            "registry-r1 hears no leader",
        ),
        ("joiner-east", {"lease": {"fenced": True}}, "joiner-east: FENCED"),
        ("dispatcher-east", {**DISPATCHER, "paused": "900 events wait"}, "dispatcher-east: 900 events wait"),
        ("dispatcher-east", {**DISPATCHER, "pending": -1}, "the fates of east do not add up"),
        (
            "joiner-east",
            {"lease": None, "sinks": [{"sink": "kafka://h/t", "behind": True, "trouble": "no broker"}]},
            "joiner-east: kafka://h/t: behind (no broker)",
        ),
        (
            "importer-east-foreign",
            {"sources": [{"source": "kafka://h/t", "records": 7, "behind": 0, "lost": 2, "trouble": None}]},
            "importer-east-foreign: kafka://h/t: 7 records copied, 2 LOST that were deleted before they were read",
        ),
        (
            "registry-r0",
            {**REPLICA, "gone_joiners": [{"address": "a:1", "events": 7}]},
            "joiner a:1 is gone and holds 7 events",
        ),
    ],
)
def test_the_verdict_names_what_is_wrong(name, told, said):
    def verdict_of(answers):
        return status.verdict(statuses.Sample(0.0, answers))

    assert verdict_of(FINE) == "all well: 3 processes answer, 0 events wait to be joined"
    assert verdict_of({**FINE, name: told}).startswith(f"NOT WELL: {said}")


@pytest.mark.parametrize(("datacenter", "told"), [("east", True), ("west", False)])
def test_shares_that_nobody_has_are_told_of_the_datacenters_that_there_are(datacenter, told):
    group = {"members": {}, "leaving": [], "moving": {}, "unowned": [2]}
    replica = {**REPLICA, "groups": {f"{datacenter}-dispatchers": group}}
    said = status.verdict(statuses.Sample(0.0, {**FINE, "registry-r0": replica}))
    assert said.startswith("NOT WELL: share 2 of east-dispatchers is nobody's" if told else "all well")


def test_sources_and_sinks_that_are_merely_behind_are_well():
    joiner = {"lease": None, "sinks": [{"sink": "kafka://h/t", "behind": True, "trouble": None}]}
    assert status.verdict(statuses.Sample(0.0, {**FINE, "joiner-east": joiner})).startswith("all well")


def test_of_many_troubles_the_worst_are_named_and_the_others_counted():
    silent = statuses.Sample(0.0, {f"joiner-{n}": None for n in range(5)})
    named = "; ".join(f"joiner-{n} does not answer" for n in range(3))
    assert status.verdict(silent) == f"NOT WELL: {named}; and 2 more below"


def test_a_registry_without_a_quorum_is_told_before_those_that_do_not_answer():
    alone = {**REPLICA, "directory": {"has_quorum": False, "leader": None}}
    silent = dict.fromkeys(("registry-r1", "registry-r2", "joiner-west", "dispatcher-west"))
    said = status.verdict(statuses.Sample(0.0, {**silent, **FINE, "registry-r0": alone}))
    assert said.startswith("NOT WELL: the registry has no quorum; registry-r1 does not answer;")


def test_watch_asks_again_until_it_is_stopped(monkeypatch, tmp_path):
    answers = iter([{"dispatcher-east": DISPATCHER}, {"dispatcher-east": None}])

    def read():
        if (answer := next(answers, None)) is None:
            raise KeyboardInterrupt
        return statuses.Sample(0.0, answer)

    reader = SimpleNamespace(read=read, close=lambda: None, why_silent={})
    monkeypatch.setattr(status, "StatusReader", lambda _: reader)
    monkeypatch.setattr(status, "find_system", lambda *_: None)
    monkeypatch.setattr(status, "_WATCH_S", 0.0)
    done = CliRunner().invoke(status.command, ["--config", str(tmp_path), "--watch"])
    assert "all well: 1 processes answer" in done.output
    assert "NOT WELL: dispatcher-east does not answer" in done.output


@pytest.mark.parametrize("days", [6, 8])
def test_who_holds_the_boundary_back_for_more_than_a_week_is_told(days):
    directory = {"leader": "r0", "has_quorum": True, "resharding": None, "replacing": None}
    line = status.line_of({"directory": {**directory, "holding": {"dispatcher-west": days * 86_400.0}}})
    kept = "for dispatcher-west ids are kept 8 days longer than registry.retention_days"
    assert (kept in line) == (days == 8)


def test_a_new_registry_of_old_events_keeps_ids_for_longer_and_is_not_said_to_be_old():
    shard = {"shard": 0, "leader": "r0", "ids": 50, "has_quorum": True, "boundary_held_s": 365 * 86_400.0}
    line = status.line_of({"shards": [shard]})
    assert line == ("shard 0: leader r0, 50 ids, ids are kept 365 days longer than registry.retention_days")
