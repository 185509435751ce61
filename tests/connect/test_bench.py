"""`photon bench kafka`: what its figures rest on. The figures themselves are no test."""

import json

import pytest

from benchmarks import kafka
from benchmarks.kafka import Output, Plan, run
from benchmarks.kafka_broker import lacking
from photon.cli.bench import KAFKA_PARTS, KAFKA_PEERS
from photon.core.errors import UsageError


def record(**fields):
    return json.dumps(fields).encode()


def test_pairs_of_ours_and_of_peers_are_counted_alike():
    output = Output()
    ours = record(id="c1", primary_id="q1", primary={"id": "q1", "x": 1}, ts_us=5)
    theirs = record(click={"id": "c2", "primary_id": "q2"}, query={"id": "q2"})
    wrong = record(click={"id": "c3", "primary_id": "q3"}, query={"id": "q9"})
    output.take([ours, theirs, wrong, theirs])
    assert output.pairs == {("q1", "c1"): 1, ("q2", "c2"): 2, ("q3", "c3"): 1}
    assert output.figures(5) == {"lost": 2, "repeated": 1, "remark": "1 with another query"}
    assert output.seen_us.keys() == {"c1", "c2", "c3"}


def test_pairs_that_are_not_the_true_ones_are_told():
    output = Output()
    output.take([record(id="c1", primary_id="q1", primary={"id": "q1"})])
    assert output.figures(1, "0" * 64)["remark"] == "not the true pairs"
    assert output.figures(1, "d51e31ac8bfb8e3ba0e5c2b8dd4ce1b2") == output.figures(1, "0" * 64)


def test_parts_and_peers_are_those_of_the_command():
    assert set(kafka.PEERS) == set(KAFKA_PEERS)
    assert set(KAFKA_PARTS) == {"catch-up", "live", "killed"}
    with pytest.raises(UsageError, match="there is no flink"):
        kafka._engines("flink", ())


def test_a_peer_that_is_not_there_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(kafka, "missing", lambda peer, python: f"no {peer.needs}")
    monkeypatch.setattr(kafka, "lacking", lambda *names: f"no {names[0]}")
    engines, lack = kafka._engines("all", ())
    assert [engine.name for engine in engines] == ["photon"]
    assert [row["remark"] for row in lack] == ["no javac", "no quixstreams", "no pyspark"]


def test_what_is_lacking_is_named():
    assert lacking("sh", "no-such-program", "nor-this") == "no no-such-program and no nor-this"
    assert lacking("sh") == ""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.soak
def test_a_small_run_of_all_parts(tmp_path, broker):
    plan = Plan(tmp_path, queries=5_000, clicks=1_000, runs=1, live_seconds=2.0)
    told = []
    report = run(plan, (), None, (), broker.address, told.append)
    assert [*report] == ["machine", *KAFKA_PARTS]
    for part in KAFKA_PARTS:
        (row,) = report[part]
        assert (row["lost"], row["repeated"], row["remark"]) == (0, 0, ""), row
    assert report["catch-up"][0]["clicks_per_s"] > 0 < report["live"][0]["p50_ms"]
    assert told[0] == "catch-up: Photon, fsync, 3 Raft replicas"
