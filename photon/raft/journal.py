"""The durable log of one group: append-only segments of checksummed records, synced in groups.

Nothing is ever rewritten in place. A conflict is cut off by a TRUNCATE record, an installed snapshot by a
RESET record, and compaction deletes whole segments, oldest first, so that what is left is always a
contiguous end of the history. What `sync` has returned for survives any crash; what it has not may be lost,
from its end.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from photon.core.errors import StorageError
from photon.raft import disk
from photon.raft.journal_records import (
    HEADER_BYTES,
    Kind,
    Record,
    pack_header,
    pack_mark,
    pack_record,
    scan,
    unpack_header,
)

Entry = tuple[bytes, int, int]  # command, index, term: the order pysyncobj wants
NO_OP = b"\x01"  # what stands for a command that is not known any more (it is covered by a snapshot)


def random_salt() -> int:
    """32 bits nobody can guess: a command can't be made to look like a record."""
    return int.from_bytes(os.urandom(4), "little")


@dataclass(slots=True)
class _Segment:
    number: int
    path: Path
    salt: int
    last_index: int = 0  # of the entries in it that still count; 0 where none does


class Journal:
    """Entries in memory and on disk. Every error of the disk is final: the journal refuses all that follows.

    `entries` are contiguous: `entries[i]` has index `first_index + i`. Not empty once the first one was
    appended.
    """

    def __init__(self, directory: Path, segment_bytes: int, salt: Callable[[], int] = random_salt) -> None:
        """Open or create. Raises CorruptStateError, StorageError."""
        self.directory = directory
        self.entries: list[Entry] = []
        self._segment_bytes = segment_bytes
        self._salt = salt
        self._segments: list[_Segment] = []
        self._pending: list[bytes] = []
        self._broken: StorageError | None = None
        self._fd = -1
        self._size = 0
        self._unsynced = b""  # the end of the last segment when it was opened
        try:
            self._open()
        except OSError as error:
            self.abandon()
            raise disk.storage_error(directory, "opening the journal", error) from error

    # -- reading ----------------------------------------------------------------------------------------

    @property
    def first_index(self) -> int:
        """Index of the oldest entry held (it may be a place holder, of which only the term is true)."""
        return self.entries[0][1]

    @property
    def last_index(self) -> int:
        """Index of the newest entry."""
        return self.entries[-1][1]

    @property
    def dirty(self) -> bool:
        """Whether something waits for `sync`."""
        return bool(self._pending)

    def term_at(self, index: int) -> int | None:
        """The term of an entry, or None where it is not held."""
        at = index - self.entries[0][1]
        return self.entries[at][2] if 0 <= at < len(self.entries) else None

    # -- writing ----------------------------------------------------------------------------------------

    def append(self, command: bytes, index: int, term: int) -> None:
        """Add the entry after the last one. Durable after the next `sync`."""
        assert not self.entries or index == self.entries[-1][1] + 1, (index, self.entries[-1][1])
        self._record(Kind.ENTRY, index, term, command)
        self.entries.append((command, index, term))
        self._segments[-1].last_index = index

    def truncate(self, index: int) -> None:
        """Forget the entries from `index` on; the first one always stays. Durable after the next `sync`."""
        at = index - self.first_index
        assert at > 0, (index, self.first_index)
        if at < len(self.entries):
            self._record(Kind.TRUNCATE, index, 0)
            self._cut(index)

    def reset(self, index: int, term: int) -> None:
        """Forget all; the log goes on after `index` of `term` (a snapshot covers it). Durable on return."""
        self._record(Kind.RESET, index, term)
        self._restart(index, term)
        self.sync()
        self._delete_segments()

    def drop_before(self, index: int) -> None:
        """Forget the entries below `index`; on disk, where a whole segment goes. Durable on return.

        The caller has a durable snapshot that covers them, and keeps the entry at the snapshot's own index.
        """
        at = index - self.first_index
        if at <= 0:
            return
        assert at < len(self.entries), (index, self.last_index)
        self.sync()  # else a crash could leave a gap between the snapshot and what is left
        del self.entries[:at]
        self._delete_segments()

    def sync(self) -> None:
        """Make all that was written durable. Raises StorageError, now and ever after."""
        if self._broken is not None:
            raise self._broken
        if not self._pending:
            return
        path = self._segments[-1].path
        try:
            batch = b"".join(self._pending)
            disk.write_all(self._fd, batch)
            disk.sync_data(self._fd)
            self._pending.clear()
            self._size += len(batch)
            self._mark()
            if self._size >= self._segment_bytes:
                self._roll()
        except OSError as error:
            self._broken = disk.storage_error(path, "writing the journal", error)
            raise self._broken from error

    def close(self) -> None:
        """Sync and close. Closes even where the sync fails."""
        try:
            if self._broken is None:
                self.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without writing what waits, as a crash would."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- the files --------------------------------------------------------------------------------------

    def _record(self, kind: Kind, index: int, term: int, command: bytes = b"") -> None:
        if self._broken is not None:
            raise self._broken
        self._pending += pack_record(self._segments[-1].salt, kind, index, term, command)

    def _mark(self) -> None:
        """Note, without a sync of its own, that all before was synced."""
        mark = pack_mark(self._segments[-1].salt, self._size)
        disk.write_all(self._fd, mark)
        self._size += len(mark)

    def _path(self, number: int) -> Path:
        return self.directory / f"journal-{number:012d}.log"

    def _create(self, number: int) -> tuple[_Segment, int]:
        segment = _Segment(number, self._path(number), self._salt())
        fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        disk.write_all(fd, pack_header(number, segment.salt))
        disk.sync_data(fd)
        disk.sync_directory(self.directory)
        return segment, fd

    def _roll(self) -> None:
        """The next segment exists before the seal says so: a sealed last one means a missing file."""
        old = self._segments[-1]
        segment, fd = self._create(old.number + 1)
        disk.write_all(self._fd, b"".join(pack_record(old.salt, Kind.SEAL, segment.number, 0)))
        disk.sync_data(self._fd)
        os.close(self._fd)
        self._segments.append(segment)
        self._fd = fd
        self._size = HEADER_BYTES

    def _delete_segments(self) -> None:
        first = self.first_index
        try:
            while len(self._segments) > 1 and self._segments[0].last_index < first:
                self._segments[0].path.unlink()
                disk.sync_directory(self.directory)
                del self._segments[0]
        except OSError as error:
            self._broken = disk.storage_error(self._segments[0].path, "deleting a covered segment", error)
            raise self._broken from error

    # -- opening ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        numbers = sorted(int(path.stem.partition("-")[2]) for path in self.directory.glob("journal-*.log"))
        sealed = False
        for number in numbers:
            if self._segments and not sealed:
                self._discard_unborn(number, numbers[-1])
                break
            if self._segments and number != self._segments[-1].number + 1:
                raise disk.corrupt(
                    self._path(self._segments[-1].number + 1), "this journal segment is missing"
                )
            before, end = (self._segments[-1].path, self._size) if self._segments else (None, 0)
            if before is not None and number == numbers[-1]:
                self._secure_seal(before, end)
            sealed = self._open_segment(number, born=sealed or number != numbers[-1])
        if sealed:
            raise disk.corrupt(self._path(numbers[-1] + 1), "this journal segment is missing")
        if not self._segments:
            segment, self._fd = self._create(1)
            self._segments.append(segment)
            self._size = HEADER_BYTES
            return
        self._fd = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._fd, self._size)  # the torn tail, which was never synced
        # A killed process leaves what it wrote and did not sync; from here on it counts as held. Written once
        # more, because after a failed sync the system believes that it is on the disk already.
        disk.write_again(self._segments[-1].path, self._unsynced, self._size - len(self._unsynced))
        disk.sync_data(self._fd)
        self._mark()
        self._unsynced = b""

    def _secure_seal(self, path: Path, end: int) -> None:
        """The same for the seal before the last segment: without it what follows would be refused."""
        disk.write_again(path, self._unsynced, end - len(self._unsynced))
        fd = os.open(path, os.O_WRONLY)
        try:
            disk.sync_data(fd)
        finally:
            os.close(fd)

    def _discard_unborn(self, number: int, last: int) -> None:
        """A crash between making a segment and sealing the one before: nothing is in it yet."""
        before = self._segments[-1]
        path = self._path(number)
        if number != before.number + 1 or number != last or path.stat().st_size > HEADER_BYTES:
            raise disk.corrupt(before.path, "this journal segment ends before its seal")
        path.unlink()
        disk.sync_directory(self.directory)

    def _open_segment(self, number: int, born: bool) -> bool:
        """Read one segment; returns whether it is sealed. One not yet `born` may lack even its header."""
        path = self._path(number)
        data = path.read_bytes()
        header = unpack_header(data)
        if header is None and not born and len(data) <= HEADER_BYTES:
            path.unlink()
            disk.sync_directory(self.directory)
            return False
        if header is None or header[0] != number:
            raise disk.corrupt(path, "this journal segment's header is damaged")
        read = scan(data, header[1])
        if read.damage is not None:
            raise disk.corrupt(path, read.damage)
        self._size = read.end
        self._unsynced = data[read.synced : read.end]
        self._segments.append(_Segment(number, path, header[1]))
        for record in read.records:
            self._replay(record, path)
        return read.sealed

    def _replay(self, record: Record, path: Path) -> None:
        kind, index, term = record.kind, record.index, record.term
        if kind is Kind.ENTRY:
            if self.entries and index != self.last_index + 1:
                raise disk.corrupt(path, f"entry {index} follows entry {self.last_index}")
            self.entries.append((record.command, index, term))
            self._segments[-1].last_index = index
        elif kind is Kind.TRUNCATE:
            if self.entries and index > self.last_index + 1:
                raise disk.corrupt(path, f"a truncation from {index} follows entry {self.last_index}")
            self._cut(index)
        elif kind is Kind.RESET:
            self._restart(index, term)

    def _cut(self, index: int) -> None:
        # On replay the segment that held what stays may be gone already: then nothing stays here.
        del self.entries[max(0, index - self.first_index) if self.entries else 0 :]
        for segment in self._segments:
            segment.last_index = min(segment.last_index, index - 1)

    def _restart(self, index: int, term: int) -> None:
        self.entries[:] = [(NO_OP, index, term)]
        for segment in self._segments:
            segment.last_index = 0
        self._segments[-1].last_index = index
