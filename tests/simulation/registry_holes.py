"""Switches that take away guards of the registry as a whole: where groups meet, and what a host remembers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from idregistry import shard as shards
from idregistry.coordinator import Hosting
from idregistry.rules import directory
from idregistry.rules import snapshots as shard_snapshots
from idregistry.rules.directory import View
from idregistry.rules.packing import Holders
from idregistry.rules.steward import DAY_US, boundary_due
from idregistry.shard import Shard
from photon.raft import sender
from photon.raft import snapshot as snapshots
from photon.raft.port import ReplicatedLog
from photon.raft.rules.placement import Group
from photon.raft.store import Home
from tests.simulation.own_holes import patched

CHUNK_BYTES = 140
"""Of a snapshot, where the state is as small as the simulator's."""


def r1_an_old_directory_is_believed() -> AbstractContextManager[None]:
    def on_tick(self: Shard, log: ReplicatedLog) -> None:
        view = self._directory.view
        may_propose = self._steward.on_tick(log, view)
        if not log.is_leader:
            self.queue.send_elsewhere(log.leader)
        elif may_propose:
            self._propose(log, view)

    return patched(Shard, "on_tick", on_tick)


def r2_a_snapshot_takes_the_whole_way() -> AbstractContextManager[None]:
    return patched(sender, "SNAPSHOT_SHARE", 1)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Not a hole: a bound that a state as small as the simulator's would meet."""
    with (
        patched(snapshots, "CHUNK_BYTES_MAX", CHUNK_BYTES),
        patched(shard_snapshots, "CHUNK_ROWS_MAX", 2),
        patched(directory, "_CHUNK_BYTES", CHUNK_BYTES),
    ):
        yield


@contextmanager
def r4_holders_are_kept_in_one_chunk() -> Iterator[None]:
    with (
        small_chunks(),
        patched(shard_snapshots, "CHUNK_ROWS_MAX", 1 << 30),
        patched(Holders, "forget_but", lambda self, kept: None),
    ):
        yield


def r5_a_disk_that_was_put_back_is_believed() -> AbstractContextManager[None]:
    return patched(Home, "check_life", lambda self, peer, life: None)


def r6_all_groups_are_founded_in_one_turn() -> AbstractContextManager[None]:
    original = Hosting._step

    def step(self: Hosting, view: View) -> bool:
        while original(self, view):
            pass
        return False

    return patched(Hosting, "_step", step)


def r7_the_boundary_leaps() -> AbstractContextManager[None]:
    def due(reached_us: int, boundary_us: int, days: float, *rest: Any) -> int | None:
        wanted_us = reached_us - round(days * DAY_US)
        leaps = wanted_us - boundary_us > DAY_US
        return wanted_us if leaps else boundary_due(reached_us, boundary_us, days, *rest)

    return patched(shards, "boundary_due", due)


def r8_holds_are_not_heeded() -> AbstractContextManager[None]:
    def due(*known: Any) -> int | None:
        return boundary_due(*known[:4], None, *known[5:])

    return patched(shards, "boundary_due", due)


def p1_sequencers_are_not_checked() -> AbstractContextManager[None]:
    """Who had a share goes on writing."""
    return patched(Group, "stands", lambda self, number, sequencer: number < len(self.shares))
