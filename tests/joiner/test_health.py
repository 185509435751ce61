"""A joiner that can't do its work says so, and gets no batches until it can."""

import errno
import os

import pytest

from joiner.commit import try_writing
from joiner.server import SERVICE_NAME
from photon.core import disk
from photon.core.errors import DiskFullError, OverloadedError, UnavailableError
from tests.fake_registry import FakeRegistry
from tests.health import NOT_SERVING, SERVING, await_health, health
from tests.joiner.fakes import FailingWrites, batch_of

LEASE_S = 2.0


@pytest.fixture
def start(serve, tmp_path):
    """A joiner with a registry of its own."""

    def make(name="one", silent=False):
        registry = FakeRegistry()
        registry.silent_to_leases = silent
        server = serve(name, registry=registry, output_root=tmp_path / f"out-{name}", lease_s=LEASE_S)
        return server, registry

    return make


def joined(server):
    return server.status()["joined"]


def send(client, name):
    """As a dispatcher does, until it is taken; how often it failed."""
    failures = 0
    while True:
        try:
            client.join(batch_of([name]))
            return failures
        except UnavailableError:
            failures += 1


def test_a_joiner_serves_while_it_has_a_lease_and_never_again_when_it_is_fenced(start, fatal):
    joiner, registry = start()
    waiting, silent = start("two", silent=True)
    assert health(joiner.listen, SERVICE_NAME) == health(joiner.listen) == SERVING
    assert health(waiting.listen, SERVICE_NAME) == health(waiting.listen) == NOT_SERVING
    silent.silent_to_leases = False
    registry.silent_to_leases = True
    await_health(SERVING, waiting.listen, SERVICE_NAME)
    await_health(NOT_SERVING, joiner.listen, SERVICE_NAME)
    registry.silent_to_leases = False
    await_health(SERVING, joiner.listen, SERVICE_NAME)
    (_, incarnation, _) = registry.asked_leases[0]
    registry.fences.add(incarnation)
    await_health(NOT_SERVING, joiner.listen, SERVICE_NAME)
    assert len(fatal) == 1


def test_batches_go_past_a_joiner_without_a_lease(start, connect):
    (one, _), (two, registry) = start("one"), start("two", silent=True)
    client = connect(one, two)
    for number in range(20):
        send(client, f"a{number}")
    assert (joined(one), joined(two)) == (20, 0)
    registry.silent_to_leases = False
    await_health(SERVING, two.listen, SERVICE_NAME)
    number = 0
    while joined(two) < 5:
        number += 1
        assert send(client, f"b{number}") == 0


def test_where_no_joiner_can_work_nothing_is_sent_and_it_is_not_the_batchs_fault(start, connect):
    client = connect(start("one", silent=True)[0], start("two", silent=True)[0])
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
    (one, _), (two, _) = start("one"), start("two")
    client = connect(one, two)
    directory = tmp_path / ("one" if what == "intents" else "out-one")
    full = FailingWrites(monkeypatch, str(directory))
    number = 0
    while one.status()["storage_error"] is None:
        number += 1
        send(client, f"a{number}")
    await_health(NOT_SERVING, one.listen, SERVICE_NAME)
    before = joined(two)
    for late in range(10):
        assert send(client, f"b{late}") == 0
    assert joined(two) == before + 10
    full.full = False
    await_health(SERVING, one.listen, SERVICE_NAME)  # though nobody sends it anything
    before = joined(one)
    while joined(one) < before + 5:
        number += 1
        send(client, f"c{number}")
    assert one.status()["storage_error"] is None


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
