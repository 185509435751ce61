"""Snapshots on disk: the state machine's chunks with the index and term of the last command in them.

A file is written aside, synced, verified where it came over the wire, and only then renamed over the one
before.
"""

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from photon.core.errors import StorageError
from photon.raft import disk

CHUNK_BYTES_MAX = 64 << 20
_MAGIC = b"PHRAFTS1"
_HEADER = struct.Struct("<8sQQI")  # magic, index, term, crc of these
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


def write_snapshot(path: Path, covers: SnapshotId, chunks: Iterable[bytes]) -> None:
    """Write and sync a whole snapshot. Raises StorageError."""
    try:
        with path.open("wb") as file:
            _write_chunks(file, covers, chunks)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk.storage_error(path, "writing a snapshot", error) from error


def _write_chunks(file: IO[bytes], covers: SnapshotId, chunks: Iterable[bytes]) -> None:
    body = _HEADER.pack(_MAGIC, covers.index, covers.term, 0)[:-4]
    crc = zlib.crc32(body)
    file.write(body + struct.pack("<I", crc))
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


def read_id(path: Path) -> SnapshotId:
    """Raises CorruptStateError, StorageError."""
    try:
        with path.open("rb") as file:
            return _read_header(path, file)[0]
    except OSError as error:
        raise disk.storage_error(path, "reading a snapshot", error) from error


def read_chunks(path: Path) -> Iterator[bytes]:
    """The chunks, each verified before it is given. Raises CorruptStateError, StorageError."""
    try:
        with path.open("rb") as file:
            yield from _read_chunks(path, file)
    except OSError as error:
        raise disk.storage_error(path, "reading a snapshot", error) from error


def _read_header(path: Path, file: IO[bytes]) -> tuple[SnapshotId, int]:
    head = file.read(_HEADER.size)
    if len(head) == _HEADER.size:
        magic, index, term, crc = _HEADER.unpack(head)
        if magic == _MAGIC and zlib.crc32(head[:-4]) == crc:
            return SnapshotId(index, term), crc
    raise disk.corrupt(path, "the snapshot's header is damaged")


def _read_chunks(path: Path, file: IO[bytes]) -> Iterator[bytes]:
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
            raise disk.corrupt(path, f"chunk {count} of the snapshot is damaged")
        count += 1
        total += length
        yield chunk
    tail = struct.pack("<IQQ", _END, count, total)
    if file.read(_TOTAL.size) != tail[4:] + struct.pack("<I", zlib.crc32(tail, crc)) or file.read(1):
        raise disk.corrupt(path, "the end of the snapshot is damaged")


class SnapshotStore:
    """The one snapshot a replica has, and the next one while it comes in. Raft thread only."""

    def __init__(self, directory: Path) -> None:
        """Drop what a crash left unfinished; read the snapshot's id.

        Raises CorruptStateError, StorageError.
        """
        self.path = directory / _FILE
        self.own_temporary = directory / _OWN_TEMPORARY
        self.incoming_temporary = directory / _INCOMING_TEMPORARY
        try:
            self.own_temporary.unlink(missing_ok=True)
            self.incoming_temporary.unlink(missing_ok=True)
        except OSError as error:
            raise disk.storage_error(directory, "dropping unfinished snapshots", error) from error
        self.current: SnapshotId | None = read_id(self.path) if self.path.exists() else None

    def adopt(self, temporary: Path, covers: SnapshotId) -> bool:
        """Put a finished, synced snapshot in place, unless the one there covers as much.

        Raises StorageError.
        """
        try:
            if self.current is not None and covers.index <= self.current.index:
                temporary.unlink()
                return False
            disk.replace(temporary, self.path)
        except OSError as error:
            raise disk.storage_error(self.path, "putting a snapshot in place", error) from error
        self.current = covers
        return True

    def chunks(self) -> Iterator[bytes]:
        """The current snapshot's chunks, verified one by one. Raises CorruptStateError, StorageError."""
        assert self.current is not None
        return read_chunks(self.path)
