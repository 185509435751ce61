"""`photon logmap` as a person calls it."""

import json

import pytest

from photon.core.clock import SystemClock
from photon.core.settings import Settings
from tests.eventstore.kit import append, line, pack


@pytest.mark.spark
@pytest.mark.usefixtures("on_session")
def test_a_map_is_built_loaded_and_served(tmp_path, photon):
    from eventstore.server import EventStoreServer

    log, work = tmp_path / "logs" / "q.jsonl", tmp_path / "work" / "eventstore"
    log.parent.mkdir()
    append(log, line("10.0.0.1:7:1700000000000000"), line("opaque"), b"malformed")
    status, said, errors = photon(
        "logmap", "build", "--primary", log.parent / "*.jsonl", "--map", tmp_path / "built", "--json"
    )
    assert (status, errors) == (0, "")
    assert json.loads(said).items() >= {"new": 1, "events": 2, "malformed": 1, "entries": 2}.items()

    status, said, errors = photon("logmap", "load", "--map", tmp_path / "built", "--into", work / "map")
    assert status == 0
    assert [row.split()[:2] for row in said.splitlines()][:3] == [
        ["files", "1"],
        ["events", "2"],
        ["malformed", "1"],
    ]
    assert "1 malformed lines are counted" in errors

    server = EventStoreServer(
        Settings(), "127.0.0.1:0", work, [str(log.parent)], tmp_path / "letters", SystemClock()
    )
    assert server.lookup(pack("10.0.0.1:7:1700000000000000") + pack("opaque"))[1] == [
        line("10.0.0.1:7:1700000000000000"),
        line("opaque"),
    ]
    status, _, errors = photon("logmap", "load", "--map", tmp_path / "built", "--into", work / "map")
    server.stop()
    assert status == 1
    assert "another process works in this directory" in errors


def test_a_pattern_that_matches_nothing_costs_no_session(tmp_path, photon):
    pytest.importorskip("pyspark")
    status, _, errors = photon(
        "logmap", "build", "--primary", tmp_path / "nothing*", "--map", tmp_path / "built"
    )
    assert (status, "no file matches" in errors) == (2, True)


def test_loading_needs_no_spark_and_says_what_is_missing(tmp_path, photon):
    status, _, errors = photon("logmap", "load", "--map", tmp_path, "--into", tmp_path / "map")
    assert (status, "photon logmap build" in errors) == (2, True)


def test_a_log_that_is_not_found_is_told(tmp_path, photon):
    from eventstore.built_map import FORMAT, BuiltFile, Manifest, identity_digest, write_manifest

    log = tmp_path / "logs" / "gone.jsonl"
    identity = identity_digest(Settings())
    manifest = Manifest(FORMAT, identity, 1, [BuiltFile(0, str(log), events=3, malformed=1)])
    write_manifest(tmp_path, manifest)
    status, said, errors = photon("logmap", "load", "--map", tmp_path, "--into", tmp_path / "map", "--json")
    assert (status, json.loads(said)["events"], json.loads(said)["malformed"]) == (0, 0, 0)
    assert f"{log} is not there, nor under another name in its directory" in errors
