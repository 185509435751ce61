"""What a host has on disk, and each of its replicas: opened, checked against itself, and locked.

A replica that has lost its disk has forgotten votes and acknowledgements, so it must not go on under its
name. Three records of its host tell: the list of groups (one of them is gone); the peers' memory of each
other's identity, which is made once with the directory (all of it is gone); and their memory of the last life
of each other, one a start, of which a directory that was put back from a copy knows nothing.
"""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from photon.core import disk
from photon.core.disk import DirectoryLock
from photon.raft.journal import NO_OP, DamagedError, Journal, storage_errors
from photon.raft.port import REPLACE_IT
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

    `store` returns when term and vote are on disk, within `gathered` the block does: only then may any
    message that speaks of them leave.
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
        self._gathers = False
        self._newest: tuple[int, str | None] | None = None
        self.exists = self.path.exists()
        if self.exists:
            self._read()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """What is stored within takes one write. Raises StorageError."""
        self._gathers = True
        try:
            yield
        finally:  # whatever went wrong, memory has it already
            self._gathers = False
            newest, self._newest = self._newest, None
            if newest is not None:
                self.store(*newest)

    def store(self, term: int, vote: str | None) -> None:
        """Raises StorageError."""
        if self._gathers:
            self._newest = term, vote
            return
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


# --- Of a host, beside its groups: who it is, whom it has met, which groups it holds.

IDENTITY_BYTES: Final = 16
# A life: the directory's identity, how many lives it has had, and dice. Two that go on from the same copy
# differ in the dice.
_COUNT_BYTES: Final = 8
_DICE_BYTES: Final = 8
LIFE_BYTES: Final = IDENTITY_BYTES + _COUNT_BYTES + _DICE_BYTES
NO_LIFE: Final = bytes(LIFE_BYTES)
# So many are kept. What a peer remembers from before them is believed.
LIVES_MAX: Final = 1000
_GROUP: Final = "group-"
_GONE: Final = ".gone"  # a group that is being deleted


class Home:
    """One host's directory, locked. Raft thread only once the host runs."""

    def __init__(self, directory: Path, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        """Open or create it, and finish deletions that a crash cut short.

        Raises CorruptStateError where something that was there is missing or damaged; LockedError,
        StorageError.
        """
        self.directory = directory
        self.identity = b""
        self.life = NO_LIFE
        self._groups: set[int] = set()
        self._peers: dict[str, str] = {}  # identity, as hex
        self._met: dict[str, str] = {}  # life, as hex
        self._lives: list[str] = []  # its own, as hex without the identity, this one last
        self._lock = DirectoryLock(directory)
        try:
            with storage_errors(directory, "opening a host's directory"):
                self._open(random_bytes)
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Unlock. Again it does no harm."""
        self._lock.release()

    # -- groups -----------------------------------------------------------------------------------------

    def group(self, number: int) -> Path:
        """The directory of a group's replica."""
        return self.directory / f"{_GROUP}{number:04d}"

    def groups(self) -> list[int]:
        """The groups on disk, in order."""
        return sorted(self._groups)

    def added(self, number: int) -> None:
        """The group's directory is there, whole: from now on it must not be missing. Durable on return."""
        if number not in self._groups:
            self._store("groups", sorted([*self._groups, number]))
            self._groups.add(number)

    def remove(self, number: int) -> Path:
        """Take a group's directory away, whole or not at all. Durable on return. Raises StorageError.

        What is left of it, to be given to `delete`: the next start does so otherwise.
        """
        path = self.group(number)
        gone = path.with_name(path.name + _GONE)
        with storage_errors(path, "deleting a group"):
            if path.exists():
                disk.replace(path, gone)
            if number in self._groups:
                self._store("groups", sorted(self._groups - {number}))
                self._groups.discard(number)
        return gone

    # -- peers ------------------------------------------------------------------------------------------

    def identity_seen(self, peer: str, identity: bytes) -> str | None:
        """A peer has proved to have this identity: why it must be refused, or None. Raises StorageError."""
        known = self._peers.get(peer)
        if known is None:
            peers = {**self._peers, peer: identity.hex()}
            self._store("peers", peers)
            self._peers = peers
        elif known != identity.hex():
            return f"{peer} does not have the directory it had before (it has lost its disk?); {REPLACE_IT}"
        return None

    def met(self, peer: str, life: bytes) -> None:
        """Neither has refused the other: from now on both remember each other. Durable on return.

        Before that nothing of the peer may be believed that it could have forgotten when it is met again.
        Being told its identity is less: it may go on to refuse this host. Raises StorageError.
        """
        if self._met.get(peer) != life.hex():
            met = {**self._met, peer: life.hex()}
            self._store("met", met)
            self._met = met

    def last_life(self, peer: str) -> bytes:
        """In which it was last `met`; NO_LIFE where it never was."""
        return bytes.fromhex(self._met.get(peer, NO_LIFE.hex()))

    def check_life(self, peer: str, life: bytes) -> None:
        """A peer says that this host was in this life when it last met it.

        Raises CorruptStateError where the directory knows nothing of such a life of its own.
        """
        mark = life[IDENTITY_BYTES:].hex()
        if life.startswith(self.identity) and mark >= self._lives[0] and mark not in self._lives:
            raise DamagedError(
                self.directory,
                f"{peer} remembers a later life of this replica: its disk was put back from a copy, and it "
                "has forgotten what it acknowledged since",
            )

    def has_met(self, peer: str) -> bool:
        """Whether it was ever `met`."""
        return peer in self._met

    # -- the files --------------------------------------------------------------------------------------

    def _open(self, random_bytes: Callable[[int], bytes]) -> None:
        disk.sync_directory(self.directory)  # what a killed process has renamed may not be on the disk yet
        identity, groups, peers, met, lives = (
            _read(self.directory / name) for name in ("identity", "groups", "peers", "met", "lives")
        )
        if identity is None:
            if groups:
                raise DamagedError(self.directory / "identity", "the host's identity is missing")
            # The identity is written last: without it nobody was ever spoken to.
            identity, groups, peers, met, lives = random_bytes(IDENTITY_BYTES).hex(), [], {}, {}, []
            born = (("groups", groups), ("peers", peers), ("met", met), ("lives", lives))
            for name, value in (*born, ("identity", identity)):
                self._store(name, value)
        for name, value in (("groups", groups), ("peers", peers), ("met", met), ("lives", lives)):
            if value is None:
                raise DamagedError(self.directory / name, "it is missing")
        self.identity = bytes.fromhex(identity)
        self._groups = set(groups)
        self._peers = peers
        self._met = {peer: life for peer, life in met.items() if peer in peers}
        for path in self.directory.glob(f"{_GROUP}*{_GONE}"):
            delete(self.remove(int(path.name[len(_GROUP) : -len(_GONE)])))
        for number in self._groups:
            if not (self.group(number) / HARD_STATE_FILE).exists():
                raise DamagedError(self.group(number), "this replica was here and is missing, or cut")
        self._begin_life(lives, random_bytes(_DICE_BYTES))

    def _begin_life(self, before: list[str], dice: bytes) -> None:
        """On the disk before any peer hears of it."""
        count = int(before[-1][: 2 * _COUNT_BYTES], 16) + 1 if before else 1
        mark = count.to_bytes(_COUNT_BYTES, "big") + dice
        self._lives = [*before, mark.hex()][-LIVES_MAX:]
        self._store("lives", self._lives)
        self.life = self.identity + mark

    def _store(self, name: str, value: object) -> None:
        path = self.directory / name
        body = json.dumps(value).encode()
        with storage_errors(path, "writing it"):
            disk.write_file(path, body + b"\n%08x\n" % zlib.crc32(body))


def delete(gone: Path) -> None:
    """What `Home.remove` has left. Any thread: a snapshot may be large."""
    shutil.rmtree(gone, ignore_errors=True)


# -- for who looks from outside -------------------------------------------------------------------------


def read_identity(directory: Path) -> str:
    """The identity, as hex, of a host that may be running; "" where there is none. CorruptStateError."""
    return str(_read_other(directory / "identity") or "")


def read_peers(directory: Path) -> dict[str, str]:
    """Peer -> identity, as hex, as that host has met it. CorruptStateError."""
    return dict(_read_other(directory / "peers") or {})


def read_groups(directory: Path) -> list[int]:
    """The groups that host must hold. CorruptStateError."""
    return list(_read_other(directory / "groups") or [])


def _read_other(path: Path) -> Any:
    try:
        return _read(path)
    except OSError as error:
        raise DamagedError(path, f"it cannot be read ({error})") from error


def _read(path: Path) -> Any:
    """None where there is none. OSError, CorruptStateError."""
    try:
        body, _, crc = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    except FileNotFoundError:
        return None
    if crc != b"%08x" % zlib.crc32(body):
        raise DamagedError(path, "it is damaged")
    return json.loads(body)
