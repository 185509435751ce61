"""`photon backfill --follow`: killed anywhere, given up, beside live joiners: each event is joined once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from photon.core.errors import CorruptStateError, UsageError
from photon.core.settings import parse_settings
from tests.spark.following import US, WAIT_S, Followed
from tests.spark.kit import RealRegistry, planned_job
from tests.system import read_lines, start_photon
from tests.waiting import wait_until

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]


@pytest.fixture
def followed(tmp_path, requirements):
    registry = RealRegistry(tmp_path / "registry", shards=2)
    yield Followed(tmp_path, registry.address, joiner={"unjoinable_age_s": 3.0})
    registry.close()


def test_what_comes_is_joined_and_what_never_meets_is_told(followed):
    table = followed.directory / "more.parquet"
    columns = {"id": ["p0", "p1"], "primary_id": ["q0", "q1"], "ts_us": [US, US]}
    pyarrow.parquet.write_table(pyarrow.table(columns), table)
    followed.more(50)
    process = followed.start("--foreign", str(table))
    followed.pairs |= {("q0", "p0"), ("q1", "p1")}
    followed.clicks += 2
    followed.await_all(process)
    followed.more(50)
    followed.log("clicks", {"id": "lonely", "primary_id": "nobody", "ts_us": US})
    followed.await_all(process)
    (followed.directory / "die").touch()  # a worker of Spark's, at its next event
    followed.more(50)
    followed.await_all(process)
    assert not (followed.directory / "die").exists()
    wait_until(lambda: followed.letters()["unjoinable"], WAIT_S)
    late = {"id": "late", "primary_id": "q3", "ts_us": US}
    followed.log("clicks", late)
    followed.pairs.add(("q3", "late"))
    followed.await_all(process)
    total = followed.stop(process)
    assert followed.joined(growing=False) == Counter(followed.pairs)
    assert followed.letters() == {"malformed": followed.bad, "unjoinable": 1}
    counted = {name: total[name] for name in ("joined", "duplicate", "unjoinable", "malformed")}
    assert counted == {
        "joined": len(followed.pairs),
        "duplicate": followed.clicks + 1 - len(followed.pairs),
        "unjoinable": 1,
        "malformed": followed.bad,
    }
    assert total["foreign_events"] == sum(counted.values())


@pytest.mark.parametrize(
    "points",
    [("joined", "published"), pytest.param(("lease seen", "renamed", "listed"), marks=pytest.mark.soak)],
    ids=", ".join,
)
def test_a_driver_that_is_killed_anywhere_goes_on_and_each_event_is_joined_once(followed, points):
    for point in points:
        followed.more(40)
        process = followed.start(kill_at=point)
        _, error = process.communicate(timeout=WAIT_S)
        assert process.returncode == -signal.SIGKILL, error[-2000:]
    process = followed.start()
    followed.await_all(process)
    process.kill()  # while nothing happens
    process.communicate()
    followed.more(40)
    process = followed.start()
    followed.await_all(process)
    followed.stop(process)
    assert followed.joined(growing=False) == Counter(followed.pairs)
    assert followed.letters()["malformed"] == followed.bad


def test_a_batch_that_was_given_up_is_joined_anew(followed):
    followed.more(40)
    process = followed.start()
    followed.await_all(process)
    followed.stop(process)
    followed.more(40)
    process = followed.start(kill_at="joined")
    process.communicate(timeout=WAIT_S)
    before = followed.joined()
    assert sum(before.values()) < len(followed.pairs)

    def command(*more):
        return subprocess.run(
            [sys.executable, "-m", "photon", *followed.arguments(*more)],
            cwd=followed.directory,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    refused = command()
    assert (refused.returncode, "go on with --follow" in refused.stderr) == (2, True), refused.stderr
    done = command("--abandon")
    assert done.returncode == 0, done.stderr
    assert f"released {len(followed.pairs) - sum(before.values())} events" in done.stdout
    assert "no unfinished batch" in command("--abandon").stderr
    process = followed.start()
    followed.await_all(process)
    followed.stop(process)
    assert followed.joined(growing=False) == Counter(followed.pairs)


@pytest.mark.cluster
def test_beside_a_live_pipeline_over_the_same_logs_each_event_is_joined_once(tmp_path, requirements):
    """It reads one log of three alone."""
    followed = Followed(tmp_path, "", adapter={})
    followed.more(21)
    logs, config = tmp_path / "logs", tmp_path / "photon.toml"
    inputs = (
        "--primary",
        logs / "queries",
        "--foreign",
        logs / "clicks/[01].jsonl",
        "--out",
        tmp_path / "out",
    )
    live = start_photon("join", *inputs, "--follow", "--config", config)
    process = None
    try:
        topology = tmp_path / "out/.photon/topology.json"
        wait_until(lambda: followed.joined(), WAIT_S)
        replicas = json.loads(topology.read_text())["replicas"]
        followed.registry = ",".join(replica["grpc"] for replica in replicas)
        process = followed.start()
        for _ in range(12):
            followed.more(25)
            time.sleep(0.5)
        followed.await_all(process)
        followed.stop(process)
    finally:
        live.send_signal(signal.SIGINT)
        if process is not None:
            process.kill()
        _, error = live.communicate(timeout=WAIT_S)
    assert live.returncode == 0, error
    assert followed.joined(growing=False) == Counter(followed.pairs)
    east, backfill = (len(read_lines(tmp_path / "out/joined" / name)) for name in ("east", "backfill"))
    assert east > 100
    assert backfill >= 100, "of the log that it reads alone"


@pytest.fixture
def refused(tmp_path, registry):
    """What `follow` says of an order, before it starts Spark, of which there is none."""
    from spark.backfill.follow import follow
    from spark.backfill.job import Place
    from spark.backfill.run import Order

    order = Order(
        ("logs/q",), ("logs/c",), Place(tmp_path / "out", "s"), "jsonl", registry.at, parse_settings({})
    )

    def refused(error, match, **changes):
        with pytest.raises(error, match=match):
            follow(replace(order, **changes), None)

    refused.place = order.place
    return refused


def test_an_order_that_is_not_the_one_it_was_begun_with_is_refused(refused):
    from spark.backfill.follow import load_followed, save_followed

    refused(UsageError, "on a disk that all executors see", primary=("s3a://bucket/q",))
    assert load_followed(refused.place) is None
    refused(TypeError, "NoneType")  # it would begin, and there is no Spark
    refused(TypeError, "NoneType", foreign=("logs/c", "logs/more"))  # as long as no batch is under way
    state = load_followed(refused.place)
    assert [len(side) for side in state.patterns] == [1, 2]
    job = planned_job(5)
    save_followed(refused.place, msgspec.structs.replace(state, job=job))
    refused(UsageError, "--primary or --foreign is not what")
    refused(UsageError, "--format is not what", foreign=("logs/c", "logs/more"), output_format="parquet")
    save_followed(refused.place, msgspec.structs.replace(state, registry="another"))
    refused(UsageError, "registers with the registry another")
    save_followed(refused.place, msgspec.structs.replace(state, home="/elsewhere"))
    refused(UsageError, "was begun as /elsewhere, .* move it back")
    save_followed(refused.place, msgspec.structs.replace(state, batch=7))
    refused(CorruptStateError, "metadata is gone")


def test_a_directory_of_a_plain_backfill_is_refused(refused):
    place = refused.place
    place.home.mkdir(parents=True)
    place.save(planned_job(5))
    refused(UsageError, "has a backfill; follow logs under another --datacenter")
