"""Regions cut off, leaders without followers, links that carry one way, datacenters that are gone."""

import pytest

from tests.faults import regions
from tests.faults.kit.system import under_faults

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def test_whatever_links_are_cut_and_whichever_datacenter_is_gone_all_is_joined_once(tmp_path, nursery):
    with under_faults(tmp_path, "regions", replicas=5, proxies=True, launcher=nursery) as system:
        for scenario in regions.REGIONS:
            scenario(system, system.rng)
            system.check_now()


def test_a_datacenter_that_is_cut_off_joins_nothing_alone_and_catches_up(tmp_path, nursery):
    """It has neither the majority nor anybody to ask: it must not guess."""
    with under_faults(tmp_path, "alone", proxies=True, launcher=nursery) as system:
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


def _has_lease(system):
    status = system.status("joiner-east")
    return status and status["lease"]["seconds_left"] > 0
