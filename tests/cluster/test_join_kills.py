"""SIGKILL of any process in the middle of a run, and of the command itself: the same pairs, none twice.

And every event read has one fate or waits, at every moment of the run (design invariant 3).
"""

import itertools
import json
import os
import random
import signal
import time

import psutil
import pytest

from dispatcher.ledger import LedgerFile
from dispatcher.rules.verdicts import NOTHING
from dispatcher.workers import worker_directories
from photon.cluster.statuses import StatusReader, fates_of
from photon.cluster.topology import read_topology
from tests.system import (
    children_of,
    fates_add_up,
    join,
    join_arguments,
    joined_pairs,
    photon,
    start_photon,
    state_of,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

CLICKS = 60_000
TWO_OF_EACH = "[dispatcher]\nworkers = 2\nbatch_events_max = 512\n[joiner]\nprocesses = 2\n"


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    done = photon(
        "generate", "--out", logs, "--seed", 3, "--queries", 100_000, "--clicks", CLICKS, "--duplicates", 0.02,
        "--orphans", 0.01, "--malformed", 0.005,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return logs, json.loads((logs / "truth.json").read_bytes())


def lines_joined(out):
    return sum(path.read_bytes().count(b"\n") for path in (out / "joined").rglob("*.jsonl"))


def assert_exact(out, truth, summary):
    pairs = joined_pairs(out)
    assert max(pairs.values()) == 1
    assert len(pairs) == truth["distinct_joined_pairs"]
    assert summary["joined"] == truth["distinct_joined_pairs"]
    assert summary["malformed"] == truth["malformed"]
    assert summary["unjoinable"] == truth["orphans"]
    assert summary["pending"] == 0
    assert fates_add_up(summary)


@pytest.mark.parametrize(
    "kinds",
    [
        ("registry", "dispatcher"),
        pytest.param(("eventstore", "joiner"), marks=[pytest.mark.long, pytest.mark.soak]),
    ],
    ids="-".join,
)
def test_killed_processes_change_nothing_in_what_is_joined(generated, tmp_path, kinds):
    logs, truth = generated
    rng = random.Random(kinds[0])
    killed = set()
    process = start_photon(*join_arguments(logs, tmp_path / "out", "--datacenters", 2))
    try:
        for share, kind in zip((0.02, 0.15, 0.3, 0.45, 0.6), itertools.cycle(kinds), strict=False):
            wait_until(
                lambda share=share: (
                    lines_joined(tmp_path / "out") > share * CLICKS or process.poll() is not None
                )
            )
            victims = [pid for name, pid in children_of(process.pid).items() if name.startswith(kind)]
            if victims and process.poll() is None:
                os.kill(rng.choice(victims), signal.SIGKILL)
                killed.add(kind)
        printed, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    summary = json.loads(printed)
    assert killed == {*kinds}
    assert summary["restarts"] >= 2
    assert_exact(tmp_path / "out", truth, summary)


@pytest.mark.long
def test_a_killed_command_leaves_no_process_behind_and_the_next_run_takes_up_what_was_left(
    generated, tmp_path
):
    logs, truth = generated
    out = tmp_path / "out"
    for share in (0.1, 0.5):
        process = start_photon(*join_arguments(logs, out))
        wait_until(lambda share=share: lines_joined(out) > share * CLICKS)
        children = children_of(process.pid)
        assert len(children) == 6
        process.send_signal(signal.SIGKILL)
        process.communicate()
        deadline = time.monotonic() + 60
        while any(state_of(pid) != psutil.STATUS_ZOMBIE for pid in children.values()):
            assert time.monotonic() < deadline, "a process outlived the command"
            time.sleep(0.02)
    assert_exact(out, truth, join(logs, out))


@pytest.mark.long
def test_ctrl_c_stops_everything_and_the_next_run_takes_up_what_was_left(generated, tmp_path):
    logs, truth = generated
    out = tmp_path / "out"
    process = start_photon(*join_arguments(logs, out))
    wait_until(lambda: lines_joined(out) > 5_000)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == 1, errors
    assert "stopped before all was read and joined" in errors
    stopped = json.loads(printed)
    assert stopped["stopped"] and fates_add_up(stopped)
    assert stopped["joined"] == lines_joined(out)
    assert_exact(out, truth, join(logs, out))


class Sampler:
    """Takes the counts of the one datacenter, from its workers and from their state on disk."""

    def __init__(self, out):
        topology = read_topology(out / ".photon" / "topology.json")
        self._reader = StatusReader(topology)
        places = worker_directories(out / ".photon" / "east" / "dispatcher")
        self._ledgers = [LedgerFile(place, 1 << 30) for place in places.values()]
        self._out = out
        self.told, self.read, self.last = 0, 0, 0

    def sample(self):
        for status in self._reader.read(("dispatcher",)).of("dispatcher"):
            row = fates_of(status)
            assert row["adds_up"], row
            self.told += 1
        totals = NOTHING
        for ledger in self._ledgers:
            with ledger.read() as rows:
                state, waiting = rows.state(), rows.waiting()
            if state is None:
                return
            own = state.totals
            assert own.foreign_events == sum(own.fates.values()) + waiting, (own, waiting)
            totals = totals.plus(own)
        assert self.last <= totals.foreign_events <= CLICKS * 1.1
        lines = sum(path.read_bytes().count(b"\n") for path in (self._out / "joined").rglob("*.jsonl"))
        assert totals.fates["joined"] <= lines
        letters = (self._out / "dead-letters" / "east").glob("foreign-*.jsonl")
        written = sum(path.read_bytes().count(b"\n") for path in letters)
        assert totals.fates["malformed"] + totals.fates["unjoinable"] <= written
        self.last = totals.foreign_events
        self.read += 1

    def close(self):
        for ledger in self._ledgers:
            ledger.close()


@pytest.mark.long
def test_the_counts_add_up_at_every_moment_under_load_and_kills(generated, tmp_path):
    logs, truth = generated
    out, rng, sampler = tmp_path / "out", random.Random(7), None
    (tmp_path / "photon.toml").write_text(TWO_OF_EACH)
    process = start_photon(*join_arguments(logs, out, "--config", tmp_path / "photon.toml"))
    try:
        ledgers = out / ".photon" / "east" / "dispatcher"
        wait_until(lambda: len(list(ledgers.glob("worker-*/ledger/data.mdb"))) == 2)
        sampler = made = Sampler(out)
        victims = ["dispatcher-east", "joiner-east", "dispatcher-east/1", "registry-r1", "eventstore-east"]
        kill_at = time.monotonic() + 0.7
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline:
            made.sample()
            if victims and made.last and time.monotonic() > kill_at:
                running = children_of(process.pid)
                if pid := running.get(victims[0]):
                    os.kill(pid, signal.SIGKILL)
                    victims.pop(0)
                    kill_at = time.monotonic() + rng.uniform(0.1, 0.4)
        printed, errors = process.communicate(timeout=100)
    finally:
        process.kill()
        if sampler is not None:
            sampler.close()
    assert process.returncode == 0, errors
    summary = json.loads(printed)
    assert sampler.read > 30 and sampler.told > 30 and summary["restarts"] >= 2
    assert_exact(out, truth, summary)
