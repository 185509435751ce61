"""Which logs a built map knows already, under whatever name, and what of them is new (paper 3.2)."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from eventstore.built_map import BuiltFile, Manifest
from photon.core.errors import StorageError
from photon.core.settings import Logs
from photon.logs.files import HEAD_BYTES, TAIL_BYTES, digest, read_at, read_chunk
from photon.logs.packed import is_packed
from spark.reading.paths import check_name
from spark.reading.ranges import LogFile, line_begins


@dataclass(frozen=True, slots=True)
class Reading:
    """A log of which something is new: its events at `fresh` and later. `file.start` is that, or a little
    before: where the last cells of the grid begin that it may still fill."""

    file: LogFile
    fresh: int


@dataclass(frozen=True, slots=True)
class Stock:
    """`files`: all that are known now, by number. `grown`, `new`, `gone`: how many."""

    files: dict[int, BuiltFile]
    readings: list[Reading]
    grown: int
    new: int
    gone: int


def take_stock(manifest: Manifest, names: Sequence[str], settings: Logs) -> Stock:
    """A log that was renamed is known by its head and by what was read last of it; one that was overwritten
    or cut is gone, and what its name holds now is a new one. StorageError, UsageError."""
    known = _Known(manifest.live)
    files = {file.number: file for file in manifest.files}
    readings, fresh = [], []
    for name in sorted(names):
        check_name(name)
        found = _Found(name)
        file = known.take(found)
        if file is None:
            fresh.append(found)
            continue
        files[file.number] = msgspec.structs.replace(file, name=name)
        reading = _growth(files[file.number], found.size, manifest.interval_bytes, settings)
        if reading is not None:
            readings.append(reading)
    grown = len(readings)
    gone = [file for file in known.left() if not _is_there(file)]
    for file in gone:
        files[file.number] = msgspec.structs.replace(file, gone=True)
    for number, found in enumerate(fresh, manifest.next_number):
        files[number] = BuiltFile(number, found.name, archive=found.archive)
        if found.archive is not None or _has_gained(found.name, 0, found.size, settings):
            readings.append(Reading(LogFile(found.name, found.size, 0, number), 0))
    return Stock(files, readings, grown, len(fresh), len(gone))


class _Found:
    """A log as it is now."""

    def __init__(self, name: str) -> None:
        try:
            status = os.stat(name)
            self._head = b"" if is_packed(name) else read_at(name, 0, HEAD_BYTES)
        except OSError as error:
            raise _unreadable(name, error) from error
        self.name = name
        self.size = status.st_size
        self.archive = (status.st_size, status.st_mtime_ns) if is_packed(name) else None

    def head(self, length: int) -> str:
        return digest(self._head[:length]).hex()

    def holds(self, file: BuiltFile) -> bool:
        """Whether it begins as that did, and what was read last stands where it stood."""
        if self.archive is not None or file.archive is not None:
            return self.archive == file.archive
        if not file.head_bytes or self.size < file.offset or self.head(file.head_bytes) != file.head:
            return False
        length = min(TAIL_BYTES, file.offset)
        return digest(read_at(self.name, file.offset - length, length)).hex() == file.tail


class _Known:
    """Logs of a built map that were not found yet."""

    def __init__(self, files: Iterable[BuiltFile]) -> None:
        self._by_name = {file.name: file for file in files}
        self._by_head: dict[object, list[BuiltFile]] = {}
        self._lengths: set[int] = set()
        for file in self._by_name.values():
            self._lengths.add(file.head_bytes)
            self._by_head.setdefault(file.archive or (file.head_bytes, file.head), []).append(file)

    def take(self, found: _Found) -> BuiltFile | None:
        file = self._by_name.get(found.name)
        # Of a log without a whole line nothing is known but its name.
        begun = file is not None and not file.offset and file.archive is None
        if file is not None and (begun or found.holds(file)):
            return self._taken(file)
        keys: list[object] = [found.archive] if found.archive else []
        keys = keys or [(length, found.head(length)) for length in self._lengths if length]
        for key in keys:
            for other in self._by_head.get(key, ()):
                if other.name in self._by_name and found.holds(other):
                    return self._taken(other)
        return None

    def left(self) -> list[BuiltFile]:
        return list(self._by_name.values())

    def _taken(self, file: BuiltFile) -> BuiltFile:
        del self._by_name[file.name]
        return file


def _growth(file: BuiltFile, size: int, interval_bytes: int, settings: Logs) -> Reading | None:
    if file.archive is not None or not _has_gained(file.name, file.offset, size, settings):
        return None
    start = file.offset
    start = line_begins(file.name, start - start % interval_bytes, start) if start else 0
    return Reading(LogFile(file.name, size, start, file.number), file.offset)


def _has_gained(name: str, offset: int, size: int, settings: Logs) -> bool:
    """Whether a whole line stands behind `offset`: a part of one is nothing to read yet."""
    if size <= offset:
        return False
    step = min(settings.chunk_bytes, size - offset)
    try:
        chunk = read_chunk(name, offset, step, settings.line_bytes_max)
    except OSError as error:
        raise _unreadable(name, error) from error
    return chunk is not None and chunk.end <= size


def _unreadable(name: str, error: OSError) -> StorageError:
    return StorageError(f"{name} cannot be read ({error.strerror}); see to its permissions")


def _is_there(file: BuiltFile) -> bool:
    """A log that nobody asked for this time may be as it was."""
    try:
        return _Found(file.name).holds(file)
    except StorageError:
        return False
