"""Several dispatcher processes of a datacenter, killed and stopped: each line counted once, none lost."""

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest

from dispatcher.workers import worker_of
from photon.core.fates import Joined
from photon.rpc.servers import StatusClient
from tests.dispatcher import child
from tests.dispatcher.fakes import Site, Writer, adds_up, click_number, clicks
from tests.dispatcher.test_kills import backends, check_all, check_ledger
from tests.forked import Child
from tests.seeds import seeds
from tests.waiting import wait_until

__all__ = ["backends"]

pytestmark = pytest.mark.cluster

FILES = 12
WORKERS = 3


class Crew:
    """The worker processes over a site."""

    def __init__(self, site: Site, address: str) -> None:
        self.site, self.address = site, address
        self.processes: dict[int, Child] = {}
        self.told = site.root / "told"
        self.started = 0

    def start(self, worker: int, drain: bool = False, workers: int = WORKERS) -> Child:
        self.started += 1
        given = (self.site.root, self.address, self.started, drain, worker, workers)
        process = self.processes[worker] = Child(child.main, *given, told=self.told)
        return process

    def client(self) -> StatusClient:
        """Of the worker that was started last."""
        address = self.site.root / f"address-{self.started}"
        wait_until(address.exists)
        return StatusClient("dispatcher", address.read_text())

    def start_all(self, drain: bool = False) -> list[StatusClient]:
        clients = []
        for worker in range(WORKERS):
            self.start(worker, drain)
            clients.append(self.client())
        return clients

    def kill(self, worker: int) -> None:
        process = self.processes.pop(worker)
        process.kill()
        process.wait()

    def ended(self) -> None:
        """All end by themselves."""
        for process in self.processes.values():
            assert process.wait() == 0, self.told.read_text()
        self.processes.clear()

    def drain(self) -> None:
        for worker in range(WORKERS):
            self.start(worker, True)
        self.ended()


@pytest.fixture
def crew(tmp_path, backends):
    site = Site(tmp_path)
    site.joiner = backends[0]
    crew = Crew(site, backends[1])
    yield crew
    for worker in list(crew.processes):
        crew.kill(worker)


@seeds(0, 2, 4)
def test_workers_killed_and_stopped_at_any_moment_lose_nothing_and_count_nothing_twice(crew, seed):
    rng = random.Random(seed)
    writer = Writer(crew.site.logs, FILES, bad_every=7, pause_s=0.008)
    writer.start()
    try:
        for worker in range(WORKERS):
            crew.start(worker)
        end = time.monotonic() + 7
        while time.monotonic() < end:
            time.sleep(rng.random() * 0.5)
            worker = rng.randrange(WORKERS)
            if rng.random() < 0.5:
                crew.kill(worker)
                crew.start(worker)
            else:
                process = crew.processes[worker]
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(rng.random())
                os.kill(process.pid, signal.SIGCONT)
                assert process.poll() is None, crew.told.read_text()
    finally:
        writer.stopping.set()
        writer.join()
    for worker in range(WORKERS):
        crew.kill(worker)
    crew.drain()
    check_all(crew.site, writer)


def renamed(log: Path, moves: bool) -> Path:
    """A name for it that belongs to another worker, which reads the file whole, or to the same."""
    names = (log.with_name(f"{log.name}.{number}.jsonl") for number in itertools.count(1))
    return next(
        name for name in names if (worker_of(str(name), WORKERS) != worker_of(str(log), WORKERS)) == moves
    )


def test_a_rename_while_the_workers_are_away_loses_nothing_and_joins_nothing_twice(crew):
    logs = crew.site.logs
    for number in range(FILES):
        (logs / f"{number}.jsonl").write_bytes(clicks(100 * number, 100 * number + 10))
    clients = crew.start_all()
    wait_until(lambda: sum(client.status()["foreign_events"] for client in clients) == FILES * 10)
    for worker in range(WORKERS):
        crew.kill(worker)
    for number in range(FILES):
        log = logs / f"{number}.jsonl"
        with log.open("ab") as file:
            file.write(clicks(100 * number + 10, 100 * number + 20))
        log.rename(renamed(log, moves=number % 2 == 1))
        log.write_bytes(clicks(100 * number + 20, 100 * number + 30))
    crew.drain()
    assert set(crew.site.joiner.joined.values()) == {1}
    assert {click_number(line) for line in crew.site.joiner.handed} == {
        100 * n + i for n in range(FILES) for i in range(30)
    }


def test_workers_say_drained_when_what_is_theirs_has_its_fate(crew):
    site, held = crew.site, [True]
    site.joiner.answer = lambda line, _tries: (
        Joined.RETRY_ABSENT if click_number(line) == 5 and held[0] else Joined.JOINED,
        None,
    )
    for number in range(FILES):
        (site.logs / f"{number}.jsonl").write_bytes(clicks(100 * number, 100 * number + 50))
    waits = worker_of(f"{site.logs}/0.jsonl", WORKERS)
    clients = crew.start_all(True)
    wait_until(lambda: clients[waits].status()["foreign_events"] and clients[waits].status()["pending"] == 1)
    for worker, process in crew.processes.items():
        if worker != waits:
            assert process.wait() == 0
    status = clients[waits].status()
    assert (status["drained"], status["pending"], adds_up(status)) == (False, 1, True)
    assert 0 < status["worker"]["files"] < FILES
    held[0] = False
    crew.ended()
    assert check_ledger(site) == FILES * 50


@pytest.mark.long
def test_workers_stopped_in_good_order_leave_everything_to_who_comes_next(crew):
    site = crew.site
    crew.start_all()
    for number in range(FILES):
        (site.logs / f"{number}.jsonl").write_bytes(clicks(1000 * number, 1000 * number + 500))
    wait_until(lambda: len(site.joiner.handed) > 1_000)
    for process in crew.processes.values():
        process.send_signal(signal.SIGTERM)
    crew.ended()
    assert 0 < check_ledger(site) < FILES * 500
    crew.drain()
    assert check_ledger(site) == FILES * 500
    assert set(site.joiner.joined.values()) == {1}


def test_another_number_of_workers_is_refused_and_nothing_is_read(crew):
    site = crew.site
    (site.logs / "0.jsonl").write_bytes(clicks(0, 10))
    crew.drain()
    assert crew.start(0, workers=2).wait() != 0
    assert "was begun with 3 dispatcher workers, not 2; set 'dispatcher.workers'" in crew.told.read_text()
    assert check_ledger(site) == 10
