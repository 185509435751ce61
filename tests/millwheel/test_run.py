"""`photon millwheel` as processes: real logs, real kills, the real store."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import time

import pytest

from tests.millwheel.running import HELD, NAME, ROOT
from tests.millwheel.topologies import SECOND, clicks, expected
from tests.waiting import wait_until


@pytest.mark.parametrize("workers", ["1", "2"])
def test_logs_are_worked_off_and_every_complete_file_is_listed(system, workers):
    lines = clicks(random.Random(1), 5_000)
    for part in range(3):
        system.write(f"{part}.jsonl", lines[part::3])
    summary = system.run("--workers", workers)
    assert summary["ended"]
    assert summary["counts"]["clicks"]["records"] == 5_000
    system.check(lines)
    listed = 0
    for manifest in (system.directory / "out" / "counts").glob("*.manifest"):
        listed += sum(json.loads(line)["lines"] for line in manifest.open())
    assert listed == len(expected(lines)["counts"])


@pytest.mark.parametrize("topology", ["TOPOLOGY", pytest.param("RELAXED", marks=pytest.mark.long)])
def test_kills_of_workers_and_of_the_run_change_nothing(system, topology):
    name = f"tests.millwheel.topologies:{topology}"
    dice = random.Random(2)
    lines = clicks(dice, 30_000, users=200, seconds=60)
    for part in range(4):
        system.write(f"{part}.jsonl", lines[part::4])
    for round_ in range(2):
        process = system.start("--workers", "3" if round_ == 1 else "2", name=name)
        deadline = time.monotonic() + dice.uniform(0.8, 1.6)
        while time.monotonic() < deadline and process.poll() is None:
            for pid in system.workers()[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(dice.uniform(0.05, 0.3))
        system.kill()
    summary = system.run("--workers", "2", name=name)
    assert summary["counts"]["clicks"]["records"] == 30_000
    assert summary["dead_letters"] == 0
    system.check(lines)
    if topology == "RELAXED":
        assert {value["id"] for value in system.sink("again")} == set(range(len(lines)))


def test_what_is_relaxed_is_told_and_what_cannot_be_is_refused(system):
    said = system.ask("check", "tests.millwheel.topologies:RELAXED")
    assert "Relay: clicks -> parsed, weak, not exactly once\n" in said
    assert "Totals: counts -> totals\n" in said
    (system.directory / "wrong.py").write_text(
        "from tests.millwheel.topologies import weak_stages\nTOPOLOGY = weak_stages(again={})\n"
    )
    assert "may come twice" in system.refused("check", "wrong:TOPOLOGY")


@pytest.mark.long
def test_more_than_links_and_buffers_hold_is_worked_off(system):
    lines = [line | {"pad": "x" * 100_000} for line in clicks(random.Random(6), 3_000)]
    system.write("a.jsonl", lines[::2])
    system.write("b.jsonl", lines[1::2])
    system.run("--workers", "2", name="tests.millwheel.topologies:WHOLE_LINES")
    system.check(lines)


def test_a_stopped_run_goes_on_with_more_workers(system):
    now = time.time_ns() // 1_000
    lines = [
        {"user": f"user{n % 50}", "ts": now - 60 * SECOND + n * 1_000, "what": "click"} for n in range(4_000)
    ]
    for part in range(8):
        system.write(f"{part}.jsonl", lines[part::8])
    system.start("--follow", "--workers", "1")
    wait_until(lambda: len(system.sinks()["totals"]) == len(expected(lines)["totals"]))
    system.stop()
    assert system.run("--workers", "4")["counts"]["clicks"]["records"] == len(lines)
    system.check(lines)


def test_live_logs_are_followed_and_a_stopped_run_goes_on(system):
    now = time.time_ns() // 1_000 // SECOND * SECOND
    lines = [
        {"user": f"user{n % 5}", "ts": now - 60 * SECOND + n * 1_000, "what": "click"} for n in range(10_000)
    ]
    system.write("a.jsonl", lines)
    system.start("--follow", "--workers", "2")
    wait_until(lambda: len(system.sinks()["counts"]) >= 45)
    status = system.status()
    assert status["low_watermarks"]["clicks"]["state"] == "moving"
    assert "clicks" in system.ask("why", "totals", "--work", "work")
    system.stop()
    now = time.time_ns() // 1_000
    later = [{"user": f"user{n % 5}", "ts": now + n, "what": "click"} for n in range(100)]
    system.write("a.jsonl", later, "a")
    lines += later
    system.start("--follow", "--workers", "1")
    wait_until(lambda: len(system.sinks()["totals"]) == len(expected(lines)["totals"]))
    system.stop()
    system.check(lines)
    assert system.dead_letters() == 0


@pytest.mark.long
def test_a_worker_that_stands_still_is_replaced(system):
    now = time.time_ns() // 1_000
    system.write("a.jsonl", [{"user": "ann", "ts": now - 60 * SECOND, "what": "click"}])
    system.start("--follow", "--workers", "2")
    wait_until(lambda: len(system.sinks()["totals"]) == 1)
    stopped = wait_until(system.workers)[0]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: len(system.workers()) == 2 and stopped not in system.workers())
    system.write("b.jsonl", [{"user": "bob", "ts": time.time_ns() // 1_000, "what": "click"}])
    wait_until(lambda: sum(one["count"] for one in system.sinks()["totals"]) == 2)
    system.stop()


def test_poison_and_nonsense_are_dead_letters_and_the_status_says_so(system):
    lines = clicks(random.Random(5), 100)
    system.write("a.jsonl", [*lines, {"user": "ann", "ts": 1, "what": "poison"}, "nonsense\n"])
    summary = system.run(status=1)
    assert summary["dead_letters"] == 2
    system.check(lines)
    assert system.dead_letters() == 2


def test_a_stopped_run_tells_what_its_workers_committed_last(system):
    system.write("a.jsonl", clicks(random.Random(5), 100))
    system.start("--follow")
    wait_until(lambda: system.is_up() and system.status()["counts"].get("windows", {}).get("records") == 100)
    system.write("a.jsonl", ["nonsense\n"] * 7, "a")
    wait_until(lambda: system.dead_letters() == 7)
    assert system.stop(status=1)["dead_letters"] == 7


@pytest.mark.long
def test_new_code_is_deployed_while_records_flow(system):
    shutil.copy(ROOT / "tests/millwheel/topologies.py", system.directory / "mine.py")
    now = time.time_ns() // 1_000
    system.write("a.jsonl", [{"user": "ann", "ts": now - 60 * SECOND, "what": "click"}])
    system.start("--follow", name="mine:TOPOLOGY")
    wait_until(lambda: len(system.sinks()["totals"]) == 1)
    before = system.status()["low_watermarks"]["totals"]["low_watermark_us"]
    module = system.directory / "mine.py"
    module.write_text(
        module.read_text().replace(
            '"second": ctx.key, **ctx.state', '"second": ctx.key, "new": 1, **ctx.state'
        )
    )
    system.ask("deploy", "--work", "work")
    system.write("a.jsonl", [{"user": "bob", "ts": time.time_ns() // 1_000, "what": "click"}], "a")
    wait_until(lambda: len(system.sinks()["totals"]) == 2)
    assert [one.get("new") for one in system.sinks()["totals"]] == [None, 1]
    assert system.status()["low_watermarks"]["totals"]["low_watermark_us"] >= before
    system.stop()


ELSEWHERE = """import os
from millwheel import Computation, Input, Logs, LogSink, Stream, Topology, node

class Same(Computation[None]):
    def process_record(self, record, ctx):
        ctx.produce("same", record.value)

TOPOLOGY = Topology(
    {"lines": Logs("logs/*.jsonl", "ts")},
    {"same": node(Same(), Input("lines", key="n"), Stream("same"))},
    {"same": LogSink(os.environ["INTO"])},
)
"""


@pytest.mark.long
@pytest.mark.soak
def test_after_a_stop_no_line_comes_again_in_another_directory_of_the_sink(system):
    (system.directory / "mine.py").write_text(ELSEWHERE)
    for into in ("first", "second", "third"):
        system.environment["INTO"] = f"out/{into}"
        system.start("--follow", "--workers", "2", name="mine:TOPOLOGY")
        for n in range(6):
            system.write("a.jsonl", [{"n": f"{into} {n}", "ts": n}], "a")
            wait_until(lambda n=n, into=into: f"{into} {n}" in [line["n"] for line in system.sink(into)])
        system.stop()
    for into in ("first", "second", "third"):
        assert sorted(line["n"] for line in system.sink(into)) == [f"{into} {n}" for n in range(6)]
    system.environment["INTO"] = "out/first"  # what it has there stays as it is
    assert "out/first: has same-" in system.run("--workers", "2", name="mine:TOPOLOGY", status=2)
    assert len(system.sink("first")) == 6
    system.environment["INTO"] = "./out/third"
    system.run("--workers", "2", name="mine:TOPOLOGY")
    assert len(system.sink("third")) == 6


HELPED = """from helper import made
TOPOLOGY = made()
"""
HELPER = "from tests.millwheel.topologies import TOPOLOGY\nmade = lambda: TOPOLOGY\n"
NESTED = """from dataclasses import replace
from millwheel import Input, node
from tests.millwheel.topologies import TOPOLOGY, Totals
reads = node(Totals(), Input("clicks", "user", ("user", "user.id")))
TOPOLOGY = replace(TOPOLOGY, computations={**TOPOLOGY.computations, "more": reads})
"""


@pytest.mark.long
def test_a_run_that_goes_on_behind_its_end_works_off_what_came_since(system):
    """Though its low watermarks stand at the end from the first moment on."""
    for round_ in range(1, 4):
        system.write(f"{round_}.jsonl", [{"ts": round_}])
        told = system.run("--workers", "3", name="tests.millwheel.topologies:CHAIN")
        assert [told["counts"][f"c{n}"]["records"] for n in range(1, 8)] == [round_] * 7
        for sink in ("third", "last"):
            files = (system.directory / "out" / sink).glob("*.jsonl")
            assert sorted(line["ts"] for file in files for line in map(json.loads, file.open())) == [
                *range(1, round_ + 1)
            ]


@pytest.mark.long
def test_new_code_that_cannot_run_is_refused_and_the_run_goes_on(system):
    module, helper = system.directory / "mine.py", system.directory / "helper.py"
    module.write_text(HELPED)
    helper.write_text(HELPER)
    now = time.time_ns() // 1_000
    system.write("a.jsonl", [{"user": "ann", "ts": now - 60 * SECOND, "what": "click"}])
    system.start("--follow", name="mine:TOPOLOGY")
    wait_until(lambda: len(system.sinks()["totals"]) == 1)
    workers = system.workers()
    for path, code, reason in [
        (module, "def (\n", "SyntaxError"),
        (helper, "raise ValueError('first\\nsecond')\n", "first"),  # a module that this one imports
        (module, NESTED, "can't lie within another"),
    ]:
        path.write_text(code)
        said = system.refused("deploy", "--work", "work")
        assert reason in said
        assert "the run goes on as it was" in said
        assert len(said.splitlines()) == 1
        module.write_text(HELPED)
        helper.write_text(HELPER)
    assert system.workers() == workers
    system.write("a.jsonl", [{"user": "bob", "ts": time.time_ns() // 1_000, "what": "click"}], "a")
    wait_until(lambda: len(system.sinks()["totals"]) == 2)
    system.stop()


MORE = """from dataclasses import replace
from millwheel import Input, Stream, node
from millwheel.ready import Sessions
from tests.millwheel.topologies import TOPOLOGY
more = node(Sessions("more", 5), Input("clicks", "user", None), Stream("more"))
made = lambda: replace(TOPOLOGY, computations={**TOPOLOGY.computations, "more": more})
"""


@pytest.mark.long
@pytest.mark.soak
def test_new_code_of_a_module_that_the_topology_imports_is_deployed(system):
    (system.directory / "mine.py").write_text(HELPED)
    (system.directory / "helper.py").write_text(HELPER)
    now = time.time_ns() // 1_000
    system.write("a.jsonl", [{"user": "ann", "ts": now - 60 * SECOND, "what": "click"}])
    system.start("--follow", name="mine:TOPOLOGY")
    wait_until(lambda: len(system.sinks()["totals"]) == 1)
    (system.directory / "helper.py").write_text(MORE)
    system.ask("deploy", "--work", "work")
    wait_until(lambda: "more" in system.status()["low_watermarks"])
    system.write("a.jsonl", [{"user": "bob", "ts": time.time_ns() // 1_000, "what": "click"}], "a")
    wait_until(lambda: system.status()["counts"].get("more", {}).get("records") == 1)
    system.stop()


@pytest.mark.parametrize(
    ("name", "workers", "message"),
    [
        (NAME, 0, "give 1 to 1024"),
        (NAME, 1025, "give 1 to 1024"),
        ("nothing", 1, "write MODULE:NAME"),
        ("nothing:T", 1, "can't be loaded"),
    ],
)
def test_a_bad_command_line_is_one_line_and_status_2(refused, tmp_path, name, workers, message):
    assert message in refused("millwheel", "run", name, "--work", tmp_path / "work", "--workers", workers)


def test_a_work_directory_that_is_a_file_is_said_to_be_none(command, tmp_path):
    work = tmp_path / "work"
    work.touch()
    for path in (work, work / "within"):
        done = command("millwheel", "run", NAME, "--work", path)
        assert (done.status, done.out) == (1, "")
        assert done.err == f"photon: {path}: Not a directory; give another path\n"


def test_a_sink_whose_directory_is_a_file_ends_the_start_and_refuses_the_deploy(system):
    sink = system.directory / "out"
    sink.touch()
    system.write("a.jsonl", clicks(random.Random(6), 50))
    assert system.run(status=1) == "photon: out/counts: Not a directory; give another path\n"
    sink.unlink()
    module = system.directory / "mine.py"
    module.write_text(f"from {NAME.partition(':')[0]} import TOPOLOGY\n")
    system.start("--follow", name="mine:TOPOLOGY")
    wait_until(system.is_up)
    module.write_text(f"{module.read_text()}TOPOLOGY.sinks['counts'] = LogSink('logs/a.jsonl')\n")
    module.write_text(f"from millwheel import LogSink\n{module.read_text()}")
    said = system.refused("deploy", "--work", "work")
    assert "the run goes on as it was: logs/a.jsonl: Not a directory; give another path" in said
    system.stop()


def test_output_of_another_run_is_not_touched(system):
    lines = clicks(random.Random(6), 50)
    system.write("a.jsonl", lines)
    system.run()
    shutil.rmtree(system.directory / "work")
    assert "of another run" in system.run(status=2)
    system.check(lines)


@pytest.mark.long
def test_a_percentile_closes_windows_that_the_longest_lateness_would_keep_open(system):
    """Two workers and one file: the one without lines goes by what the other saw."""
    now = time.time_ns() // 1_000 // SECOND * SECOND
    lines = [
        {"user": f"user{n % 5}", "ts": now - 60 * SECOND + n * 10_000, "what": "click"} for n in range(3_000)
    ]
    late = {"user": "user1", "ts": now - 300 * SECOND, "what": "click"}
    system.write("a.jsonl", [*lines, late])
    name = "tests.millwheel.topologies:PERCENTILE"
    system.start("--follow", "--workers", "2", name=name)
    wait_until(lambda: len(system.sinks()["totals"]) >= len(expected(lines)["totals"]))
    assert system.status()["low_watermarks"]["clicks"]["lateness_s"] < 1
    assert "stragglers" in system.ask("status", "--work", "work")
    wait_until(lambda: "left behind (99 %)" in system.ask("why", "clicks", "--work", "work"))
    again = late | {"user": "user2"}
    system.write("a.jsonl", [again], "a")
    wait_until(lambda: system.dead_letters() >= 1)
    refused = system.dead_letters()
    system.kill()
    system.start("--follow", "--workers", "1", name=name)
    system.write("a.jsonl", [again], "a")
    wait_until(lambda: system.dead_letters() > refused)
    system.kill()
    counted = sum(count["count"] for count in system.sinks()["counts"])
    assert counted + system.dead_letters() == len(lines) + 3


@pytest.mark.long
def test_new_code_that_does_not_read_the_state_is_not_deployed(system):
    """Which is in the workers' logs yet."""
    module = system.directory / "mine.py"
    code = (ROOT / "tests/millwheel/topologies.py").read_text()
    module.write_text(code)
    now = time.time_ns() // 1_000
    lines = [{"user": f"user{n}", "ts": now + 3_600 * SECOND, "what": "click"} for n in range(5)]
    system.write("0.jsonl", lines)
    system.write("1.jsonl", lines[:0])
    system.start("--follow", name="mine:HELD")
    wait_until(lambda: system.is_up() and system.status()["counts"].get("windows", {}).get("records") == 5)
    module.write_text(
        code.replace("class Counts(Computation[dict]):", "class Counts(Computation[int]):\n    state = int\n")
    )
    said = system.refused("deploy", "--work", "work")
    assert "there is state of it that is no int" in said and "the run goes on as it was" in said
    module.write_text(code)
    system.ask("deploy", "--work", "work")
    system.stop()


@pytest.mark.long
def test_a_state_that_new_code_does_not_read_is_refused_before_anything_is_used_up(system):
    module = system.directory / "mine.py"
    code = (ROOT / "tests/millwheel/topologies.py").read_text()
    module.write_text(code)
    lines = clicks(random.Random(7), 50)
    system.write("0.jsonl", lines)
    system.write("1.jsonl", lines[:0])
    system.start("--follow", name="mine:HELD")
    wait_until(lambda: system.is_up() and system.status()["counts"].get("windows", {}).get("records") == 50)
    system.stop()
    module.write_text(
        code.replace("class Counts(Computation[dict]):", "class Counts(Computation[int]):\n    state = int\n")
    )
    said = system.run(status=2, name="mine:HELD")
    assert "computation 'windows': there is state of it that is no int (Expected `int`, got `object`)" in said
    module.write_text(code)
    assert system.run(name="mine:HELD")["dead_letters"] == 0
    system.check(lines)


@pytest.mark.long
@pytest.mark.soak
def test_a_log_that_is_written_anew_is_told_on_the_terminal_of_the_run(system, tmp_path):
    """Not in the log of its worker alone, where nobody looks."""
    told, lengths = tmp_path / "told", itertools.cycle((200, 1))
    lines = [{"user": "a", "ts": n * SECOND, "what": "click"} for n in range(200)]

    def is_told():
        system.write("0.jsonl", lines[: next(lengths)])
        said = told.read_text()
        return "worker-0: " in said and "0.jsonl shrank to" in said

    system.write("0.jsonl", lines)
    system.start("--follow", name=HELD, told=told)
    wait_until(is_told, 60, pause=0.1)
    system.stop()


@pytest.mark.long
def test_a_worker_that_starts_again_has_the_code_that_was_deployed_and_no_other(system):
    module = system.directory / "mine.py"
    code = (ROOT / "tests/millwheel/topologies.py").read_text()

    def write(new):
        module.write_text(code.replace('"second": ctx.key,', f'"second": ctx.key, "new": {new},'))

    def next_is(new):
        os.kill(wait_until(system.workers)[0], signal.SIGKILL)
        known = len(system.sinks()["totals"])
        system.write("a.jsonl", [{"user": "ann", "ts": time.time_ns() // 1_000, "what": "click"}], "a")
        wait_until(lambda: len(system.sinks()["totals"]) == known + 1)
        assert system.sinks()["totals"][-1]["new"] == new

    write(1)
    system.write("a.jsonl", [])
    system.start("--follow", name="mine:TOPOLOGY")
    next_is(1)
    write(2)
    next_is(1)
    module.write_text("raise ValueError('half edited')")
    assert "the run goes on as it was" in system.refused("deploy", "--work", "work")
    next_is(1)
    write(3)
    system.ask("deploy", "--work", "work")
    next_is(3)
    write(4)
    next_is(3)
    system.stop()
