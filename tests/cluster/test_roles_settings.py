"""Machines that make other ids of the same events: none but the first kind of them joins anything."""

import pytest

from dispatcher.client import DispatcherClient
from joiner.client import JoinerClient
from photon.rpc.network import LOOPBACK
from tests.cluster.roles_kit import Roles, Truth
from tests.health import SERVING
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

EAST, WEST = ("joiner", "east"), ("joiner", "west")
DISPATCHER = ("dispatcher", "west")
TABLES = ['[ids]\nkey = "west"\n', '[foreign]\nid = "event"\n']


@pytest.fixture
def roles(tmp_path):
    made = Roles(tmp_path)
    yield made
    made.kill()


def incarnation(roles):
    client = JoinerClient([roles.all[EAST]], 5.0, network=LOOPBACK)
    try:
        return client.status()["lease"]["incarnation"]
    finally:
        client.close()


def start_with(roles, table, who):
    """On a machine with another photon.toml."""
    theirs = roles.config
    roles.config = roles.root / "other.toml"
    roles.config.write_text(theirs.read_text() + table)
    roles.start(who)
    roles.config = theirs


def said(roles, who):
    return [line for line in roles.said(who).splitlines() if line.startswith("photon: ")]


def status(roles, who):
    client = DispatcherClient(roles.all[who])
    try:
        return client.status()
    finally:
        client.close()


def test_a_joiner_that_makes_other_ids_ends_with_2_and_the_first_goes_on(roles):
    roles.start(*(("registry", name) for name in roles.replicas), EAST)
    roles.await_health(SERVING, EAST)
    for number, table in enumerate(TABLES, 1):
        start_with(roles, table, WEST)
        assert roles.ended(WEST) == 2
        told = said(roles, WEST)
        assert len(told) == number
        assert "ids.key and all of [foreign] must be the same on all machines" in told[-1]
        assert "founded with others" in told[-1]
        assert roles.process(EAST).poll() is None
    life = incarnation(roles)
    roles.await_health(SERVING, EAST)
    roles.start(WEST)
    roles.await_health(SERVING, WEST)
    assert incarnation(roles) == life


def test_a_dispatcher_that_makes_other_ids_ends_with_2_before_it_reads_and_nothing_is_joined_twice(roles):
    """With another key every click would have two ids; by another field every line would be malformed."""
    truth = Truth(roles)
    start_with(roles, TABLES[0], DISPATCHER)  # it waits for a joiner that has a lease
    truth.write(200)
    roles.start(*(who for who in roles.all if who != DISPATCHER))
    assert roles.ended(DISPATCHER) == 2
    truth.await_all("by the dispatcher of the east")
    start_with(roles, TABLES[1], DISPATCHER)
    assert roles.ended(DISPATCHER) == 2, "by an idle system, too"
    told = said(roles, DISPATCHER)
    assert len(told) == len(TABLES)
    for line in told:
        assert "ids.key and all of [foreign] must be the same on all machines" in line
        assert "give the client the joiner's photon.toml" in line
    letters = list(roles.out.glob("dead-letters/west/foreign*"))
    assert not b"".join(path.read_bytes() for path in letters)
    roles.start(DISPATCHER)
    lines = sum(1 for _ in (roles.root / "logs-west" / "clicks" / "log.jsonl").open())
    wait_until(lambda: roles.health(*DISPATCHER) == SERVING)
    wait_until(lambda: sum(status(roles, DISPATCHER)["fates"].values()) == lines)
    assert status(roles, DISPATCHER)["fates"]["malformed"] == 0
    truth.await_all("by both")
