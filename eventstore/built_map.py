"""A log file map that was built outside of an event store, as files: `photon logmap build` writes it, in
generations; `photon logmap load` reads it (docs/logmap.md).

    files.json                    the manifest: which log files, how far read; which generations count
    generation-NNNNNN/
        sparse-...                records of 40 bytes, sorted: a key and a value of the sparse map
        dense-...                 segments (eventstore.segments) of opaque ids; an id may stand several times,
                                  in the order of its places
        malformed-....jsonl       dead letters, those of a log together

The manifest is replaced as a whole when a generation is complete: what it does not name is nothing.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from eventstore.rules.entries import LEVEL_PARTS, SPARSE_RECORD, Ints, Records
from eventstore.segments import Columns, Segment
from photon.core.disk import storage_errors, write_file
from photon.core.errors import CorruptStateError, UsageError
from photon.logs.files import digest

FORMAT: Final = 2
MANIFEST: Final = "files.json"


class BuiltFile(msgspec.Struct, frozen=True):
    """A log file and how far it is read: all in its first `offset` bytes (unpacked, of an archive).

    Head and tail as of photon.logs.files.FileState, in hex. `archive`: size and time of change of an
    archive. `gone`: it holds something else by now, or is deleted; its entries count no more.
    """

    number: int
    name: str
    offset: int = 0
    head_bytes: int = 0
    head: str = ""
    tail: str = ""
    events: int = 0
    malformed: int = 0
    archive: tuple[int, int] | None = None
    gone: bool = False


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The dead letters of a file: that many bytes of their part, behind those of the span before."""

    file: int
    bytes: int


class Part(msgspec.Struct, frozen=True):
    """A file of a generation; `level`: of the sparse map; `spans`: of dead letters, all of the part."""

    name: str
    count: int
    level: int = 0
    spans: list[Span] = []


class Generation(msgspec.Struct, frozen=True):
    """What one build found. Sparse parts are in the order of their keys, dense ones of their ids.

    `begun`: file number -> offset from which on its runs are here, whatever earlier generations say: the last
    cells of a file that has grown are made anew.
    """

    name: str
    sparse: list[Part]
    dense: list[Part]
    malformed: list[Part]
    begun: dict[int, int] = {}


class Manifest(msgspec.Struct, frozen=True):
    """`identity`: digest of what ids are made with; M and W of the grid."""

    format: int
    identity: str
    interval_bytes: int
    interval_us: int
    next_number: int = 0
    files: list[BuiltFile] = []
    generations: list[Generation] = []

    @property
    def live(self) -> list[BuiltFile]:
        return [file for file in self.files if not file.gone]


def identity_digest(identity: str) -> str:
    """The settings' own text names the key."""
    return digest(identity.encode("utf-8", "surrogatepass")).hex()


def read_manifest(directory: Path) -> Manifest | None:
    """None if nothing was built there yet. CorruptStateError, StorageError."""
    path = directory / MANIFEST
    with storage_errors(path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise CorruptStateError(f"{path}: not a built log file map ({error}); build it anew") from error
    if manifest.format != FORMAT:
        raise CorruptStateError(
            f"{path}: a built map of format {manifest.format}, this Photon reads {FORMAT}; build it anew"
        )
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Durably, all or nothing. StorageError."""
    path = directory / MANIFEST
    with storage_errors(path):
        write_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def check_same(directory: Path, manifest: Manifest, wanted: Manifest) -> None:
    """UsageError unless both are of the same ids and the same grid."""
    if manifest.identity != wanted.identity:
        raise UsageError(
            f"{directory}: built with other ids ([primary] id or [ids] key); use the settings it was built "
            "with, or build a new one"
        )
    grid, asked = [(one.interval_bytes, one.interval_us) for one in (manifest, wanted)]
    if grid != asked:
        raise UsageError(
            f"{directory}: built with 'eventstore.map_interval_bytes' {grid[0]} and 'map_interval_s' "
            f"{grid[1] / 1e6:g}; use these, or build a new one"
        )


def write_sparse(path: Path, records: Records) -> None:
    """Durably. OSError."""
    # numpy makes big-endian records native where it joins them.
    write_durably(path, records.astype(SPARSE_RECORD, copy=False).tobytes())


def write_durably(path: Path, data: bytes) -> None:
    """A new file under its own name; nobody knows of it yet. OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _mapped(directory: Path, part: Part, kind: Any, count: int) -> npt.NDArray[Any]:
    """So many records of a kind, all of a part's file. CorruptStateError."""
    path = directory / part.name
    try:
        records = np.memmap(path, kind, "r") if count else np.empty(0, kind)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if len(records) != count:
        raise _damaged(path, f"{len(records)} records, not {count}")
    return np.asarray(records)


def _damaged(path: Path, why: str) -> CorruptStateError:
    return CorruptStateError(f"{path}: not the file that was built ({why}); build the map anew")


def names_of(generations: Sequence[Generation]) -> set[str]:
    """Directories that count."""
    return {generation.name for generation in generations}


_RECORDS_A_STEP: Final = 1 << 18
_LETTER_BYTES_A_STEP: Final = 1 << 20
_NEVER: Final = np.iinfo(np.int64).max
_OPAQUE: Final = 0xE << 60  # opaque ids begin so, and are even above it
_OPAQUE_RANGE: Final = 1 << 60


def sparse_records(
    directory: Path, manifest: Manifest, gone: Collection[int]
) -> Iterator[tuple[int, bool, Records]]:
    """Level, whether these come after all before them in their level, and some records, sorted.

    `gone`: numbers of files whose entries are left out. CorruptStateError.
    """
    cuts = _cuts(manifest, gone)
    for level in range(len(LEVEL_PARTS)):
        first = True
        for generation, cut in zip(manifest.generations, cuts, strict=True):
            found = False
            for part in generation.sparse:
                if part.level != level:
                    continue
                records = _mapped(directory / generation.name, part, SPARSE_RECORD, part.count)
                for low in range(0, len(records), _RECORDS_A_STEP):
                    step = records[low : low + _RECORDS_A_STEP]
                    step = step[step["start"].astype(np.int64) < cut[step["file"].astype(np.int64)]]
                    if len(step):
                        found = True
                        yield level, first, step
            first &= not found


def _cuts(manifest: Manifest, gone: Collection[int]) -> list[Ints]:
    """For each generation, by file number: runs that start there or later count no more."""
    cut = np.full(manifest.next_number, _NEVER, np.int64)
    cut[list(gone)] = 0
    cuts = []
    for generation in reversed(manifest.generations):
        cuts.append(cut.copy())
        for number, begun in generation.begun.items():
            cut[number] = min(cut[number], begun)
    return cuts[::-1]


def dense_entries_of(manifest: Manifest) -> int:
    """How many there are at most."""
    return sum(part.count for generation in manifest.generations for part in generation.dense)


def dense_columns(
    directory: Path, manifest: Manifest, gone: Collection[int]
) -> Iterator[tuple[Columns, Columns]]:
    """In the order of their ids: where each opaque id was found first, and where else, in other files.

    First is the earliest generation, file number and offset. CorruptStateError.
    """
    total = dense_entries_of(manifest)
    live = np.ones(manifest.next_number, np.bool_)
    live[list(gone)] = False
    segments = [_segments(directory, generation) for generation in manifest.generations]
    steps = max(1, -(-total // _RECORDS_A_STEP))
    bounds = np.array([_OPAQUE + _OPAQUE_RANGE * n // steps for n in range(1, steps)], np.uint64)
    cuts = [
        [[0, *np.searchsorted(one.columns.high, bounds).tolist(), one.count] for one in generation]
        for generation in segments
    ]
    for step in range(steps):
        pieces = [
            (number, segment.columns.take(slice(cut[step], cut[step + 1])))
            for number, generation in enumerate(segments)
            for segment, cut in zip(generation, cuts[number], strict=True)
        ]
        if pieces:
            yield _first_and_others(pieces, live)


def letters(directory: Path, manifest: Manifest, gone: Collection[int]) -> Iterator[bytes]:
    """Dead letters as they were built, in pieces; not those of `gone`. CorruptStateError."""
    for generation in manifest.generations:
        for part in generation.malformed:
            data = _mapped(
                directory / generation.name, part, np.uint8, sum(span.bytes for span in part.spans)
            )
            end = 0
            for span in part.spans:
                start, end = end, end + span.bytes
                if span.file not in gone:
                    for low in range(start, end, _LETTER_BYTES_A_STEP):
                        yield data[low : min(end, low + _LETTER_BYTES_A_STEP)].tobytes()


def _segments(directory: Path, generation: Generation) -> list[Segment]:
    segments = []
    for part in generation.dense:
        path = directory / generation.name / part.name
        try:
            segment = Segment(path)
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if segment.count != part.count:
            raise _damaged(path, f"{segment.count} entries, not {part.count}")
        segments.append(segment)
    return segments


def _first_and_others(
    pieces: Sequence[tuple[int, Columns]], live: npt.NDArray[np.bool_]
) -> tuple[Columns, Columns]:
    """Pieces, each with the number of its generation -> of all their ids the first places and the others."""
    columns = Columns.joined([piece for _, piece in pieces])
    rows = np.flatnonzero(live[columns.file])
    if len({number for number, piece in pieces if len(piece)}) > 1:
        ages = np.concatenate([np.full(len(piece), number) for number, piece in pieces])
        order = np.lexsort((columns.offset, columns.file, ages, columns.low, columns.high))
        rows = order[live[columns.file[order]]]
    columns = columns.take(rows)
    again = np.zeros(len(columns), np.bool_)
    again[1:] = (columns.high[1:] == columns.high[:-1]) & (columns.low[1:] == columns.low[:-1])
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(columns))))
    others = again & (columns.file != columns.file[first])
    return columns.take(~again), columns.take(others)
