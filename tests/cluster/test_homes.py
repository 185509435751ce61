"""Two datacenters of real processes share the work by the homes of events (paper 4.4), also when one dies."""

from statistics import median

import pytest

from photon.core.fates import Fate
from tests.cluster.roles_kit import Roles, Truth
from tests.health import SERVING, status_of
from tests.waiting import wait_until

BURSTS, BURST = 25, 100
WASTED_MAX = 0.05
"""Of the joins of a burst, the median: in a few the machine may stand still for longer than the hedge, and then
others rightly join what a home has not. Without homes it is a fifth; with them under a hundredth."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def status(roles, datacenter):
    return status_of("dispatcher", roles.all["dispatcher", datacenter])


def await_live(roles, truth, datacenter, names):
    """Who lives is looked up while there are events."""

    def sees():
        truth.write(10, twice=0)
        return status(roles, datacenter)["homes"]["live"] == names

    wait_until(sees, 60, lambda: f"{datacenter}: {status(roles, datacenter)['homes']}")


def await_read(roles, truth, datacenter):
    def has_read():
        told = status(roles, datacenter)
        return told["foreign_events"] == len(truth.pairs) and told["pending"] == 0

    wait_until(has_read, 120, lambda: f"{datacenter}: {status(roles, datacenter)}")


def burst(roles, truth):
    """What each datacenter has joined of a burst, and how many joins were wasted on it."""
    before = [status(roles, name) for name in roles.places]
    truth.write(BURST, twice=0)
    truth.await_all()
    for name in roles.places:
        await_read(roles, truth, name)
    after = [status(roles, name) for name in roles.places]
    joined = [
        now["fates"][Fate.JOINED] - then["fates"][Fate.JOINED]
        for then, now in zip(before, after, strict=True)
    ]
    return joined, sum(one["wasted_joins"] for one in after) - sum(one["wasted_joins"] for one in before)


@pytest.mark.long
def test_datacenters_share_the_joins_and_one_does_all_when_the_other_is_killed(tmp_path):
    roles = Roles(tmp_path)
    truth = Truth(roles)
    try:
        roles.start()
        roles.await_health(SERVING)
        truth.write(BURST, twice=0)
        truth.await_all()
        for name in roles.places:
            await_live(roles, truth, name, ["east", "west"])
        truth.await_all()
        bursts = [burst(roles, truth) for _ in range(BURSTS)]
        assert median(wasted / sum(joined) for joined, wasted in bursts) < WASTED_MAX, bursts
        assert median(min(joined) / sum(joined) for joined, wasted in bursts) > 0.3, bursts

        west = [who for who in roles.all if who[1] in ("west", "r1")]
        roles.kill(*west)
        truth.write(3 * BURST, twice=0)
        truth.await_all("while the leases of the dead may run")
        await_live(roles, truth, "east", ["east"])
        truth.write(BURST, twice=0)
        truth.await_all("when they are over")

        roles.start(*west)
        roles.await_health(SERVING)
        await_read(roles, truth, "west")
        await_live(roles, truth, "west", ["east", "west"])
        truth.write(BURST, twice=0)
        truth.await_all("with both again")
    finally:
        roles.kill()
