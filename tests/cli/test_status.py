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
    monkeypatch.setattr(statuses, "StatusReader", lambda _: reader)
    monkeypatch.setattr(status, "find_system", lambda *_: None)
    config = tmp_path / "photon.toml"
    config.touch()
    done = CliRunner().invoke(status.command, ["--config", str(config)])
    assert done.exit_code == ends, done.output
    assert ("registered 3 events that stand in no output" in done.output) == (ends == 1)
    assert ("000000.jsonl" in done.output) == ("gone" in account)


@pytest.mark.parametrize("days", [6, 8])
def test_who_holds_the_boundary_back_for_more_than_a_week_is_told(days):
    directory = {"leader": "r0", "has_quorum": True, "resharding": None, "replacing": None}
    line = status.line_of({"directory": {**directory, "holding": {"dispatcher-west": days * 86_400.0}}})
    assert ("nothing is forgotten for dispatcher-west, 8 days by now" in line) == (days == 8)
