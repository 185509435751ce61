"""Batches are spread over joiners' processes, of which one is killed and one stopped."""

import itertools
import signal
import threading
import time

import pytest

from joiner.client import JoinerClient
from photon.core.errors import UnavailableError
from tests.forked import Child
from tests.joiner import serving_child
from tests.joiner.fakes import IDENTITY, batch_of
from tests.waiting import wait_until

NAMES = ["one", "two", "three"]
LEASE_S = 1.0


class Joiner:
    def __init__(self, root, name):
        self._root, self._name, self._listen = root, name, "127.0.0.1:0"
        self.start()

    def start(self):
        address = self._root / f"address-{self._name}"
        address.unlink(missing_ok=True)
        self.process = Child(serving_child.main, self._root, self._name, self._listen, LEASE_S)
        wait_until(lambda: address.exists() or self.process.poll() is not None)
        self._listen = self.address = address.read_text()
        self._client = JoinerClient([self.address], 20.0, identity=IDENTITY)

    def status(self):
        """Asked until it answers: it may have been stopped or started just now."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self._client.status()
            except UnavailableError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def joined(self):
        return self.status()["joined"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self._client.close()
        self.kill()


class Load:
    """Threads that send batches and send again what failed, as a dispatcher does."""

    def __init__(self, addresses, threads=4):
        self._client = JoinerClient(addresses, 30.0, identity=IDENTITY)
        self._stopping = threading.Event()
        self.answers = [0] * threads
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number):
        for batch in (batch_of([f"{number}-{count}"]) for count in itertools.count()):
            while not self._stopping.wait(0.002):
                try:
                    self._client.join(batch)
                    break
                except UnavailableError:
                    self._stopping.wait(0.02)
            if self._stopping.is_set():
                return
            self.answers[number] += 1

    def goes_on(self):
        """Wait until each thread had 40 more answers."""
        before = list(self.answers)
        wait_until(lambda: all(a >= b + 40 for a, b in zip(self.answers, before, strict=True)))

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)
        self._client.close()


@pytest.fixture
def joiners(tmp_path):
    started = [Joiner(tmp_path, name) for name in NAMES]
    yield started
    for joiner in started:
        joiner.close()


@pytest.fixture
def load(joiners):
    load = Load([joiner.address for joiner in joiners])
    yield load
    load.stop()


def each_gets_more(joiners):
    before = [joiner.joined() for joiner in joiners]
    wait_until(lambda: all(j.joined() >= b + 10 for j, b in zip(joiners, before, strict=True)))


@pytest.mark.long
def test_batches_go_on_past_joiners_that_are_killed_or_stopped_and_all_come_back(joiners, load):
    killed, stopped, _ = joiners
    each_gets_more(joiners)
    killed.kill()
    stopped.process.send_signal(signal.SIGSTOP)
    load.goes_on()
    killed.start()
    stopped.process.send_signal(signal.SIGCONT)
    each_gets_more(joiners)
