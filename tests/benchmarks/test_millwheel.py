"""The benchmark of MillWheel: what its figures rest on. The figures themselves are no test."""

import json
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from benchmarks import millwheel
from benchmarks.measuring import BenchError, Tail, text
from benchmarks.millwheel import (
    Live,
    Plan,
    Shape,
    Written,
    check_counts,
    check_odd,
    drained,
    odd_ones,
    written,
)
from benchmarks.peer_runs import Peer
from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.ready import WindowCounts, Zeitgeist
from millwheel.testing import oracle
from photon.cli import bench
from tests.waiting import wait_until


def lines_of(logs):
    return [json.loads(line) for path in sorted((logs.directory / "logs").iterdir()) for line in path.open()]


@pytest.mark.parametrize("shape", [Shape(5), Shape(50, skew=1.0, pad=10)])
def test_what_is_written_is_what_is_counted(tmp_path, shape):
    logs = written(tmp_path, shape, 1_000)
    lines = lines_of(logs)
    assert len(lines) == 1_000
    counted = Counter((line["key"], line["ts_us"] // 1_000_000 * 1_000_000) for line in lines)
    assert logs.counts() == Counter((*window, count) for window, count in counted.items())


def test_what_is_odd_is_what_zeitgeist_tells(tmp_path):
    spiky = [9] * 40 + [40] * 5 + [9] * 300 + [0] * 9 + [9] * 3
    times = [second * 1_000_000 + n for second, count in enumerate(spiky) for n in range(count)]
    lines = [{"key": key, "ts_us": ts} for ts in times for key in ("a", "b")]
    lines = [line for n, line in enumerate(lines) if line["key"] == "a" or n % 3]
    topology = Topology(
        {"events": Logs("logs/*.jsonl", "ts_us", lateness_s=1)},
        {
            "windows": node(
                WindowCounts("counts", 1.0), Input("events", key="key", value=None), Stream("counts")
            ),
            "zeitgeist": node(Zeitgeist("odd", 1.0), Input("counts"), Stream("odd")),
        },
        {"odd": LogSink("out/odd")},
    )
    told = Counter(
        f"{odd['key']} {odd['kind']} {odd['start_us']}" for odd in oracle(topology, {"events": lines})["odd"]
    )
    seconds = Counter((line["key"], line["ts_us"] // 1_000_000 * 1_000_000) for line in lines)
    assert odd_ones(Counter((*window, count) for window, count in seconds.items())) == told
    assert {"spike", "dip"} == {one.split()[1] for one in told}


@pytest.mark.parametrize("wrong", ["missing", "twice", "other"])
def test_a_wrong_count_is_an_error(tmp_path, wrong):
    logs = written(tmp_path, Shape(5), 1_000)
    truth = logs.counts()
    lines = [{"key": key, "start_us": start, "count": count} for key, start, count in truth]
    out = tmp_path / "out" / "counts"
    out.mkdir(parents=True)
    file = out / "counts-0-000000.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_counts(logs, truth)
    changed = {"missing": lines[1:], "twice": [*lines, lines[0]]}
    changed["other"] = [lines[0] | {"count": 0}, *lines[1:]]
    file.write_text("".join(json.dumps(line) + "\n" for line in changed[wrong]))
    with pytest.raises(BenchError, match="wrong output"):
        check_counts(logs, truth)


def test_an_odd_second_that_was_not_told_is_an_error(tmp_path):
    logs = Written(tmp_path, None, None)
    with pytest.raises(BenchError, match="of 1 odd seconds, 0 were told"):
        check_odd(logs, Counter(["a spike 1"]))


@pytest.mark.parametrize(("topology", "kills"), [("WINDOWS", 1), ("RECORDS", 0), ("ZEITGEIST", 0)])
def test_a_run_is_measured_and_its_output_is_true(tmp_path, topology, kills):
    logs = written(tmp_path, Shape(5), 2_000)
    seconds, usage, killed = drained(logs, topology, 2, kills)
    assert seconds > 0
    assert usage.cpu_s > 0
    assert killed == kills
    check_counts(logs, logs.counts())


@pytest.mark.long
def test_a_small_cache_counts_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(millwheel, "CACHES", (10, 1_000))
    rows = millwheel.cache(Plan(tmp_path, lines=3_000, runs=1), lambda _: None)
    assert [row["cached_keys"] for row in rows] == [10, 1_000]
    assert max(row["cpu"] for row in rows) == 1.0


@pytest.mark.long
@pytest.mark.soak
def test_lines_that_come_one_by_one_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(millwheel, "LIVE_LINES_PER_S", 100)
    monkeypatch.setattr(millwheel, "LIVE_WORKERS", (1, 2))
    plan = replace(Plan(tmp_path), live_seconds=2.0)
    rows = millwheel.latency(plan, lambda _: None)
    assert [row.get("lines") for row in rows] == [None, None, *[200] * 8]
    assert all(row["p50_ms"] > 0 for row in rows)
    assert "watermark" in text({"latency": rows})


@pytest.mark.long
@pytest.mark.soak
def test_lines_wait_while_a_worker_with_its_keys_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(millwheel, "LIVE_LINES_PER_S", 100)
    rows = millwheel.recovery(replace(Plan(tmp_path), lines=2_000, live_seconds=3.0), lambda _: None)
    assert [(row["fault"], row["restarts"]) for row in rows] == [
        ("none", 0),
        ("a worker is killed", 1),
        ("new code", 0),
    ]
    assert all(row["lines"] == 200 and row["longest_ms"] >= row["p50_ms"] for row in rows)


def test_a_sink_file_that_comes_later_is_read_too(tmp_path):
    live = Live(tmp_path)
    out = tmp_path / "out" / "echoed"
    out.mkdir(parents=True)
    (out / "echoed-0-000000.jsonl").write_text("1\n")
    reader = threading.Thread(target=live._read)
    reader.start()
    try:
        wait_until(lambda: 1 in live._got)
        (out / "echoed-1-000000.jsonl").write_text("2\n")
        wait_until(lambda: 2 in live._got)
    finally:
        live._over.set()
        reader.join()


def test_a_fault_that_was_not_played_gives_no_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(millwheel, "LIVE_LINES_PER_S", 100)
    (tmp_path / "logs").mkdir()
    out = tmp_path / "out" / "echoed"
    out.mkdir(parents=True)
    over = threading.Event()

    def echo():
        with (
            closing(Tail(tmp_path / "logs", "*.jsonl")) as logs,
            (out / "echoed-0-000000.jsonl").open("w") as sink,
        ):
            while not over.wait(0.001):
                for whole in logs.read():
                    sink.writelines(f"{json.loads(line)['n']}\n" for line in whole.splitlines())
                    sink.flush()

    def fails():
        raise BenchError("nothing to kill")

    echoing = threading.Thread(target=echo)
    echoing.start()
    try:
        with pytest.raises(BenchError, match="nothing to kill"):
            Live(tmp_path).run(0.2, "echo", fails)
    finally:
        over.set()
        echoing.join()


def test_the_command_has_each_part_and_peer():
    assert tuple(millwheel.PARTS) == bench.MILLWHEEL_PARTS
    assert tuple(millwheel.PEERS) == bench.MILLWHEEL_PEERS


@pytest.mark.long
def test_ours_counts_right_beside_peers_after_a_kill_too(tmp_path, monkeypatch):
    monkeypatch.setattr(millwheel, "SHAPES", {"few keys": Shape(5)})
    monkeypatch.setattr(
        millwheel, "PEERS", {"photon": millwheel.PEERS["photon"], "none": Peer("no_such", "none")}
    )
    absent, ours = millwheel.beside_us(Plan(tmp_path, lines=2_000, runs=1), "all", [], lambda _: None)
    assert "no_such" in absent["remark"]
    wrong = ("missing", "extra", "killed_missing", "killed_extra")
    assert [ours[key] for key in wrong] == [0, 0, 0, 0]


def counts_of(out, lines, name="part-0.json"):
    path = out / "counts" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_a_peer_misses_doubles_and_takes_back_is_counted(tmp_path):
    truth = Counter([("a", 0, 3), ("b", 0, 1)])
    a, b = ({"key": key, "start_us": 0, "count": count} for key, _, count in truth)
    counts_of(tmp_path, [a, b, {"key": "end", "start_us": 9, "count": 1}])
    assert millwheel._wrong(tmp_path, truth) == {"missing": 0, "extra": 0}
    counts_of(tmp_path, [a, a, b | {"count": 2}])
    assert millwheel._wrong(tmp_path, truth) == {"missing": 1, "extra": 2}
    counts_of(tmp_path, [a, b | {"count": 2}, b | {"count": 2, "diff": -1}, b])
    assert millwheel._wrong(tmp_path, truth) == {"missing": 0, "extra": 0}


def test_of_a_sink_with_a_log_only_listed_files_are_read(tmp_path):
    line = {"key": "a", "start_us": 0, "count": 3}
    kept = counts_of(tmp_path, [line])
    counts_of(tmp_path, [line], "part-of-a-killed-attempt.json")
    entry = tmp_path / "counts" / "_spark_metadata" / "0"
    entry.parent.mkdir()
    entry.write_text("v1\n" + json.dumps({"path": kept.as_uri()}) + "\n")
    assert millwheel._wrong(tmp_path, Counter([("a", 0, 3)])) == {"missing": 0, "extra": 0}
