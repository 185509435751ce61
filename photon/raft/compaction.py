"""When a snapshot is due, how it is written beside the work, and what of the log goes once it is there."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from photon.core.errors import PhotonError
from photon.raft.journal import Journal
from photon.raft.members import MemberLog
from photon.raft.port import StateMachine
from photon.raft.settings import RaftLimits
from photon.raft.snapshot import Head, SnapshotId, SnapshotStore, write_snapshot

# While followers take in a snapshot, the next one waits, so that what follows the first is still there for
# them: up to so many times the usual size of the log.
PATIENCE = 4


class Job(Protocol):
    """Work in the background."""

    def done(self) -> bool: ...
    def result(self) -> None:
        """Raises what the work raised."""


class Jobs(Protocol):
    """One piece of work at a time, for all groups of a host."""

    def busy(self) -> bool: ...
    def start(self, work: Callable[[], None]) -> Job: ...


class StateMachineError(PhotonError):
    """The state machine raised. The replica stops: going on, it would differ from the others."""


class _Abandoned(Exception):
    """The replica stops before its snapshot is written."""


def _finish(job: Job) -> None:
    try:
        job.result()
    except PhotonError:
        raise
    except Exception as error:
        raise StateMachineError(f"what the state machine's freeze returned raised {error!r}") from error


class Compactor:
    """Raft thread only; the writing itself is a `Job`."""

    def __init__(
        self,
        machine: StateMachine,
        journal: Journal,
        snapshots: SnapshotStore,
        members: MemberLog,
        jobs: Jobs,
        limits: RaftLimits,
    ) -> None:
        self._machine = machine
        self._journal = journal
        self._snapshots = snapshots
        self._members = members
        self._jobs = jobs
        self._limits = limits
        self._frozen_index = 0 if snapshots.current is None else snapshots.current.index
        self._applied_bytes = 0
        self._job: Job | None = None
        self._head: Head | None = None  # of the snapshot that is being written
        self._abandoned = False

    def applied(self, command_bytes: int) -> None:
        """One more command is in the state."""
        self._applied_bytes += command_bytes

    def installed(self, index: int) -> None:
        """The state was replaced by a snapshot up to `index`."""
        self._frozen_index = index
        self._applied_bytes = 0

    def tick(self, applied_index: int, needed_index: Callable[[], int | None], transferring: bool) -> None:
        """Finish a snapshot that is written, start one that is due.

        `needed_index`: the entry the slowest live follower has, on a leader; asked once a snapshot.
        StorageError, StateMachineError.
        """
        if self._job is not None:
            if not self._job.done():
                return
            job, self._job = self._job, None
            _finish(job)
            assert self._head is not None
            if self._snapshots.adopt(self._snapshots.own_temporary, self._head):
                index = self._head.covers.index
                self._journal.drop_before(self._keep_from(index, needed_index()))
                self._members.forget_before(index)
        patience = PATIENCE if transferring else 1
        if self._due(applied_index, patience) and not self._jobs.busy():
            self._start(applied_index)

    def abandon(self) -> None:
        """Stop writing soon; what was written is dropped at the next start."""
        self._abandoned = True

    def _due(self, applied_index: int, patience: int) -> bool:
        return (
            applied_index - self._frozen_index >= self._limits.compact_entries * patience
            or self._applied_bytes >= self._limits.compact_bytes * patience
        )

    def _start(self, applied_index: int) -> None:
        term, members = self._journal.term_at(applied_index), self._members.at(applied_index)
        assert term is not None, applied_index
        if members is None:
            return  # one who joined has not yet come to where its log names anybody
        try:
            chunks = self._machine.freeze()
        except Exception as error:
            raise StateMachineError(f"the state machine's freeze raised {error!r}") from error
        head = self._head = Head(SnapshotId(applied_index, term), members)
        self._frozen_index = applied_index
        self._applied_bytes = 0
        path = self._snapshots.own_temporary
        self._job = self._jobs.start(lambda: write_snapshot(path, head, self._until_abandoned(chunks)))

    def _until_abandoned(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._abandoned:
                raise _Abandoned
            yield chunk

    def _keep_from(self, snapshot_index: int, needed_index: int | None) -> int:
        """The first entry to keep: a short tail, a longer one where a live follower needs it."""
        journal, limits = self._journal, self._limits
        entries, first = journal.entries, journal.first_index
        keep = snapshot_index
        size = len(entries[keep - first][0])
        floor = max(first, snapshot_index - limits.tail_entries)
        while keep > floor and (size := size + len(entries[keep - 1 - first][0])) <= limits.tail_bytes:
            keep -= 1
        if needed_index is not None:
            keep = min(keep, max(needed_index, snapshot_index - limits.compact_entries))
        return max(keep, first)
