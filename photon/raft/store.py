"""What one replica has on disk, opened, checked against itself, and locked."""

import struct
import zlib
from pathlib import Path

from photon.core import disk
from photon.core.disk import DirectoryLock
from photon.raft.journal import NO_OP, DamagedError, Journal, storage_errors
from photon.raft.rules.members import MemberLog
from photon.raft.snapshot import SnapshotStore

# Every log begins with an entry of this index and term, so that there always is one before the next. It names
# the founders; in the log of one who joined later nothing stands for it.
FIRST_INDEX = 1
FIRST_TERM = 0
HARD_STATE_FILE = "hard_state"
_MAGIC = b"PHRAFTB1"
_FIXED = struct.Struct("<8sQQHH")  # magic, term, group, length of node, length of vote (0xFFFF: none)
_NO_VOTE = 0xFFFF


class HardState:
    """The durable term and vote of one replica (Raft's `currentTerm` and `votedFor`), and whose they are.

    `store` returns when term and vote are on disk: only then may any message speak of them.
    """

    def __init__(self, directory: Path, node: str, group: int) -> None:
        """Read the file where there is one.

        Raises CorruptStateError when it is damaged or another replica's.
        """
        self.path = directory / HARD_STATE_FILE
        self.node = node
        self.group = group
        self.term = 0
        self.vote: str | None = None
        self.exists = self.path.exists()
        if self.exists:
            self._read()

    def store(self, term: int, vote: str | None) -> None:
        """Raises StorageError."""
        if self.exists and (term, vote) == (self.term, self.vote):
            return
        node = self.node.encode()
        named = b"" if vote is None else vote.encode()
        length = _NO_VOTE if vote is None else len(named)
        body = _FIXED.pack(_MAGIC, term, self.group, len(node), length) + node + named
        with storage_errors(self.path, "writing term and vote"):
            disk.write_file(self.path, body + struct.pack("<I", zlib.crc32(body)))
        self.term, self.vote, self.exists = term, vote, True

    def _read(self) -> None:
        with storage_errors(self.path, "reading term and vote"):
            data = self.path.read_bytes()
        body = data[:-4]
        if len(body) < _FIXED.size or struct.pack("<I", zlib.crc32(body)) != data[-4:]:
            raise DamagedError(
                self.path, "term and vote are damaged (a replica without them could vote twice)"
            )
        magic, term, group, node_length, vote_length = _FIXED.unpack_from(body)
        split = _FIXED.size + node_length
        node = body[_FIXED.size : split].decode()
        if magic != _MAGIC or (node, group) != (self.node, self.group):
            raise DamagedError(
                self.path,
                f"this is the state of {node} in group {group}, not {self.node} in group {self.group}",
            )
        self.term = term
        self.vote = None if vote_length == _NO_VOTE else body[split : split + vote_length].decode()


class ReplicaStore:
    """`journal`, `hard_state`, `snapshots` and `members` of one replica, consistent with each other."""

    def __init__(
        self, directory: Path, node: str, group: int, segment_bytes: int, first: bytes = NO_OP
    ) -> None:
        """Open or create, then with `first` as the first entry.

        Raises CorruptStateError, LockedError, StorageError; then holds nothing open.
        """
        self.directory = directory
        self.members = MemberLog()
        self._lock = DirectoryLock(directory)
        try:
            self._secure_names()
            self.snapshots = SnapshotStore(directory)
            self.hard_state = HardState(directory, node, group)
            self.journal = Journal(directory, segment_bytes)
            try:
                self._reconcile(first)
                self._list_members(joins=first == NO_OP)
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
        with storage_errors(self.directory, "syncing the directory"):
            disk.sync_directory(self.directory)

    def _reconcile(self, first: bytes) -> None:
        journal, snapshot = self.journal, self.snapshots.current
        if not self.hard_state.exists:
            self._be_born(first)
        elif not journal.entries:
            raise DamagedError(self.directory / "journal-*.log", "the journal is missing or empty")
        elif snapshot is None and journal.first_index != FIRST_INDEX:
            raise DamagedError(
                self.snapshots.path, f"the snapshot before entry {journal.first_index} is missing"
            )
        elif snapshot is not None and journal.first_index > snapshot.index:
            raise DamagedError(
                self.snapshots.path,
                f"the snapshot ends at {snapshot.index} but the journal begins at {journal.first_index}",
            )
        elif snapshot is not None and journal.term_at(snapshot.index) != snapshot.term:
            # A crash between putting an installed snapshot in place and resetting the journal: finish it.
            journal.reset(snapshot.index, snapshot.term)
        if journal.entries[-1][2] > self.hard_state.term:
            raise DamagedError(
                self.hard_state.path, f"the journal knows of term {journal.entries[-1][2]}, this does not"
            )

    def _be_born(self, first: bytes) -> None:
        """The hard state is written last: without it nothing was ever promised to anybody."""
        journal = self.journal
        if self.snapshots.current is not None or (journal.entries and journal.last_index > FIRST_INDEX):
            raise DamagedError(
                self.hard_state.path, "term and vote are missing beside a journal or a snapshot"
            )
        if journal.entries and journal.entries[0][0] != first:
            raise DamagedError(self.directory, "it was begun with other founders, and not finished")
        if not journal.entries:
            journal.append(first, FIRST_INDEX, FIRST_TERM)
            journal.sync()
        self.hard_state.store(0, None)

    def _list_members(self, joins: bool) -> None:
        journal, head = self.journal, self.snapshots.head
        if head is not None:
            self.members.restart(head.covers.index, head.members, journal.entries)
        else:
            for command, index, _ in journal.entries:
                self.members.appended(command, index)
        if self.members.newest is None and not joins:
            raise DamagedError(
                self.directory, "a founder's log names no members: it is of an older version, or was to join"
            )
