"""What must hold of the log, over many seeds of partitions, crashes, torn writes and snapshots."""

import os

import pytest

from tests.raft.kit import memory_directory
from tests.raft.simulation import Findings, Simulation

SEEDS = int(os.environ.get("PHOTON_SIM_SEEDS", "60"))
BATCH = 10


def play(seeds: range, nodes: str) -> list[Findings]:
    found = []
    for seed in seeds:
        with memory_directory() as directory:
            findings = Simulation(seed, directory, nodes).run()
        assert not findings.broken(), (seed, findings.broken())
        found.append(findings)
    return found


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_no_id_has_two_winners_and_none_is_lost_through_crashes_and_partitions(first: int) -> None:
    found = play(range(first, min(first + BATCH, SEEDS)), "abc")
    # A simulation in which nothing happens proves nothing.
    assert sum(findings.acknowledged for findings in found) > 50 * len(found)
    assert all(findings.crashes for findings in found)
    assert sum(findings.installs for findings in found) > 0
    assert sum(findings.elections for findings in found) > len(found)


def test_five_replicas_keep_the_same_promises() -> None:
    play(range(1000, 1000 + max(2, SEEDS // 12)), "abcde")
