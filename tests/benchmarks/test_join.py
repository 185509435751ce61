"""The whole system's benchmark: what its figures rest on. The figures themselves are no test."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import join, join_peers, matrix, peers, rooms
from benchmarks.join import PARTS, Drain, Plan, check, drain, generated, live, run, wait_for_start
from benchmarks.join_peers import PEERS, beside_us, what_it_wrote
from benchmarks.matrix import SHAPES, Shape, fit, shape_of
from benchmarks.measuring import BenchError, ProcessTree, Usage, memory_of, table, text
from benchmarks.peer_runs import Peer
from photon.cli import bench
from photon.cluster.statuses import Sample, StatusReader
from photon.cluster.topology import write_topology
from photon.core.errors import UsageError
from tests.cluster.test_statuses import system

SMALL = Plan(Path("."), queries=300, clicks=100, steady_queries=100, steady_clicks=300, runs=1)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return generated(tmp_path_factory.mktemp("bench"), 300, 100)


def test_pages_that_processes_share_count_once_in_all_of_them():
    assert memory_of("Rss: 900 kB\nPss:     500 kB\nPss_Anon:   100 kB\nPss_File:   400 kB\n") == 500 << 10


def test_memory_and_cpu_of_all_processes_below_are_counted():
    work = "import time; kept = bytearray(b'x') * (64 << 20); time.sleep(1.2)"
    shell = ["sh", "-c", f'{sys.executable} -c "{work}"; true']
    with subprocess.Popen(shell) as process:
        tree = ProcessTree(process.pid)
        process.wait()
        usage = tree.stop()
    assert 64 <= usage.peak_mib < 256
    assert usage.cpu_s > 0


def test_the_cpu_of_what_ended_before_a_sample_is_counted_too():
    work = "import time\nwhile time.process_time() < 0.2: pass"
    with subprocess.Popen(["sh", "-c", f'{sys.executable} -c "{work}"; true']) as process:
        tree = ProcessTree(process.pid)
        process.wait()
        assert tree.stop(ended=True).cpu_s >= 0.2


def steady_drain(samples):
    return Drain(10.0, {}, Usage(cpu_s=2.0, peak_mib=1), samples, 10_000, 60_000)


def test_the_steady_rate_leaves_out_the_first_and_the_last_tenth():
    samples = [(0.0, 0), (5.0, 100), (6.0, 500), (7.0, 900), (60.0, 1_000)]
    assert steady_drain(samples).steady_per_s() == 4_000
    assert steady_drain(samples).cpu_us_per_click() == 200.0


def test_a_run_too_short_to_be_steady_has_no_rate():
    with pytest.raises(BenchError, match="more clicks"):
        steady_drain([(0.0, 0), (1.0, 500), (2.0, 1_000)]).steady_per_s()


@pytest.mark.cluster
def test_a_run_is_measured_only_if_its_output_is_the_true_one(logs, tmp_path):
    run = drain(logs, tmp_path / "out")
    assert run.pairs == run.summary["joined"] == 100
    assert run.samples[-1][1] > 0
    assert run.usage.cpu_s > 0 and run.usage.peak_mib > 20  # of so short a run as far as it was sampled
    truth = json.loads((logs / "truth.json").read_bytes())
    (log,) = (tmp_path / "out" / "joined").rglob("*.jsonl")
    whole = log.read_bytes()
    log.write_bytes(whole.replace(b"\n", b"", 1).partition(b"}{")[2])
    with pytest.raises(BenchError, match="wrong"):
        check(tmp_path / "out" / "joined", 100, truth["joined_pairs_sha256"])
    log.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(BenchError, match="again"):
        check(tmp_path / "out" / "joined", 100, truth["joined_pairs_sha256"])


@pytest.mark.cluster
@pytest.mark.long
def test_live_latencies_are_of_every_click_after_the_warm_up(tmp_path, monkeypatch):
    monkeypatch.setattr(join, "WARM_UP_S", 0.5)
    (row,) = live(Plan(tmp_path, live_seconds=1.0), 400, 200)
    assert row["joined"] == 300
    assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"] < 60_000


@pytest.mark.cluster
@pytest.mark.long
def test_the_command_prints_its_rows_as_json(tmp_path):
    options = ["join", "--only", "catch-up", "--queries", "300", "--clicks", "100", "--runs", "1"]
    bench = [sys.executable, "-m", "photon.cli.main", "bench", *options, "--dir", str(tmp_path), "--json"]
    done = subprocess.run(bench, capture_output=True, check=True, timeout=100)
    report = json.loads(done.stdout)
    assert report["catch-up"][0]["clicks"] == 100
    assert report["machine"]["cores"] >= 1
    assert list(report) == ["machine", "catch-up"]


# --- the matrix


def costs(us):
    """Rows of these CPU us an event, whose lines have 1, 2, ... KiB."""
    rows = enumerate(us, 1)
    return [
        {"shape": f"s{kib}", "kib_an_event": kib, "cpu_us_an_event": one, "cpu_us_a_kib": round(one / kib, 1)}
        for kib, one in rows
    ]


def test_what_an_event_costs_is_fitted_over_the_shapes_and_each_says_how_far_it_is_beside():
    rows = costs([13.0, 15.0, 20.0, 19.0])
    found = fit(rows)
    assert (found["a_us_an_event"], found["b_us_a_kib"]) == (11.0, 2.3)
    assert [row["beside_the_fit_us"] for row in rows] == [-0.3, -0.6, 2.1, -1.2]
    assert found["worst_times_the_fit"] == "1.12, s3" and found["best_times_the_fit"] == "0.94, s4"
    assert found["worst_cpu_us_a_kib"] == "13.0, s1" and found["best_cpu_us_a_kib"] == "4.8, s4"


def test_no_two_shapes_are_alike():
    assert len(set(SHAPES.values())) == len(SHAPES) >= 8


def test_a_shape_is_named_or_told_by_what_is_unlike_the_plain_one():
    assert shape_of("wide") == SHAPES["wide"]
    assert shape_of("files=3000,line_bytes=2000,ids=uuid") == Shape(files=3_000, line_bytes=2_000, ids="uuid")
    for wrong in ("wider", "files=many", "colour=red", ""):
        with pytest.raises(UsageError, match="many-files"):
            shape_of(wrong)


def test_the_command_refuses_a_shape_that_there_is_not_before_it_measures(tmp_path):
    bench = ["-m", "photon.cli.main", "bench", "join", "--dir", str(tmp_path), "--shape", "colour=red"]
    done = subprocess.run([sys.executable, *bench], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "many-files" in done.stderr and "measuring" not in done.stderr


@pytest.mark.parametrize("name", SHAPES)
def test_logs_have_about_as_many_events_and_bytes_as_their_shape_says(tmp_path, name):
    size = SHAPES[name].generate(tmp_path, 3_000)
    truth = json.loads((tmp_path / "truth.json").read_bytes())
    assert truth["primary_rows"] + truth["foreign_rows"] == pytest.approx(3_000, rel=0.02)
    assert size > 3_000 * SHAPES[name].line_bytes * 0.95


@pytest.mark.cluster
@pytest.mark.long
def test_a_matrix_has_a_row_for_each_shape_with_the_peers_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(join_peers, "PEERS", {"none": Peer("no_such_engine", "no such engine")})
    shapes = ["plain", "files=2,duplicates=0.5,early=0.3", "line_bytes=1000,cache_mib=1"]
    plan = replace(SMALL, directory=tmp_path)
    report = matrix.run(plan, shapes, 0.003, "none", [], lambda _: None)
    assert list(report) == ["machine", "start", "matrix", "fit", "peers"]
    assert [row["shape"] for row in report["matrix"]] == shapes == [row["shape"] for row in report["peers"]]
    assert all(row["events"] == pytest.approx(600, abs=3) for row in report["matrix"])
    assert all(row["cpu_s"] > 0 for row in report["matrix"])


@pytest.mark.cluster
@pytest.mark.long
def test_each_room_tells_what_an_event_costs_it(tmp_path):
    found = {row["room"]: row for row in rooms.rooms(replace(SMALL, directory=tmp_path))}
    assert {name: row["processes"] for name, row in found.items()} == {
        "eventstore": 2,
        "dispatcher": 2,
        "joiner": 2,
        "registry": 3,
    }
    assert found["eventstore"]["events"] == 2 * SMALL.queries
    assert all(row["cpu_us_an_event"] > 0 and row["memory_mib"] > 1 for row in found.values())
    assert found["joiner"]["bytes_written_an_event"] > 100


def test_several_rows_stand_side_by_side_under_the_words_of_their_keys():
    rows = [{"who": "a", "ids_per_s": 1_234_567}, {"who": "bb", "ids_per_s": 5}]
    assert table(rows) == [
        "             ids",
        "             per",
        "  who          s",
        "    a  1,234,567",
        "   bb          5",
    ]


def test_a_single_row_and_single_figures_have_a_line_each():
    rows = text({"machine": {"cores": 2}, "live": [{"p50_ms": 1_000.5}]}).splitlines()
    assert [row.split() for row in rows] == [
        ["machine"],
        ["cores", "2"],
        [],
        ["live"],
        ["p50", "ms", "1,000.5"],
    ]
    figures = {
        "kills": 2,
        "each_s": [0.5, 0.75],
        "reached": True,
        "some_rows": [{"a": 1}, {"a": 2, "b": "x"}],
    }
    told = text({"failover": figures})
    assert told.startswith("failover") and "0.5 0.75" in told and "yes" in told
    assert told.splitlines()[-2:] == ["  1", "  2  x"]


# --- the peers

SCRIPT = """
import json, sys
from pathlib import Path
logs, out = map(Path, sys.argv[2:])
(out / "joined").mkdir()
clicks = [json.loads(l) for p in sorted((logs / "clicks").iterdir()) for l in p.read_bytes().splitlines()]
rows = [{"click_id": c["id"], "primary_id": c["primary_id"], "query_id": c["primary_id"]} for c in clicks]
rows = CHANGE
(out / "joined" / "part-0.json").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(out / "joined" / "_metadata").write_text("not JSON")
"""


@pytest.fixture
def peer_row(logs, tmp_path, monkeypatch):
    """The row of a peer that changes its rows so."""
    monkeypatch.setitem(PEERS, "scripted", Peer("json", "a peer"))

    def row(change):
        (tmp_path / "benchmarks").mkdir()
        (tmp_path / "benchmarks" / "peers.py").write_text(SCRIPT.replace("CHANGE", change))
        return join_peers._run("scripted", sys.executable, logs, tmp_path / "out", root=tmp_path)

    return row


def test_a_peer_that_joins_all_has_lost_nothing(peer_row):
    row = peer_row("rows")
    assert (row["lost"], row["repeated"], row["remark"]) == (0, 0, "")
    assert row["seconds"] > 0


def test_what_a_peer_loses_and_repeats_is_counted(peer_row):
    row = peer_row("rows[7:] + rows[-3:]")
    assert (row["lost"], row["repeated"]) == (7, 3)


def test_a_peer_that_joins_the_wrong_queries_is_found_out(peer_row):
    row = peer_row("[{**row, 'query_id': rows[0]['primary_id']} for row in rows]")
    assert "with another query" in row["remark"]


def test_a_peer_that_fails_is_told_of_and_has_no_figures(peer_row):
    row = peer_row("1 / 0")
    assert "status 1" in row["remark"]
    assert "seconds" not in row


@pytest.mark.cluster
def test_a_peer_that_is_not_installed_has_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(join_peers, "PEERS", {"none": Peer("no_such_engine", "no such engine")})
    ours, theirs = run(replace(SMALL, directory=tmp_path), [], "all", [], lambda _: None)["peers"]
    assert ours["lost"] == 0
    assert ours["seconds"] > 0
    assert "no_such_engine" in theirs["remark"]


@pytest.mark.parametrize("given", ["spark", "nobody=/usr/bin/python3", "duckdb=/no/such/python"])
def test_an_interpreter_that_is_none_is_refused(given, tmp_path):
    with pytest.raises(UsageError, match="NAME=PATH"):
        beside_us(tmp_path, tmp_path, 1, "all", [given], lambda _: None)


def test_a_peer_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no nobody, but spark, pathway, duckdb"):
        beside_us(tmp_path, tmp_path, 1, "duckdb,nobody", [], lambda _: None)


def test_the_command_knows_the_parts_and_peers_that_there_are():
    assert tuple(PARTS) == bench.JOIN_PARTS
    assert tuple(PEERS) == bench.PEERS
    assert all(callable(getattr(peers, name)) for name in PEERS)


def test_a_peers_output_that_is_no_join_is_an_error(tmp_path):
    (tmp_path / "x.json").write_text('{"click_id": "a"}\n')
    with pytest.raises(ValueError, match="primary_id"):
        what_it_wrote(tmp_path, {"distinct_joined_pairs": 1})


@pytest.mark.parametrize("name", ["duckdb", "pathway"])
def test_a_peer_joins_the_true_pairs_where_it_is_installed(logs, tmp_path, name):
    pytest.importorskip(PEERS[name].needs)
    row = join_peers._run(name, sys.executable, logs, tmp_path / "out")
    assert (row["lost"], row["repeated"], row["remark"]) == (0, 0, "")


def test_who_waits_for_a_run_to_start_stops_asking_when_it_has(tmp_path, monkeypatch):
    """Its threads and channels would use CPU while the run is measured."""
    readers = []

    class Answering(StatusReader):
        def read(self):
            readers.append(self)
            well = {"has_quorum": True, "shard": 0}
            replica = {"directory": well, "shards": [well], "shards_expected": [0]}
            return Sample(0.0, {"registry-r0": replica})

    monkeypatch.setattr(join, "StatusReader", Answering)
    (tmp_path / ".photon").mkdir()
    write_topology(system(), tmp_path / ".photon" / "topology.json")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        try:
            wait_for_start(tmp_path, process)
        finally:
            process.kill()
    with pytest.raises(RuntimeError, match="shutdown"):
        readers[0]._pool.submit(print)
