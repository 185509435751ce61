"""A machine whose clock is wrong by seconds: leases and shards are judged by no such clock."""

import pytest

from tests.faults.kit.cutting import LONG, cut_short
from tests.faults.kit.feeder import Feed
from tests.faults.kit.skewed import SkewedLauncher
from tests.faults.kit.system import FaultSystem, seed_for
from tests.faults.scenarios import goes_on

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SETTINGS = {"registry": {"retention_days": 1.0, "clock_skew_s": 20.0}}
"""Ids are forgotten by the clock, and a new number of shards begins by the clock."""


@pytest.mark.parametrize("by_s", [5.0, -5.0])
def test_a_clock_that_is_five_seconds_off_changes_nothing_in_what_is_joined(tmp_path, nursery, by_s):
    seed = seed_for(f"clock {by_s:+g} s")
    launcher = SkewedLauncher(nursery, lambda name: name.endswith("-west") or name == "registry-r1", by_s)
    feed = Feed(seed, LONG, 200.0)
    with FaultSystem(tmp_path, seed, feed, settings=SETTINGS, launcher=launcher) as system:
        system.until_joined(50)
        assert system.topology.replica("r1").datacenter == "west"
        before = system.watch.by_datacenter()
        assert system.registry().reshard(3).adopted
        for victim in ("registry-r0", "registry-r1", "joiner-west"):
            system.kill(victim)  # who leads, and whose lease it is, is decided anew
            goes_on(system)
        system.until(
            lambda: all(system.watch.by_datacenter()[name] > before[name] for name in ("east", "west")),
            "both datacenters to join",
        )
        cut_short(system.feeder)
        system.finish()
    assert launcher.skewed == {"registry-r1", "eventstore-west", "joiner-west", "dispatcher-west"}
