"""Replicas that are known by other addresses than they bind: a proxy of each one's own stands at those.

As with a mapped port or a load balancer: all dial what is advertised, those of its own datacenter, too.
"""

import random

import pytest

from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.system import FaultSystem, seed_for
from tests.faults.kit.toxics import need_toxiproxy
from tests.faults.kit.toxiproxy import ToxiproxyServer
from tests.ports import free_ports

pytestmark = [pytest.mark.links, pytest.mark.timeout(300)]

REPLICAS = {"r0": "east", "r1": "west", "r2": "central"}


@pytest.fixture
def rng():
    return random.Random()


@pytest.fixture
def server(rng):
    started = ToxiproxyServer(need_toxiproxy())
    yield started
    started.close()


def settings_of(server, rng):
    """A system whose replicas bind one address and advertise the proxy's before it."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(12)]
    bound = {f"{kind}:{name}": ports.pop() for name in REPLICAS for kind in ("grpc", "raft")}
    taken = {int(address.rpartition(":")[2]) for address in (*ports, *bound.values())}
    advertised = server.create(bound, taken)
    roles = ("eventstores", "joiners", "dispatchers")
    return {
        "registry": {"leaders": ["r2"], "shards": 1},
        "joiner": {"unjoinable_age_s": 4.0},
        "replicas": {
            name: {
                "datacenter": datacenter,
                "grpc": advertised[f"grpc:{name}"],
                "raft": advertised[f"raft:{name}"],
                "listen_grpc": bound[f"grpc:{name}"],
                "listen_raft": bound[f"raft:{name}"],
            }
            for name, datacenter in REPLICAS.items()
        },
        "datacenters": {
            "east": {"region": "us", **{role: [ports.pop()] for role in roles}},
            "west": {"region": "us", **{role: [ports.pop()] for role in roles}},
            "central": {"region": "eu"},
        },
    }


def test_a_replica_is_reached_at_its_advertised_address_and_nowhere_else(tmp_path, server, rng, nursery):
    seed = seed_for("advertised")
    feed = Feed(seed, clicks=LONG, clicks_per_s=100)
    with FaultSystem(tmp_path, seed, feed, settings=settings_of(server, rng), launcher=nursery) as system:
        system.until(lambda: system.leader_of() == "r2", "r2 to lead")
        system.until_joined(50)
        before = server.received_bytes()
        # Of the replicas the one with the greatest name is dialed by all others.
        for kind in ("grpc", "raft"):
            server.enable(f"{kind}:r2", False)
        system.until(lambda: len(told_of(server, before)) == 2, "the bytes of ended connections")
        system.until(lambda: system.leader_of() in ("r0", "r1"), "another leader")
        system.until_joined(system.watch.joined + 50)
        for kind in ("grpc", "raft"):
            server.enable(f"{kind}:r2", True)
        system.until(lambda: system.leader_of() == "r2", "r2 to lead again")
        cut_short(system.feeder)
        system.finish()


def told_of(server, before):
    """Ports of r2 through whose proxies bytes went."""
    return {
        name for name, count in (server.received_bytes() - before).items() if count > 100 and "r2" in name
    }
