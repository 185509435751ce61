"""One run of `photon logmap build`: what is new in the logs becomes a generation of the built map.

A log that was renamed since the last run is known by its contents (paper 3.2), and only its growth is read.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from eventstore import built_map
from eventstore.built_map import BuiltFile, Generation, Manifest, Part, Span
from eventstore.segments import identity_of
from photon.core.disk import DirectoryLock, make_directory, storage_errors, sync_directory
from photon.core.errors import StorageError, UsageError
from photon.core.settings import Logs, Settings
from photon.logs.files import HEAD_BYTES, TAIL_BYTES, digest, read_at, read_chunk
from photon.logs.packed import is_packed
from spark.logmap import jobs as logmap
from spark.logmap.jobs import Facts, write_letters, write_segments
from spark.reading.lines import LogFile
from spark.reading.paths import check_name, input_paths, local_name
from spark.session import spark_failures

_ROWS_A_PART: Final = 1 << 22
"""Of a segment: an executor holds 24 bytes of each, and a map of many segments is slow."""
_GENERATION: Final = "generation-"


@dataclass(frozen=True, slots=True)
class Built:
    """What a run found: logs that were new, had grown or were gone; and what it read."""

    new: int
    grown: int
    gone: int
    bytes: int
    events: int
    malformed: int
    entries: int

    def as_document(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stock:
    """`files`: all that are known now, by number. `grown`, `new`, `gone`: how many."""

    files: dict[int, BuiltFile]
    readings: list[LogFile]
    grown: int
    new: int
    gone: int


def local_names(patterns: Sequence[str]) -> list[str]:
    """The logs. UsageError: as input_paths, and where one is not on a disk: event stores read files."""
    names = []
    for path in input_paths(patterns):
        name = local_name(path)
        if name is None:
            raise UsageError(f"{path}: an event store reads logs from a disk; name files, not a URI")
        names.append(name)
    return names


def build(session: SparkSession, patterns: Sequence[str], directory: Path, settings: Settings) -> Built:
    """Add what the logs have gained to the built map in `directory`, which is made if there is none.

    Executors must see logs and directory by the same names. UsageError, StorageError; SparkFailedError if a
    job fails: then the map is as it was.
    """
    names = local_names(patterns)
    with DirectoryLock(directory):
        manifest = _manifest(directory, settings)
        _clear(directory, manifest)
        stock = take_stock(manifest, names, settings.logs)
        with spark_failures():
            generation, found = _generation(session, directory, manifest, stock, settings)
        files, built = _summed(stock, found, generation)
        generations = [*manifest.generations, *([generation] if stock.readings else [])]
        numbers = [manifest.next_number, *[number + 1 for number in files]]
        changed = msgspec.structs.replace(
            manifest,
            files=[files[number] for number in sorted(files)],
            generations=generations,
            next_number=max(numbers),
        )
        built_map.write_manifest(directory, changed)
        return built


def _manifest(directory: Path, settings: Settings) -> Manifest:
    wanted = Manifest(built_map.FORMAT, built_map.identity_digest(identity_of(settings)))
    known = built_map.read_manifest(directory)
    if known is None:
        return wanted
    built_map.check_same(directory, known, wanted)
    return known


def _clear(directory: Path, manifest: Manifest) -> None:
    """Generations of runs that were killed."""
    listed = built_map.names_of(manifest.generations)
    with storage_errors(directory):
        for path in directory.glob(f"{_GENERATION}*"):
            if path.name not in listed:
                shutil.rmtree(path)


def _generation(
    session: SparkSession, directory: Path, manifest: Manifest, stock: Stock, settings: Settings
) -> tuple[Generation, list[Facts]]:
    """The files of a new generation, durable, and the facts of what was read."""
    name = f"{_GENERATION}{len(manifest.generations):06d}"
    if not stock.readings:
        return Generation(name, [], []), []
    into = (directory / name).absolute()
    with storage_errors(into):
        make_directory(into)
    rows = logmap.rows_of(session, stock.readings, settings).persist(StorageLevel.DISK_ONLY)
    try:
        facts = logmap.facts(rows)
        segments, letters = [], []
        if events := sum(fact.events for fact in facts):
            parts = _parts(events, session.sparkContext.defaultParallelism)
            segments = _collected(write_segments(rows, parts, into))
        if any(fact.malformed for fact in facts):
            [written] = _collected(write_letters(rows, into))
            letters = [msgspec.structs.replace(written, spans=_spans(facts))]
    finally:
        rows.unpersist()
    with storage_errors(into):
        _remove_others(into, {part.name for part in (*segments, *letters)})
        sync_directory(into)
    return Generation(name, segments, letters), facts


def _spans(facts: Sequence[Facts]) -> list[Span]:
    """Of the dead letters of all files, which are sorted by the numbers of these."""
    sizes: Counter[int] = Counter()
    for fact in facts:
        sizes[fact.file] += fact.letter_bytes
    return [Span(number, size) for number, size in sorted(sizes.items()) if size]


def _parts(rows: int, parallelism: int) -> int:
    return max(-(-rows // _ROWS_A_PART), min(parallelism, -(-rows // (_ROWS_A_PART // 8))))


def _collected(written: DataFrame) -> list[Part]:
    rows = sorted(written.collect(), key=lambda row: row.part)
    return [Part(row.name, row.entries) for row in rows]


def _remove_others(directory: Path, names: set[str]) -> None:
    """What attempts have left that did not count."""
    for path in directory.iterdir():
        if path.name not in names:
            path.unlink()


def _summed(
    stock: Stock, facts: Sequence[Facts], generation: Generation
) -> tuple[dict[int, BuiltFile], Built]:
    """The files as they are known now, and the summary of the run."""
    files = dict(stock.files)
    for fact in facts:
        file = files[fact.file]
        events, malformed = file.events + fact.events, file.malformed + fact.malformed
        file = msgspec.structs.replace(file, events=events, malformed=malformed)
        if fact.end > file.offset:
            head, tail = fact.head.hex(), fact.tail.hex()
            file = msgspec.structs.replace(
                file, offset=fact.end, head_bytes=fact.head_bytes, head=head, tail=tail
            )
        files[fact.file] = file
    built = Built(
        stock.new,
        stock.grown,
        stock.gone,
        sum(files[reading.number].offset - reading.start for reading in stock.readings),
        sum(fact.events for fact in facts),
        sum(fact.malformed for fact in facts),
        sum(part.count for part in generation.segments),
    )
    return files, built


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
        reading = _growth(files[file.number], found.size, settings)
        if reading is not None:
            readings.append(reading)
    grown = len(readings)
    gone = [file for file in known.left.values() if not _is_there(file)]
    for file in gone:
        files[file.number] = msgspec.structs.replace(file, gone=True)
    for number, found in enumerate(fresh, manifest.next_number):
        files[number] = BuiltFile(number, found.name, archive=found.archive)
        if found.archive is not None or _has_gained(found.name, 0, found.size, settings):
            readings.append(LogFile(found.name, found.size, 0, number))
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
        self.left = {file.name: file for file in files}
        self._by_head: dict[object, list[BuiltFile]] = {}
        self._lengths: set[int] = set()
        for file in self.left.values():
            self._lengths.add(file.head_bytes)
            self._by_head.setdefault(file.archive or (file.head_bytes, file.head), []).append(file)

    def take(self, found: _Found) -> BuiltFile | None:
        file = self.left.get(found.name)
        # Of a log without a whole line nothing is known but its name.
        begun = file is not None and not file.offset and file.archive is None
        if file is not None and (begun or found.holds(file)):
            return self.left.pop(file.name)
        keys: list[object] = [found.archive] if found.archive else []
        keys = keys or [(length, found.head(length)) for length in self._lengths if length]
        for key in keys:
            for other in self._by_head.get(key, ()):
                if other.name in self.left and found.holds(other):
                    return self.left.pop(other.name)
        return None


def _growth(file: BuiltFile, size: int, settings: Logs) -> LogFile | None:
    if file.archive is not None or not _has_gained(file.name, file.offset, size, settings):
        return None
    return LogFile(file.name, size, file.offset, file.number)


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
