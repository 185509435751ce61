"""`photon millwheel spark`: killed anywhere, each line of the sinks is there once, as in a run."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from millwheel import Logs, LogSink, Push, TopologyError
from millwheel.engine.plan import numbered
from millwheel.testing import in_order, oracle
from photon.core.errors import CorruptStateError, UsageError
from tests.millwheel.topologies import two_stages
from tests.spark.histories import CHAIN, COUNTS, DECLARED, NAME, ROOT, SECOND, TWICE, WALL
from tests.waiting import wait_until

pytest.importorskip("pyspark")
import pyspark

from spark.history.live import Live, check_live, live
from spark.streaming import clear_unbegun

WAIT_S = 180.0
COMMAND = """\
import os, signal, sys
import spark.history.live as module, spark.history.steps as steps
steps.LOG_BYTES = 300
whole = module.live

def checkpoint(where):
    if where == os.environ["KILL_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)

module.live = lambda *given: whole(*given, checkpoint=checkpoint)
from photon.cli.main import main
main()
"""


@pytest.fixture
def run(tmp_path, requirements):
    with contextlib.ExitStack() as started:
        yield lambda topology: Running(tmp_path, NAME + topology, started)


class Running:
    """A topology on Spark, in a process of its own, over logs that grow."""

    def __init__(self, directory, name, started, where=("--master", "local[2]", "--driver-memory", "512m")):
        self.directory, self.name, self._started, self._where = directory, name, started, where
        self.lines = []
        (directory / "logs").mkdir()

    def start(self, kill_at=""):
        words = ["millwheel", "spark", self.name, "--work", "work", "--every", "0.3s", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words, *self._where],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": ROOT, "KILL_AT": kill_at},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.callback(process.kill)
        return process

    def write(self, count, dice, users=20):
        """Of this moment, and none behind the two seconds that one may be."""
        now = time.time_ns() // 1_000
        for row in range(count):
            user = f"user{row % users}"
            line = {"user": user, "ts": now - dice.randrange(SECOND), "what": "click"}
            self.lines.append(line)
            with (self.directory / f"logs/{row % 3}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def sinks(self, growing=True):
        found = {}
        for path in sorted((self.directory / "out").glob("*/*.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n") or not growing:
                    found.setdefault(path.parent.name, []).append(json.loads(line))
        return found

    def await_all(self, process, topology):
        expected = in_order(oracle(topology, dict.fromkeys(topology.injectors, self.lines)))
        expected.pop("dead-letters")

        def there():
            return in_order(self.sinks()) == expected

        wait_until(lambda: process.poll() is not None or there(), WAIT_S, lambda: self.told(expected))
        assert process.poll() is None, process.communicate()[1][-3000:]

    def told(self, expected):
        found = in_order(self.sinks())
        return str({name: (len(lines), len(found.get(name, []))) for name, lines in expected.items()})

    def stop(self, process):
        """-> the summaries of its batches."""
        process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=WAIT_S)
        assert process.returncode == 128 + signal.SIGTERM, error[-2000:]
        return [json.loads(line) for line in said.splitlines()]


def pythons_of(process):
    """Spark's, which live as long as it does."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "pyspark.daemon" in child.cmdline():
                yield child


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_driver_and_pythons_that_are_killed_change_no_line(tmp_path, run):
    running, dice = run("COUNTS"), random.Random(5)
    (tmp_path / "logs/bad.jsonl").write_text("no line\n")
    for point in ("staged", "noted", "written"):
        running.write(100, dice)
        process = running.start(point)
        _, error = process.communicate(timeout=WAIT_S)
        assert process.returncode == -signal.SIGKILL, error[-2000:]
        [ranges, *_] = sorted((tmp_path / "work/spark/ranges").glob("*.json"))
        shutil.copy(ranges, f"{ranges}.tmp")  # as one that is still written looks
    process = running.start()
    running.write(200, dice)
    running.await_all(process, COUNTS)
    running.write(200, dice)
    killed = [python.kill() for python in pythons_of(process)]
    running.await_all(process, COUNTS)
    assert killed
    running.stop(process)
    letters = (tmp_path / "work/dead-letters/dead-letters-0-000000.jsonl").read_text().splitlines()
    assert [json.loads(letter)["line"] for letter in letters] == ["no line"]


@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "topology"), [("CHAIN", CHAIN), ("WALL", WALL)])
def test_holds_wall_clock_timers_and_several_inputs_are_as_in_a_run(tmp_path, run, name, topology):
    """A user has one line, as the order of records is promised nowhere; a timer on the wall clock may come
    with any batch, so its effect is not compared."""
    running = run(name)
    process = running.start()
    running.write(60, random.Random(2), users=60)
    if name == "CHAIN":
        running.await_all(process, topology)
    else:
        wait_until(lambda: running.sinks().get("visits"), WAIT_S)
        running.write(20, random.Random(3))
        wait_until(lambda: any("soon" in line for line in running.sinks()["visits"]), WAIT_S)
        wait_until(lambda: sum(line["pages"] for line in running.sinks()["visits"]) == 80, WAIT_S)
    batches = running.stop(process)
    read = sum(batch["counts"].get("clicks", {}).get("records", 0) for batch in batches)
    assert read == len(running.lines)
    other = "CHAIN" if name == "WALL" else "WALL"
    begun = (NAME + other, Path("work"), None, 1.0)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tmp_path)
        with pytest.raises(UsageError, match="computations, inputs and sinks are not"):
            live(*begun)


@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.soak
def test_two_injectors_of_the_same_logs_each_read_all_of_them(run):
    running, dice = run("TWICE"), random.Random(7)
    running.write(60, dice)
    process = running.start()
    running.await_all(process, TWICE)
    running.write(60, dice)
    running.await_all(process, TWICE)
    running.stop(process)


def test_without_its_checkpoints_nothing_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work/spark").mkdir(parents=True)
    patterns = [[str(tmp_path / "logs/*.jsonl*")]]
    begun = {"numbers": numbered(COUNTS, {}), "parts": 4, "tasks": 2, "places": {}, "batch": 3}
    state = Live(home=str(tmp_path / "work/spark"), spark=pyspark.__version__, patterns=patterns, **begun)
    (tmp_path / "work/spark/live.json").write_bytes(msgspec.json.encode(state))
    with pytest.raises(CorruptStateError, match="metadata is gone"):
        live(f"{NAME}COUNTS", Path("work"), None, 1.0)
    Path("work").rename("moved")
    with pytest.raises(UsageError, match=r"moved/spark was begun as .*/work/spark, .* move it back"):
        live(f"{NAME}COUNTS", Path("moved"), None, 1.0)


def test_a_query_that_was_killed_before_its_first_batch_was_noted_begins_anew(tmp_path):
    left = tmp_path / "checkpoints/offsets/.0.9a04382b.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    (tmp_path / "checkpoints/metadata").touch()
    clear_unbegun(tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()
    clear_unbegun(tmp_path / "checkpoints")
    left.parent.mkdir(parents=True)
    left.with_name("0").touch()
    clear_unbegun(tmp_path / "checkpoints")
    assert left.with_name("0").exists()


def test_what_can_not_be_is_refused_before_spark_starts(tmp_path, monkeypatch, requirements, photon):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spark.session.open_session", lambda _: pytest.fail("Spark was started"))
    there = Path("out/windows/windows-0-000000.jsonl")
    there.parent.mkdir(parents=True)
    there.write_text("of another run\n")
    for name, hint in (
        ("NONE", "can't be loaded"),
        ("DECLARED", "asks or changes something outside"),
        ("COUNTS", "move them away, or name another directory"),
    ):
        status, said, errors = photon("millwheel", "spark", NAME + name, "--work", "work")
        assert (status, said, errors.count("\n")) == (2, "", 1), errors
        assert hint in errors
    for every in ("0s", "0", "-1s"):
        status, _, errors = photon("millwheel", "spark", NAME + "COUNTS", "--work", "new", "--every", every)
        assert (status, "'--every'" in errors) == (2, True), errors


def test_what_spark_can_not_run_is_refused_with_the_reason(tmp_path):
    for injector, why in (
        (Push("127.0.0.1:7100", "ts"), "it is pushed to"),
        (Logs("kafka://h:1/t", "ts"), "it copies its sources"),
        (Logs("logs/*", "ts", silent="hold"), 'silent="hold" goes by the last line'),
        (Logs("logs/*", "ts", percentile=99.0, lateness_s=5), "a percentile"),
        (Logs("logs/*", "ts", expected=("logs/0*",)), "expected files"),
    ):
        with pytest.raises(TopologyError, match=why):
            check_live(two_stages(injector))
    with pytest.raises(TopologyError, match="asks or changes something outside"):
        check_live(DECLARED)
    with pytest.raises(TopologyError, match="sink 'totals': only workers of a run publish"):
        check_live(two_stages(totals=LogSink("out", publish="kafka://h/t")))
    check_live(two_stages())
