"""Regions cut off, leaders without followers, links that carry one way, datacenters that are gone."""

import random

import pytest

from tests.faults import regions
from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.system import FaultSystem, seed_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def test_whatever_links_are_cut_and_whichever_datacenter_is_gone_all_is_joined_once(tmp_path, nursery):
    rng = random.Random(seed := seed_for("regions"))
    feed = Feed(seed, LONG, 200.0)
    with FaultSystem(tmp_path, seed, feed, replicas=5, proxies=True, launcher=nursery) as system:
        system.until_joined(50)
        for scenario in regions.REGIONS:
            scenario(system, rng)
            system.check_now()
        cut_short(system.feeder)
        system.finish()


def test_a_datacenter_that_is_cut_off_joins_nothing_alone_and_catches_up(tmp_path, nursery):
    """It has neither the majority nor anybody to ask: it must not guess."""
    seed = seed_for("alone")
    feed = Feed(seed, LONG, 200.0)
    with FaultSystem(tmp_path, seed, feed, proxies=True, launcher=nursery) as system:
        system.until_joined(50)
        lease_s = system.topology.settings.registry.lease_s
        with regions.healed(system):
            system.proxies.isolate("east")
            system.run_for(lease_s + 1.0)  # what was on its way, and its lease, are over
            before = system.watch.by_datacenter()
            regions.goes_on(system, 200)
            after = system.watch.by_datacenter()
            assert after.get("east", 0) == before.get("east", 0)
            status = system.status("joiner-east")
            assert status is not None
            assert status["lease"]["seconds_left"] <= 0
        system.until(lambda: _has_lease(system), "a lease again")
        cut_short(system.feeder)
        system.finish()


def _has_lease(system):
    status = system.status("joiner-east")
    return status and status["lease"]["seconds_left"] > 0
