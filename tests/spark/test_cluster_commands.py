"""Each command on Spark says and writes on a cluster what is true, or what it does on one machine."""

import json

import pytest

from tests.spark.cluster import ended, on_cluster, photon, python_process
from tests.spark.kit import copy_of
from tests.system import join, joined_pairs
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]  # a cluster on a busy machine is slow

_SHARES = ("--duplicates", 0.02, "--orphans", 0.02, "--malformed", 0.01, "--malformed-queries", 0.01)


def generate(directory, *more):
    arguments = ("--out", directory, "--queries", 2000, "--clicks", 400, "--files", 4, "--json", *_SHARES)
    done = photon("generate", *arguments, *more, directory=directory.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def inputs(*directories):
    """The options that name these logs."""
    sides = (("--foreign", "clicks"), ("--primary", "queries"))
    return [str(part) for logs in directories for option, side in sides for part in (option, logs / side)]


@pytest.fixture(scope="module")
def run(tmp_path_factory, requirements):
    """A directory with `logs` and `out` of a run over them, and `old`: logs that nobody has joined."""
    directory = tmp_path_factory.mktemp("run")
    generate(directory / "logs")
    generate(directory / "old", "--seed", 2, "--start-us", 1_600_000_000_000_000)
    join(directory / "logs", directory / "out")
    return directory


def truth_of(logs):
    return json.loads((logs / "truth.json").read_text())


@pytest.fixture
def damaged(run, tmp_path):
    """Such a run of its own, of whose output 30 lines are lost and 2 stand twice."""
    copy = copy_of(run, tmp_path / "run")
    [path] = (copy / "out" / "joined").glob("*/*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[30:] + lines[-2:]))
    return copy


@pytest.fixture
def here(on_session, photon):
    """Runs a command on the session of this process -> its status and report."""

    def here(*arguments):
        status, said, _ = photon(*arguments)
        return status, report(said)

    return here


@pytest.fixture
def there(cluster, tmp_path):
    """Runs a command on the cluster -> its status and report."""

    def there(*arguments):
        done = photon(*arguments, *on_cluster(cluster, codegen="logmap" in arguments), directory=tmp_path)
        assert done.stderr == "", done.stderr
        return done.returncode, report(done.stdout)

    return there


def report(text):
    """What was said, but for what no two runs share."""
    said = json.loads(text)
    return {name: said[name] for name in said if name not in ("seconds", "joined_per_s", "incarnation")}


def test_verify_finds_the_faults(damaged, there):
    asked = ["--out", damaged / "out", "--work", damaged / "out" / ".photon", "--settle", "0", "--json"]
    command = ["verify", *inputs(damaged / "logs"), *asked]
    status, said = there(*command)
    assert (status, said["broken"]) == (1, ["lost", "joined_twice"])
    truth = truth_of(damaged / "logs")
    assert {name: value for name, value in said.items() if type(value) is int and value} == {
        "foreign_events": truth["foreign_rows"],
        "malformed": truth["malformed"],
        "repeated": truth["duplicates"],
        "unjoinable": truth["orphans"],
        "joined": truth["distinct_joined_pairs"] - 32,
        "lost": 30,
        "joined_twice": 2,
    }
    assert {losses["lease"] for losses in said["lost_by"]} <= {"runs", "over"}


@pytest.mark.long
@pytest.mark.soak
def test_recover_finds_the_same_losses(damaged, here, there):
    where = ["--out", damaged / "out", "--work", damaged / "out" / ".photon", "--json"]
    command = ["recover", "--foreign", damaged / "logs" / "clicks", *where]
    lost = without_ages(there(*command))
    assert lost[1]["lost"] + lost[1]["in_flight"] == 30
    assert lost == without_ages(here(*command))


@pytest.mark.long
@pytest.mark.soak
def test_logmap_build_makes_the_same_map(run, tmp_path, here, there):
    command = ["logmap", "build", "--primary", run / "logs" / "queries", "--json", "--map"]
    done = there(*command, tmp_path / "first")
    assert done[1]["entries"] > 0
    assert done == here(*command, tmp_path / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def contents(built):
    """Kind and bytes of each file of a built map; their names are random."""
    return sorted((path.name.partition("-")[0], path.read_bytes()) for path in built.glob("generation-*/*"))


def without_ages(done):
    """What was young when it was asked first may be lost a little later."""
    status, said = done
    told = {
        name: said[name] for name in said if name not in ("lost", "in_flight", "incarnations", "remaining")
    }
    return status, {**told, "lost": said["lost"] + said["in_flight"], "in_flight": 0}


_SLOW_ADAPTER = """
import time
from joiner.adapter import Adapter

class Slow(Adapter):
    def join(self, primary, foreign):
        time.sleep(0.02)
        return None
"""


def backfill(run):
    """The options of a backfill of the old logs, and the live ones, into the output of the run."""
    where = ["--out", run / "out", "--work", run / "out" / ".photon", "--json"]
    return ["backfill", *inputs(run / "old", run / "logs"), *where]


def test_backfill_joins_what_nobody_has_joined(run, tmp_path, there):
    copy = copy_of(run, tmp_path / "run")
    status, said = there(*backfill(copy))
    live, old = (truth_of(run / name) for name in ("logs", "old"))
    assert (status, said["joined"]) == (0, old["distinct_joined_pairs"])
    assert said["foreign_events"] == live["foreign_rows"] + old["foreign_rows"]
    assert said["malformed"] == live["malformed"] + old["malformed"]
    pairs = joined_pairs(copy / "out")
    assert pairs.keys() > joined_pairs(run / "out").keys()
    assert len(pairs) == live["distinct_joined_pairs"] + old["distinct_joined_pairs"]
    assert set(pairs.values()) == {1}


def without_a_worker(command, directory, cluster, *signs):
    """The command, of whose cluster a worker is lost once there is each of the signs, one after the other."""
    process = python_process("-m", "photon.cli.main", *command, *on_cluster(cluster), directory=directory)
    try:
        for sign in signs:
            wait_until(lambda sign=sign: list(directory.glob(sign)), 150, sign)
        cluster.kill_worker(cluster.workers[0])
        done = ended(process, 150)
    finally:
        process.kill()
        process.wait()
    cluster.start_worker()
    assert (done.returncode, done.stderr) == (0, "")
    return done


@pytest.mark.long
def test_a_backfill_whose_worker_is_lost_joins_each_event_once(run, tmp_path, cluster):
    """It is lost while buckets register; the adapter, which is the user's own module, makes that last."""
    copy = copy_of(run, tmp_path / "run")
    (tmp_path / "slow_adapter.py").write_text(_SLOW_ADAPTER)
    (tmp_path / "photon.toml").write_text('[adapter]\nuse = "slow_adapter:Slow"\n')
    command = [*backfill(copy), "--config", tmp_path / "photon.toml"]
    without_a_worker(command, tmp_path, cluster, "run/out/.photon-backfill/backfill/staging/joined-*")
    pairs = joined_pairs(copy / "out")
    truth = [truth_of(run / logs) for logs in ("logs", "old")]
    assert set(pairs.values()) == {1}
    assert len(pairs) == sum(each["distinct_joined_pairs"] for each in truth)


_SLOW_VISITS = """
import time
from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.ready import Sessions

class Visits(Sessions):
    def process_timer(self, timer, ctx):
        time.sleep(0.02)
        super().process_timer(timer, ctx)

TOPOLOGY = Topology(
    {"clicks": Logs("logs/*.jsonl", "ts")},
    {"visits": node(Visits("visits", 1), Input("clicks", "user", None), Stream("visits"))},
    {"visits": LogSink("out/visits")},
)
"""


@pytest.mark.long
@pytest.mark.soak
def test_a_history_whose_worker_is_lost_has_each_line_once(tmp_path, cluster):
    """Of the user's own module, which the executors don't have; then held against what a run makes."""
    (tmp_path / "visits.py").write_text(_SLOW_VISITS)
    (tmp_path / "logs").mkdir()
    for file in range(3):
        lines = [{"user": f"u{n % 37}", "ts": (n * 3 + file) * 50_000} for n in range(600)]
        (tmp_path / f"logs/{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("millwheel", "history", "visits:TOPOLOGY", "--out", "old", "--json")
    rows = "old/.work/rows"
    done = without_a_worker(words, tmp_path, cluster, f"{rows}/what=input*", f"{rows}/_temporary")
    assert json.loads(done.stdout)["counts"]["visits"]["records"] == 1800
    made = "".join(path.read_text() for path in tmp_path.glob("old/sinks/visits/*.jsonl")).splitlines()
    live = photon("millwheel", "run", "visits:TOPOLOGY", "--work", "work", directory=tmp_path)
    assert live.returncode == 0
    written = "".join(path.read_text() for path in tmp_path.glob("out/visits/*.jsonl")).splitlines()
    assert sorted(made) == sorted(written)
    words = ("millwheel", "verify", "visits:TOPOLOGY", "--scratch", tmp_path, *on_cluster(cluster))
    verified = photon(*words, directory=tmp_path)
    assert (verified.returncode, verified.stdout) == (
        0,
        f"{'visits':<20} ok: {len(made)} lines are as they should be\n",
    )
