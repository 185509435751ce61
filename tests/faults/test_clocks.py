"""A machine whose clock is wrong by seconds: leases and shards are judged by no such clock."""

import pytest

from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.recovering import recover_into
from tests.faults.kit.skewed import SkewedLauncher
from tests.faults.kit.system import FaultSystem, seed_for
from tests.faults.scenarios import goes_on

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SETTINGS = {
    "registry": {"retention_days": 1.0, "clock_skew_s": 6.0},
}
"""Replicas ask each other for the time, though no id gets so old that it is forgotten; a new number of shards
begins by the clock, and soon: 13 s ahead."""
NEW_SHARD = 2


@pytest.mark.parametrize("by_s", [5.0, -5.0])
def test_a_clock_that_is_five_seconds_off_changes_nothing_in_what_is_joined(tmp_path, nursery, by_s):
    seed = seed_for(f"clock {by_s:+g} s")
    launcher = SkewedLauncher(nursery, lambda name: name.endswith("-west") or name == "registry-r1", by_s)
    feed = Feed(seed, LONG, 200.0)
    with FaultSystem(tmp_path, seed, feed, settings=SETTINGS, launcher=launcher) as system:
        system.until_joined(50)
        assert system.topology.replica("r1").datacenter == "west"
        assert system.registry().reshard(NEW_SHARD + 1).adopted
        for victim in ("registry-r0", "registry-r1"):
            system.kill(victim)  # who leads is decided anew
            goes_on(system)
        system.until(lambda: _ids_of(system, NEW_SHARD) > 100, "ids in the new shard")
        fenced = system.until(lambda: system.lives("west"), "a joiner in west")[-1].incarnation
        system.kill("joiner-west")
        system.fence(fenced)  # once its lease is over, by the clocks of both
        report = recover_into(system, "west")  # what was under way when it was killed
        assert report.refused is None, report
        before = system.watch.by_datacenter()
        system.until(
            lambda: all(system.watch.by_datacenter().get(n, 0) > before.get(n, 0) for n in ("east", "west")),
            "both datacenters to join",
        )
        cut_short(system.feeder)
        system.until(lambda: system.feeder.is_done, "all to be fed")
        system.until_fated(system.feeder.written["west"] + report.recovered, ["west"])
        system.finish(ledgers=["east"])
    assert launcher.skewed == {"registry-r1", "eventstore-west", "joiner-west", "dispatcher-west"}


def _ids_of(system, shard):
    """In the replica that has most of them."""
    replicas = system.statuses(("registry-",)).values()
    return max((one["ids"] for r in replicas for one in r["shards"] if one["shard"] == shard), default=0)
