"""Switches that take a guard away and so reopen a hole of pysyncobj (docs/decisions/003), or one that
photon.raft, or a shard's state, itself could have (`own_holes`).

Each switch is a context; while it lasts, replicas have the hole.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from photon.core import disk
from photon.core import journal as records
from photon.core.errors import CorruptStateError
from photon.core.journal import RECORD_BYTES, SEAL, SYNCED, Record
from photon.raft import follower, replica
from photon.raft import snapshot as compaction
from photon.raft.follower import Follower
from photon.raft.journal import Journal, Kind
from photon.raft.membership import Elections
from photon.raft.replica import Proposals, Replica
from photon.raft.rules.codec import Message
from photon.raft.rules.guards import Conflict, Fitted, fit
from photon.raft.snapshot import Head, SnapshotStore, StateMachineError, write_snapshot
from photon.raft.store import FIRST_INDEX, FIRST_TERM, HardState, ReplicaStore
from tests.raft.kit import Register
from tests.simulation import own_holes, registry_holes
from tests.simulation.own_holes import patched

Switch = Callable[[], AbstractContextManager[None]]
_BEYOND = 1 << 62


def s1_snapshot_piece_commits() -> AbstractContextManager[None]:
    original = Follower._on_piece

    def on_piece(self: Follower, peer: str, message: Message) -> None:
        original(self, peer, message)
        index = min(message["commit_index"], self._journal.last_index)
        self._core._SyncObj__raftCommitIndex = max(self._core.commit_index, index)

    return patched(Follower, "_on_piece", on_piece)


def s2_truncates_what_matches() -> AbstractContextManager[None]:
    return patched(follower, "fit", lambda log, commit, message: Fitted(message, _BEYOND))


def s2_acknowledges_what_was_not_compared() -> AbstractContextManager[None]:
    def uncapped(log: Any, commit: int, message: Message) -> Fitted:
        fitted = fit(log, commit, message)
        if fitted.verified is None:
            return fitted
        return Fitted({**fitted.message, "commit_index": message["commit_index"]}, _BEYOND)

    return patched(follower, "fit", uncapped)


def s3_acknowledgements_of_any_term() -> AbstractContextManager[None]:
    return patched(replica, "is_stale_ack", lambda message, term: False)


def s4_restart_clears_the_journal() -> AbstractContextManager[None]:
    original = ReplicaStore._reconcile

    def reconcile(self: ReplicaStore, *founding: Any) -> None:
        original(self, *founding)
        covers = self.snapshots.current
        if covers is not None and self.journal.last_index > covers.index:
            self.journal.reset(covers.index, covers.term)

    return patched(ReplicaStore, "_reconcile", reconcile)


def s5_compaction_rewrites_the_journal() -> AbstractContextManager[None]:
    def drop_before(self: Journal, index: int) -> None:
        at = index - self.first_index
        if at > 0:
            (_, first, term), *rest = self.entries[at:]
            self.reset(first, term)
            for entry in rest:
                self.append(*entry)
            self.sync()

    return patched(Journal, "drop_before", drop_before)


@contextmanager
def s6_no_snapshot_after_a_restart() -> Iterator[None]:
    original, reconcile = SnapshotStore.__init__, ReplicaStore._reconcile

    def opened(self: SnapshotStore, directory: Path) -> None:
        original(self, directory)
        self.path.unlink(missing_ok=True)
        self.head = None

    def forgetful(self: ReplicaStore, *founding: Any) -> None:
        if self.journal.entries and self.journal.first_index != FIRST_INDEX:
            self.journal.reset(FIRST_INDEX, FIRST_TERM)
            self.journal.entries[0] = (founding[0], FIRST_INDEX, FIRST_TERM)
        reconcile(self, *founding)

    with patched(SnapshotStore, "__init__", opened), patched(ReplicaStore, "_reconcile", forgetful):
        yield


@contextmanager
def weak_machine() -> Iterator[None]:
    """Not a hole: now and then `apply` raises, for want of memory perhaps."""
    original = Register.apply
    calls = 0

    def apply(self: Register, command: bytes) -> object:
        nonlocal calls
        calls += 1
        if calls % 150 == 0:
            raise MemoryError("played")
        return original(self, command)

    with patched(Register, "apply", apply):
        yield


@contextmanager
def s8_goes_on_after_an_exception() -> Iterator[None]:
    original = Replica.apply_committed

    def apply_committed(self: Replica) -> None:
        try:
            original(self)
        except StateMachineError:
            self._proposals._waiting.pop(self.core.applied_index + 1, None)  # its callback is lost

    with weak_machine(), patched(Replica, "apply_committed", apply_committed):
        yield


@contextmanager
def s9_older_snapshot_replaces_the_log() -> Iterator[None]:
    def adopt(self: SnapshotStore, temporary: Path, head: Head) -> bool:
        self.head = None
        return adopt_newer(self, temporary, head)

    adopt_newer = SnapshotStore.adopt

    stale = patched(follower, "is_stale_snapshot", lambda index, commit_index, applied_index: False)
    with stale, patched(SnapshotStore, "adopt", adopt):
        yield


@contextmanager
def s10_commit_index_outlives_the_log() -> Iterator[None]:
    """It hurts only where the log can lose what was committed: where nothing is synced, as in the library."""
    kept: dict[Path, int] = {}
    original, tick = Replica.__init__, Replica.tick

    def opened(self: Replica, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        commit = kept.get(self.store.directory, 0)
        self.core._SyncObj__raftCommitIndex = max(self.core.commit_index, commit)

    def noting(self: Replica) -> None:
        tick(self)
        kept[self.store.directory] = self.core.commit_index

    with s11_nothing_is_synced(), patched(Replica, "__init__", opened), patched(Replica, "tick", noting):
        yield


def s11_nothing_is_synced() -> AbstractContextManager[None]:
    return patched(disk, "sync_data", lambda fd: None)


def s11_vote_is_forgotten() -> AbstractContextManager[None]:
    original = HardState.store

    def store(self: HardState, term: int, vote: str | None) -> None:
        original(self, term, None)
        self.vote = vote

    return patched(HardState, "store", store)


def s11_no_checksums() -> AbstractContextManager[None]:
    def record_at(view: memoryview, offset: int, salt: int) -> Record | None:
        if offset + RECORD_BYTES > len(view):
            return None
        _, kind, length = records._RECORD.unpack_from(view, offset)
        end = offset + RECORD_BYTES + length
        record = Record(kind, view[offset + RECORD_BYTES : end])
        if end > len(view) or kind not in {SYNCED, SEAL, *Kind}:
            return None
        return None if kind == SYNCED and not records._is_mark(record, offset) else record

    return patched(records, "_record_at", record_at)


def s12_damaged_snapshot_is_an_empty_one() -> AbstractContextManager[None]:
    original = Replica._restore

    def restore(self: Replica) -> int:
        try:
            return original(self)
        except CorruptStateError:
            covers = self.store.snapshots.current
            return FIRST_INDEX if covers is None else covers.index

    return patched(Replica, "_restore", restore)


def s13_snapshot_is_renamed_before_it_is_whole() -> AbstractContextManager[None]:
    def early(path: Path, head: Head, chunks: Any) -> None:
        kept = list(chunks)
        write_snapshot(path, head, kept)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        path.rename(path.with_name("snapshot"))
        write_snapshot(path, head, kept)

    return patched(compaction, "write_snapshot", early)


def s14_part_of_the_state_is_not_in_the_snapshot() -> AbstractContextManager[None]:
    original = Register.freeze
    return patched(Register, "freeze", lambda self: list(original(self))[:-1])


@contextmanager
def l1_backing_off_bounces() -> Iterator[None]:
    with (
        patched(Conflict, "bound", lambda self, term, next_index: next_index),
        patched(follower, "conflict_start", lambda log, commit_index, previous: None),
    ):
        yield


@contextmanager
def l2_lost_proposals_are_not_told() -> Iterator[None]:
    with (
        patched(Proposals, "lose", lambda self: self._waiting.clear()),
        patched(Proposals, "expire", lambda self, now: None),
    ):
        yield


@contextmanager
def l4_stands_without_asking_first() -> Iterator[None]:
    def due(self: Elections) -> None:
        if self._core.may_stand:
            self._core.elect(self._core.term)

    def would_vote(self: Elections, message: Message) -> bool:
        return True  # the library looks at the log

    with patched(Elections, "due", due), patched(Elections, "_would_vote", would_vote):
        yield


_NO_HOLES = {"weak_machine", "small_chunks", "patched"}


def _switches(module: ModuleType) -> dict[str, Switch]:
    made = {name: one for name, one in vars(module).items() if isfunction(one) and not name.startswith("_")}
    return {
        name: one for name, one in made.items() if one.__module__ == module.__name__ and name not in _NO_HOLES
    }


HOLES: dict[str, Switch] = {
    name: switch
    for module in (sys.modules[__name__], own_holes, registry_holes)
    for name, switch in _switches(module).items()
}
