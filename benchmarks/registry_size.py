"""`photon bench registry --only size`: what a replica's state costs as it grows, by the state machine alone.

Segments of so many ids are made by a generator, of the size that merging would give them, and opened as a
replica does that starts. Then batches of new ids, and of old ones, are applied.
"""

import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import BenchError, Row
from idregistry.rules.commands import Commit, Configure, encode
from idregistry.rules.packing import bucket_of, unhash_ids
from idregistry.rules.segments import STAMP_DTYPE, Layout, Rows, Segment
from idregistry.rules.sharding import BEGINNING, HORIZON, Configuration, Interval, Route
from idregistry.rules.state import ShardState
from idregistry.rules.table import MERGE_IDS_MAX, IdTable
from idregistry.segment_file import SegmentFile, SegmentFiles
from photon.core.columns import pack_times
from photon.core.fates import Committed
from photon.core.ids import Token

SIZES: Final = (1_000_000, 10_000_000, 100_000_000)
BATCH_IDS: Final = 10_000
BATCHES: Final = 60
_PARTS: Final = 1 << 12
_ANOTHER: Final = 99
"""A holder that the new ones do not have."""
_NOW_US: Final = 1_700_000_000_000_000
_MIB: Final = 1 << 20


def rows(sizes: Sequence[int], directory: Path) -> list[Row]:
    """What each size costs, with files below the directory."""
    return [_measured(size, directory) for size in sizes]


def segments_of(size: int) -> list[int]:
    """How many ids each has, the oldest first: as large as they become, then ever smaller ones."""
    found = [MERGE_IDS_MAX] * (size // MERGE_IDS_MAX)
    left = size % MERGE_IDS_MAX
    while left > 1 << 20:
        found.append(left * 3 // 4)
        left -= left * 3 // 4
    return [*found, left] if left else found


def _measured(size: int, below: Path) -> Row:
    rng = np.random.default_rng(size)
    directory = Path(tempfile.mkdtemp(prefix="photon-bench-", dir=below))
    try:
        known, made_s = _make(directory, size, rng)
        before = _resident()
        began = time.monotonic()
        files = [SegmentFiles(directory).open(number) for number in range(1, len(segments_of(size)) + 1)]
        opened_s = time.monotonic() - began
        memory = _resident() - before
        state = _state(files)
        new_us = _apply(state, [rng.bytes(16 * BATCH_IDS) for _ in range(BATCHES)], Committed.WON)
        old = [known[rng.integers(0, len(known), BATCH_IDS)].tobytes() for _ in range(BATCHES // 6)]
        old_us = _apply(state, old, Committed.DUPLICATE)
        return {
            "ids": size,
            "segments": len(files),
            "disk_bytes_an_id": round(sum(file.size for file in files) / size, 1),
            "memory_bytes_an_id": round(sum(file.filter.bytes for file in files) / size, 2),
            "resident_mib_after_start": memory // _MIB,
            "made_us_an_id": round(made_s / size * 1e6, 2),
            "opened_s": round(opened_s, 2),
            "new_us_an_id": round(new_us, 2),
            "old_us_an_id": round(old_us, 2),
        }
    finally:
        shutil.rmtree(directory)


def _make(directory: Path, size: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.void], float]:
    """Files of random ids; some of these ids, and how long it took."""
    known: list[bytes] = []
    spent = 0.0
    for number, ids in enumerate(segments_of(size), 1):
        writer = SegmentFiles(directory).writer(number, ids)
        for part in _parts(ids, rng):
            if len(part):
                known.append(unhash_ids(part.hashes[:100], part.tails[:100]))
            began = time.monotonic()
            writer.write(part)
            spent += time.monotonic() - began
        began = time.monotonic()
        writer.finish()
        writer.adopt()
        spent += time.monotonic() - began
    return np.frombuffer(b"".join(known), "V16"), spent


def _parts(ids: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Rows in order, by parts of the range of hashes."""
    counts = rng.multinomial(ids, np.full(_PARTS, 1 / _PARTS))
    width = (1 << 64) // _PARTS
    for part, count in enumerate(counts.tolist()):
        hashes = np.sort(rng.integers(0, width, count, np.uint64)) + np.uint64(part * width)
        stamps = np.zeros(count, STAMP_DTYPE)
        stamps["holder"], stamps["time_us"], stamps["bucket"] = _ANOTHER, _NOW_US, bucket_of(_NOW_US)
        yield Rows(hashes, rng.integers(0, 1 << 63, count, np.uint64), stamps)


def _state(files: Sequence[SegmentFile]) -> ShardState:
    state = ShardState(0)
    state.apply(encode(Configure(_NOW_US, Configuration(1, (Interval(BEGINNING, (0,)),)))))
    segments = tuple(Segment(number, file) for number, file in enumerate(files, 1))
    empty = IdTable()
    state._facts.table = IdTable(Layout(empty._layout.subs, segments), len(files) + 1)
    return state


def _apply(state: ShardState, batches: Sequence[bytes], expected: Committed) -> float:
    """CPU us an id."""
    times = pack_times([_NOW_US] * BATCH_IDS)
    token = Token("bench:1", 1, _NOW_US).pack()
    commands = [
        encode(Commit(_NOW_US, [token], [BATCH_IDS], ids, times, [Route(HORIZON, False)])) for ids in batches
    ]
    spent = 0.0
    for command in commands:
        began = time.perf_counter()
        outcome = state.apply(command)
        spent += time.perf_counter() - began
        if outcome != bytes([expected]) * BATCH_IDS:
            raise BenchError(f"an id was not {expected.name}")
    return spent / (len(batches) * BATCH_IDS) * 1e6


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
