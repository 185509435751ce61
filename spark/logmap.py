"""`photon logmap build` (paper 3.4.2): what is new in the logs becomes a generation of the built map.

A log that was renamed since the last run is known by its contents (paper 3.2), and only its growth is read.

One pass over the logs makes rows of three kinds:

    ENTRY    hash: of an event's id (8, big endian), a: start, b: length of its line
    LETTER   a: start, text: a malformed line as a dead letter
    FACT     of a range that was read. text: packed Facts

Sorted rows become the map's files, a partition each, on the executors. Every attempt gives its files new
names: the driver lists those of the attempts that counted.
"""

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark import StorageLevel, TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from eventstore import built_map
from eventstore.built_map import BuiltFile, Generation, Manifest, Part, Span
from eventstore.rules.entries import PLACE, Entries
from eventstore.segments import Writer
from photon.core.columns import hash_ids
from photon.core.disk import DirectoryLock, make_directory, storage_errors, sync_directory
from photon.core.errors import UsageError
from photon.core.fates import Fate
from photon.core.settings import Logs, Settings
from photon.logs.files import HEAD_BYTES, TAIL_BYTES, SeenFile, digest, goes_on, read_at, read_chunk
from photon.logs.packed import is_packed
from photon.logs.writer import DeadLetter, dead_letter_lines
from spark.reading.events import plan, run
from spark.reading.lines import ChunkParser, LogFile, Range, batch_of, chunks_of, fixed_binary
from spark.reading.paths import check_name, input_paths, local_name
from spark.session import map_in_arrow, spark_failures

_ROWS_A_PART: Final = 1 << 22
"""Of a segment: an executor holds 24 bytes of each, and a map of many segments is slow."""
_GENERATION: Final = "generation-"
ENTRY: Final = 0
LETTER: Final = 1
FACT: Final = 2

_ROWS: Final = pa.schema(
    {
        "kind": pa.int32(),
        "file": pa.int32(),
        "hash": pa.binary(),
        "a": pa.int64(),
        "b": pa.int64(),
        "text": pa.binary(),
    }
)


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


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Of a range: its end, digests of the file's first bytes and of the last ones read; counts of events and
    of malformed lines."""

    file: int
    end: int
    head_bytes: int
    head: bytes
    tail: bytes
    events: int
    malformed: int


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
    known = built_map.read_manifest(directory)
    if known is None:
        return Manifest(built_map.FORMAT, built_map.identity_digest(settings))
    built_map.check_ids(directory, known, settings)
    return known


def _clear(directory: Path, manifest: Manifest) -> None:
    """Generations of runs that were killed."""
    listed = {generation.name for generation in manifest.generations}
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
    rows = rows_of(session, stock.readings, settings).persist(StorageLevel.DISK_ONLY)
    try:
        facts = facts_of(rows)
        segments, letters = [], []
        if events := sum(fact.events for fact in facts):
            parts = _parts(events, session.sparkContext.defaultParallelism)
            segments = write_segments(rows, parts, into)
        if any(fact.malformed for fact in facts):
            letters = [_write_letters(rows, into)]
    finally:
        rows.unpersist()
    with storage_errors(into):
        _remove_others(into, {part.name for part in (*segments, *letters)})
        sync_directory(into)
    return Generation(name, segments, letters), facts


def _parts(rows: int, parallelism: int) -> int:
    return max(-(-rows // _ROWS_A_PART), min(parallelism, -(-rows // (_ROWS_A_PART // 8))))


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
    or cut is gone, and what its name holds now is a new one. One that nobody asked for this time may be as it
    was. StorageError, UsageError."""
    asked = {seen.source: seen for seen in map(_look_at, sorted(names))}
    known = built_map.locate(manifest.live, lambda _: "", lambda _: names, _same)
    files = {file.number: file for file in manifest.files}
    readings = []
    for file in manifest.live:
        seen = known.get(file.number)
        if seen is None:
            files[file.number] = msgspec.structs.replace(file, gone=True)
        elif now := asked.pop(seen.source, None):
            files[file.number] = msgspec.structs.replace(file, name=now.name)
            if file.archive is None and _has_gained(now.name, file.offset, now.size, settings):
                readings.append(LogFile(now.name, now.size, file.offset, file.number, now.inode))
        else:
            files[file.number] = msgspec.structs.replace(file, name=seen.name)
    grown, gone = len(readings), len(manifest.live) - len(known)
    for number, new in enumerate(asked.values(), manifest.next_number):
        archive = built_map.stamp_of(new)
        files[number] = BuiltFile(number, new.name, archive=archive)
        if archive is not None or _has_gained(new.name, 0, new.size, settings):
            readings.append(LogFile(new.name, new.size, 0, number, new.inode))
    return Stock(files, readings, grown, len(asked), gone)


def _look_at(name: str) -> SeenFile:
    check_name(name)
    try:
        return built_map.seen_file(name)
    except OSError as error:
        raise built_map.unreadable(name, error) from error


def _same(seen: SeenFile, file: BuiltFile) -> SeenFile | None:
    """An archive is not looked into."""
    if file.archive is not None or is_packed(seen.name):
        return seen if built_map.stamp_of(seen) == file.archive else None
    return seen if goes_on(seen, file.state(seen), file.offset) else None


def _has_gained(name: str, offset: int, size: int, settings: Logs) -> bool:
    """Whether a whole line stands behind `offset`: a part of one is nothing to read yet."""
    if size <= offset:
        return False
    step = min(settings.chunk_bytes, size - offset)
    try:
        chunk = read_chunk(name, offset, step, settings.line_bytes_max)
    except OSError as error:
        raise built_map.unreadable(name, error) from error
    return chunk is not None and chunk.end <= size


def rows_of(session: SparkSession, files: Sequence[LogFile], settings: Settings) -> DataFrame:
    """What is in the files from their starts on, as rows of _ROWS."""

    def work(ranges: list[Range]) -> Iterator[Any]:
        parser = ChunkParser(settings)
        for one in ranges:
            yield from _rows_of_range(one, parser, settings)

    return run(session, plan(session, files), work, from_arrow_schema(_ROWS))


def _rows_of_range(one: Range, parser: ChunkParser, settings: Settings) -> Iterator[Any]:
    file, events, malformed = one.file, 0, 0
    facts: Facts | None = None

    def rows(kind: int, count: int, **columns: Any) -> Any:
        return batch_of(_ROWS, count, kind=np.full(count, kind), file=np.full(count, file.number), **columns)

    for path, chunk in chunks_of(one, settings.logs, unended=False):
        batch = parser.primary(path, chunk)
        found, bad, start, end = batch.found, batch.malformed, chunk.start, chunk.end
        if len(found):
            hashes = fixed_binary(hash_ids(batch.ids).astype(">u8").tobytes(), 8)
            yield rows(ENTRY, len(found), hash=hashes, a=found.starts + start, b=found.lengths)
        if bad:
            letters = [DeadLetter(Fate.MALFORMED, b.reason, b.line, file.name, start + b.start) for b in bad]
            lines = [dead_letter_lines([letter]) for letter in letters]
            yield rows(LETTER, len(lines), a=[letter.offset for letter in letters], text=lines)
        events, malformed = events + len(found), malformed + len(bad)
        # Looked at now: the copy of an archive goes with its last chunk.
        head_bytes, tail_bytes = min(HEAD_BYTES, end), min(TAIL_BYTES, end)
        head = digest(read_at(path, 0, head_bytes))
        tail = digest(read_at(path, end - tail_bytes, tail_bytes))
        facts = Facts(file.number, end, head_bytes, head, tail, events, malformed)
    if facts is not None:
        yield rows(FACT, 1, text=[msgspec.msgpack.encode(facts)])


def facts_of(rows: DataFrame) -> list[Facts]:
    """Of all ranges that were read."""
    texts = rows.where(F.col("kind") == FACT).select("text").collect()
    return [msgspec.msgpack.decode(bytes(row.text), type=Facts) for row in texts]


def write_segments(rows: DataFrame, parts: int, directory: Path) -> list[Part]:
    """Entries, range-partitioned and sorted by their hashes, those of one hash by their places."""

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        found = [_entries(batch) for batch in batches if batch.num_rows]
        count = sum(map(len, found))
        if not count:
            return
        context = TaskContext.get()
        assert context is not None, "on an executor"
        name = f"segment-{context.partitionId():05d}-{secrets.token_hex(6)}"
        writer = Writer(directory / name, count)
        for entries in found:
            writer.append(entries)
        writer.close()
        yield pa.RecordBatch.from_pydict({"name": [name], "count": [count]})

    entries = rows.where(F.col("kind") == ENTRY).select("hash", "file", "a", "b")
    entries = entries.repartitionByRange(parts, "hash").sortWithinPartitions("hash", "file", "a")
    written = map_in_arrow(entries, write, "name string, count long").collect()
    return [Part(*row) for row in sorted(written)]


def _write_letters(rows: DataFrame, directory: Path) -> Part:
    """The dead letters in the order of their places, and how many bytes are of each file. StorageError."""
    letters = rows.where(F.col("kind") == LETTER).sort("file", "a").select("file", "text")
    path = directory / f"malformed-{secrets.token_hex(6)}.jsonl"
    sizes: Counter[int] = Counter()
    count = 0
    with storage_errors(path), path.open("xb") as file:
        for row in letters.toLocalIterator():
            sizes[row.file] += file.write(row.text)
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return Part(path.name, count, [Span(number, size) for number, size in sizes.items()])


def _entries(batch: Any) -> Entries:
    places = np.empty(batch.num_rows, PLACE)
    for column, name in enumerate(("file", "offset", "length"), 1):
        places[name] = batch.column(column).to_numpy()
    return Entries(_bytes_of(batch.column(0), ">u8").astype(np.uint64), places)


def _bytes_of(column: Any, dtype: str) -> Any:
    """Of a binary column whose values have all one width: its bytes as numbers."""
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].view(dtype)
