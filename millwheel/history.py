"""Where a history ends and a run goes on: what Spark made of old logs (spark.history), taken up by a store.

OUT/sinks/<sink>/<sink>-history-NNNNNN.jsonl   and a manifest, as a run has them
OUT/state/*.parquet                            state and timers, rows of the store
OUT/history.json                               what else a run has to know; there once all else is
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from pyarrow import parquet

from millwheel.computation import BEFORE
from millwheel.engine.logged import LoggedStore
from millwheel.engine.store import Changes, Lane, lane_row, position_row, slot_of_row
from millwheel.sources import newest_of_logs, stand_for
from millwheel.topology import Logs
from photon.core.disk import read_json, storage_errors
from photon.core.errors import CorruptStateError, UsageError
from photon.logs.files import FileState, find

NAME: Final = "history.json"
STATE: Final = "state"
SINKS: Final = "sinks"
STEM: Final = "history"
"""Of files of sinks, where a run has the number of a worker."""
_ROWS: Final = 50_000
"""Of one commit, about."""
_encode: Final = msgspec.msgpack.encode
_rows: Final = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What a history says to a run. `numbers`: as of a Plan; `marks`: low watermarks by source; `files`: of
    each injector whose logs it read, the positions of the files by number. `goes_on`: timers wait, and the
    state is there.
    """

    topology: str
    goes_on: bool
    numbers: dict[str, int]
    marks: dict[str, int]
    counts: dict[str, dict[str, int]]
    files: dict[str, dict[int, bytes]]


def load(directory: Path) -> Left:
    """UsageError where there is none that a run can go on with; CorruptStateError, StorageError."""
    left = read_json(directory / NAME, Left)
    if left is None:
        raise UsageError(
            f"{directory} is no whole history; make one with `photon millwheel history --goes-on --out ...`"
        )
    if not left.goes_on:
        raise UsageError(f"{directory} is of logs that have ended: make one with --goes-on")
    return left


def take_up(stores: Sequence[LoggedStore], directory: Path, left: Left) -> None:
    """Put all of it into stores that have nothing else and are claimed. What was cut off is done again.
    StorageError."""
    changes: list[Changes] = [{} for _ in stores]
    for rows in _state(directory / STATE):
        for row, packed in rows.items():
            changes[slot_of_row(row) % len(stores)][row] = packed
        if sum(map(len, changes)) > _ROWS:
            for store, of_store in zip(stores, changes, strict=True):
                store.commit(of_store)
                of_store.clear()
    for name, files in left.files.items():
        injector = left.numbers[f"injector {name}"]
        # Numbers are below those that workers give; a worker takes those of its slots.
        for number, packed in files.items():
            for of_store in changes:
                of_store[position_row(injector, number)] = packed
    changes[0][lane_row(0)] = _encode(Lane(marks=left.marks, counts=left.counts))
    for store, of_store in zip(stores, changes, strict=True):
        store.commit(of_store)


def _state(directory: Path) -> Iterator[dict[bytes, bytes]]:
    with storage_errors(directory):
        for path in sorted(directory.glob("*.parquet")):
            try:
                with parquet.ParquetFile(path) as file:
                    for batch in file.iter_batches(64, columns=["blob"]):
                        yield from map(_rows, batch.column(0).to_pylist())
            except (pa.ArrowException, msgspec.DecodeError) as error:
                raise CorruptStateError(f"{path} can't be read ({error})") from error


def low_of(injector: Logs, states: Sequence[FileState], newest: Mapping[int, int]) -> int:
    """What can be promised of logs that go on, as a run does that has just read them: all are as far as the
    newest line; with `silent="hold"` each as its own; less `lateness_s`. `newest`: by number of the file."""
    if any(not find([glob]) for glob in injector.expected):
        return BEFORE
    low = max(newest.values(), default=BEFORE)
    if injector.silent == "hold":
        stands = newest_of_logs(stand_for(states, injector.log), newest)
        low = min(stands.values(), default=low)
    return max(BEFORE, low - round(injector.lateness_s * 1e6))
