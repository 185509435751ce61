"""A joiner that can't do its work says so, and gets no batches until it can."""

import errno
import os
import random

import pytest

from joiner.client import JoinerClient
from joiner.commit import try_writing
from joiner.server import SERVICE_NAME, JoinerServer
from photon.core import disk
from photon.core.clock import SystemClock
from photon.core.errors import DiskFullError, OverloadedError, UnavailableError
from tests.health import NOT_SERVING, SERVING, await_health, health
from tests.joiner.fakes import IDENTITY, FakeEventStore, FakeRegistry, batch_of, settings
from tests.joiner.test_pipeline import FullDisk

LEASE_S = 2.0


class Joiner:
    def __init__(self, root, name, requests=8):
        self.registry = FakeRegistry()
        self.ended = []
        self.server = JoinerServer(
            settings(lease_s=LEASE_S, requests_in_flight_max=requests),
            name=name,
            datacenter="east",
            listen="127.0.0.1:0",
            directory=root / name,
            output_root=root / f"out-{name}",
            registry=self.registry,
            eventstore=FakeEventStore(),
            clock=SystemClock(),
            rng=random.Random(),
            on_fatal=self.ended.append,
        )

    @property
    def address(self):
        return self.server.listen

    def joined(self):
        return self.server.status()["joined"]


@pytest.fixture
def start(tmp_path):
    started = []

    def make(name="one", silent=False):
        joiner = Joiner(tmp_path, name)
        joiner.registry.silent_to_leases = silent
        joiner.server.start()
        started.append(joiner.server)
        return joiner

    yield make
    for server in started:
        server.stop(1)


@pytest.fixture
def connect():
    clients = []

    def open_client(*joiners):
        clients.append(JoinerClient([joiner.address for joiner in joiners], 20.0, identity=IDENTITY))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def send(client, name):
    """As a dispatcher does, until it is taken; how often it failed."""
    failures = 0
    while True:
        try:
            client.join(batch_of([name]))
            return failures
        except UnavailableError:
            failures += 1


def test_a_joiner_serves_as_soon_as_it_has_a_lease(start):
    joiner = start()
    assert health(joiner.address, SERVICE_NAME) == health(joiner.address) == SERVING
    waiting = start("two", silent=True)
    assert health(waiting.address, SERVICE_NAME) == health(waiting.address) == NOT_SERVING
    waiting.registry.silent_to_leases = False
    await_health(SERVING, waiting.address, SERVICE_NAME)


def test_a_joiner_whose_lease_ran_out_does_not_serve_until_it_has_one_again(start):
    joiner = start()
    joiner.registry.silent_to_leases = True
    await_health(NOT_SERVING, joiner.address, SERVICE_NAME)
    joiner.registry.silent_to_leases = False
    await_health(SERVING, joiner.address, SERVICE_NAME)


def test_a_fenced_joiner_does_not_serve(start):
    joiner = start()
    (_, incarnation, _) = joiner.registry.asked_leases[0]
    joiner.registry.fences.add(incarnation)
    await_health(NOT_SERVING, joiner.address, SERVICE_NAME)
    assert len(joiner.ended) == 1


def test_batches_go_past_a_joiner_without_a_lease(start, connect):
    one, two = start("one"), start("two", silent=True)
    client = connect(one, two)
    for number in range(20):
        send(client, f"a{number}")
    assert (one.joined(), two.joined()) == (20, 0)
    two.registry.silent_to_leases = False
    await_health(SERVING, two.address, SERVICE_NAME)
    number = 0
    while two.joined() < 5:
        number += 1
        assert send(client, f"b{number}") == 0


def test_where_no_joiner_can_work_nothing_is_sent_and_it_is_not_the_batchs_fault(start, connect):
    client = connect(start("one", silent=True), start("two", silent=True))
    with pytest.raises(UnavailableError):
        client.join(batch_of(["a"]))
    with pytest.raises(OverloadedError, match="no joiner is there and healthy"):
        while True:  # the first calls may be on their way before the channel knows
            try:
                client.join(batch_of(["a"]))
            except OverloadedError:
                raise
            except UnavailableError:
                continue


@pytest.mark.parametrize("what", ["intents", "output"])
def test_a_full_disk_is_no_health_and_batches_go_elsewhere_until_there_is_space(
    start, connect, monkeypatch, tmp_path, what
):
    one, two = start("one"), start("two")
    client = connect(one, two)
    directory = tmp_path / ("one" if what == "intents" else "out-one")
    full = FullDisk(monkeypatch, str(directory))
    number = 0
    while one.server.status()["storage_error"] is None:
        number += 1
        send(client, f"a{number}")
    await_health(NOT_SERVING, one.address, SERVICE_NAME)
    before = two.joined()
    for late in range(10):
        assert send(client, f"b{late}") == 0
    assert two.joined() == before + 10
    full.full = False
    await_health(SERVING, one.address, SERVICE_NAME)  # though nobody sends it anything
    before = one.joined()
    while one.joined() < before + 5:
        number += 1
        send(client, f"c{number}")
    assert one.server.status()["storage_error"] is None


def test_what_tries_a_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    before = sorted(tmp_path.rglob("*"))
    try_writing(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "write", fail)
    with pytest.raises(DiskFullError):
        try_writing(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
