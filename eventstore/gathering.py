"""The generations of a built log file map as one: what each entry is, and which of them count."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from eventstore.built_map import Generation, Manifest, Records, map_sparse
from eventstore.entries import LEVEL_PARTS
from eventstore.runs import Ints
from eventstore.segments import Columns, Segment
from photon.core.errors import CorruptStateError

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
                records = map_sparse(directory / generation.name, part)
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
            path = directory / generation.name / part.name
            try:
                data = np.memmap(path, np.uint8, "r")
            except (OSError, ValueError) as error:
                raise CorruptStateError(f"{path}: {error}; build the map anew") from error
            if len(data) != sum(span.bytes for span in part.spans):
                raise CorruptStateError(f"{path}: not the dead letters that were built; build the map anew")
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
            raise CorruptStateError(f"{path}: {error}; build the map anew") from error
        if segment.count != part.count:
            raise CorruptStateError(f"{path}: not the segment that was built; build the map anew")
        segments.append(segment)
    return segments


def _first_and_others(
    pieces: Sequence[tuple[int, Columns]], live: npt.NDArray[np.bool_]
) -> tuple[Columns, Columns]:
    """Pieces, each with the number of its generation -> of all their ids the first places and the others."""
    columns = Columns(*map(np.concatenate, zip(*[piece.all() for _, piece in pieces], strict=True)))
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
