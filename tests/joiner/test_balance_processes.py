"""Batches are spread over joiners' processes, of which one is killed and one stopped."""

import itertools
import signal
import time
from functools import partial

import pytest

from joiner.client import JoinerClient
from photon.core.errors import UnavailableError
from tests.forked import Child
from tests.joiner import serving_child
from tests.joiner.fakes import IDENTITY, batch_of, running
from tests.waiting import wait_until


class Joiner:
    def __init__(self, root, name):
        self._told, self._arguments, self.address = root / f"address-{name}", (root, name), "127.0.0.1:0"
        self.start()

    def start(self):
        self._told.unlink(missing_ok=True)
        self.process = Child(serving_child.main, *self._arguments, self.address)
        wait_until(lambda: self._told.exists() or self.process.poll() is not None)
        self.address = self._told.read_text()

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def joiners(tmp_path):
    started = [Joiner(tmp_path, name) for name in ("one", "two", "three")]
    yield started
    for joiner in started:
        joiner.kill()


@pytest.fixture
def client(joiners):
    client = JoinerClient([joiner.address for joiner in joiners], 30.0, identity=IDENTITY)
    yield client
    client.close()


NUMBERS = itertools.count()


def send(client, batches=40):
    """Each again until it is answered, as a dispatcher does."""
    for _ in range(batches):
        batch, answer = batch_of([f"e{next(NUMBERS)}"]), None
        while answer is None:
            try:
                answer = client.join(batch)
            except UnavailableError:
                time.sleep(0.02)


def each_gets_more(client):
    def counts():
        told = client.statuses().values()
        return [one["joined"] if isinstance(one, dict) else 0 for one in told]

    before = counts()

    def all_have():
        send(client, 10)
        return all(now > had for now, had in zip(counts(), before, strict=True))

    wait_until(all_have)


@pytest.mark.long
def test_batches_go_on_past_joiners_that_are_killed_or_stopped_and_all_come_back(joiners, client):
    killed, stopped, _ = joiners
    each_gets_more(client)
    killed.kill()
    stopped.process.send_signal(signal.SIGSTOP)
    with running(*[partial(send, client)] * 4):
        pass
    killed.start()
    stopped.process.send_signal(signal.SIGCONT)
    each_gets_more(client)
