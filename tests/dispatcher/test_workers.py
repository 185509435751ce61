"""Several dispatcher processes over one directory, killed and stopped: each line counted once, none lost."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from dispatcher.client import DispatcherClient
from dispatcher.ledger import Group, Ledger
from photon.core.clock import SystemClock
from photon.core.fates import Joined
from tests.dispatcher.child import LEASE_S
from tests.dispatcher.fakes import Site, Writer, adds_up, click_number, clicks
from tests.dispatcher.test_kills import REPOSITORY, backends, check_ledger
from tests.seeds import seeds
from tests.waiting import wait_until

__all__ = ["backends"]

pytestmark = pytest.mark.cluster

FILES = 12
WORKERS = 3


class Crew:
    """The worker processes over a site."""

    def __init__(self, site: Site, address: str, workers: int = WORKERS) -> None:
        self.site, self.address, self.workers = site, address, workers
        self.processes: list[subprocess.Popen] = []
        self.started = 0

    def start(self, *more: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "tests.dispatcher.child",
            str(self.site.root),
            self.address,
            self.address,
        ]
        self.started += 1
        process = subprocess.Popen(
            [*command, str(self.started), f"workers={self.workers}", *more],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def client(self, number: int) -> DispatcherClient:
        """Of the worker that was started as the `number`th."""
        address = self.site.root / f"address-{number}"
        wait_until(address.exists)
        return DispatcherClient(address.read_text())

    def kill(self, process: subprocess.Popen) -> None:
        process.kill()
        process.wait()
        process.stderr.close()
        self.processes.remove(process)

    def drain(self) -> None:
        for process in list(self.processes):
            self.kill(process)
        drainers = [self.start("drain") for _ in range(2)]
        for process in drainers:
            assert process.wait(40) == 0, process.stderr.read()
            process.stderr.close()
            self.processes.remove(process)


@pytest.fixture
def crew(tmp_path, backends):
    site = Site(tmp_path)
    site.joiner = backends[0]
    crew = Crew(site, backends[1])
    yield crew
    for process in list(crew.processes):
        crew.kill(process)


@pytest.fixture
def writer(crew):
    writer = Writer(crew.site.logs, FILES, bad_every=7, pause_s=0.008)
    writer.start()
    yield writer
    writer.stopping.set()
    writer.join()


def check_all(site: Site, writer: Writer) -> None:
    """Every line was handed over and counted, joined ones once, and each dead letter is there once."""
    total, joiner = writer.written * 20, site.joiner
    assert check_ledger(site) == total + writer.bad
    assert {click_number(line) for line in joiner.handed} == set(range(total))
    assert set(joiner.joined.values()) == {1}
    assert {click_number(line) for line in joiner.joined} == {n for n in range(total) if n % 7}
    letters = Counter((letter["fate"], letter["file"], letter["offset"]) for letter in site.letters())
    assert set(letters.values()) == {1}
    assert Counter(fate for fate, _, _ in letters) == {
        "filtered": len(range(0, total, 7)),
        "malformed": writer.bad,
    }


@seeds(0, 2, 4)
def test_workers_killed_and_stopped_at_any_moment_lose_nothing_and_count_nothing_twice(crew, writer, seed):
    rng = random.Random(seed)
    for _ in range(WORKERS):
        crew.start()
    time.sleep(1.0)
    stopped: list[tuple[float, subprocess.Popen]] = []
    end = time.monotonic() + 7
    while time.monotonic() < end:
        time.sleep(rng.random() * 0.5)
        for process in list(crew.processes):
            if process.poll() is None:
                continue
            told = process.stderr.read()
            # One that stood still ends by itself, or was ended because it held the others up.
            assert process.returncode == -signal.SIGKILL or "FencedError" in told, told
            process.stderr.close()
            crew.processes.remove(process)
            stopped = [(when, p) for when, p in stopped if p is not process]
        asleep = [process for _, process in stopped]
        awake = [process for process in crew.processes if process not in asleep]
        for when, process in list(stopped):
            if time.monotonic() > when:
                os.kill(process.pid, signal.SIGCONT)
                stopped.remove((when, process))
        if len(crew.processes) < WORKERS:
            crew.start()
        elif len(awake) > 1:
            victim = rng.choice(awake)
            if rng.random() < 0.5:
                crew.kill(victim)
            else:
                os.kill(victim.pid, signal.SIGSTOP)
                stopped.append((time.monotonic() + LEASE_S * rng.choice([0.5, 2, 3]), victim))
    writer.stopping.set()
    writer.join()
    crew.drain()
    check_all(crew.site, writer)


def test_a_killed_workers_files_are_read_on_by_the_others_within_seconds(crew):
    site = crew.site
    for number in range(FILES):
        (site.logs / f"{number}.jsonl").write_bytes(clicks(100 * number, 100 * number + 10))
    first, second = crew.start(), crew.start()
    told = crew.client(1), crew.client(2)
    wait_until(lambda: all(len(client.status()["workers"]) == 2 for client in told))
    wait_until(lambda: min(worker["files"] for worker in told[0].status()["workers"]) > 0)
    wait_until(lambda: sum(worker["files"] for worker in told[0].status()["workers"]) == FILES)
    wait_until(lambda: told[1].status()["worker"]["slot"] != told[0].status()["worker"]["slot"])
    killed = time.monotonic()
    crew.kill(first)
    for number in range(FILES):
        with (site.logs / f"{number}.jsonl").open("ab") as file:
            file.write(clicks(100 * number + 10, 100 * number + 20))
    wanted = {line for number in range(FILES) for line in range(100 * number, 100 * number + 20)}
    wait_until(lambda: {click_number(line) for line in dict(site.joiner.handed)} == wanted)
    assert time.monotonic() - killed < 8
    wait_until(lambda: told[1].status()["worker"]["files"] == FILES)
    assert any("has ended" in notice for notice in told[1].status()["notices"])
    assert second.poll() is None


def test_a_worker_that_stood_still_ends_when_it_wakes_and_has_recorded_nothing(crew):
    site = crew.site
    for number in range(FILES):
        (site.logs / f"{number}.jsonl").write_bytes(clicks(100 * number, 100 * number + 10))
    zombie = crew.start()
    wait_until(lambda: len(dict(site.joiner.handed)) >= FILES * 10)
    client = crew.client(1)
    wait_until(lambda: client.status()["pending"] == 0 and client.status()["foreign_events"] == FILES * 10)
    os.kill(zombie.pid, signal.SIGSTOP)
    other = crew.start()
    client = crew.client(2)
    wait_until(lambda: client.status()["worker"].get("files") == FILES)
    for number in range(FILES):
        with (site.logs / f"{number}.jsonl").open("ab") as file:
            file.write(clicks(100 * number + 10, 100 * number + 20))
    wait_until(lambda: client.status()["foreign_events"] == FILES * 20)
    os.kill(zombie.pid, signal.SIGCONT)
    assert zombie.wait(10) == 1
    assert "taken over its slot" in zombie.stderr.read()
    zombie.stderr.close()
    crew.processes.remove(zombie)
    wait_until(lambda: client.status()["pending"] == 0)
    assert client.status()["foreign_events"] == FILES * 20 and other.poll() is None
    crew.kill(other)
    assert check_ledger(site) == FILES * 20
    assert set(site.joiner.joined.values()) == {1}


STOPS_ITSELF = """
import os, signal, sys
from pathlib import Path
from dispatcher.ledger import Group, Ledger
from photon.core.clock import SystemClock
group = Group(3, float(sys.argv[2]), SystemClock(), "stops")
ledger = Ledger(Path(sys.argv[1]) / "state", Path(sys.argv[1]) / "dead-letters", 16 << 30, group)
with ledger.file.write() as rows:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.long
def test_a_worker_that_is_stopped_while_it_writes_does_not_hold_the_others_up(crew):
    site = crew.site
    (site.logs / "0.jsonl").write_bytes(clicks(0, 100))
    crew.start()
    client = crew.client(1)
    wait_until(lambda: client.status()["foreign_events"] == 100)
    command = [sys.executable, "-c", STOPS_ITSELF, str(site.root), str(LEASE_S)]
    stopped = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    crew.processes.append(stopped)
    wait_until(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().split()[2] == "T")
    with (site.logs / "0.jsonl").open("ab") as file:
        file.write(clicks(100, 200))
    wait_until(lambda: client.status()["foreign_events"] == 200, 10)
    assert stopped.wait(5) == -signal.SIGKILL
    assert any("stopped while it wrote" in notice for notice in client.status()["notices"])


def test_a_slot_that_is_held_by_one_who_sleeps_is_not_given_away(tmp_path):
    """Its dead letters have one writer."""
    group = Group(2, 0.2, SystemClock(), "here")
    code = STOPS_ITSELF.replace("with ledger.file.write() as rows:", "if True:")
    sleeper = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), "0.2"], cwd=REPOSITORY)
    try:
        wait_until(lambda: Path(f"/proc/{sleeper.pid}/stat").read_text().split()[2] == "T")
        ledger = Ledger(tmp_path / "state", tmp_path / "dead-letters", 16 << 30, group)
        assert ledger.slot == 1
        ledger.close()
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.long
def test_workers_say_drained_only_when_all_of_the_directory_is(crew, backends):
    site = crew.site
    held = threading.Event()
    site.joiner.answer = lambda line, _tries: (
        Joined.RETRY_ABSENT if click_number(line) == 5 and not held.is_set() else Joined.JOINED,
        None,
    )
    for number in range(FILES):
        (site.logs / f"{number}.jsonl").write_bytes(clicks(100 * number, 100 * number + 50))
    workers = [crew.start("drain") for _ in range(WORKERS)]
    clients = [crew.client(number + 1) for number in range(WORKERS)]
    wait_until(lambda: clients[0].status()["foreign_events"] == FILES * 50)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        for client in clients:
            status = client.status()
            assert not status["drained"] and adds_up(status) and status["pending"] == 1
        assert all(worker.poll() is None for worker in workers)
        time.sleep(0.02)
    held.set()
    for worker in workers:
        assert worker.wait(20) == 0, worker.stderr.read()
    assert check_ledger(site) == FILES * 50


@pytest.mark.long
def test_workers_stopped_in_good_order_leave_everything_to_who_comes_next(crew):
    site = crew.site
    workers = [crew.start() for _ in range(2)]
    for number in range(len(workers)):
        crew.client(number + 1).close()
    for number in range(FILES):
        (site.logs / f"{number}.jsonl").write_bytes(clicks(1000 * number, 1000 * number + 500))
    wait_until(lambda: len(site.joiner.handed) > 1_000)
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        assert worker.wait(20) == 0, worker.stderr.read()
    assert 0 < check_ledger(site) < FILES * 500
    crew.processes.clear()
    crew.workers = 1
    alone = crew.start("drain")
    assert alone.wait(40) == 0, alone.stderr.read()
    crew.processes.clear()
    assert check_ledger(site) == FILES * 500
    assert set(site.joiner.joined.values()) == {1}
