"""One run of `photon logmap build`: what is new in the logs becomes a generation of the built map."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from eventstore import built_map
from eventstore.built_map import BuiltFile, Generation, Manifest, Part, Span
from eventstore.rules.entries import Interval
from eventstore.segments import identity_of, interval_us_of
from photon.core.disk import DirectoryLock, make_directory, storage_errors, sync_directory
from photon.core.errors import UsageError
from photon.core.settings import Settings
from spark.engine.session import spark_failures
from spark.logmap import jobs as logmap
from spark.logmap.files import Stock, take_stock
from spark.logmap.jobs import write_dense_parts, write_letters, write_sparse_parts
from spark.reading.paths import input_paths, local_name

_ROWS_A_PART: Final = 1 << 20
_GENERATION: Final = "generation-"


@dataclass(frozen=True, slots=True)
class Built:
    """What a run found: logs that were new, had grown or were gone, and of what it read the events, the
    malformed lines and the entries."""

    new: int
    grown: int
    gone: int
    bytes: int
    events: int
    malformed: int
    sparse: int
    dense: int

    def as_document(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


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

    Every executor must see the logs and the directory by the same names. UsageError, StorageError;
    SparkFailedError if a job fails: then the map is as it was.
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
    wanted = Manifest(
        built_map.FORMAT,
        built_map.identity_digest(identity_of(settings)),
        settings.eventstore.map_interval_bytes,
        interval_us_of(settings.eventstore.map_interval_s),
    )
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
) -> tuple[Generation, list[Any]]:
    """The files of a new generation, durable, and the facts of what was read."""
    name = f"{_GENERATION}{len(manifest.generations):06d}"
    if not stock.readings:
        return Generation(name, [], [], []), []
    into = (directory / name).absolute()
    with storage_errors(into):
        make_directory(into)
    interval = Interval(manifest.interval_bytes, manifest.interval_us)
    rows = logmap.rows_of(session, stock.readings, settings, interval).persist(StorageLevel.DISK_ONLY)
    try:
        facts = logmap.facts(rows).collect()
        told = [msgspec.msgpack.decode(bytes(fact.text), type=logmap.Facts) for fact in facts]
        sparse, dense, letters = [], [], []
        parallelism = session.sparkContext.defaultParallelism
        if runs := sum(one.runs for one in told):
            ordered = logmap.sorted_sparse(logmap.sparse(rows, interval), _parts(runs, parallelism))
            sparse = _collected(write_sparse_parts(ordered, into, interval.us))
        if opaque := sum(one.opaque for one in told):
            dense = _collected(
                write_dense_parts(logmap.sorted_dense(rows, _parts(opaque, parallelism)), into)
            )
        if any(fact.c for fact in facts):
            written = _collected(write_letters(logmap.sorted_letters(rows), into))
            letters = [msgspec.structs.replace(part, spans=_spans(facts, told)) for part in written]
            assert len(letters) == 1, "they are sorted as one part"
    finally:
        rows.unpersist()
    with storage_errors(into):
        _remove_others(into, {part.name for part in (*sparse, *dense, *letters)})
        sync_directory(into)
    begun = {reading.file.number: reading.file.start for reading in stock.readings if reading.fresh}
    return Generation(name, sparse, dense, letters, begun), list(zip(facts, told, strict=True))


def _spans(facts: Sequence[Any], told: Sequence[logmap.Facts]) -> list[Span]:
    """Of the dead letters of all files, which are sorted by the numbers of these."""
    sizes: dict[int, int] = {}
    for fact, one in zip(facts, told, strict=True):
        sizes[fact.file] = sizes.get(fact.file, 0) + one.letter_bytes
    return [Span(number, size) for number, size in sorted(sizes.items()) if size]


def _parts(rows: int, parallelism: int) -> int:
    return max(-(-rows // _ROWS_A_PART), min(parallelism, -(-rows // (_ROWS_A_PART // 8))))


def _collected(written: DataFrame) -> list[Part]:
    rows = sorted(written.collect(), key=lambda row: (row.level, row.part))
    return [Part(row.name, row.entries, row.level) for row in rows]


def _remove_others(directory: Path, names: set[str]) -> None:
    """What attempts have left that did not count."""
    for path in directory.iterdir():
        if path.name not in names:
            path.unlink()


def _summed(
    stock: Stock, found: Sequence[tuple[Any, logmap.Facts]], generation: Generation
) -> tuple[dict[int, BuiltFile], Built]:
    """The files as they are known now, and the summary of the run."""
    files = dict(stock.files)
    before = {reading.file.number: reading.fresh for reading in stock.readings}
    for fact, told in found:
        file = files[fact.file]
        file = msgspec.structs.replace(file, events=file.events + fact.b, malformed=file.malformed + fact.c)
        if fact.a > file.offset:
            file = msgspec.structs.replace(
                file, offset=fact.a, head_bytes=told.head_bytes, head=told.head.hex(), tail=told.tail.hex()
            )
        files[fact.file] = file
    built = Built(
        stock.new,
        stock.grown,
        stock.gone,
        sum(files[number].offset - offset for number, offset in before.items()),
        sum(fact.b for fact, _ in found),
        sum(fact.c for fact, _ in found),
        sum(part.count for part in generation.sparse),
        sum(part.count for part in generation.dense),
    )
    return files, built
