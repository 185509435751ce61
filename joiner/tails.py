"""What stands at the ends of joined logs: read at a start, when a crash may have left something there.

All roots hold the same bytes in the same files, up to where a crash came between the append to one and to
the next (joiner.output)."""

import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from joiner.intent_records import Range
from photon.core.disk import storage_errors
from photon.core.logwriter import LogPosition, RotatingLog

_READ_BYTES: Final = 1 << 20


def missing_files(log: RotatingLog, first: int, last: int) -> list[Path]:
    """Files of these numbers that are not there."""
    there = {*log.file_numbers()}
    return [log.path(number) for number in range(first, last + 1) if number not in there]


def count_lines(
    log: RotatingLog, wanted: Container[bytes], start: LogPosition, but: Iterable[Range]
) -> Counter[bytes]:
    """How often each wanted line (no newline) stands after `start`, outside of the ranges in `but`."""
    found: Counter[bytes] = Counter()
    for number in log.file_numbers():
        if number < start.file:
            continue
        path = log.path(number)
        with storage_errors(path):
            size = path.stat().st_size
            low = start.offset if number == start.file else 0
            skipped = sorted((r.start, r.end) for r in but if r.file == number and r.end > r.start)
            for gap in _gaps(low, size, skipped):
                found.update(line for line in _lines(path, *gap) if line in wanted)
    return found


def common_end(logs: Sequence[RotatingLog], floor: LogPosition) -> LogPosition | None:
    """Up to where all logs hold the same whole lines from `floor` on; None where one ends before it."""
    if any(log.position < floor for log in logs):
        return None
    numbers = sorted({n for log in logs for n in log.file_numbers() if n >= floor.file})
    for number in numbers:
        paths = [log.path(number) for log in logs]
        low = floor.offset if number == floor.file else 0
        sizes = [_size(path) for path in paths]
        same = _same_bytes(paths, low, max(low, min(sizes)))
        if same < max(sizes):
            return LogPosition(number, _line_end(paths[0], low, same))
    return LogPosition(numbers[-1], _size(logs[0].path(numbers[-1]))) if numbers else floor


def cut_file(path: Path, size: int) -> int:
    """Cut a file, durably; how many bytes it was longer. The file stays, were it empty."""
    with storage_errors(path), path.open("r+b", buffering=0) as file:
        longer = max(0, os.fstat(file.fileno()).st_size - size)
        if longer:
            os.ftruncate(file.fileno(), size)
            os.fsync(file.fileno())
        return longer


def _size(path: Path) -> int:
    with storage_errors(path):
        return path.stat().st_size if path.exists() else 0


def _same_bytes(paths: Sequence[Path], low: int, high: int) -> int:
    """How far files agree, from `low` on and at most to `high`."""
    while low < high:
        step = min(_READ_BYTES, high - low)
        blocks = [_read(path, low, step) for path in paths]
        if any(block != blocks[0] for block in blocks):
            alike = takewhile(lambda column: len({*column}) == 1, zip(*blocks, strict=False))
            return low + sum(1 for _ in alike)
        low += step
    return low


def _line_end(path: Path, low: int, high: int) -> int:
    """The end of the last whole line between two places, the first of which is the end of one."""
    while high > low:
        start = max(low, high - _READ_BYTES)
        newline = _read(path, start, high - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        high = start
    return low


def _read(path: Path, start: int, count: int) -> bytes:
    with storage_errors(path), path.open("rb", buffering=0) as file:
        file.seek(start)
        return file.read(count)


def _gaps(low: int, high: int, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What of `low` to `high` is outside of the ranges (ascending)."""
    for start, end in ranges:
        if start > low:
            yield low, min(start, high)
        low = max(low, end)
    if low < high:
        yield low, high


def _lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb", buffering=_READ_BYTES) as file:
        file.seek(start)
        left = end - start
        while left > 0 and (line := file.readline()):
            left -= len(line)
            yield line[:-1]
