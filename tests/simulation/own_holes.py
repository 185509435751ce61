"""Switches that take away guards of our own, of the replicated log and of the state of a shard."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from idregistry.rules import state as shard_state
from idregistry.rules.commands import Release
from idregistry.rules.packing import Encoded
from idregistry.rules.segments import STAMP
from idregistry.rules.state import Facts, Sealed, release
from photon.core import disk
from photon.core.fates import Released
from photon.core.ids import ID_BYTES
from photon.core.journal import SegmentedJournal
from photon.raft.follower import Follower
from photon.raft.membership import Elections
from photon.raft.replica import Replica
from photon.raft.rules.codec import encode
from photon.raft.snapshot import Head, Installation
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


def prepared_state_is_not_put() -> AbstractContextManager[None]:
    original = Installation.work

    def work(self: Installation) -> None:
        original(self)
        self.put_state = lambda: None

    return patched(Installation, "work", work)


def what_a_failed_sync_dropped_is_believed() -> AbstractContextManager[None]:
    return patched(disk, "write_again", lambda path, data, offset: None)


def a_failed_sync_is_tried_again() -> AbstractContextManager[None]:
    def sync_data(fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError:
            os.fdatasync(fd)

    return patched(disk, "sync_data", sync_data)


def names_are_not_synced() -> AbstractContextManager[None]:
    return patched(disk, "sync_directory", lambda directory: None)


def seal_is_not_secured() -> AbstractContextManager[None]:
    return patched(SegmentedJournal, "_secure_seal", lambda self, path, end: None)


def names_are_not_secured_at_the_start() -> AbstractContextManager[None]:
    return patched(ReplicaStore, "_secure_names", lambda self: None)


def directory_is_synced_only_when_made() -> AbstractContextManager[None]:
    def make_directory(directory: Path) -> None:
        if not directory.is_dir():
            make_directory(directory.parent)
            directory.mkdir(exist_ok=True)
            disk.sync_directory(directory.parent)

    return patched(disk, "make_directory", make_directory)


def a_release_needs_no_fence() -> AbstractContextManager[None]:
    class Lenient:
        """All is fenced, for whoever asks here."""

        def __init__(self, facts: Facts) -> None:
            self._facts = facts

        def is_fenced(self, token: bytes) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            return getattr(self._facts, name)

    return patched(shard_state, "release", lambda facts, command: release(Lenient(facts), command))  # type: ignore[arg-type]


def a_release_is_told_and_not_done() -> AbstractContextManager[None]:
    def pretend(facts: Facts, command: Release) -> bytes:
        return bytes([Released.RELEASED]) * (len(command.ids) // ID_BYTES)

    return patched(shard_state, "release", pretend)


def a_release_takes_the_id_from_whoever_holds_it() -> AbstractContextManager[None]:
    original = shard_state._release_one

    def release_one(
        facts: Facts, batch: Encoded, row: int, sealed: Sealed, wanted: tuple[int | None, int]
    ) -> Released:
        holder, token_us, bucket = STAMP.unpack(facts.table.stamp(batch.subs[row], batch.keys[row]))
        return original(facts, batch, row, sealed, (holder, token_us) if bucket >= facts.live else wanted)

    return patched(shard_state, "_release_one", release_one)


def disks_lie() -> AbstractContextManager[None]:
    """No guard can help: it shows that the simulated disks are as bad as they are said to be."""
    return patched(Disks, "_sync", lambda self, fd: None)
