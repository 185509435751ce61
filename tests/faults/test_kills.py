"""SIGKILL of any process of a system of several datacenters, at random moments and many at once."""

import random

import pytest

from tests.faults import scenarios
from tests.faults.kit.crashing_nursery import CrashingNursery
from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.system import FaultSystem, seed_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SETTINGS = {
    "registry": {"lease_s": 1.5},
    "joiner": {"unjoinable_age_s": 4.0, "output_file_bytes_max": 100_000},
}


@pytest.fixture
def launcher(tmp_path):
    made = CrashingNursery(tmp_path / "reached")
    yield made
    made.close()


def test_processes_of_any_role_killed_at_random_moments_change_nothing_in_what_is_joined(tmp_path, launcher):
    rng = random.Random(seed := seed_for("kills"))
    feed = Feed(seed, LONG, 200.0)
    with FaultSystem(tmp_path, seed, feed, replicas=5, settings=SETTINGS, launcher=launcher) as system:
        system.until_joined(50)
        scenarios.kill_at_random_moments(system, rng)
        scenarios.crashing_at_points(launcher)(system, rng)
        assert launcher.reached()
        cut_short(system.feeder)
        system.finish()


def test_all_replicas_killed_at_once_and_joiners_in_turns_lose_and_double_nothing(tmp_path, nursery):
    rng = random.Random(seed := seed_for("kills at once"))
    two_of_each = {
        "joiner": {**SETTINGS["joiner"], "processes": 2},
        "dispatcher": {"workers": 2},
        "eventstore": {"processes": 2},
    }
    settings = SETTINGS | two_of_each
    feed = Feed(seed, LONG, 200.0)
    with FaultSystem(tmp_path, seed, feed, settings=settings, launcher=nursery) as system:
        system.until_joined(50)
        scenarios.kill_all_replicas_at_once(system, rng)
        scenarios.kill_joiners_in_turns_while_the_other_datacenter_stands_still(system, rng)
        scenarios.kill_at_random_moments(system, rng, kills=8)
        cut_short(system.feeder)
        system.finish()
