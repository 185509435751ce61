"""A journal: segment files of checksummed records, to which is only ever appended, synced in groups.

What `sync` has returned for survives any crash; what it has not may be lost, from its end. Whole segments are
deleted, oldest first, so that what is left is always a contiguous end of the history. The files are
`<directory>/<stem>-<number>.log`; their bytes: photon.core.journal. Raft's log and the joiner's intents are
journals; what their records mean, they know.
"""

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from photon.core import disk

# --- The bytes of a journal's segment: pure rules, no IO.
#
# A segment is a header, then records. A record's checksum starts from the segment's salt, so that bytes of
# another file (recycled disk blocks, a payload that looks like a record) never pass for a record of this
# one.
#
# A `SYNCED` mark is written after each sync and says up to where. That tells a torn tail (never synced,
# never promised: cut it) from damage to what was promised (stop). What other kinds of records mean is their
# writer's.

MAGIC: Final = b"PHJOURN2"
_HEADER = struct.Struct("<8sQII")  # magic, segment number, salt, crc of these
HEADER_BYTES: Final = _HEADER.size
_RECORD = struct.Struct("<IBI")  # crc of the rest, kind, length of the payload
RECORD_BYTES: Final = _RECORD.size
_CRC = struct.Struct("<I")
PAYLOAD_BYTES_MAX: Final = 1 << 30

SYNCED: Final = 0  # everything before some offset was synced
SEAL: Final = 255  # the segment ends here; another one follows
_MARK = struct.Struct("<QQQ")  # the mark's own offset, the offset that was synced, something to search for
_MARK_WORD: Final = 0x9E53A7D14CF08B26
_MARK_WORD_BYTES: Final = _MARK_WORD.to_bytes(8, "little")
MARK_BYTES: Final = RECORD_BYTES + _MARK.size
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read; the payload is a view of the segment's bytes."""

    kind: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Scan:
    """A segment as it was read: a mark says that it was synced up to `synced`; good records end at `end`.

    `damage` is None where what follows `end` may be cut: nothing in it was ever synced.
    """

    records: list[Record]
    synced: int
    end: int
    sealed: bool
    damage: str | None


def pack_header(number: int, salt: int) -> bytes:
    """The first bytes of segment `number`."""
    body = _HEADER.pack(MAGIC, number, salt, 0)[: -_CRC.size]
    return body + _CRC.pack(zlib.crc32(body))


def unpack_header(data: bytes) -> tuple[int, int] | None:
    """(segment number, salt), or None where the bytes are not a header."""
    if len(data) < HEADER_BYTES:
        return None
    magic, number, salt, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or zlib.crc32(data[: HEADER_BYTES - _CRC.size]) != crc:
        return None
    return number, salt


def pack_record(salt: int, kind: int, *payload: bytes) -> list[bytes]:
    """The record as the pieces to write; so is its payload given."""
    head = _RECORD.pack(0, kind, sum(map(len, payload)))[_CRC.size :]
    crc = zlib.crc32(head, salt)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return [_CRC.pack(crc), head, *payload]


def pack_mark(salt: int, offset: int, synced: int) -> bytes:
    """The mark that stands at `offset`."""
    return b"".join(pack_record(salt, SYNCED, _MARK.pack(offset, synced, _MARK_WORD)))


def pack_seal(salt: int, following: int) -> bytes:
    """The last record of a segment, which names the one after it."""
    return b"".join(pack_record(salt, SEAL, _NUMBER.pack(following)))


def scan(data: bytes, salt: int) -> Scan:
    """Read a segment's records; marks and the seal are not among them."""
    records: list[Record] = []
    end = synced = HEADER_BYTES
    sealed = False
    for record, record_end in _records(data, salt):
        end = record_end
        if record.kind == SEAL:
            sealed = True
            break
        if record.kind == SYNCED:
            synced = max(synced, _MARK.unpack(record.payload)[1])
        else:
            records.append(record)
    return Scan(records, synced, end, sealed, _damage(data, salt, end, sealed))


def _damage(data: bytes, salt: int, end: int, sealed: bool) -> str | None:
    if end == len(data):
        return None
    if sealed:
        return f"bytes follow the seal at offset {end}"
    promised = _synced_later(data, end, salt)
    return f"damaged record at offset {end}, before what was synced ({promised})" if promised > end else None


def _records(data: bytes, salt: int) -> Iterator[tuple[Record, int]]:
    """Each good record with its end, up to the first one that is not good."""
    view = memoryview(data)
    offset = HEADER_BYTES
    while (record := _record_at(view, offset, salt)) is not None:
        offset += RECORD_BYTES + len(record.payload)
        yield record, offset


def _record_at(view: memoryview, offset: int, salt: int) -> Record | None:
    if offset + RECORD_BYTES > len(view):
        return None
    crc, kind, length = _RECORD.unpack_from(view, offset)
    end = offset + RECORD_BYTES + length
    if length > PAYLOAD_BYTES_MAX or end > len(view):
        return None
    if zlib.crc32(view[offset + _CRC.size : end], salt) != crc:
        return None
    record = Record(kind, view[offset + RECORD_BYTES : end])
    return None if kind == SYNCED and not _is_mark(record, offset) else record


def _is_mark(record: Record, offset: int) -> bool:
    if len(record.payload) != _MARK.size:
        return False
    own, _, word = _MARK.unpack(record.payload)
    return bool(own == offset and word == _MARK_WORD)


def _synced_later(data: bytes, start: int, salt: int) -> int:
    """The largest offset that a good mark after `start` says was synced; 0 where there is none."""
    view = memoryview(data)
    synced = 0
    at = data.find(_MARK_WORD_BYTES, start)
    while at >= 0:
        offset = at + len(_MARK_WORD_BYTES) - MARK_BYTES
        record = _record_at(view, offset, salt) if offset >= start else None
        if record is not None and record.kind == SYNCED:
            synced = max(synced, _MARK.unpack(record.payload)[1])
        at = data.find(_MARK_WORD_BYTES, at + 1)
    return synced


class Place(NamedTuple):
    """An offset in a segment. Later places are greater."""

    segment: int
    offset: int


def random_salt() -> int:
    """32 bits nobody can guess: a payload can't be made to look like a record."""
    return int.from_bytes(os.urandom(4), "little")


class SegmentedJournal:
    """For many threads, but `append`, `roll` and `drop_before` one at a time, for what is appended was packed
    with the `salt` of the last segment.

    A failed append leaves nothing behind. After a failed sync nothing is known of what is on disk: every
    later call raises the same error. Errors of the disk are OSErrors.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        replay: Callable[[int, Path, Record], None],
        corrupt: Callable[[Path, str], Exception],
    ) -> None:
        """Open or create; a torn tail is cut. `replay` gets each record with its segment's number and path.
        `corrupt` makes the error to raise where a file does not hold what was synced."""
        self.directory = directory
        self.segments: dict[int, int] = {}
        """Numbers of those there are, ascending, and how many bytes those before the last one hold."""
        self.salt = 0
        """Of the last segment."""
        self.synced = Place(0, 0)
        """All records before are durable."""
        self._stem = stem
        self._replay = replay
        self._corrupt = corrupt
        self._lock = threading.Lock()
        self._turn = threading.Condition()
        self._syncing = False
        self._failure: OSError | None = None
        self._fd = -1
        self._size = 0
        self._unsynced = b""  # the end of the last segment when it was opened
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.end = self.synced = Place(self.number, self._size)

    @property
    def number(self) -> int:
        """Of the last segment: the one that grows."""
        return next(reversed(self.segments))

    @property
    def path(self) -> Path:
        """The last segment's."""
        return self.path_of(self.number)

    @property
    def broken(self) -> bool:
        """No write will work any more: only a restart can tell what is on disk."""
        return self._failure is not None

    def path_of(self, number: int) -> Path:
        return self.directory / f"{self._stem}-{number:012d}.log"

    def append(self, records: bytes) -> Place:
        """Write packed records; durable after `sync` of the place that is returned."""
        with self._lock:
            self._write(records)
            self.end = Place(self.number, self._size)
            return self.end

    def sync(self, upto: Place | None = None) -> None:
        """Return when all before `upto` (else: all that was appended) is durable. Threads that wait at the
        same time share one fdatasync."""
        upto = self.end if upto is None else upto
        with self._turn:
            while self._syncing and self.synced < upto:
                self._turn.wait()
            if self.synced >= upto:
                return
            self._syncing = True
        with self._ending_turn():
            with self._lock:
                self._check_usable()
                target = self.end
            self._sync_data()
            self.synced = target
            with self._lock:
                self._mark()

    def roll(self) -> None:
        """Go on in a new segment; all before is durable.

        It exists before the seal says so: a sealed last one means a missing file.
        """
        self._take_turn()
        with self._ending_turn(), self._lock:
            self._check_usable()
            if self.synced < self.end:
                self._sync_data()
                self.synced = self.end
                self._mark()
            number = self.number + 1
            salt, fd = self._create(number)
            try:
                self._write(pack_seal(self.salt, number))
            except OSError:
                os.close(fd)
                self.path_of(number).unlink(missing_ok=True)
                raise
            self._sync_data()
            os.close(self._fd)
            self.segments[self.number] = self._size
            self.segments[number] = 0
            self.salt, self._fd, self._size = salt, fd, HEADER_BYTES
            self.end = self.synced = Place(number, HEADER_BYTES)

    def drop_before(self, number: int) -> None:
        """Delete the segments before this one; the last one stays."""
        for old in [n for n in self.segments if n < min(number, self.number)]:
            self.path_of(old).unlink(missing_ok=True)
            disk.sync_directory(self.directory)
            del self.segments[old]

    def close(self) -> None:
        """Close without a sync, as a crash would."""
        self._take_turn()
        with self._ending_turn(), self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _take_turn(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._syncing)
            self._syncing = True

    @contextlib.contextmanager
    def _ending_turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._turn:
                self._syncing = False
                self._turn.notify_all()

    def _write(self, data: bytes) -> None:
        self._check_usable()
        try:
            disk.write_all(self._fd, data)
        except OSError as error:
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self._failure = error  # part of a record stands there: only a restart can cut it
            raise
        self._size += len(data)

    def _mark(self) -> None:
        """Not synced: it is only there to tell a torn tail from damage."""
        self._write(pack_mark(self.salt, self._size, self.synced.offset))

    def _sync_data(self) -> None:
        try:
            disk.sync_data(self._fd)
        except OSError as error:
            # The kernel has dropped what it could not write; another fdatasync would say that all is well.
            self._failure = error
            raise

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._fd < 0:
            raise OSError("the journal is closed")

    def _create(self, number: int) -> tuple[int, int]:
        salt, path = random_salt(), self.path_of(number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            disk.write_all(fd, pack_header(number, salt))
            disk.sync_data(fd)
            disk.sync_directory(self.directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return salt, fd

    # -- opening ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        names = self.directory.glob(f"{self._stem}-*.log")
        numbers = sorted(int(path.stem.removeprefix(f"{self._stem}-")) for path in names)
        sealed = False
        for number in numbers:
            if self.segments and not sealed:
                self._discard_unborn(number, numbers[-1])
                break
            if self.segments and number != self.number + 1:
                raise self._missing()
            if self.segments and number == numbers[-1]:
                self._secure_seal(self.path, self._size)
            sealed = self._open_segment(number, born=sealed or number != numbers[-1])
        if sealed:
            raise self._missing()
        if not self.segments:
            self.salt, self._fd = self._create(1)
            self.segments[1] = 0
            self._size = HEADER_BYTES
            return
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, self._size)  # the torn tail, which was never synced
        # A killed process leaves what it wrote and did not sync; from here on it counts as held. Written once
        # more, because after a failed sync the system believes that it is on the disk already.
        disk.write_again(self.path, self._unsynced, self._size - len(self._unsynced))
        disk.sync_data(self._fd)
        self._write(pack_mark(self.salt, self._size, self._size))
        self._unsynced = b""

    def _missing(self) -> Exception:
        return self._corrupt(self.path_of(self.number + 1), "this journal segment is missing")

    def _secure_seal(self, path: Path, end: int) -> None:
        """The same for the seal before the last segment: without it what follows would be refused."""
        disk.write_again(path, self._unsynced, end - len(self._unsynced))
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            disk.sync_data(fd)
        finally:
            os.close(fd)

    def _discard_unborn(self, number: int, last: int) -> None:
        """A crash between making a segment and sealing the one before: nothing is in it yet."""
        path = self.path_of(number)
        if number != self.number + 1 or number != last or path.stat().st_size > HEADER_BYTES:
            raise self._corrupt(self.path, "this journal segment ends before its seal")
        path.unlink()
        disk.sync_directory(self.directory)

    def _open_segment(self, number: int, born: bool) -> bool:
        """Read one segment; returns whether it is sealed. One not yet `born` may lack even its header."""
        path = self.path_of(number)
        data = path.read_bytes()
        header = unpack_header(data)
        if header is None and not born and len(data) <= HEADER_BYTES:
            path.unlink()
            disk.sync_directory(self.directory)
            return False
        if header is None or header[0] != number:
            raise self._corrupt(path, "this journal segment's header is damaged")
        found = scan(data, header[1])
        if found.damage is not None:
            raise self._corrupt(path, found.damage)
        self.salt = header[1]
        self._size = found.end
        self._unsynced = data[found.synced : found.end]
        self.segments[number] = len(data)
        for record in found.records:
            self._replay(number, path, record)
        return found.sealed
