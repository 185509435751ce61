"""`photon backfill` as a person calls it, where it says no."""

import os
from pathlib import Path

import pytest

from photon.cluster.topology import Topology, write_topology
from photon.core.settings import parse_settings
from tests.spark.kit import planned_job
from tests.system import write_lines

pytest.importorskip("pyspark")
pytestmark = pytest.mark.spark


@pytest.fixture
def said(tmp_path, monkeypatch, photon, requirements):
    """Arguments, over the usual ones -> exit status and the one line on stderr."""
    monkeypatch.chdir(tmp_path)
    event = {"id": "a", "primary_id": "q", "ts_us": 1}
    write_lines(tmp_path / "logs/queries/a.jsonl", [event])
    write_lines(tmp_path / "logs/clicks/a.jsonl", [event])

    def said(*more, **changed):
        options = {"primary": "logs/queries", "foreign": "logs/clicks", "out": "out"}
        options |= {"registry": "127.0.0.1:1", **changed}
        given = [word for name, value in options.items() if value for word in (f"--{name}", value)]
        status, printed, errors = photon("backfill", *given, *more)
        assert (printed, errors.count("\n")) == ("", 1), errors
        return status, errors

    return said


@pytest.fixture
def no_spark(monkeypatch):
    """The registry answers, and Spark must not be started."""
    monkeypatch.setattr("spark.session.open_session", lambda *_: pytest.fail("Spark was started"))
    monkeypatch.setattr("idregistry.client.RegistryClient.identity", lambda _: "0" * 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"registry": ""}, "either --work DIR or --registry"),
        ({"datacenter": "a/b"}, "--datacenter"),
        ({"foreign": "out/joined/**/*.jsonl"}, "matches what this backfill writes"),
        ({"foreign": "nothing-*.jsonl"}, "no foreign log"),
        ({"primary": "nowhere/*.jsonl"}, "nowhere"),
        ({"config": "none.toml"}, "none.toml"),
        ({"work": "nowhere", "registry": ""}, "topology.json"),
    ],
)
@pytest.mark.usefixtures("no_spark")
def test_what_can_not_be_is_told_in_a_line_before_spark_is_started(said, changed, message):
    status, line = said(**changed)
    assert (status, message in line) == (2, True), line
    assert not Path("out/.photon-backfill/backfill/job.json").exists()


@pytest.mark.parametrize(
    "changed", [{}, {"foreign": os.fsdecode(b"logs/clicks/\xff*")}, {"primary": "logs/clicks"}]
)
@pytest.mark.usefixtures("no_spark")
def test_a_log_whose_name_is_no_utf8_is_told_before_spark_is_started(said, tmp_path, changed):
    (tmp_path / os.fsdecode(b"logs/clicks/\xff.jsonl")).touch()
    status, line = said(**changed)
    assert (status, "\\udcff" in line, "rename the log" in line) == (2, True, True), line
    assert not (tmp_path / "out/.photon-backfill/backfill/job.json").exists()


def test_a_registry_that_does_not_answer_is_told_before_spark_is_started(said, monkeypatch):
    monkeypatch.setattr("spark.session.open_session", lambda *_: pytest.fail("Spark was started"))
    monkeypatch.setattr("spark.backfill.run.CLIENT_TIMEOUT_S", 0.5)
    status, line = said()
    assert (status, "127.0.0.1:1" in line) == (1, True)


def test_there_must_be_something_to_abandon(said):
    assert said("--abandon") == (
        2,
        "photon: out/.photon-backfill/backfill: no unfinished backfill to abandon\n",
    )


def test_of_a_backfill_that_is_done_and_lost_its_files_it_is_told_that_recovery_is_the_way(said, tmp_path):
    from spark.backfill.job import Phase, Place

    place = Place(tmp_path / "out", "backfill")
    place.home.mkdir(parents=True)
    place.save(planned_job(1, phase=Phase.DONE))
    status, line = said("--abandon")
    assert (status, "is done" in line, "`photon recover --gone-for-good`" in line) == (2, True, True), line


def test_the_run_in_out_is_the_one_whose_registry_it_is_unless_another_is_named(said, tmp_path):
    (tmp_path / "out/.photon").mkdir(parents=True)
    (tmp_path / "out/.photon/topology.json").write_text("{}")
    status, line = said(registry="")
    assert (status, "out/.photon/topology.json" in line) == (2, True), line


def test_settings_that_read_events_otherwise_than_the_run_are_refused(said, tmp_path):
    runs = parse_settings({"foreign": {"id": "click"}})
    topology = Topology(runs, [], [], str(tmp_path / "out"), "", True, [], [])
    (tmp_path / "out/.photon").mkdir(parents=True)
    write_topology(topology, tmp_path / "out/.photon/topology.json")
    (tmp_path / "other.toml").write_text('[foreign]\nid = "id"\n')
    status, line = said(work="out/.photon", registry="", config="other.toml")
    assert (status, "joined twice" in line) == (2, True)
