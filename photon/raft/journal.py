"""The durable log of one group: append-only segments of checksummed records, synced in groups.

Nothing is ever rewritten in place. A conflict is cut off by a TRUNCATE record, an installed snapshot by a
RESET record, and compaction deletes whole segments, oldest first, so that what is left is always a
contiguous end of the history. What `sync` has returned for survives any crash; what it has not may be lost,
from its end.
"""

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Final

from photon.core.errors import CorruptStateError, DiskFullError, StorageError
from photon.core.journal import Record, SegmentedJournal, pack_record
from photon.raft.port import REPLACE_IT

# --- What a replica says where the disk failed it.

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """An OSError inside becomes a StorageError that says what the disk failed at."""
    try:
        yield
    except OSError as error:
        held = f"while {doing}; nothing unsynced was acknowledged"
        if error.errno in _FULL:
            raise DiskFullError(f"{path}: no space left {held}: free space and restart") from error
        raise StorageError(f"{path}: {error.strerror or error} {held}: check the disk and restart") from error


class DamagedError(CorruptStateError):
    """A file does not hold what was written to it, or is gone. `what`: just that, where it can be mended."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}; {REPLACE_IT}")
        self.what = what


Entry = tuple[bytes, int, int]  # command, index, term: the order pysyncobj wants
NO_OP = b"\x01"  # what stands for a command that is not known any more (it is covered by a snapshot)
_DELETED_AT_ONCE: Final = 4  # segments, each with a sync
_ENTRY: Final = struct.Struct("<QQ")  # index, term; the command follows


class Kind(IntEnum):
    """What a record says."""

    ENTRY = 1  # the entry `index` of `term` is `command`; the one after the last
    TRUNCATE = 2  # the entries from `index` on are gone
    RESET = 3  # the log is empty but for a place holder at `index` of `term` (a snapshot was installed)


class Journal:
    """Entries in memory and on disk. Every error of the disk is final: the journal refuses all that follows.

    `entries` are contiguous: `entries[i]` has index `first_index + i`. Not empty once the first one was
    appended.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        """Open or create. Raises CorruptStateError, StorageError."""
        self.directory = directory
        self.entries: list[Entry] = []
        self._segment_bytes = segment_bytes
        self._last_indexes: dict[int, int] = {}  # by segment: of its entries that still count, else 0
        self._needed = 0
        """The first segment that holds entries that count."""
        self._pending: list[bytes] = []
        self._broken: StorageError | None = None
        with storage_errors(directory, "opening the journal"):
            self._log = SegmentedJournal(directory, "journal", self._replay, DamagedError)

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
        self._last_indexes[self._log.number] = index

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
        self._restart(self._log.number, index, term)
        self.sync()
        self._delete_segments()

    def drop_before(self, index: int) -> None:
        """Forget the entries below `index`; on disk, where a whole segment goes: a few now, and the rest with
        `tidy`. Durable on return.

        The caller has a durable snapshot that covers them, and keeps the entry at the snapshot's own index.
        """
        at = index - self.first_index
        if at <= 0:
            return
        assert at < len(self.entries), (index, self.last_index)
        self.sync()  # else a crash could leave a gap between the snapshot and what is left
        del self.entries[:at]
        self._delete_segments()

    def tidy(self) -> None:
        """Delete a few more of the segments that were dropped. Each costs a sync, and all groups of a host
        wait for it."""
        if next(iter(self._log.segments)) < self._needed:
            self._delete_some()

    def sync(self) -> None:
        """Make all that was written durable. Raises StorageError, now and ever after."""
        if self._broken is not None:
            raise self._broken
        if not self._pending:
            return
        with self._breaking("writing the journal"):
            self._log.append(b"".join(self._pending))
            self._log.sync()
            self._pending.clear()
            if self._log.end.offset >= self._segment_bytes:
                self._log.roll()

    def close(self) -> None:
        """Sync and close. Closes even where the sync fails."""
        try:
            if self._broken is None:
                self.sync()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without writing what waits, as a crash would."""
        self._log.close()

    @contextmanager
    def _breaking(self, doing: str) -> Iterator[None]:
        try:
            with storage_errors(self._log.path, doing):
                yield
        except StorageError as error:
            self._broken = error
            raise

    def _record(self, kind: Kind, index: int, term: int, command: bytes = b"") -> None:
        if self._broken is not None:
            raise self._broken
        self._pending += pack_record(self._log.salt, kind, _ENTRY.pack(index, term), command)

    def _delete_segments(self) -> None:
        first = self.first_index
        needed = (n for n in self._log.segments if self._last_indexes.get(n, 0) >= first)
        self._needed = next(needed, self._log.number)
        self._last_indexes = {n: i for n, i in self._last_indexes.items() if n >= self._needed}
        self._delete_some()

    def _delete_some(self) -> None:
        with self._breaking("deleting a covered segment"):
            self._log.drop_before(min(next(iter(self._log.segments)) + _DELETED_AT_ONCE, self._needed))

    def _replay(self, segment: int, path: Path, record: Record) -> None:
        index, term = _ENTRY.unpack_from(record.payload)
        if record.kind == Kind.ENTRY:
            if self.entries and index != self.last_index + 1:
                raise DamagedError(path, f"entry {index} follows entry {self.last_index}")
            self.entries.append((bytes(record.payload[_ENTRY.size :]), index, term))
            self._last_indexes[segment] = index
        elif record.kind == Kind.TRUNCATE:
            if self.entries and index > self.last_index + 1:
                raise DamagedError(path, f"a truncation from {index} follows entry {self.last_index}")
            self._cut(index)
        elif record.kind == Kind.RESET:
            self._restart(segment, index, term)
        else:
            raise DamagedError(path, f"a record of an unknown kind, {record.kind}")

    def _cut(self, index: int) -> None:
        # On replay the segment that held what stays may be gone already: then nothing stays here.
        del self.entries[max(0, index - self.first_index) if self.entries else 0 :]
        self._last_indexes = {n: min(last, index - 1) for n, last in self._last_indexes.items()}

    def _restart(self, segment: int, index: int, term: int) -> None:
        self.entries[:] = [(NO_OP, index, term)]
        self._last_indexes = {segment: index}
