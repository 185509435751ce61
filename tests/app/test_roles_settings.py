"""Machines that make other ids of the same events: none but the first kind of them joins anything."""

import pytest

from joiner.client import JoinerClient
from photon.wire.network import LOOPBACK
from tests.app.roles_kit import Roles
from tests.health import SERVING

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

EAST, WEST = ("joiner", "east"), ("joiner", "west")


@pytest.fixture
def roles(tmp_path):
    made = Roles(tmp_path)
    yield made
    made.close()


def incarnation(roles):
    client = JoinerClient([roles.all[EAST]], 5.0, network=LOOPBACK)
    try:
        return client.status()["lease"]["incarnation"]
    finally:
        client.close()


def start_west_with(roles, table):
    """On a machine with another photon.toml."""
    theirs = roles.config
    roles.config = roles.root / "west.toml"
    roles.config.write_text(theirs.read_text() + table)
    roles.start(WEST)
    roles.config = theirs


@pytest.mark.parametrize("table", ['[ids]\nkey = "west"\n', '[foreign]\nid = "event"\n'])
def test_a_joiner_that_makes_other_ids_ends_with_2_and_the_first_goes_on(roles, table):
    roles.start(*(("registry", name) for name in roles.replicas), EAST)
    roles.await_health(SERVING, EAST)
    start_west_with(roles, table)
    assert roles.ended(WEST) == 2
    told = [line for line in roles.log_of(*WEST).read_text().splitlines() if line.startswith("photon: ")]
    assert len(told) == 1
    assert "ids.key and all of [foreign] must be the same on all machines" in told[0]
    assert "founded with others" in told[0]
    assert roles.process(*EAST).poll() is None
    life = incarnation(roles)
    roles.await_health(SERVING, EAST)
    roles.start(WEST)
    roles.await_health(SERVING, WEST)
    assert incarnation(roles) == life
