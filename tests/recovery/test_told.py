"""Losses are told without being asked, by `photon status`: of lines that are gone, and of lines never written."""

import json

import pytest

from tests.recovery.recovering import Run
from tests.system import photon
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

EVENTS = 60
TOLD_S = 150.0
"""Two looks, at what is half a minute old."""


@pytest.fixture
def run(tmp_path):
    started = Run(tmp_path / "run")
    started.begin(EVENTS)
    yield started
    started.kill()


def line_of(run, process):
    """What the status says of it, and the exit status."""
    done = photon("status", "--work", run.work)
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{process} ")]
    return (lines or [""])[0], done.returncode


def account_of(run):
    return json.loads(photon("status", "--work", run.work, "--json").stdout)["joiner-east"]["account"]


@pytest.mark.long
def test_a_joined_file_that_is_deleted_is_told_by_the_joiner_that_wrote_it(run):
    (path,) = (run.out / "joined" / "east").glob("*.jsonl")
    path.unlink()
    wait_until(
        lambda: f"{EVENTS} events stood in files that are gone" in line_of(run, "joiner-east")[0], TOLD_S
    )
    assert str(path) in line_of(run, "joiner-east")[0]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_events_that_were_won_and_lost_with_a_disk_are_told_until_they_are_recovered(run):
    """SIGKILL between the commit and the write, and the intents are gone."""
    run.told("lose")
    run.click(EVENTS)
    wait_until(run.obeyed)
    wait_until(lambda: "before its directory was lost" in line_of(run, "joiner-east")[0], TOLD_S)
    assert "run `photon recover`" in line_of(run, "joiner-east")[0]
    run.until_over()
    assert run.recover()[0] == 0
    wait_until(lambda: run.joined() == run.all_once())
    wait_until(lambda: account_of(run)["unknown"] == 0, TOLD_S)
    assert account_of(run) | {"trouble": None} == {
        "unwritten": 0, "gone": 0, "missing_file": None, "unknown": 0, "trouble": None
    }  # fmt: skip
