"""Every event read has one fate or waits, at every moment of a run (design invariant 3), whoever is killed."""

import json
import os
import random
import signal
import time

import pytest

from dispatcher.ledger import LedgerFile
from dispatcher.rules.verdicts import NOTHING
from dispatcher.workers import worker_directories
from photon.cluster.statuses import StatusReader, fates_of
from photon.cluster.topology import read_topology
from tests.system import children_of, fates_add_up, join_arguments, joined_pairs, photon, start_photon
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

CLICKS = 60_000
SETTINGS = "[dispatcher]\nworkers = 2\nbatch_events_max = 512\n[joiner]\nprocesses = 2\n"


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
def test_the_counts_add_up_at_every_moment_under_load_and_kills(tmp_path):
    logs, out = tmp_path / "logs", tmp_path / "out"
    done = photon(
        "generate", "--out", logs, "--seed", 7, "--queries", CLICKS, "--clicks", CLICKS, "--duplicates", 0.02,
        "--orphans", 0.02, "--malformed", 0.01, "--early", 0.05,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    truth = json.loads((logs / "truth.json").read_bytes())
    (tmp_path / "photon.toml").write_text(SETTINGS)
    rng = random.Random(7)
    process = start_photon(*join_arguments(logs, out, "--config", tmp_path / "photon.toml"))
    sampler = None
    try:
        ledgers = out / ".photon" / "east" / "dispatcher"
        wait_until(lambda: len(list(ledgers.glob("worker-*/ledger/data.mdb"))) == 2, 60)
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
    assert sampler.read > 30
    assert sampler.told > 30
    assert summary["restarts"] >= 2
    assert fates_add_up(summary)
    assert summary["joined"] == truth["distinct_joined_pairs"]
    assert max(joined_pairs(out).values()) == 1
    assert summary["malformed"] == truth["malformed"]
    assert summary["unjoinable"] == truth["orphans"]
