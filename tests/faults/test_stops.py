"""Processes that stand still (SIGSTOP) and go on (SIGCONT): nobody waits for them, zombies do no harm."""

import random

import pytest

from tests.faults import scenarios
from tests.faults.kit.checkers import ledger_of
from tests.faults.kit.crashing import Crash
from tests.faults.kit.crashing_nursery import CrashingNursery
from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.recovering import recover_into
from tests.faults.kit.system import FaultSystem, seed_for, under_faults

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SETTINGS = {
    "registry": {"lease_s": 1.5},
    "joiner": {"unjoinable_age_s": 4.0, "output_file_bytes_max": 100_000},
    "eventstore": {"request_timeout_s": 2.0},
}
STEPS = ["intent synced", "registered", "lines written", "output appended"]
TRIES_MAX = 5


def test_who_stands_still_holds_nobody_up_and_goes_on_without_harm(tmp_path, nursery):
    with under_faults(tmp_path, "stops", 100.0, settings=SETTINGS, launcher=nursery) as system:
        for scenario in system.rng.sample(scenarios.STOPPING, len(scenarios.STOPPING)):
            scenario(system, system.rng)


def test_a_joiner_that_is_fenced_while_it_stands_still_writes_nothing_and_all_comes_back(tmp_path):
    """What it had registered: by recovery, or by its next life, which takes back the lines it had written."""
    rng = random.Random(seed := seed_for("zombies"))
    launcher = CrashingNursery(tmp_path / "reached")
    system = FaultSystem(tmp_path, seed, Feed(seed, LONG // 2, 100.0), settings=SETTINGS, launcher=launcher)
    here, other = rng.sample(["east", "west"], 2)
    injected = 0
    try:
        with system:
            system.until_joined(50)
            for step in rng.sample(STEPS, len(STEPS)):
                for _ in range(TRIES_MAX):
                    meanwhile, afterwards = fence_a_zombie(system, launcher, here, step, rng)
                    injected += meanwhile + afterwards
                    # What it had registered may all have been another's already.
                    if meanwhile or step != "registered":
                        break
                else:
                    pytest.fail(f"{TRIES_MAX} zombies had registered nothing")
            cut_short(system.feeder)
            system.until(lambda: system.feeder.is_done, "all to be fed")
            system.until_fated(system.feeder.written[here] + injected, [here])
            counted = ledger_of(system.statuses((f"dispatcher-{here}",))[f"dispatcher-{here}"])
            assert counted.foreign_events == system.feeder.truth.foreign_lines + injected
            assert sum(counted.fates.values()) == counted.foreign_events
            system.finish(ledgers=[other])
    finally:
        launcher.close()


def fence_a_zombie(
    system: FaultSystem, launcher: CrashingNursery, datacenter: str, step: str, rng: random.Random
) -> tuple[int, int]:
    """How many events recovery brings back while the joiner stands still at the step, and after that."""
    zombie = f"joiner-{datacenter}"
    reached = launcher.reached().total()
    others = [p.title for p in system.topology.processes("dispatcher") if p.name != datacenter]
    scenarios.until_up(system, zombie)
    launcher.arm(zombie, [Crash(step, rng.randrange(3), stop=True)])
    system.kill(zombie)  # it is started again by a poll, and none is between the two
    with scenarios.standing_still(system, *others):  # else they may have everything before it has
        system.until(
            lambda: scenarios.lets_up(system) or launcher.reached().total() > reached,
            f"{zombie} to stand still: {step}",
        )
    pid = system.dev.pid_of(zombie)
    system.fence(system.lives(datacenter)[-1].incarnation)
    meanwhile = recovers(system, datacenter)
    scenarios.goes_on(system)
    system.resume(zombie)
    system.until(
        lambda: scenarios.lets_up(system) or system.dev.pid_of(zombie) not in (None, pid),
        "the next life of the zombie",
    )
    afterwards = recovers(system, datacenter)
    scenarios.goes_on(system)
    return meanwhile, afterwards


def recovers(system: FaultSystem, datacenter: str) -> int:
    """How many events are brought back."""
    report = recover_into(system, datacenter)
    assert report.refused is None, report
    return report.recovered
