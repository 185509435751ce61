"""What one replica has on disk, opened, checked against itself, and locked."""

from pathlib import Path

from photon.core.disk import DirectoryLock
from photon.raft import disk
from photon.raft.ballot import Ballot
from photon.raft.journal import NO_OP, Journal
from photon.raft.snapshot import SnapshotStore

# Every log begins with the same entry, so that there always is one before the next.
FIRST_INDEX = 1
FIRST_TERM = 0


class ReplicaStore:
    """`journal`, `ballot` and `snapshots` of one replica, consistent with each other."""

    def __init__(self, directory: Path, node: str, group: int, segment_bytes: int) -> None:
        """Open or create. Raises CorruptStateError, LockedError, StorageError; then holds nothing open."""
        self.directory = directory
        self._lock = DirectoryLock(directory)
        try:
            self.snapshots = SnapshotStore(directory)
            self.ballot = Ballot(directory, node, group)
            self.journal = Journal(directory, segment_bytes)
            try:
                self._reconcile()
            except BaseException:
                self.journal.abandon()
                raise
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Sync, close, unlock. Raises StorageError, unlocked all the same."""
        try:
            self.journal.close()
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Close and unlock without writing what waits, as a crash would."""
        self.journal.abandon()
        self._lock.release()

    def _reconcile(self) -> None:
        journal, snapshot = self.journal, self.snapshots.current
        if not self.ballot.exists:
            self._be_born()
        elif not journal.entries:
            raise disk.corrupt(
                self.directory / "journal-*.log", "the journal is missing or empty", self.directory
            )
        elif snapshot is None and journal.first_index != FIRST_INDEX:
            raise disk.corrupt(
                self.snapshots.path, f"the snapshot before entry {journal.first_index} is missing"
            )
        elif snapshot is not None and journal.first_index > snapshot.index:
            raise disk.corrupt(
                self.snapshots.path,
                f"the snapshot ends at {snapshot.index} but the journal begins at {journal.first_index}",
            )
        elif snapshot is not None and journal.term_at(snapshot.index) != snapshot.term:
            # A crash between putting an installed snapshot in place and resetting the journal: finish it.
            journal.reset(snapshot.index, snapshot.term)
        if journal.entries[-1][2] > self.ballot.term:
            raise disk.corrupt(
                self.ballot.path, f"the journal knows of term {journal.entries[-1][2]}, this does not"
            )

    def _be_born(self) -> None:
        """The ballot is written last: without it nothing was ever promised to anybody."""
        journal = self.journal
        if self.snapshots.current is not None or (journal.entries and journal.last_index > FIRST_INDEX):
            raise disk.corrupt(self.ballot.path, "term and vote are missing beside a journal or a snapshot")
        if not journal.entries:
            journal.append(NO_OP, FIRST_INDEX, FIRST_TERM)
            journal.sync()
        self.ballot.store(0, None)
