"""A datacenter that is down for longer than ids are kept (paper 2.3)."""

import pytest

from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.system import FaultSystem, seed_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

KEPT_S = 10.0
SETTINGS = {"registry": {"retention_days": KEPT_S / 86_400}}


def test_a_datacenter_that_was_down_for_longer_than_ids_are_kept_finds_none_expired(tmp_path, nursery):
    feed = Feed(seed_for("hold"), LONG, 100.0)
    with FaultSystem(tmp_path, feed.seed, feed, settings=SETTINGS, launcher=nursery) as system:
        system.until(lambda: _directory(system)["holds"] == 2, "both dispatchers to hold")
        first_us = system.until(lambda: _boundary_us(system), "a boundary")
        system.until(lambda: _boundary_us(system) > first_us, "the boundary to move")
        system.dev.kill_datacenter("west")
        before = system.feeder.written["west"]
        system.until(lambda: _directory(system)["holding"].get("dispatcher-west", 0) > KEPT_S, "a hold")
        assert system.feeder.written["west"] - before > KEPT_S * feed.clicks_per_s, "it has much to read"
        stood_us = _boundary_us(system)
        system.dev.restore_datacenter("west")
        system.until(lambda: _boundary_us(system) > stood_us, "the boundary to go on")
        cut_short(system.feeder)
        system.until_drained()
        fates = {name: one["fates"] for name, one in system.statuses(("dispatcher-",)).items()}
        assert fates.keys() == {"dispatcher-east", "dispatcher-west"}
        assert {one.get("expired", 0) for one in fates.values()} == {0}, fates
        west = fates["dispatcher-west"]
        assert west["joined"] + west["duplicate"] > KEPT_S * feed.clicks_per_s


def _boundary_us(system):
    """Of a replica in east; None: there is none."""
    shards = _status(system)["shards"]
    return min((one["boundary_us"] for one in shards if one["boundary_us"] is not None), default=None)


def _directory(system):
    return _status(system)["directory"]


def _status(system):
    return system.until(lambda: system.status("registry-r0"), "an answer of r0")
