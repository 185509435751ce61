"""`photon recover` (paper 3.3.3), its drills with real processes: nothing is doubled, lost or untold."""

import json
import os
import shutil
import signal

import psutil
import pytest

from joiner.output_files import complete_files
from tests.recovery.recovering import Run
from tests.system import children_of, photon, state_of
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

EVENTS = 60
TOLD_S = 150.0
"""Two looks, at what is half a minute old."""


@pytest.fixture
def make_run(tmp_path):
    runs = []

    def make(**options):
        runs.append(Run(tmp_path / f"run{len(runs)}", **options))
        return runs[-1]

    yield make
    for run in runs:
        run.kill()


def with_loss(run, what="lose"):
    """A run of which a batch is registered and, the joiner's disk being gone, written by nobody."""
    run.begin(EVENTS)
    run.told(what)
    run.click(EVENTS)
    wait_until(run.obeyed)
    return run


def lost_count(run):
    return 2 * EVENTS - sum(run.joined().values())


@pytest.mark.long
def test_what_a_joiner_lost_with_its_disk_is_joined_again_by_the_run_that_goes_on(make_run):
    run = with_loss(make_run())
    run.until_over()
    status, told = run.recover(apply=False)
    assert (status, [one["state"] for one in told["incarnations"]]) == (1, ["over"])
    assert told["lost"] > 0
    assert told["recovered"] == 0
    assert run.joined() != run.all_once()
    status, report = run.recover()
    assert status == 0, report
    assert report["recovered"] > 0
    assert report["remaining"] == 0
    wait_until(lambda: run.joined() == run.all_once())
    status, again = run.recover()
    assert (status, again["lost"], again["recovered"]) == (0, 0, 0)
    run.click(EVENTS)
    wait_until(lambda: run.joined() == run.all_once())
    summary = run.stop()
    assert summary["pending"] == 0


STEPS = [
    "surveyed", "fenced", "tails mended", "read again", "lines kept", "planned", "some released", "released",
    "lines copied", "injected", "forgotten",
]  # fmt: skip


@pytest.mark.long
def test_recovery_that_is_killed_at_any_step_and_run_again_doubles_nothing_and_loses_nothing(make_run):
    """One loss, and a kill at each step on the way to its end; the run goes on meanwhile."""
    run = with_loss(make_run())
    for step in STEPS:
        status, report = run.recover(die_at=step)
        assert (status, report) == (-signal.SIGKILL, {}), step
        assert max(run.joined().values()) == 1
    for step in ("injected", "planned"):  # of the second piece
        run.recover(die_at=step)
    status, report = run.recover()
    assert (status, report["remaining"]) == (0, 0), report
    wait_until(lambda: run.joined() == run.all_once())
    assert not list((run.work / "recovery").glob("*.json*"))
    assert run.stop()["pending"] == 0
    assert run.joined() == run.all_once()


@pytest.mark.long
def test_a_zombie_that_goes_on_after_the_release_writes_nothing(make_run):
    # A request that the zombie got, and registered nothing of, is sent to the other one after that time.
    more = "processes = 2\n[dispatcher]\nrequest_timeout_s = 3.0\n"
    run = with_loss(make_run(joiner=more), "stop")
    assert run.process is not None
    joiners = {name: pid for name, pid in children_of(run.process.pid).items() if name.startswith("joiner")}
    wait_until(lambda: psutil.STATUS_STOPPED in map(state_of, joiners.values()))
    (zombie,) = [pid for pid in joiners.values() if state_of(pid) == psutil.STATUS_STOPPED]
    assert lost_count(run) > 0, (run.recover(apply=False), run.joined() == run.all_once())
    run.until_over()  # it is fenced, and what it has is free, only then
    status, report = run.recover()
    assert (status, report["remaining"]) == (0, 0), report
    assert report["recovered"] > 0, report
    wait_until(lambda: run.joined() == run.all_once(), what=str((report, lost_count(run))))
    os.kill(zombie, signal.SIGCONT)
    wait_until(lambda: state_of(zombie) == psutil.STATUS_ZOMBIE, what="a fenced joiner must end")
    run.click(EVENTS)
    wait_until(lambda: sum(run.joined().values()) >= 3 * EVENTS)
    assert run.stop()["pending"] == 0
    assert run.joined() == run.all_once()
    assert run.recover()[1]["lost"] == 0


def ended(run):
    """A run that was killed: what it wrote last is in no manifest."""
    run.begin(EVENTS)
    run.kill()
    run.process = None


def grown(run):
    return max((run.out / "joined" / "east").glob("*.jsonl"), key=lambda path: path.stat().st_size)


def assert_joined_by_the_next_run(run):
    run.start()
    wait_until(lambda: run.joined() == run.all_once())
    run.stop()
    assert run.joined() == run.all_once()
    assert run.recover()[1]["lost"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("harm", "left"),
    [
        pytest.param("deleted", 0, marks=pytest.mark.soak),
        ("cut in the middle of a line", 20),
        pytest.param("cut before a newline", 19, marks=pytest.mark.soak),
    ],
)
def test_what_a_joined_file_lost_is_joined_again_once_and_the_rest_stays(make_run, harm, left):
    run = make_run()
    ended(run)
    path = grown(run)
    lines = path.read_bytes().splitlines(keepends=True)
    if harm == "deleted":
        path.unlink()
    else:
        os.truncate(path, sum(map(len, lines[:20])) + (len(lines[20]) // 2 if left == 20 else -1))
    status, report = run.recover()
    assert (status, report["recovered"]) == (0, EVENTS - left), report
    if left:
        assert path.read_bytes() == b"".join(lines[:left])
        assert any("unfinished lines" in note for note in report["notes"])
    assert_joined_by_the_next_run(run)


@pytest.mark.long
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("a file", marks=pytest.mark.soak),
        pytest.param("all that it wrote", marks=pytest.mark.soak),
        "its disk",
    ],
)
def test_complete_files_that_are_gone_are_joined_again_once_the_user_says_that_they_were_not_moved(
    make_run, what
):
    run = make_run()
    run.begin(EVENTS)
    run.stop()
    path = grown(run)
    assert path.name in complete_files(path.parent)
    if what == "a file":
        path.rename(run.root / path.name)
        status, report = run.recover()
        assert (status, report["recovered"], report["remaining"]) == (1, 0, EVENTS)
        assert path.name in report["refused"]
        assert "--gone-for-good" in report["refused"]
        (run.root / path.name).rename(path)
        assert run.recover()[0] == 0
        path.unlink()
    else:
        shutil.rmtree(path.parent)
    if what == "its disk":
        shutil.rmtree(run.work / "east" / "joiner")
    assert run.recover()[0] == 1, "it may have been moved"
    status, report = run.recover(gone=True)
    assert (status, report["recovered"], report["remaining"]) == (0, EVENTS, 0), report
    assert_joined_by_the_next_run(run)


@pytest.mark.long
def test_what_a_living_joiner_lost_is_left_alone_until_it_is_restarted(make_run):
    run = make_run()
    run.begin(EVENTS)
    grown(run).unlink()
    status, report = run.recover()
    assert [one["state"] for one in report["incarnations"]] == ["alive"]
    assert report["recovered"] == 0
    assert run.process is not None
    os.kill(children_of(run.process.pid)["joiner-east"], signal.SIGKILL)
    status, report = run.recover()
    assert (status, report["recovered"]) == (0, EVENTS), report
    wait_until(lambda: run.joined() == run.all_once())


@pytest.mark.long
def test_lost_events_of_which_no_input_has_the_line_stay_registered_and_are_told(make_run):
    run = make_run()
    ended(run)
    grown(run).unlink()
    (clicks,) = (run.logs / "clicks").glob("*.jsonl")
    lines = clicks.read_bytes().splitlines(keepends=True)
    clicks.write_bytes(b"".join(lines[:10]))
    status, report = run.recover()
    assert (status, report["recovered"], report["no_input"]) == (1, 10, EVENTS - 10)
    assert report["remaining"] == EVENTS - 10
    clicks.write_bytes(b"".join(lines))
    status, report = run.recover()
    assert (status, report["recovered"]) == (0, EVENTS - 10)
    assert_joined_by_the_next_run(run)


# --- losses are told without being asked, by `photon status`


def told_of_joiner(run):
    """The line of the status."""
    lines = photon("status", "--work", run.work).stdout.splitlines()
    return next((line for line in lines if line.startswith("joiner-east ")), "")


def account_of(run):
    return json.loads(photon("status", "--work", run.work, "--json").stdout)["joiner-east"]["account"]


@pytest.mark.long
@pytest.mark.soak
def test_a_joined_file_that_is_deleted_is_told_by_the_joiner_that_wrote_it(make_run):
    run = make_run()
    run.begin(EVENTS)
    (path,) = (run.out / "joined" / "east").glob("*.jsonl")
    path.unlink()
    wait_until(lambda: f"{EVENTS} events stood in files that are gone" in told_of_joiner(run), TOLD_S)
    assert str(path) in told_of_joiner(run)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_events_that_were_won_and_lost_with_a_disk_are_told_until_they_are_recovered(make_run):
    """SIGKILL between the commit and the write, and the intents are gone."""
    run = with_loss(make_run())
    wait_until(lambda: "before its directory was lost" in told_of_joiner(run), TOLD_S)
    assert "run `photon recover`" in told_of_joiner(run)
    run.until_over()
    assert run.recover()[0] == 0
    wait_until(lambda: run.joined() == run.all_once())
    wait_until(lambda: account_of(run)["unknown"] == 0, TOLD_S)
    assert account_of(run) | {"trouble": None} == {
        "unwritten": 0, "gone": 0, "missing_file": None, "unknown": 0, "trouble": None
    }  # fmt: skip
