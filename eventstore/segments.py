"""What the log file map is on disk: sorted segments, which never change, and a manifest, which names them.

A segment is columns, little endian, each of `capacity` places of which the first `count` are used:

    head (64): magic, capacity (8), count (8), files (8) | hashes (8) | places (16)
    | for each file that entries point to: its number (8), how many do (8)

The manifest is replaced as a whole. It says which segments count and how far each log is read in them: what
is read and not yet in a segment is read again after a restart. So the map is never ahead of or behind the
offsets.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from eventstore.rules.entries import PLACE, Entries, Listed, joined
from photon.core.disk import storage_errors, sync_directory, write_file
from photon.core.errors import CorruptStateError
from photon.core.settings import Settings
from photon.logs.files import FileState, pack_file_state, unpack_file_state
from photon.logs.writer import LogPosition

MANIFEST: Final = "manifest"
LOADED_LETTERS: Final = "primary-000000.jsonl"
LOADING_LETTERS: Final = f"{LOADED_LETTERS}.loading"
"""Among the dead letters: of a load that is under way, or was killed; of no use to anybody else."""


class Counts(msgspec.Struct, frozen=True):
    """What was read of the primary logs so far, and where the next dead letter goes."""

    primary_events: int = 0
    malformed: int = 0
    dead_letter_file: int = 0
    dead_letter_offset: int = 0
    lost_bytes: int = 0

    @property
    def dead_letters(self) -> LogPosition:
        return LogPosition(self.dead_letter_file, self.dead_letter_offset)


class Manifest(msgspec.Struct, frozen=True):
    """`segments`: oldest first. `files`: states of the logs that are there, packed. `next_number`: no log
    has had this number or a greater one."""

    identity: str
    counts: Counts = Counts()
    next_number: int = 0
    segments: list[Listed] = []
    files: list[bytes] = []

    def states(self) -> list[FileState]:
        return list(map(unpack_file_state, self.files))


def with_states(manifest: Manifest, states: Iterable[FileState], next_number: int) -> Manifest:
    files = list(map(pack_file_state, states))
    return msgspec.structs.replace(manifest, files=files, next_number=next_number)


def read_manifest(directory: Path) -> Manifest | None:
    """None if there is none. CorruptStateError, StorageError."""
    path = directory / MANIFEST
    with storage_errors(path):
        try:
            manifest = msgspec.msgpack.decode(path.read_bytes(), type=Manifest)
            manifest.states()
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise corrupt(directory, f"its manifest: {error}") from error
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Durably, all or nothing. StorageError: then either may be there."""
    path = directory / MANIFEST
    with storage_errors(path):
        write_file(path, msgspec.msgpack.encode(manifest))


def corrupt(directory: Path, why: str) -> CorruptStateError:
    return CorruptStateError(
        f"{directory}: the log file map is damaged ({why}); remove {directory}: the map is rebuilt from the "
        "logs"
    )


def identity_of(settings: Settings) -> str:
    """By which settings ids are made of log lines: a map of other ids is refused."""
    return f"[primary] id = {settings.primary.id!r}, [ids] key = {settings.ids.key!r}"


def segment_name(number: int) -> str:
    return f"segment-{number:08d}"


_MAGIC: Final = b"photon segment1\0"
_HEAD: Final = struct.Struct("<16sQQQ24x")
_HASH_BYTES: Final = 8
ENTRY_BYTES: Final = _HASH_BYTES + PLACE.itemsize
_FILE_BYTES: Final = 16
_PART_ENTRIES: Final = 1 << 18


class Segment:
    """A file, mapped into memory. For many threads at once; valid while it is held, even if unlinked.

    `files`, `counts`: numbers of the files that its entries point to, and how many of them do.
    """

    def __init__(self, path: Path) -> None:
        """OSError; ValueError if it is no whole segment."""
        with path.open("rb") as file:
            head = file.read(_HEAD.size).ljust(_HEAD.size, b"\0")
        magic, capacity, count, files = _HEAD.unpack(head)
        at = [_HEAD.size, capacity * _HASH_BYTES, capacity * PLACE.itemsize, files * _FILE_BYTES]
        _, places, table, end = np.cumsum(at).tolist()
        if magic != _MAGIC or count > capacity or path.stat().st_size != end:
            raise ValueError(f"{path.name} is not the segment that was written")
        mapped = np.asarray(np.memmap(path, np.uint8, "r"))
        hashes = mapped[_HEAD.size : places].view("<u8")[:count]
        self.entries: Entries = Entries(hashes, mapped[places:table].view(PLACE)[:count])
        self.files, self.counts = np.array(mapped[table:].view("<i8").reshape(-1, 2).T)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def disk_bytes(self) -> int:
        return Writer.bytes_of(len(self))

    def dead(self, live: npt.NDArray[np.bool_]) -> int:
        """How many entries point to files that are gone. `live`: by file number, whether it is there."""
        return int(self.counts[~live[self.files]].sum())


class Writer:
    """Writes a segment part by part; `close` makes it durable under its name."""

    def __init__(self, path: Path, capacity: int) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._capacity = capacity
        self._files: dict[int, int] = {}
        self._file: BinaryIO = self._partial.open("wb")
        self.count = 0

    @staticmethod
    def bytes_of(entries: int) -> int:
        return _HEAD.size + entries * ENTRY_BYTES

    def append(self, part: Entries) -> None:
        """Entries that come after those before."""
        self._file.seek(_HEAD.size + self.count * _HASH_BYTES)
        self._file.write(part.hashes.astype("<u8", copy=False).tobytes())
        self._file.seek(_HEAD.size + self._capacity * _HASH_BYTES + self.count * PLACE.itemsize)
        self._file.write(part.places.tobytes())
        self.count += len(part)
        files, counts = np.unique(part.places["file"], return_counts=True)
        for number, count in zip(files.tolist(), counts.tolist(), strict=True):
            self._files[number] = self._files.get(number, 0) + count

    def close(self) -> None:
        table = np.array(sorted(self._files.items()), "<i8")
        self._file.seek(Writer.bytes_of(self._capacity))
        self._file.write(table.tobytes())
        self._file.truncate()
        self._file.seek(0)
        self._file.write(_HEAD.pack(_MAGIC, self._capacity, self.count, len(self._files)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        sync_directory(self._path.parent)

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def merged(segments: Sequence[Segment], live: npt.NDArray[np.bool_]) -> Iterator[Entries]:
    """Entries of all, the oldest first, a part at a time; those of files that are gone are left out."""
    tables = [segment.entries for segment in segments]
    greatest = max(tables, key=len).hashes
    total = sum(map(len, tables))
    step = max(1, len(greatest) * _PART_ENTRIES // max(1, total))
    bounds = np.unique(np.asarray(greatest[step::step]))
    cuts = [[0, *np.searchsorted(table.hashes, bounds).tolist(), len(table)] for table in tables]
    for part in range(len(bounds) + 1):
        pieces = [
            table.take(slice(cut[part], cut[part + 1])) for table, cut in zip(tables, cuts, strict=True)
        ]
        together = joined(pieces)
        yield together.take(live[together.places["file"]])
