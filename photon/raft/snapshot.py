"""Snapshots on disk: the state machine's chunks, the index and term of the last command in them, the members.

A file is written aside, synced, verified if it came over the wire, and only then renamed over the one
before. `Compactor` writes the replica's own beside its work, when the log has grown, and then shortens the
log. `Installer` takes in a leader's: nothing is replaced before all of it is verified.
"""

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from photon.core import disk
from photon.core.errors import DiskFullError, PhotonError, StorageError
from photon.raft.files import Fetch, FileShelf, delete
from photon.raft.journal import DamagedError, Journal, storage_errors
from photon.raft.port import FileId, Filing, Members, RaftLimits, StateMachine
from photon.raft.rules.codec import FILE_NAME, Message, MessageError, SnapshotPiece
from photon.raft.rules.members import MemberLog, command_of, members_of

_log = logging.getLogger(__name__)

CHUNK_BYTES_MAX = 64 << 20
_MAGIC = b"PHRAFTS3"
_HEADER = struct.Struct("<8sQQII")  # magic, index, term, lengths of the members' entry and the files after it
_HEADER_CRC = struct.Struct("<I")  # of both
_MEMBERS_BYTES_MAX = 1 << 20
_FILES_BYTES_MAX = 1 << 24
_FILE_FIXED = struct.Struct("<QIH")  # size, crc, length of the name, which follows
_CHUNK = struct.Struct("<II")  # length, crc chained over all chunks so far: none can be missing or swapped
_END = 0xFFFFFFFF  # stands for the length where the chunks end
_TOTAL = struct.Struct("<QQI")  # chunks, bytes, crc chained on
_FILE = "snapshot"
_OWN_TEMPORARY = "snapshot.own.tmp"
_INCOMING_TEMPORARY = "snapshot.incoming.tmp"


@dataclass(frozen=True, slots=True)
class SnapshotId:
    """The last entry a snapshot covers."""

    index: int
    term: int


@dataclass(frozen=True, slots=True)
class Head:
    """What a snapshot begins with: the members are those of the group at its last entry. `files`: without
    which its state is not whole (port.Filing)."""

    covers: SnapshotId
    members: Members
    files: tuple[FileId, ...] = ()


def write_snapshot(path: Path, head: Head, chunks: Iterable[bytes]) -> None:
    """Write and sync a whole snapshot. Raises StorageError."""
    with storage_errors(path, "writing a snapshot"):
        try:
            with path.open("wb") as file:
                _write_chunks(file, head, chunks)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # it may be what fills the disk
            raise


def _write_chunks(file: IO[bytes], head: Head, chunks: Iterable[bytes]) -> None:
    members, files = command_of(head.members), _pack_files(head.files)
    covers = head.covers
    body = _HEADER.pack(_MAGIC, covers.index, covers.term, len(members), len(files)) + members + files
    crc = zlib.crc32(body)
    file.write(body + _HEADER_CRC.pack(crc))
    count = total = 0
    for chunk in chunks:
        if len(chunk) > CHUNK_BYTES_MAX:
            raise StorageError(f"a snapshot chunk of {len(chunk)} bytes; cut it to {CHUNK_BYTES_MAX} or less")
        crc = zlib.crc32(chunk, zlib.crc32(struct.pack("<I", len(chunk)), crc))
        file.write(_CHUNK.pack(len(chunk), crc))
        file.write(chunk)
        count += 1
        total += len(chunk)
    tail = struct.pack("<IQQ", _END, count, total)
    file.write(tail + struct.pack("<I", zlib.crc32(tail, crc)))


def _pack_files(files: Iterable[FileId]) -> bytes:
    names = ((file, file.name.encode()) for file in files)
    return b"".join(_FILE_FIXED.pack(file.size, file.crc, len(name)) + name for file, name in names)


def _unpack_files(data: bytes) -> tuple[FileId, ...]:
    """Raises struct.error, ValueError."""
    files, at = [], 0
    while at < len(data):
        size, crc, length = _FILE_FIXED.unpack_from(data, at)
        at += _FILE_FIXED.size + length
        name = data[at - length : at].decode()
        if len(name.encode()) != length or not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no file's name")
        files.append(FileId(name, size, crc))
    return tuple(files)


def read_head(path: Path) -> Head:
    """Raises CorruptStateError, StorageError."""
    with storage_errors(path, "reading a snapshot"), path.open("rb") as file:
        return _read_header(path, file)[0]


def read_chunks(path: Path) -> Iterator[bytes]:
    """The chunks, each verified before it is given. Raises CorruptStateError, StorageError."""
    with storage_errors(path, "reading a snapshot"), path.open("rb") as file:
        yield from verified(path, file)


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _read_header(path: Path, file: Readable) -> tuple[Head, int]:
    damaged = DamagedError(path, "the snapshot's header is damaged, or of an older version")
    fixed = file.read(_HEADER.size)
    if len(fixed) < _HEADER.size:
        raise damaged
    magic, index, term, length, files_length = _HEADER.unpack(fixed)
    if magic != _MAGIC or length > _MEMBERS_BYTES_MAX or files_length > _FILES_BYTES_MAX:
        raise damaged
    listed, named = file.read(length), file.read(files_length)
    crc = zlib.crc32(named, zlib.crc32(listed, zlib.crc32(fixed)))
    if file.read(_HEADER_CRC.size) != _HEADER_CRC.pack(crc):
        raise damaged
    try:
        members, files = members_of(listed), _unpack_files(named)
    except (MessageError, struct.error, ValueError) as error:
        raise damaged from error
    if members is None:
        raise damaged
    return Head(SnapshotId(index, term), members, files), crc


def verified(path: Path, file: Readable) -> Iterator[bytes]:
    """The chunks of the snapshot that `file` reads. Raises CorruptStateError, OSError."""
    _, crc = _read_header(path, file)
    count = total = 0
    while True:
        length_bytes = file.read(4)
        if length_bytes == struct.pack("<I", _END):
            break
        chunk_crc = file.read(4)
        length = int.from_bytes(length_bytes, "little")
        chunk = file.read(length) if length <= CHUNK_BYTES_MAX else b""
        crc = zlib.crc32(chunk, zlib.crc32(length_bytes, crc))
        if len(length_bytes) != 4 or len(chunk) != length or chunk_crc != struct.pack("<I", crc):
            raise DamagedError(path, f"chunk {count} of the snapshot is damaged")
        count += 1
        total += length
        yield chunk
    tail = struct.pack("<IQQ", _END, count, total)
    if file.read(_TOTAL.size) != tail[4:] + struct.pack("<I", zlib.crc32(tail, crc)) or file.read(1):
        raise DamagedError(path, "the end of the snapshot is damaged")


class SnapshotStore:
    """The one snapshot a replica has, and the next one while it comes in. Raft thread only."""

    def __init__(self, directory: Path) -> None:
        """Drop what a crash left unfinished; read the snapshot's id.

        Raises CorruptStateError, StorageError.
        """
        self.path = directory / _FILE
        self.own_temporary = directory / _OWN_TEMPORARY
        self.incoming_temporary = directory / _INCOMING_TEMPORARY
        with storage_errors(directory, "dropping unfinished snapshots"):
            self.own_temporary.unlink(missing_ok=True)
            self.incoming_temporary.unlink(missing_ok=True)
        self.head: Head | None = read_head(self.path) if self.path.exists() else None

    @property
    def current(self) -> SnapshotId | None:
        """What the snapshot covers; None where there is none."""
        return None if self.head is None else self.head.covers

    def adopt(self, temporary: Path, head: Head) -> bool:
        """Put a finished, synced snapshot in place, unless the one there covers as much.

        Raises StorageError.
        """
        with storage_errors(self.path, "putting a snapshot in place"):
            if self.current is not None and head.covers.index <= self.current.index:
                temporary.unlink()
                return False
            disk.replace(temporary, self.path)
        self.head = head
        return True


_FULL_DISK_S = 5.0
# After a piece of a machine's work comes a rest of up to so many times its length. All replicas do the same
# work at the same moments, beside commits that others wait for.
RESTS = 19
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
    """The replica stops before the work on its snapshot is done."""


def _finish(job: Job, what: str) -> None:
    """Raises what the work raised: StorageError, StateMachineError."""
    try:
        job.result()
    except PhotonError:
        raise
    except Exception as error:
        raise StateMachineError(f"the state machine's {what} raised {error!r}") from error


class Compactor:
    """Raft thread only; the writing itself is a `Job`."""

    def __init__(
        self,
        machine: StateMachine,
        journal: Journal,
        snapshots: SnapshotStore,
        members: MemberLog,
        shelf: FileShelf,
        jobs: Jobs,
        limits: RaftLimits,
    ) -> None:
        self._machine = machine
        self._journal = journal
        self._snapshots = snapshots
        self._members = members
        self._shelf = shelf
        self._jobs = jobs
        self._limits = limits
        self._frozen_index = 0 if snapshots.current is None else snapshots.current.index
        self._applied_bytes = 0
        self._job: Job | None = None
        self._head: Head | None = None  # of the snapshot that is being written
        self._filing: Job | None = None
        self._needless: list[Path] = []
        self._file_at = 0.0
        self._filing_since = 0.0
        self._abandoned = False

    def applied(self, command_bytes: int) -> None:
        """One more command is in the state."""
        self._applied_bytes += command_bytes

    def installed(self, index: int) -> None:
        """The state was replaced by a snapshot up to `index`."""
        self._frozen_index = index
        self._applied_bytes = 0

    def tick(
        self, now: float, applied_index: int, needed_index: Callable[[], int | None], transferring: bool
    ) -> None:
        """Finish a snapshot that is written, start one that is due; or a piece of the machine's own work.

        `needed_index`: the entry the slowest live follower has, on a leader; asked once a snapshot.
        StorageError, StateMachineError.
        """
        self._journal.tidy()
        if self._job is not None:
            if not self._job.done():
                return
            job, self._job = self._job, None
            if self._is_written(job):
                self._put_in_place(needed_index())
        machine = self._shelf.machine
        if machine is not None:
            self._tick_filing(machine, now)
        if self._needless and not self._jobs.busy():
            self._jobs.start(partial(delete, self._needless))
            self._needless = []
        patience = PATIENCE if transferring else 1
        if self._due(applied_index, patience) and not self._jobs.busy():
            files = () if machine is None else machine.files()
            if files is not None:
                self._start(applied_index, files)
        if machine is not None and self._filing is None and now >= self._file_at and not self._jobs.busy():
            work = machine.work()
            self._filing = None if work is None else self._jobs.start(work)
            self._filing_since = now

    def _tick_filing(self, machine: Filing, now: float) -> None:
        if self._filing is None or not self._filing.done():
            return
        job, self._filing = self._filing, None
        if self._is_written(job, "work", "more is held in memory until a file can be written: %s"):
            machine.worked()
            self._file_at = now + (now - self._filing_since) * RESTS * (1.0 - machine.pressure())
        else:
            machine.gave_up()
            self._file_at = now + _FULL_DISK_S

    def _is_written(
        self,
        job: Job,
        what: str = "freeze",
        told: str = "the log grows until a snapshot of it can be written: %s",
    ) -> bool:
        """A full disk costs no more than a long log: the next snapshot is due when it has grown as much."""
        try:
            _finish(job, what)
        except DiskFullError as error:
            _log.warning(told, error)
            return False
        return True

    def _put_in_place(self, needed_index: int | None) -> None:
        assert self._head is not None
        if self._snapshots.adopt(self._snapshots.own_temporary, self._head):
            index = self._head.covers.index
            self._journal.drop_before(self._keep_from(index, needed_index))
            self._members.forget_before(index)
            self._needless = self._shelf.needless(self._head.files)

    def abandon(self) -> None:
        """Stop writing soon; what was written is dropped at the next start."""
        self._abandoned = True

    def _due(self, applied_index: int, patience: int) -> bool:
        return (
            applied_index - self._frozen_index >= self._limits.compact_entries * patience
            or self._applied_bytes >= self._limits.compact_bytes * patience
        )

    def _start(self, applied_index: int, files: Sequence[FileId]) -> None:
        term, members = self._journal.term_at(applied_index), self._members.at(applied_index)
        assert term is not None, applied_index
        if members is None:
            return  # one who joined has not yet come to where its log names anybody
        try:
            chunks = self._machine.freeze()
        except Exception as error:
            raise StateMachineError(f"the state machine's freeze raised {error!r}") from error
        head = self._head = Head(SnapshotId(applied_index, term), members, tuple(files))
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


class Installation:
    """One snapshot; `work` is what a job does, until nothing is missing."""

    def __init__(
        self, peer: str, expected: SnapshotId, path: Path, machine: StateMachine, shelf: FileShelf
    ) -> None:
        self.peer = peer
        self.expected = expected
        self.head: Head | None = None  # once it is verified
        self.fetch: Fetch | None = None
        self.missing: list[FileId] = []
        self.put_state: Callable[[], None]
        """Its state takes the present one's; there once all is done, for the raft thread."""
        self._path = path
        self._machine = machine
        self._shelf = shelf
        self._abandoned = False

    def work(self) -> None:
        """Raises StorageError, and what the state machine raises."""
        if self.head is None:
            with storage_errors(self._path, "syncing a snapshot that came in"), self._path.open("rb") as file:
                os.fsync(file.fileno())
            self.head = self._verified()
            if self.head is None:
                return
        if self.fetch is not None:
            self.fetch.put()
        self._shelf.pinned = self.head.files
        self.missing = self._shelf.lacks(self.head.files)
        if not self.missing:
            self.put_state = self._machine.prepare(self._chunks())

    def abandon(self) -> None:
        """End soon; nobody asks for the result."""
        self._abandoned = True

    def _chunks(self) -> Iterator[bytes]:
        for chunk in read_chunks(self._path):
            if self._abandoned:
                raise _Abandoned
            yield chunk

    def _verified(self) -> Head | None:
        try:
            head = read_head(self._path)
            if head.covers == self.expected:
                for _ in self._chunks():
                    pass
                return head
            _log.warning(
                "%s: came in as another snapshot than it was said to be; asking for it again", self._path
            )
        except DamagedError as error:
            # Only what came in: this replica has lost nothing.
            _log.warning(
                "%s: damaged on its way from %s, asked for again: %s", self._path, self.peer, error.what
            )
        return None


class Installer:
    """Takes in a leader's snapshots, one at a time: the pieces in order, the files that it names and this
    replica lacks, and jobs between. Raft thread only."""

    def __init__(
        self,
        machine: StateMachine,
        path: Path,
        shelf: FileShelf,
        jobs: Jobs,
        ask: Callable[[str, Message], None],
        limits: RaftLimits,
    ) -> None:
        """`path`: where a snapshot comes in. `ask`: as of Fetch."""
        self._machine = machine
        self._path = path
        self._shelf = shelf
        self._jobs = jobs
        self._ask = ask
        self._limits = limits
        self._file: IO[bytes] | None = None
        self._source: tuple[str, int, int, int, int] | None = None
        self._received = 0
        self._installation: Installation | None = None
        self._job: Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot has come in that is not dealt with: no other may come in over it."""
        return self._installation is not None

    def take(self, peer: str, term: int, piece: SnapshotPiece) -> None:
        """A piece of one snapshot of one leader in one term; the first of any other begins anew.

        A piece out of order is dropped: the leader notices, when what follows the snapshot does not fit, and
        sends it again. Raises StorageError.
        """
        if self.busy:
            return
        source = (peer, term, piece.index, piece.term, piece.total)
        with storage_errors(self._path, "writing a snapshot that comes in"):
            if piece.offset == 0 and piece.data:
                self.drop()
                self._file, self._source, self._received = self._path.open("wb"), source, 0
            if self._file is None or source != self._source or piece.offset != self._received:
                return
            self._file.write(piece.data)
            self._received += len(piece.data)
            if self._received < piece.total:
                return
            self._file.flush()
        self.drop()
        covers = SnapshotId(piece.index, piece.term)
        self._installation = Installation(peer, covers, self._path, self._machine, self._shelf)

    def take_file(self, now: float, peer: str, message: Message) -> None:
        """A piece of a file. Raises StorageError."""
        if self._installation is not None and self._installation.fetch is not None:
            self._installation.fetch.take(now, peer, message)

    def drop(self) -> None:
        """Give up what came in so far."""
        if self._file is not None:
            self._file.close()
        self._file = self._source = None

    def abandon(self) -> None:
        """The replica stops; what came in is dropped at the next start."""
        self.drop()
        if self._installation is not None:
            self._installation.abandon()
            if self._installation.fetch is not None:
                self._installation.fetch.drop()

    def poll(self, now: float, peers: Sequence[str]) -> Installation | None:
        """The one that is ready now (its `head` None where it was damaged). `peers`: whom files may be asked
        of. Raises StorageError, StateMachineError.
        """
        installation = self._installation
        if installation is None:
            return None
        if self._job is None:
            fetch = installation.fetch
            if fetch is not None and not fetch.done:
                others = [peer for peer in peers if peer != installation.peer]
                if not fetch.tick(now, [installation.peer, *others]):
                    self._end()  # nobody has them any more: a newer snapshot will come
            elif not self._jobs.busy():
                self._job = self._jobs.start(installation.work)
            return None
        if not self._job.done():
            return None
        job, self._job = self._job, None
        _finish(job, "prepare")
        if installation.missing:
            installation.fetch = Fetch(self._shelf, installation.missing, self._ask, self._limits)
            return None
        return self._end()

    def _end(self) -> Installation | None:
        ended, self._installation = self._installation, None
        self._shelf.pinned = ()
        if ended is not None and ended.fetch is not None:
            ended.fetch.drop()
        return ended
