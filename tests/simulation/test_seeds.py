"""What must hold of the log and of the registry in it, over many seeds."""

import os
from collections import Counter

import pytest

from tests.simulation.caught import ROTTEN
from tests.simulation.cluster import Plan, Run, play

SEEDS = int(os.environ.get("PHOTON_SIM_SEEDS", "0"))
"""Seeds of each size and mood; 0: a few."""

BATCH = 10


def played(plans: list[Plan]) -> list[Run]:
    runs = []
    for plan in plans:
        run = play(plan)
        assert not run.broken, (plan.command(), run.broken)
        runs.append(run)
    return runs


def batches(few: int, share: int = 1) -> list[range]:
    """All seeds, or every `share`-th part of them, in batches for one test each."""
    count = SEEDS // share or few
    return [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]


def named(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop - 1}"


@pytest.mark.parametrize("seeds", batches(15), ids=named)
def test_three_replicas_keep_every_promise(seeds: range) -> None:
    runs = played([Plan(seed, 3) for seed in seeds])
    # A simulation in which nothing happens proves nothing.
    total = sum((Counter(run.stats) for run in runs), Counter())
    assert total["acknowledged"] > 100 * len(runs)
    assert total["elections"] > len(runs)
    assert total["deaths"] > len(runs)
    assert total["snapshots"] > 10 * len(runs)
    assert total["retried"] > len(runs)


@pytest.mark.parametrize("seeds", batches(10), ids=named)
@pytest.mark.long
def test_five_replicas_keep_every_promise(seeds: range) -> None:
    runs = played([Plan(seed, 5) for seed in seeds])
    assert sum(run.stats["installs"] for run in runs) > 0


@pytest.mark.parametrize("seeds", batches(3, share=2), ids=named)
@pytest.mark.parametrize("replicas", [3, 5])
def test_messages_may_be_lost_late_doubled_and_out_of_order(replicas: int, seeds: range) -> None:
    played([Plan(seed, replicas, hostile=True) for seed in seeds])


@pytest.mark.parametrize("seeds", batches(2, share=3), ids=named)
@pytest.mark.parametrize("replicas", [3, pytest.param(5, marks=pytest.mark.long)])
def test_the_registry_keeps_every_promise(replicas: int, seeds: range) -> None:
    played([Plan(seed, replicas, machine="registry", hostile=seed % 2 == 1) for seed in seeds])


@pytest.mark.parametrize("seeds", batches(2, share=2), ids=named)
def test_replicas_may_be_added_promoted_removed_and_replaced_meanwhile(seeds: range) -> None:
    machines = ("register", "registry")
    runs = played(
        [Plan(seed, 3 + seed % 3, machines[seed // 2 % 2], seed % 2 == 1, members=True) for seed in seeds]
    )
    assert sum(run.stats["changes"] for run in runs) > len(runs)


def test_a_replica_whose_disk_is_damaged_stops_and_is_replaced() -> None:
    runs = played([Plan(seed, 3, members=True, profile=ROTTEN) for seed in range(4)])
    assert sum(run.stats["lost"] for run in runs) > 0


def test_a_seed_is_played_the_same_again() -> None:
    one, other = play(Plan(7, 5)), play(Plan(7, 5))
    assert one.history == other.history
    assert one.history != play(Plan(8, 5)).history
