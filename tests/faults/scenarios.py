"""What can happen to the processes of a running system, one thing each; used by the tests and by the soak.

Each is a function (system, rng) -> None. It needs a feed that goes on, and leaves every process running. What
it asserts is that those who are not hit go on; what must hold of the output, the checkers say afterwards.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.faults.kit.crashing import POINTS, Crash
from tests.faults.kit.crashing_nursery import CrashingNursery
from tests.faults.kit.system import FaultSystem

Scenario = Callable[[FaultSystem, random.Random], None]

KILLS: Final = 20
MORE_LINES: Final = 30
"""So many more joined lines show that work goes on."""
_PAUSE_S: Final = (0.05, 0.6)
_TURNS: Final = 4
CRASHING: Final = 4
"""Processes at a time."""
_CRASHING_S: Final = (2.0, 5.0)


def kill_at_random_moments(system: FaultSystem, rng: random.Random, kills: int = KILLS) -> None:
    """SIGKILL, each role as often as the others; now and then the next kill hits before all is up again."""
    roles = [*POINTS]
    restarts = system.dev.supervisor.restarts()
    for number in range(kills):
        role = roles[number % len(roles)]
        victim = rng.choice([name for name in system.topology.titles() if name.startswith(role)])
        system.run_for(rng.uniform(*_PAUSE_S))
        until_up(system, victim)
        system.kill(victim)
    system.until(lambda: system.dev.supervisor.restarts() >= restarts + kills, "all to be started again")
    goes_on(system)


def kill_all_replicas_at_once(system: FaultSystem, rng: random.Random) -> None:
    """Twice; the second time while they find to each other again, perhaps."""
    for _ in range(2):
        for replica in system.topology.replicas:
            system.kill(f"registry-{replica.name}")
        system.run_for(rng.uniform(0.1, 1.5))
    for shard in (None, 0):
        system.until_leader(shard)
    goes_on(system)


def kill_joiners_in_turns_while_the_other_datacenter_stands_still(
    system: FaultSystem, rng: random.Random
) -> None:
    """All of the other datacenter is stopped (SIGSTOP); here is never more than one joiner at a time."""
    here, other = rng.sample([pipeline.datacenter for pipeline in system.topology.pipelines], 2)
    joiners = [p.title for p in system.topology.processes("joiner") if p.datacenter == here]
    with standing_still(system, *system.dev.processes_of(other)):
        for turn in range(_TURNS):
            down = [joiners[turn % len(joiners)]]
            system.dev.supervisor.hold_down(down)
            if len(joiners) > 1:
                goes_on(system)
            system.dev.supervisor.let_up(down)
            goes_on(system)


def stop_a_leader(system: FaultSystem, rng: random.Random) -> None:
    """SIGSTOP of the registry replica that leads the directory or a shard, until another leads; SIGCONT."""
    shard = rng.choice([None, 0])
    leader = system.until_leader(shard)
    with standing_still(system, f"registry-{leader}"):
        system.until(lambda: system.leader_of(shard) not in (None, leader), "another leader")
        goes_on(system)
    system.until(lambda: system.status(f"registry-{leader}"), f"{leader} to answer again")
    goes_on(system)


def stop_a_joiner_for_longer_than_its_lease(system: FaultSystem, rng: random.Random) -> None:
    """SIGSTOP of one, wherever it stands; nobody fences it, so SIGCONT lets it go on."""
    joiner = rng.choice(system.topology.processes("joiner"))
    lease_s = system.topology.settings.registry.lease_s
    with standing_still(system, joiner.title):
        system.run_for(lease_s * rng.uniform(1.1, 1.5))
        goes_on(system)
    goes_on(system)


def stop_a_dispatcher(system: FaultSystem, rng: random.Random) -> None:
    """SIGSTOP; the other datacenter joins what it would have."""
    _stop_for_a_while(system, rng, "dispatcher")


def stop_an_eventstore(system: FaultSystem, rng: random.Random) -> None:
    """SIGSTOP; lookups of its datacenter hang until their timeout."""
    _stop_for_a_while(system, rng, "eventstore")


def crashing_at_points(launcher: CrashingNursery) -> Scenario:
    """For systems that `launcher` starts: some processes end, twice, at marked points between two steps."""

    def crash_at_random_points(system: FaultSystem, rng: random.Random) -> None:
        victims = rng.sample(system.topology.titles(), CRASHING)
        try:
            for victim in victims:
                points = POINTS[victim.partition("-")[0]]
                until_up(system, victim)
                launcher.arm(victim, [Crash(rng.choice(points), rng.randrange(3)) for _ in range(2)])
                system.kill(victim)
            system.run_for(rng.uniform(*_CRASHING_S))
        finally:
            launcher.disarm()
        for victim in victims:  # some points have not come: nor shall they in the midst of another fault
            until_up(system, victim)
            system.kill(victim)
        goes_on(system)

    return crash_at_random_points


KILLING: Final[tuple[Scenario, ...]] = (
    kill_at_random_moments,
    kill_all_replicas_at_once,
    kill_joiners_in_turns_while_the_other_datacenter_stands_still,
)
STOPPING: Final[tuple[Scenario, ...]] = (
    stop_a_leader,
    stop_a_joiner_for_longer_than_its_lease,
    stop_a_dispatcher,
    stop_an_eventstore,
)
SCENARIOS: Final = KILLING + STOPPING
"""For any system of two pipelines or more."""


def goes_on(system: FaultSystem, lines: int = MORE_LINES) -> None:
    """Return when so many more events are joined, wherever."""
    system.until_joined(system.watch.joined + lines)


def lets_up(system: FaultSystem) -> None:
    """Restarts are not put off: a process that ends so often is not left alone for longer and longer."""
    children = system.dev.supervisor.children
    down = [name for name, child in children.items() if child.process is None and not child.held]
    system.dev.supervisor.let_up(down)


def until_up(system: FaultSystem, process: str) -> int:
    """Its process id, as soon as it runs."""
    return system.until(lambda: system.dev.pid_of(process), f"{process} to be up") or 0


@contextmanager
def standing_still(system: FaultSystem, *processes: str) -> Iterator[None]:
    """SIGSTOP all that run, and SIGCONT at the end."""
    for process in processes:
        until_up(system, process)
        system.pause(process)
    try:
        yield
    finally:
        for process in processes:
            system.resume(process)


def _stop_for_a_while(system: FaultSystem, rng: random.Random, role: str) -> None:
    process = rng.choice(system.topology.processes(role)).title
    with standing_still(system, process):
        system.run_for(rng.uniform(0.5, 2.0))
        goes_on(system)
    goes_on(system)
