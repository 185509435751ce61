"""`photon millwheel history` and `verify`, and `run --history`, as a person calls them."""

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from millwheel import Logs, LogSink, TopologyError
from millwheel.computation import BEFORE
from millwheel.history import NAME as LEFT
from millwheel.history import low_of
from millwheel.sinks import complete_files
from millwheel.testing import in_order, oracle
from photon.core.disk import DirectoryLock
from photon.core.errors import CorruptStateError, StorageError, UsageError
from photon.core.settings import Settings
from photon.logs.files import Chunk, FileState
from spark.options import Span
from spark.reading.lines import LogFile, Range, chunks_of
from tests.connect.postgresql import Postgresql, need_server
from tests.millwheel.running import LOSES
from tests.spark.histories import COUNTS, NAME, ROOT, SECOND, VISITS, clicks
from tests.waiting import wait_until

pytest.importorskip("pyspark")
import spark.history.run

SINKS = ("windows", "sessions", "lengths")
DAY = 86_400 * SECOND


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory that is the current one, with logs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    return tmp_path


def write(name, lines, mode="wb"):
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(f"logs/{name}", mode) as file:
        file.write(data)


def lines_in(directory):
    return [json.loads(line) for path in sorted(directory.glob("*.jsonl")) for line in path.open("rb")]


def run_command(topology, *more):
    words = [sys.executable, "-m", "photon", "millwheel", "run", NAME + topology, "--work", "work", *more]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": ROOT})


def run(topology, *more):
    assert run_command(topology, *more).wait(60) == 0


@pytest.mark.spark
def test_a_history_has_what_a_run_would_have(here, on_session, photon):
    dice = random.Random(3)
    lines = clicks(dice, 3000, users=40, seconds=600)
    write("a.jsonl.gz", lines[:1000])
    write("b.jsonl", lines[1000::2])
    write("c.jsonl", lines[1001::2])
    with open("logs/c.jsonl", "ab") as file:
        file.write(b'no line\n{"user":"last","ts":700000000,"what":"x"}')  # the end of a log counts
    status, said, errors = photon("millwheel", "history", NAME + "VISITS", "--out", "old[1]", "--json")
    summary = json.loads(said)
    assert (status, errors) == (1, "")
    lines.append({"user": "last", "ts": 700 * SECOND, "what": "x"})
    expected = oracle(VISITS, {"clicks": lines})
    found = {sink: lines_in(here / "old[1]/sinks" / sink) for sink in expected}
    [bad] = [letter for letter in found["dead-letters"] if "injector" in letter]
    assert (bad["line"], bad["file"]) == ("no line", str(here / "logs/c.jsonl"))
    found["dead-letters"].remove(bad)
    assert in_order(found) == in_order(expected)
    assert summary["lines"] == {"visits": len(expected["visits"]), "dead-letters": summary["dead_letters"]}
    assert summary["counts"]["clicks"] == {"records": 3001, "dead_letters": 1}
    [entry] = complete_files(here / "old[1]/sinks/visits/visits-history.manifest")
    assert entry.lines == len(expected["visits"])
    assert sorted(path.name for path in (here / "old[1]").iterdir()) == [LEFT, "sinks"]
    status, _, errors = photon("millwheel", "history", NAME + "VISITS", "--out", "old[1]")
    assert (status, errors.count("\n")) == (2, 1)
    assert "name a new directory" in errors


@pytest.mark.spark
def test_what_sinks_have_is_held_against_the_logs(here, on_session, photon):
    lines = clicks(random.Random(5), 4000, users=30, seconds=900)
    for file in range(3):
        write(f"{file}.jsonl", lines[file::3])
    run("COUNTS", "--workers", "2")
    status, said, errors = photon("millwheel", "verify", NAME + "COUNTS", "--json")
    verdicts = json.loads(said)
    assert (status, errors) == (0, "")
    assert {sink: verdict["equal"] for sink, verdict in verdicts.items()} == {
        sink: len(lines_in(here / "out" / sink)) for sink in SINKS
    }
    [damaged, *_] = sorted((here / "out/windows").glob("*.jsonl"))
    whole = damaged.read_bytes().splitlines(keepends=True)
    doubled = next(line for line in whole if 500 * SECOND < json.loads(line)["time"] < 600 * SECOND)
    changed = next(line for line in whole if json.loads(line)["time"] == 300 * SECOND)
    rest = [line for line in whole if line != changed]
    damaged.write_bytes(b"".join([*rest, doubled, changed.replace(b'"count":', b'"count":1')]))
    status, said, _ = photon("millwheel", "verify", NAME + "COUNTS", "--sink", "windows", "--json")
    assert status == 1
    [verdict] = json.loads(said).values()
    assert (verdict["missing"], verdict["extra"]) == (1, 2)
    assert verdict["equal"] == verdicts["windows"]["equal"] - 1
    assert verdict["examples_missing"] == [changed.decode().strip()]
    assert doubled.decode().strip() in verdict["examples_extra"]
    # Of a part of the time, from the records that it takes.
    part = ("--from", "400", "--to", "500", "--warm-up", "5s")
    status, said, _ = photon("millwheel", "verify", NAME + "COUNTS", "--sink", "windows", *part)
    assert (status, said.split()[:2]) == (0, ["windows", "ok:"])
    inside = sum(400 * SECOND <= json.loads(line)["time"] < 500 * SECOND for line in rest)
    assert f"{inside:,} lines" in said or len(sorted((here / "out/windows").glob("*.jsonl"))) > 1
    status, said, _ = photon("millwheel", "verify", NAME + "COUNTS", "--from", "250", "--to", "550")
    assert status == 1
    assert re.search(r"windows +WRONG: 1 lines missing, 2 too many", said)
    assert re.search(r"sessions +ok", said)


@pytest.mark.spark
def test_a_history_that_was_cut_off_is_made_anew_and_one_at_a_time(here, on_session, photon, monkeypatch):
    write("a.jsonl", clicks(random.Random(2), 300))
    asked = ("millwheel", "history", NAME + "COUNTS", "--out", "old")

    def cut_off(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("spark.history.run._left", cut_off)  # all is there but the note
        patched.setattr("spark.history.run.shutil.rmtree", lambda *_, **__: None)  # as after SIGKILL
        assert photon(*asked)[0] == 130
    assert sorted(path.name for path in (here / "old").iterdir()) == [".work", "sinks"]
    with DirectoryLock(here / "old/.work"):
        status, _, errors = photon(*asked)
        assert (status, "another process works" in errors) == (1, True)
    assert photon(*asked)[0] == 0
    assert sorted(path.name for path in (here / "old").iterdir()) == [LEFT, "sinks"]
    assert len(lines_in(here / "old/sinks/sessions")) == len(
        oracle(COUNTS, {"clicks": clicks(random.Random(2), 300)})["sessions"]
    )


def test_nothing_says_that_a_history_is_whole_while_it_is_made_anew(tmp_path):
    """Killed just before its end, and again on the way: its state is gone, and so is the note on it."""
    for name in (".work", "state", "sinks"):
        (tmp_path / name).mkdir()
    (tmp_path / LEFT).write_text("{}")

    class Killed:
        def run(self, *_):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spark.history.run.recompute(None, Killed(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == []


@pytest.mark.spark
@pytest.mark.cluster
def test_a_run_goes_on_where_a_history_ends_through_kills(here, on_session, photon, monkeypatch):
    """Archives, a log that grows, its rotation while it is read, a new log; late lines up to the lateness."""
    lines = clicks(random.Random(7), 6000, users=30, seconds=1200)
    old, new = lines[:4000], lines[4000:]
    cut = old[-1]["ts"] - 2 * SECOND
    late = [line for line in old if line["ts"] >= cut][::2]
    old = [line for line in old if line not in late]
    write("a.jsonl.1.gz", old[0:2000:2])
    write("b.jsonl", old[1:2000:2])
    write("a.jsonl", old[2000:])
    with open("logs/a.jsonl", "ab") as file:
        file.write(b'{"user":"half')

    def looked(*given, look=spark.history.run._logs_of):
        found = look(*given)
        with open("logs/a.jsonl", "ab") as file:
            file.write(b'way","ts":%d,"what":"x"}\n' % old[-1]["ts"])
        write("a.jsonl", late, "ab")
        os.rename("logs/a.jsonl", "logs/a.jsonl.2")
        os.rename("logs/a.jsonl.1.gz", "logs/a.jsonl.3.gz")
        write("a.jsonl", new[::2])
        return found

    with monkeypatch.context() as patched:
        patched.setattr("spark.history.run._logs_of", looked)
        status, said, errors = photon("millwheel", "history", NAME + "COUNTS", "--out", "old", "--goes-on")
    assert (status, errors) == (0, "")
    assert "low watermark 1970-01-01T" in said
    write("c.jsonl", new[1::2])
    killed = run_command("COUNTS", "--workers", "2", "--history", "old")
    wait_until(lambda: (here / "work/state").exists())
    time.sleep(random.random())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    run("COUNTS", "--workers", "3", "--history", "old")
    expected = oracle(COUNTS, {"clicks": [*lines, {"user": "halfway", "ts": old[-1]["ts"], "what": "x"}]})
    for sink in SINKS:
        before, after = lines_in(here / "old/sinks" / sink), lines_in(here / "out" / sink)
        assert before, sink
        assert after, sink
        assert in_order({sink: before + after}) == in_order({sink: expected[sink]})
    status, said, _ = photon("millwheel", "verify", NAME + "COUNTS", "--history", "old")
    assert (status, said.count("ok:")) == (0, 3)


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.soak
def test_a_history_goes_into_several_servers_through_kills(here, on_session, photon):
    programs = need_server()
    lines = clicks(random.Random(9), 4000, users=40, seconds=900)
    write("a.jsonl", lines[:3000])
    assert photon("millwheel", "history", NAME + "COUNTS", "--out", "old", "--goes-on")[0] == 0
    write("a.jsonl", lines[3000::2], "ab")
    write("b.jsonl", lines[3001::2])
    with contextlib.closing(Postgresql(programs)) as one, contextlib.closing(Postgresql(programs)) as two:
        stores = [word for server in (one, two) for word in ("--store", f"{server.uri}?schema=s&{LOSES}")]
        killed = run_command("COUNTS", "--workers", "2", "--history", "old", *stores)
        wait_until(lambda: (here / "work/store").exists())
        time.sleep(random.random())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        run("COUNTS", "--workers", "4", "--history", "old", *stores)
    expected = oracle(COUNTS, {"clicks": lines})
    for sink in SINKS:
        found = lines_in(here / "old/sinks" / sink) + lines_in(here / "out" / sink)
        assert in_order({sink: found}) == in_order({sink: expected[sink]})


def test_a_log_is_read_under_the_name_that_it_has_by_then(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "a.jsonl.1"
    first.write_text('{"a":1}\n')
    log = LogFile(str(first), 8, inode=first.stat().st_ino)
    first.rename(second)
    first.write_text('{"b":2}\n{"b":3}\n')
    [(_, chunk)] = chunks_of(Range(log, 0, 8), Settings().logs, False)
    assert chunk.data == b'{"a":1}\n'
    second.unlink()
    with pytest.raises(StorageError, match="it was replaced, or packed, meanwhile"):
        list(chunks_of(Range(log, 0, 8), Settings().logs, False))


def test_lines_of_a_sink_are_not_those_of_one_whose_name_begins_like_its(here):
    from spark.history.compare import written_files

    history = "old/sinks/windows/windows-history-000000.jsonl"
    names = ("out/windows-0-000000.jsonl", "out/windows-1-000000.jsonl", history)
    others = ("out/windows-late-0-000000.jsonl", "out/windows-0-0-000000.jsonl")
    for name in (*names, *others):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("{}\n")
    topology = replace(COUNTS, sinks={"windows": LogSink("out")})
    found = written_files(topology, "windows", [here / "old"])
    assert [log.name for log in found] == [str(here / name) for name in names]


def test_lines_of_a_sink_that_tell_no_time_are_compared_with_those_of_any_time():
    from spark.history.compare import _parsing

    kept = [b'{"time":4}', b'{"tim', b"", b'{"time":"\xff"}', b'{"user":"u"}', b"\0" * 9, b"[" * 10_000]
    data = b"\n".join([b'{"time":3}', *kept, b'{"time":7}', b""])
    [rows] = _parsing("windows", Span(4, 7))("", "", Chunk(0, len(data), data))
    assert rows.column("line").to_pylist() == kept


def test_what_can_be_no_history_is_refused_before_spark_starts(here, photon, requirements):
    asked = ("millwheel", "history", "--out", "old")
    for words, hint in {
        (*asked, NAME + "COUNTS"): "no file matches 'logs/*.jsonl*'",
        (*asked, NAME + "COUNTS", "--input", "clicks"): "write INJECTOR=GLOB",
        (*asked, NAME + "NONE"): "can't be loaded",
        ("millwheel", "verify", NAME + "PAIRS", "--to", "7"): "with_time=True",
        ("millwheel", "verify", NAME + "PAIRS", "--sink", "no"): "there are 'attributed', 'unmatched'",
        ("millwheel", "verify", NAME + "COUNTS", "--warm-up", "7s"): "--from",
        ("millwheel", "run", NAME + "COUNTS", "--work", "w", "--history", "no"): "is no whole history",
    }.items():
        status, said, errors = photon(*words)
        assert (status, said, errors.count("\n")) == (2, "", 1), errors
        assert hint in errors


def test_what_asks_outside_or_is_not_there_is_refused():
    from spark.history.run import check
    from tests.spark.histories import DECLARED

    copied = replace(COUNTS, injectors={"clicks": Logs("kafka://h:1/t", "ts")})
    with pytest.raises(TopologyError, match=r"say where its logs are, --input clicks=\.\.\."):
        check(copied, {})
    check(copied, {"clicks": ("logs/*.jsonl",)})
    with pytest.raises(TopologyError, match="asks or changes something outside"):
        check(DECLARED, {})
    with pytest.raises(UsageError, match="no such injector; there are 'clicks'"):
        check(COUNTS, {"click": ()})


@pytest.mark.spark
def test_a_run_takes_up_a_history_of_its_own_topology_before_it_begins(here, on_session, photon):
    write("a.jsonl", clicks(random.Random(1), 500))
    for out, more in (("ended", ()), ("old", ("--goes-on",))):
        assert photon("millwheel", "history", NAME + "COUNTS", "--out", out, *more)[0] == 0

    def refused(topology, history, work="work"):
        words = ("millwheel", "run", NAME + topology, "--work", work)
        status, _, errors = photon(*words, *(("--history", history) if history else ()))
        assert status in (1, 2), errors
        assert errors.count("\n") == 1
        return errors

    assert "of logs that have ended" in refused("COUNTS", "ended")
    assert f"is of {NAME}COUNTS" in refused("VISITS", "old")
    state = min((here / "old/state").glob("*.parquet"))
    data = state.read_bytes()
    state.write_bytes(data[: len(data) // 2])
    assert f"{state.name} can't be read" in refused("COUNTS", "old")
    assert "has a part of" in refused("COUNTS", "")  # what it took up stays half
    state.write_bytes(data)
    run("COUNTS", "--history", "old")
    shutil.rmtree("out")
    run("COUNTS", "--work", "other")
    assert "has begun without a history" in refused("COUNTS", "old", "other")


def test_a_low_watermark_ends_where_a_run_that_has_read_the_logs_would_be(tmp_path):
    states = [FileState(n, name, name, 1, n) for n, name in enumerate(("a", "a.1", "b.gz", "c", "d"))]
    newest = {0: 90, 1: 95, 2: 10, 3: 70}

    def low(newest=newest, **how):
        return low_of(Logs("*", "t", lateness_s=1e-5, **how), states, newest)

    assert low() == 95 - 10
    assert low(silent="hold") == BEFORE  # nothing was ever in d
    assert low({**newest, 4: 80}, silent="hold") == 70 - 10
    assert low(expected=(f"{tmp_path}/x",)) == BEFORE
    assert low({}) == BEFORE


def test_a_damaged_note_of_a_history_is_told(tmp_path):
    from millwheel.history import load

    (tmp_path / LEFT).write_text("{")
    with pytest.raises(CorruptStateError, match=f"{LEFT}: .*; restore it"):
        load(tmp_path)
