"""What can happen to the links between datacenters, one thing each, and to a whole datacenter.

As tests.faults.scenarios; the system must have proxies. Links are as they were before, in the end.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.faults.kit.system import FaultSystem
from tests.faults.kit.toxics import Direction, Kind
from tests.faults.scenarios import Scenario, goes_on

_CUT_S: Final = (1.0, 4.0)


def cut_off_a_region(system: FaultSystem, rng: random.Random) -> None:
    """No byte in or out; what its clients and replicas were told stays true."""
    region = rng.choice(sorted(set(system.topology.regions.values())))
    inside = [name for name, of in system.topology.regions.items() if of == region]
    with healed(system):
        system.proxies.isolate_region(_sites(system), region)
        system.run_for(rng.uniform(*_CUT_S))
        _others_go_on(system, inside)
    goes_on(system)


def cut_a_leader_off_from_its_followers(system: FaultSystem, rng: random.Random) -> None:
    """Its clients reach it still: it must not tell them that it leads."""
    shard = rng.choice([None, 0])
    leader = system.until_leader(shard)
    with healed(system):
        system.proxies.isolate(system.topology.replica(leader).datacenter, kind="raft")
        system.until(lambda: system.leader_of(shard) not in (None, leader), "a leader among those left")
        goes_on(system)
    goes_on(system)


def cut_one_way(system: FaultSystem, rng: random.Random) -> None:
    """A datacenter is not heard, or hears nothing, while the other way is whole.

    Not of its clients' links alone: a leader whom its followers reach and the clients elsewhere do not keeps
    its lead, and those clients wait.
    """
    datacenter = rng.choice(sorted({replica.datacenter for replica in system.topology.replicas}))
    direction: Direction = rng.choice(("to", "from"))
    kind: Kind | None = rng.choice((None, "raft"))
    with healed(system):
        system.proxies.isolate(datacenter, direction, kind)
        system.run_for(rng.uniform(*_CUT_S))
        _others_go_on(system, [datacenter])
    goes_on(system)


def lose_a_datacenter(system: FaultSystem, rng: random.Random) -> None:
    """SIGKILL of all its processes; they start again on their disks."""
    datacenter = rng.choice(system.topology.datacenters)
    system.dev.kill_datacenter(datacenter)
    try:
        system.run_for(rng.uniform(0.5, 3.0))
        _others_go_on(system, [datacenter])
    finally:
        system.dev.restore_datacenter(datacenter)
    goes_on(system)


REGIONS: Final[tuple[Scenario, ...]] = (
    cut_off_a_region,
    cut_a_leader_off_from_its_followers,
    cut_one_way,
    lose_a_datacenter,
)


@contextmanager
def healed(system: FaultSystem) -> Iterator[None]:
    """In the end no link is cut, whatever was done."""
    try:
        yield
    finally:
        system.proxies.mend_cuts()


def _others_go_on(system: FaultSystem, inside: list[str]) -> None:
    """Where there is a pipeline elsewhere, it joins all: nobody waits for those inside."""
    elsewhere = [p.datacenter for p in system.topology.pipelines if p.datacenter not in inside]
    assert elsewhere, "no pipeline is left to go on"
    before = {name: _joined_by(system, name) for name in elsewhere}
    system.until(
        lambda: any(_joined_by(system, name) > before[name] + 30 for name in elsewhere),
        f"{', '.join(elsewhere)} to join alone",
    )


def _joined_by(system: FaultSystem, datacenter: str) -> int:
    return system.watch.by_datacenter().get(datacenter, 0)


def _sites(system: FaultSystem) -> dict[str, str]:
    """Datacenter -> region, of those that there are."""
    return {name: system.topology.regions[name] for name in system.topology.datacenters}
