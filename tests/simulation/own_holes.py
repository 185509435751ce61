"""Switches that take away guards of photon.raft which are not there for a hole of the library."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from photon.core import disk as core_disk
from photon.core.journal import SegmentedJournal
from photon.raft import journal as disk
from photon.raft.elections import Elections
from photon.raft.follower import Follower
from photon.raft.replica import Replica
from photon.raft.rules.codec import encode
from photon.raft.snapshot import Head
from photon.raft.store import ReplicaStore
from tests.simulation.disks import Disks


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while. It must exist: what has moved would not be taken away."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def votes_are_counted_by_message() -> AbstractContextManager[None]:
    return patched(Elections, "_counts", lambda self, peer, term: True)


def acknowledged_before_it_is_synced() -> AbstractContextManager[None]:
    original = Replica.sync

    def sync(self: Replica) -> None:
        for peer, acks in self._follower.acks.take().items():
            for ack in acks:
                self._wire.send(peer, encode(ack))
        original(self)

    return patched(Replica, "sync", sync)


def leader_counts_what_it_has_not_synced() -> AbstractContextManager[None]:
    return patched(Replica, "tick", lambda self: self.core.tick())


def installing_drops_the_matching_tail() -> AbstractContextManager[None]:
    original = Follower._install

    def install(self: Follower, head: Head) -> None:
        original(self, head)
        self._journal.reset(head.covers.index, head.covers.term)

    return patched(Follower, "_install", install)


def installing_keeps_the_old_conflict() -> AbstractContextManager[None]:
    original = Follower._install

    def install(self: Follower, head: Head) -> None:
        conflict = self._conflict
        before = conflict.term, conflict.next_index
        original(self, head)
        conflict.term, conflict.next_index = before

    return patched(Follower, "_install", install)


def names_are_not_synced() -> AbstractContextManager[None]:
    @contextmanager
    def both() -> Iterator[None]:
        with (
            patched(disk, "sync_directory", lambda directory: None),
            patched(core_disk, "sync_directory", lambda directory: None),
        ):
            yield

    return both()


def seal_is_not_secured() -> AbstractContextManager[None]:
    return patched(SegmentedJournal, "_secure_seal", lambda self, path, end: None)


def names_are_not_secured_at_the_start() -> AbstractContextManager[None]:
    return patched(ReplicaStore, "_secure_names", lambda self: None)


def directory_is_synced_only_when_made() -> AbstractContextManager[None]:
    def make_directory(directory: Path) -> None:
        if not directory.is_dir():
            make_directory(directory.parent)
            directory.mkdir(exist_ok=True)
            core_disk.sync_directory(directory.parent)

    return patched(core_disk, "make_directory", make_directory)


def disks_lie() -> AbstractContextManager[None]:
    """No guard can help: it shows that the simulated disks are as bad as they are said to be."""
    return patched(Disks, "_sync", lambda self, fd: None)
