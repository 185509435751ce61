"""A joiner that never comes back tells nothing of what it lost, so the registry tells of it (paper 3.3.3).

Real joiners, and a registry's replica on fake logs, whose leases end when they are told to.
"""

import json

import pytest

from idregistry.rules.commands import EndLease, encode
from photon.cluster.told import line_of
from photon.core.clock import SystemClock
from photon.core.ids import Token
from photon.rpc.metrics import collect
from tests.health import status_of
from tests.idregistry.nodes import Ensemble
from tests.joiner.fakes import NOW_US, batch_of, make_worker, packed_id
from tests.waiting import wait_until

LEASE_S = 600.0
HERE, THERE = "127.0.0.1:1", "127.0.0.1:2"


class Ahead(SystemClock):
    """A minute later, once it is told so: what was won before is not young any more."""

    minutes = 0

    def now_us(self):
        return super().now_us() + self.minutes * 60_000_000


@pytest.fixture
def node():
    ensemble = Ensemble()
    made = ensemble.leading(shards=2)
    made.client = ensemble.client()
    yield made
    ensemble.close()


@pytest.fixture
def make(tmp_path, node):
    made = []

    def build(address=HERE, **options):
        options = {"lease_s": LEASE_S, "address": address, "clock": Ahead()} | options
        made.append(make_worker(tmp_path, node.client, **options))
        return made[-1]

    yield build
    for worker in made:
        worker.close()


def status(node):
    return status_of("registry", node.address)


def gone(node):
    """Once every lease has run out and is forgotten."""
    for incarnation, lease in list(node.directory.leases.items()):
        assert node.directory.apply(encode(EndLease(NOW_US, incarnation, lease.grant)))
    return {one["address"]: one["events"] for one in status(node)["gone_joiners"]}


def die(worker):
    """Let go of everything, and say nothing."""
    worker.close()


def look(worker):
    """Compare accounts when what was won is old enough."""
    worker._clock.minutes += 2
    worker._accountant.step()


def test_a_joiner_that_dies_and_stays_away_is_told_with_what_it_holds(make, node):
    worker = make()
    worker.join(batch_of(["a", "b", "c"]))
    assert status(node)["gone_joiners"] == []
    die(worker)
    assert gone(node) == {HERE: 3}
    told = status(node)
    assert f"joiner {HERE} is gone and holds 3 events: run `photon recover` unless it comes back" in line_of(
        told
    )
    samples = [sample for family in collect("registry", "r0", told) for sample in family.samples]
    (sample,) = [one for one in samples if one.name == "photon_registry_gone_joiner_events"]
    assert (sample.labels, sample.value) == ({"process": "r0", "joiner": HERE}, 3)


def test_a_joiner_that_is_stopped_with_nothing_under_way_is_not_missed(make, node):
    worker = make()
    worker.join(batch_of(["a"]))
    assert worker.stop(5.0)
    assert gone(node) == {}


def test_a_joiner_that_is_stopped_and_has_lost_something_is_missed(make, node):
    worker = make()
    token = Token(HERE, worker.leases.own.incarnation, worker._clock.now_us()).pack()
    node.client.commit(packed_id("lost"), NOW_US.to_bytes(8, "little"), token)
    look(worker)
    assert worker.stop(5.0)
    assert gone(node) == {HERE: 1}


def test_a_joiner_that_is_back_sees_to_its_former_life_wherever_it_listens_now(make, node):
    """As in a run that is resumed, on other ports."""
    worker = make()
    worker.join(batch_of(["a", "b"]))
    die(worker)
    worker = make(THERE)
    look(worker)
    die(worker)
    assert gone(node) == {}, "the one holds nothing, and the other's events are written"


def test_a_joiner_that_is_back_without_its_journal_is_not_gone_but_its_former_life_is_not_settled(
    make, node, tmp_path
):
    worker = make()
    worker.join(batch_of(["a", "b"]))
    die(worker)
    assert gone(node) == {HERE: 2}
    worker = make(directory=tmp_path / "another")
    look(worker)
    assert worker._accountant._last.unknown == {former(tmp_path, worker): 2}
    told = status(node)
    assert (told["directory"]["leases"], told["gone_joiners"]) == (1, [])
    assert len(node.directory.vanished) == 1


def former(tmp_path, worker):
    (lives,) = (tmp_path / "out" / "joined" / "east").glob("*.lives")
    first = json.loads(lives.read_text().splitlines()[0])
    assert int(first["incarnation"], 16) != worker.leases.own.incarnation
    return int(first["incarnation"], 16)


@pytest.mark.parametrize("seen_to", ["fence", "dismiss"])
def test_whom_recovery_has_seen_to_is_missed_no_more(make, node, seen_to):
    worker = make()
    worker.join(batch_of(["a"]))
    die(worker)
    assert gone(node) == {HERE: 1}
    incarnation = worker.leases.own.incarnation
    if seen_to == "fence":
        wait_until(lambda: node.client.fence(incarnation).fenced)
    else:
        node.client.dismiss([incarnation])
    assert gone(node) == {}
