"""Backfills whose processes are killed, and one beside a live pipeline. Real processes, real registries."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from idregistry.client import RegistryAt
from photon.core.settings import Settings
from photon.dev.generated_logs import AtOnce, Mix, generate_at_once
from photon.dev.pairs import check_pairs
from tests.spark.kit import RealRegistry
from tests.system import join_arguments, photon, read_lines, start_photon, write_lines
from tests.waiting import wait_until

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

EVENTS = 400
WAIT_S = 150.0

ADAPTER = '''\
import os, random, time
from pathlib import Path
from idregistry.client import RegistryClient
from joiner.adapter import Adapter
from photon.core.clock import SystemClock
from photon.core.columns import pack_times
from photon.core.ids import IdPacker

HERE = Path(__file__).parent

class Striking(Adapter):
    """Once its first event is registered, does what the file `strike` says, once."""
    first = None

    def join(self, primary, foreign):
        name = foreign.data["id"]
        if self.first is None:
            self.first = name
        elif int(name[1:]) > 150 and (HERE / "strike").exists():
            client = RegistryClient([os.environ["REGISTRY"]], 20.0, SystemClock(), random.Random())
            ids, times = IdPacker().pack([self.first]), pack_times([1_700_000_000_000_000])
            deadline = time.monotonic() + 5.0
            while client.lookup(ids, times) != bytes([1]):
                if time.monotonic() > deadline:
                    return None  # it waits in this very batch
                time.sleep(0.02)
            what = (HERE / "strike").read_text()
            (HERE / "strike").rename(HERE / ("struck-" + what))
            if what == "die":
                os._exit(9)
            while not (HERE / "go").exists():
                time.sleep(0.02)
        return None
'''

COMMAND = """\
import spark.backfill.run as module
module.SESSION_SETTINGS["spark.sql.execution.arrow.maxRecordsPerBatch"] = "10"
from photon.cli.main import main
main()
"""


def wait_for(condition, what, process):
    wait_until(lambda: condition() or process.poll() is not None, WAIT_S, what)
    assert process.poll() is None, process.communicate()


class Command:
    """`photon backfill` in batches of ten events, with the adapter above."""

    def __init__(self, directory, registry):
        self.directory = directory
        self.registry = registry
        queries = [{"id": f"q{n}", "ts_us": 1} for n in range(20)]
        clicks = [
            {"id": f"c{n}", "primary_id": f"q{n % 20}", "ts_us": 1_700_000_000_000_000} for n in range(EVENTS)
        ]
        write_lines(directory / "logs/queries/a.jsonl", queries)
        write_lines(directory / "logs/clicks/a.jsonl", clicks)
        (directory / "striking.py").write_text(ADAPTER)
        (directory / "photon.toml").write_text(
            '[adapter]\nuse = "striking:Striking"\n[registry]\nlease_s = 2\n'
        )

    def start(self, kill_at=""):
        arguments = ["backfill", "--primary", "logs/queries", "--foreign", "logs/clicks", "--out", "out"]
        arguments += ["--config", "photon.toml", "--registry", self.registry.address, "--json"]
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments, "--master", "local[2]", "--driver-memory", "512m"],
            cwd=self.directory,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "REGISTRY": self.registry.address,
                "PHOTON_BACKFILL_KILL_AT": kill_at,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process):
        said, error = process.communicate(timeout=WAIT_S)
        return process.returncode, said, error

    def joined(self):
        return Counter(event["id"] for event in read_lines(self.directory / "out/joined"))


@pytest.fixture
def command(tmp_path, requirements):
    registry = RealRegistry(tmp_path / "registry")
    yield Command(tmp_path, registry)
    registry.close()


def test_killed_drivers_and_a_task_that_dies_after_it_registered_lose_and_double_nothing(command):
    here = command.directory
    (here / "strike").write_text("wait")
    first = command.start()
    wait_for((here / "struck-wait").exists, "a task that has registered something", first)
    first.kill()
    first.communicate()
    (here / "go").touch()
    assert command.joined() == {}

    (here / "strike").write_text("die")
    status, _, error = command.end(command.start(kill_at="renamed"))
    assert (here / "struck-die").exists(), error
    assert status == -signal.SIGKILL, error
    published = command.joined()
    assert 0 < len(published) < EVENTS

    status, said, error = command.end(command.start())
    assert status == 0, error
    summary = json.loads(said)
    assert (summary["foreign_events"], summary["joined"]) == (EVENTS, EVENTS)
    assert command.joined() == {f"c{n}": 1 for n in range(EVENTS)}


@pytest.mark.cluster
def test_beside_a_live_pipeline_over_the_same_logs_each_event_is_joined_once(session, tmp_path):
    from spark.backfill.job import Place
    from spark.backfill.run import Order, backfill

    mix = Mix(files=30, duplicates=0.02, orphans=0.02)
    truth = generate_at_once(tmp_path / "old", mix, AtOnce(6000, 4000)).document()
    live, out = tmp_path / "live", tmp_path / "out"
    (live / "clicks").mkdir(parents=True)
    shutil.copytree(tmp_path / "old/queries", live / "queries")
    clicks = sorted((tmp_path / "old/clicks").iterdir())
    random.Random(4).shuffle(clicks)
    done = threading.Event()

    def feed():
        """Most while the backfill runs, the last after it."""
        for path in clicks[5:-5]:
            shutil.copy(path, live / "clicks")
            done.wait(0.3)
        done.wait(WAIT_S)
        for path in clicks[-5:]:
            shutil.copy(path, live / "clicks")

    for path in clicks[:5]:
        shutil.copy(path, live / "clicks")
    pipeline = start_photon(*join_arguments(live, out, "--follow"))
    feeder = threading.Thread(target=feed)
    try:
        wait_for(lambda: read_lines(out / "joined", growing=True), "the live pipeline's first line", pipeline)
        feeder.start()
        topology = json.loads((out / ".photon/topology.json").read_text())
        order = Order(
            (str(tmp_path / "old/queries"),),
            (str(tmp_path / "old/clicks"),),
            Place(out, "old"),
            "jsonl",
            RegistryAt(tuple(replica["grpc"] for replica in topology["replicas"])),
            Settings(),
        )
        summary = backfill(order, lambda: nullcontext(session))
        done.set()
        feeder.join()
        expected = truth["distinct_joined_pairs"]
        wait_for(lambda: len(read_lines(out / "joined", growing=True)) >= expected, "all pairs", pipeline)
    finally:
        done.set()
        pipeline.send_signal(signal.SIGINT)
        said, error = pipeline.communicate(timeout=WAIT_S)
    assert pipeline.returncode == 0, error
    assert check_pairs(out / "joined").problems(expected, truth["joined_pairs_sha256"]) == []
    lines = {path.name: len(read_lines(path)) for path in (out / "joined").iterdir() if path.is_dir()}
    assert lines["old"] == summary["joined"] > 0
    assert lines["east"] > 0
    assert summary["unjoinable"] == truth["expected_summary"]["unjoinable"]
    total = sum(json.loads(said)[fate] for fate in ("joined", "duplicate", "unjoinable", "pending"))
    assert total == json.loads(said)["foreign_events"]


@pytest.mark.soak
def test_tables_are_copied_first_and_what_they_get_later_is_joined_by_the_next_backfill(
    tmp_path, requirements
):
    registry = RealRegistry(tmp_path / "registry")
    queries = tmp_path / "queries.csv"
    queries.write_text("id,ts_us\n" + "".join(f"q{n},1700000000000000\n" for n in range(20)))

    def clicked(path, first):
        numbers = range(first, first + 50)
        columns = {"id": [f"c{n}" for n in numbers], "primary_id": [f"q{n % 25}" for n in numbers]}
        columns["ts_us"] = [1_700_000_000_000_000] * 50
        pyarrow.parquet.write_table(pyarrow.table(columns), path)

    def backfill():
        inputs = ("--primary", queries, "--foreign", tmp_path / "clicks-*.parquet", "--out", tmp_path / "out")
        spark = ("--master", "local[2]", "--driver-memory", "512m")
        return photon("backfill", *inputs, "--registry", registry.address, "--json", *spark)

    try:
        for number, read in ((0, 50), (1, 100)):
            clicked(tmp_path / f"clicks-{number}.parquet", number * 50)
            done = backfill()
            assert done.returncode == 0, done.stderr
            summary = json.loads(done.stdout)
            assert (summary["foreign_events"], summary["joined"]) == (read, 40)
    finally:
        registry.close()
    events = read_lines(tmp_path / "out/joined")
    assert sorted(event["id"] for event in events) == sorted(f"c{n}" for n in range(100) if n % 25 < 20)
    assert all(event["primary"]["id"] == event["primary_id"] for event in events)
