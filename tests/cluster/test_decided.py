"""What several datacenters say is said once, whichever is up, killed or late."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import psutil
import pytest

from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.computation import NEVER
from millwheel.ready import WindowCounts
from millwheel.testing import Bench
from photon import Decided
from photon.core.errors import UsageError
from photon.core.ids import Token
from spark.registered import scan_of
from tests.spark.kit import ROOT
from tests.system import join_arguments, read_lines, start_photon
from tests.waiting import wait_until

SECOND = 1_000_000


def bench_of(config, datacenter, **more):
    computations = {
        "counts": node(WindowCounts("counts", 1), Input("clicks", "user", None), Stream("counts")),
        "decided": node(
            Decided("out", of="clicks by second", datacenter=datacenter, config=config, **more),
            Input("counts"),
            Stream("out"),
        ),
    }
    return Bench(Topology({"clicks": Logs("clicks/*", "ts")}, computations, {"out": LogSink("out")}))


def clicks(seconds, users=3):
    return [{"user": f"u{user}", "ts": second * SECOND} for second in seconds for user in range(users)]


def keys(lines):
    return {(line["key"], line["end_us"] // SECOND) for line in lines}


def test_each_result_is_of_the_datacenter_that_was_first_and_stays_so(registry, config):
    everything = clicks(range(10))
    east, west = (bench_of(config, name) for name in ("east", "west"))
    east.send("clicks", *everything)
    west.send("clicks", *everything)
    east.watermark(4 * SECOND)
    west.watermark(7 * SECOND)
    east.watermark(NEVER)
    west.watermark(NEVER)
    said = {"east": east.lines("out"), "west": west.lines("out")}
    expected = {(f"u{user}", end) for end in range(1, 11) for user in range(3)}
    assert [len(lines) for lines in said.values()] == [12 + 9, 9]
    assert keys(said["east"]) | keys(said["west"]) == expected
    # A datacenter that lost all it knew says the same again, and no other.
    for name, lines in said.items():
        again = bench_of(config, name)
        again.send("clicks", *everything)
        again.watermark(NEVER)
        assert sorted(again.lines("out"), key=str) == sorted(lines, key=str)
    late = bench_of(config, "north")
    late.send("clicks", *everything)
    late.watermark(NEVER)
    assert (late.lines("out"), late.dead_letters) == ([], [])
    # No event's: who reads what joiners registered finds none of them.
    registry.commit(["click"], Token("joiner:1", 7, 1))
    (rows,) = scan_of(registry.at, 10.0, 0)
    assert rows["address"].to_pylist() == ["joiner:1"]


def test_results_are_told_by_what_they_are_given_an_id_by(registry, config):
    for datacenter, count in (("east", 1), ("west", 0)):
        bench = bench_of(config, datacenter, id=lambda value: value["key"])
        bench.send("clicks", *clicks([0]), *clicks([5 if datacenter == "west" else 0]))
        bench.watermark(NEVER)
        assert len(bench.lines("out")) == 3 * count


def test_of_equal_results_in_a_batch_all_are_one_datacenters(config):
    class Context:
        def __init__(self):
            self.found = []

        def produce(self, stream, names, values, times):
            self.found += list(zip(names, values.tolist(), times.tolist(), strict=True))

    class Made:
        names, codes = ["a", "b"], np.array([0, 1, 0])
        times, values = np.array([5, 5, 5]), np.array([1, 2, 3])

        def __len__(self):
            return 3

    for datacenter, expected in (("east", [("a", 1, 5), ("b", 2, 5), ("a", 3, 5)]), ("west", [])):
        context = Context()
        Decided("out", of="x", datacenter=datacenter, config=config).process_batch(Made(), context)
        assert context.found == expected


def test_what_is_no_use_is_refused(config):
    with pytest.raises(UsageError, match="Decided: give one of work="):
        Decided("out", of="x", datacenter="east")
    with pytest.raises(UsageError, match="name the results"):
        Decided("out", of="", datacenter="east", config=config)


TOPOLOGY = """
import os
from millwheel import Input, JoinedLogs, LogSink, Stream, Topology, node
from millwheel.ready import Deduplicate, WindowCounts
from photon import Decided

HERE = os.environ["DATACENTER"]
TOPOLOGY = Topology(
    {"joined": JoinedLogs("out", lateness_s=6)},
    {
        "once": node(Deduplicate("once", 600), Input("joined", key="id"), Stream("once")),
        "counts": node(WindowCounts("counts", 1), Input("once", lambda click: click["user"]), Stream("counts")),
        "decided": node(
            Decided("said", of="clicks by second", datacenter=HERE, work="out/.photon"),
            Input("counts"),
            Stream("said"),
        ),
    },
    {"said": LogSink(f"said/{HERE}")},
)
"""


class Wheels:
    """A run in each of two datacenters."""

    def __init__(self, directory):
        self.directory = directory
        self.runs = {}
        for datacenter in ("east", "west"):
            self.start(datacenter)

    def start(self, datacenter):
        words = ["-m", "photon", "millwheel", "run", "topology:TOPOLOGY", "--follow", "--workers", "2"]
        self.runs[datacenter] = subprocess.Popen(
            [sys.executable, *words, "--work", f"wheel-{datacenter}"],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DATACENTER": datacenter},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self, datacenter):
        """All of it at once, as the datacenter is."""
        run = self.runs[datacenter]
        for process in [run, *psutil.Process(run.pid).children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        run.wait()


@pytest.mark.cluster
@pytest.mark.long
def test_windows_are_exact_though_each_datacenter_is_killed_in_turn(tmp_path):
    """Joiners of two datacenters, a MillWheel in each over what both join."""
    rng = random.Random(31)
    (tmp_path / "topology.py").write_text(TOPOLOGY)
    for name in ("queries", "clicks"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    joins = start_photon(
        *join_arguments(tmp_path / "logs", tmp_path / "out", "--follow", "--datacenters", "2"),
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (tmp_path / "out" / ".photon" / "topology.json").exists())
        wheels = Wheels(tmp_path)
        expected = Counter()
        began = time.time()

        def write(second):
            for number in range(40):
                now, user = round(time.time() * SECOND), f"u{rng.randrange(5)}"
                name = f"{second}-{number}"
                write_line("queries", f'{{"id":"q{name}","ts_us":{now}}}')
                write_line(
                    "clicks", f'{{"id":"c{name}","primary_id":"q{name}","ts_us":{now},"user":"{user}"}}'
                )
                expected[user, now // SECOND + 1] += 1
                time.sleep(0.02)

        def write_line(side, line):
            with (tmp_path / "logs" / side / "log.jsonl").open("a") as file:
                file.write(line + "\n")

        for second in range(24):
            write(second)
            if second in (4, 12):
                down = "east" if second == 4 else "west"
                wheels.kill(down)
            elif second in (8, 16):
                wheels.start(down)
            elif second in (6, 14, 20):
                kill_a_child(rng, joins.pid)
        assert time.time() - began < 100
        wait_until(lambda: said(tmp_path).total() >= len(expected), 60, "all results")
    finally:
        for run in (*wheels.runs.values(), joins):
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=100)
    assert set(said(tmp_path).values()) == {1}
    lines = list(read_lines(tmp_path / "said", growing=True))
    counts = {(line["key"], line["end_us"] // SECOND): line["count"] for line in lines}
    assert counts == dict(expected)
    by = {name: len(list(read_lines(tmp_path / "said" / name, growing=True))) for name in ("east", "west")}
    assert min(by.values()) > 0


def said(directory):
    lines = read_lines(directory / "said", growing=True)
    return Counter((line["key"], line["end_us"]) for line in lines)


def kill_a_child(rng, parent):
    """A dispatcher, a joiner or another of the processes that join; its run starts it again."""
    children = [
        child
        for child in psutil.Process(parent).children(recursive=True)
        if {"joiner", "dispatcher"} & set(child.cmdline())
    ]
    if children:
        rng.choice(children).send_signal(signal.SIGKILL)
