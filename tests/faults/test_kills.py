"""SIGKILL of any process of a system of several datacenters, at random moments and many at once."""

import pytest

from tests.faults import scenarios
from tests.faults.kit.crashing_nursery import CrashingNursery
from tests.faults.kit.system import under_faults

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
    with under_faults(tmp_path, "kills", replicas=5, settings=SETTINGS, launcher=launcher) as system:
        scenarios.kill_at_random_moments(system, system.rng)
        scenarios.crashing_at_points(launcher)(system, system.rng)
        assert launcher.reached()


def test_all_replicas_killed_at_once_and_joiners_in_turns_lose_and_double_nothing(tmp_path, nursery):
    settings = SETTINGS | {
        "joiner": {**SETTINGS["joiner"], "processes": 2},
        "dispatcher": {"workers": 2},
        "eventstore": {"processes": 2},
    }
    with under_faults(tmp_path, "kills at once", settings=settings, launcher=nursery) as system:
        scenarios.kill_all_replicas_at_once(system, system.rng)
        scenarios.kill_joiners_in_turns_while_the_other_datacenter_stands_still(system, system.rng)
        scenarios.kill_at_random_moments(system, system.rng, kills=8)
