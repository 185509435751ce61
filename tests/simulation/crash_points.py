"""One replica's disk, ended at every point in turn: what was acknowledged must be there in every later life.

A life that is cut short, a second one that goes on from what is left (or only starts, which is enough to act
upon what it finds), then a power loss, and a third one.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from photon.core.errors import PhotonError
from photon.raft import snapshot as compaction
from photon.raft.port import Members
from photon.raft.rules.members import command_of
from photon.raft.snapshot import Head, SnapshotId
from photon.raft.store import ReplicaStore
from tests.in_memory import memory_directory
from tests.simulation.clock import Clock
from tests.simulation.disks import Disks, SimulatedCrash

_FIRST = command_of(Members(("a", "b", "c")))
_SEGMENT_BYTES = 180
_CHUNKS = [b"state"]


class _EndsAt(Disks):
    """Ends the process at the point that is `left` points away."""

    left: int | None = None

    def _touch(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise SimulatedCrash


@dataclass
class _Promises:
    """What was acknowledged."""

    term: int = 0
    vote: str | None = None
    entries: dict[int, bytes] = field(default_factory=dict)
    covered: int = 0


def _live(store: ReplicaStore, promises: _Promises, term: int, count: int) -> None:
    """Vote, append and sync a few entries, cut one off, take a snapshot, go on."""
    store.hard_state.store(term, "a")
    promises.term, promises.vote = term, "a"
    journal = store.journal
    for number in range(count):
        _append(store, promises, b"%d of %d" % (number, term), term)
    journal.truncate(journal.last_index)
    del promises.entries[journal.last_index + 1]
    covers = SnapshotId(journal.last_index - 1, journal.entries[-2][2])
    head = Head(covers, Members(("a", "b", "c")))
    compaction.__dict__["write_snapshot"](store.snapshots.own_temporary, head, _CHUNKS)
    if store.snapshots.adopt(store.snapshots.own_temporary, head):
        promises.covered = covers.index
        journal.drop_before(covers.index - 1)
    for number in range(count):
        _append(store, promises, b"%d more of %d" % (number, term), term)


def _append(store: ReplicaStore, promises: _Promises, command: bytes, term: int) -> None:
    journal = store.journal
    index = journal.last_index + 1
    promises.entries.pop(index, None)
    journal.append(command, index, term)
    journal.sync()
    promises.entries[index] = command


def _broken(store: ReplicaStore, promises: _Promises) -> str | None:
    voted = store.hard_state
    if (voted.term, voted.vote or "") < (promises.term, promises.vote or ""):
        return f"the vote {promises.term}, {promises.vote} became {voted.term}, {voted.vote}"
    covers = store.snapshots.current
    if promises.covered > (covers.index if covers is not None else 0):
        return f"the snapshot of {promises.covered} became {covers}"
    held = {index: command for command, index, _ in store.journal.entries}
    for index, command in promises.entries.items():
        if index > (covers.index if covers is not None else 0) and held.get(index) != command:
            return f"entry {index}, {command!r}, became {held.get(index)!r}"
    return None


def _act_upon(store: ReplicaStore, promises: _Promises) -> None:
    """A replica that has started says what it holds, though nothing more is written."""
    promises.term, promises.vote = store.hard_state.term, store.hard_state.vote
    promises.entries = {index: command for command, index, _ in store.journal.entries}
    covers = store.snapshots.current
    promises.covered = covers.index if covers is not None else 0


def _ended_at(point: int, power: bool, idle: bool, seed: int) -> tuple[bool, str | None]:
    """(whether the first life came to its end before that point, what is broken)."""
    with memory_directory() as root:
        clock = Clock()
        disks = _EndsAt(random.Random(seed), clock, root)
        directory = disks.add("a") / "group-0000"
        promises = _Promises()
        with disks.installed():
            disks.left = point
            whole = _in_a_life(disks, directory, lambda store: _live(store, promises, 1, 4))
            if power:
                disks.lose_power("a")
            disks.left = None
            found: list[str | None] = []
            for term in (2, 3):
                try:
                    _in_a_life(disks, directory, lambda store: found.append(_broken(store, promises)))
                    if idle:
                        _in_a_life(disks, directory, partial(_act_upon, promises=promises))
                        disks.lose_power("a")
                        _in_a_life(disks, directory, lambda store: found.append(_broken(store, promises)))
                    _in_a_life(disks, directory, partial(_live, promises=promises, term=term, count=2))
                except (PhotonError, AssertionError) as error:
                    found.append(repr(error))
                    break
                disks.lose_power("a")
        return whole, next((finding for finding in found if finding is not None), None)


def _in_a_life(disks: Disks, directory: Path, work: Callable[[ReplicaStore], object]) -> bool:
    """Whether the work was done; a crash leaves the memory of the machine."""
    store = None
    disks.node = "a"
    try:
        store = ReplicaStore(directory, "a", 0, _SEGMENT_BYTES, _FIRST)
        work(store)
        return True
    except SimulatedCrash:
        return False
    finally:
        disks.node = None
        if store is not None:
            store.abandon()


def sweep(seeds: range = range(2)) -> Iterator[str]:
    """Every point, killed and without power; what was broken."""
    for power, idle, seed in product((False, True), (False, True), seeds):
        point, whole = 0, False
        while not whole:
            whole, finding = _ended_at(point, power, idle, seed)
            if finding is not None:
                yield f"point {point}, power {power}, idle {idle}, seed {seed}: {finding}"
            point += 1
