"""What one replica has on disk, opened, checked against itself, and locked."""

from pathlib import Path

from photon.core.disk import DirectoryLock
from photon.raft import disk
from photon.raft.ballot import Ballot
from photon.raft.journal import NO_OP, Journal
from photon.raft.roster import Roster
from photon.raft.snapshot import SnapshotStore

# Every log begins with an entry of this index and term, so that there always is one before the next. It names
# the founders; in the log of one who joined later nothing stands for it.
FIRST_INDEX = 1
FIRST_TERM = 0


class ReplicaStore:
    """`journal`, `ballot`, `snapshots` and `roster` of one replica, consistent with each other."""

    def __init__(
        self, directory: Path, node: str, group: int, segment_bytes: int, first: bytes = NO_OP
    ) -> None:
        """Open or create, then with `first` as the first entry.

        Raises CorruptStateError, LockedError, StorageError; then holds nothing open.
        """
        self.directory = directory
        self.roster = Roster()
        self._lock = DirectoryLock(directory)
        try:
            self._secure_names()
            self.snapshots = SnapshotStore(directory)
            self.ballot = Ballot(directory, node, group)
            self.journal = Journal(directory, segment_bytes)
            try:
                self._reconcile(first)
                self._call_roll(joins=first == NO_OP)
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

    def _secure_names(self) -> None:
        """What a killed process has renamed may not be on the disk yet; what is read from here on counts."""
        try:
            disk.sync_directory(self.directory)
        except OSError as error:
            raise disk.storage_error(self.directory, "syncing the directory", error) from error

    def _reconcile(self, first: bytes) -> None:
        journal, snapshot = self.journal, self.snapshots.current
        if not self.ballot.exists:
            self._be_born(first)
        elif not journal.entries:
            raise disk.corrupt(self.directory / "journal-*.log", "the journal is missing or empty")
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

    def _be_born(self, first: bytes) -> None:
        """The ballot is written last: without it nothing was ever promised to anybody."""
        journal = self.journal
        if self.snapshots.current is not None or (journal.entries and journal.last_index > FIRST_INDEX):
            raise disk.corrupt(self.ballot.path, "term and vote are missing beside a journal or a snapshot")
        if journal.entries and journal.entries[0][0] != first:
            raise disk.corrupt(self.directory, "it was begun with other founders, and not finished")
        if not journal.entries:
            journal.append(first, FIRST_INDEX, FIRST_TERM)
            journal.sync()
        self.ballot.store(0, None)

    def _call_roll(self, joins: bool) -> None:
        journal, head = self.journal, self.snapshots.head
        if head is not None:
            self.roster.restart(head.covers.index, head.members, journal.entries)
        else:
            for command, index, _ in journal.entries:
                self.roster.appended(command, index)
        if self.roster.newest is None and not joins:
            raise disk.corrupt(
                self.directory, "a founder's log names no members: it is of an older version, or was to join"
            )
