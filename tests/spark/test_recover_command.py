"""`photon recover` as a user calls it: the drill of docs/recovery.md, with real processes."""

import json

import pytest

from photon.cluster.topology import Pipeline, Topology, write_topology
from photon.core.settings import Settings
from tests import system
from tests.recovery.recovering import Run
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

EVENTS = 40
SPARK = ["--master", "local[2]", "--driver-memory", "768m"]


@pytest.fixture
def run(tmp_path, requirements):
    run = Run(tmp_path / "run", roots=[tmp_path / "second"])
    (tmp_path / "second").mkdir()
    yield run
    run.kill()


def recover(run, *more):
    done = system.photon(
        "recover", "--foreign", run.logs / "clicks", "--work", run.work, *SPARK, "--json", *more, timeout=250
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_joiner_lost_with_its_disk_is_joined_again_in_every_root(run, tmp_path):
    run.begin(EVENTS)
    run.told("lose")
    run.click(EVENTS)
    wait_until(run.obeyed)
    status, told = recover(run, "--details", tmp_path / "details")
    assert told["lost"] + told["in_flight"] > 0
    assert (told["applied"], told["recovered"]) == (False, 0)
    status, report = recover(run, "--apply")
    assert (status, report["remaining"]) == (0, 0), report
    assert report["recovered"] == told["lost"] + told["in_flight"]
    wait_until(lambda: run.joined() == run.all_once())
    assert run.joined(tmp_path / "second") == run.all_once()
    assert run.stop()["pending"] == 0
    status, again = recover(run, "--apply")  # the registry of a run that has ended is started for it
    assert (status, again["lost"], again["recovered"]) == (0, 0, 0)


@pytest.fixture
def ended(tmp_path):
    """What a run left, as far as is looked at before Spark starts."""
    work, logs = tmp_path / "out" / ".photon", tmp_path / "clicks"
    (work / "east" / "joiner-1").mkdir(parents=True)
    logs.mkdir()
    (logs / "a.jsonl").write_text("{}\n")
    (tmp_path / "out" / "joined").mkdir()
    (tmp_path / "out" / "joined" / "run").touch()
    pipeline = Pipeline(datacenter="east", directory=str(work / "east"))
    write_topology(
        Topology(Settings(), [], [], str(tmp_path / "out"), "", False, [], [pipeline]), work / "topology.json"
    )
    return ["recover", "--foreign", logs, "--work", work]


def test_mistakes_are_told_in_a_line_before_spark_starts(photon, ended, tmp_path):
    out, foreign = tmp_path / "out", ended[:3]
    for arguments, told in (
        ([*foreign, "--out", out], "--work DIR or --registry"),
        ([*foreign, "--registry", "127.0.0.1:1"], "name the joined logs with --out"),
        ([*foreign, "--out", out, "--registry", "127.0.0.1:1", "--apply"], "--inbox"),
        ([*foreign, "--out", tmp_path / "no", "--registry", "127.0.0.1:1"], "neither joined/"),
        ([*foreign, "--work", tmp_path], "topology.json: cannot be read"),
        (
            ["recover", "--foreign", tmp_path / "no", "--out", out, "--registry", "127.0.0.1:1"],
            "no such file",
        ),
    ):
        status, _, errors = photon(*arguments)
        assert (status, told in errors, errors.count("\n")) == (2, True, 1), errors


def test_a_copied_run_is_told_from_the_one_it_was_copied_from(photon, tmp_path):
    """Its topology names the other one's directories: that one's dispatcher would get the events."""
    old, new, logs = tmp_path / "old" / ".photon", tmp_path / "new" / ".photon", tmp_path / "clicks"
    pipeline = Pipeline(datacenter="east", directory=str(old / "east"))
    topology = Topology(Settings(), [], [], str(tmp_path / "old"), "", False, [], [pipeline])
    for work in (old, new):
        work.mkdir(parents=True)
        write_topology(topology, work / "topology.json")
    status, _, errors = photon("recover", "--foreign", logs, "--work", new, "--apply")
    assert (status, "copied or moved" in errors, errors.count("\n")) == (2, True, 1)
    assert "copied or moved" not in photon("recover", "--foreign", logs, "--work", old)[2]


def test_a_registry_that_does_not_answer_is_told_in_a_line(photon, ended, tmp_path):
    status, _, errors = photon(*ended[:3], "--out", tmp_path / "out", "--registry", "127.0.0.1:1")
    assert (status, "127.0.0.1:1" in errors, errors.count("\n")) == (1, True, 1)


def test_a_config_that_reads_events_otherwise_than_the_run_is_refused(photon, ended, tmp_path):
    config = tmp_path / "wrong.toml"
    config.write_text('[ids]\nkey = "another key, long enough"\n')
    status, _, errors = photon(*ended, "--config", config)
    assert (status, "must be those of the run" in errors, errors.count("\n")) == (2, True, 1)
