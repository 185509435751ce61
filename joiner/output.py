"""The joined log: joined/<datacenter>/<joiner>-NNNNNN.jsonl in each output root, a joined event a line.

Every root gets the same bytes in the same files, so a place in the log is the same place in all of them. A
batch is written to all roots or to none: what fails in one is taken back from those before it. Only a crash
can come between; the next start takes it back (`begin`), before it looks for what is there.

Lines are written under a lease (joiner.leases), which is looked at before the first root's append and after
the last one's. A process may stand still anywhere (SIGSTOP, a starved machine) while its lease runs out, it
is fenced, recovery reads the joined logs, releases what is missing there, and another joiner writes it:

* before the first look: nothing is written. The batch waits for the lease; if it is fenced, it is dropped.
* between the looks, in whatever root: the lines are taken back from all roots, whether recovery saw them or
  not. If it did not, they may stand elsewhere by now; if it did, the ids are still registered, and its next
  reading finds them missing. What a start takes back after a crash between two roots is like this.
* after the second look: the lines were readable in every root before the lease was over, so before the fence,
  and recovery, which reads after it, saw them, whichever root it reads: they stay. So nothing is looked at
  after the sync; a crash of the machine before its end loses lines as any crash does, and the next reading
  finds that. (A file system that shows other machines what was appended only later must do so within the
  registry's margin for clocks.)

A process that stood still between the looks must not end before it took its lines back: `finish_append` sees
to that for every end of its own choice. A kill from outside that hits those few instructions leaves the
lines; recovery closes that hole where it sees, by the lock of the joiner's directory, that the process is
dead.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from joiner.intents import Range
from joiner.output_files import Root
from photon.core.clock import Clock
from photon.core.disk import storage_errors
from photon.core.errors import CorruptStateError, PhotonError, StorageError
from photon.logs.writer import LogPosition, RotatingLog

_READ_BYTES: Final = 1 << 20

Checkpoint = Callable[[str], None]
"""Told before each IO step of a request what the step before was; tests kill the process there."""


@dataclass(frozen=True, slots=True)
class Left:
    """What the life before left in the log, as its intents tell.

    Unfinished batches stand after `earliest`, if at all; what comes now stands after `latest`, so that the
    next start looks for it. All before `earliest` is whole, and so is what stands in `done`.
    """

    earliest: LogPosition
    latest: LogPosition
    done: Sequence[Range]

    @property
    def floor(self) -> LogPosition:
        """All before it is the same in every root."""
        return max([self.earliest, *(LogPosition(r.file, r.end) for r in self.done if r.end > r.start)])


class JoinedLog:
    """Appends columns of joined lines. For many threads at once; a log has one writing process."""

    def __init__(
        self,
        roots: Sequence[Root],
        file_bytes_max: int,
        fsync: bool,
        clock: Clock,
        checkpoint: Checkpoint,
    ) -> None:
        """`begin` comes before everything else."""
        self.roots = roots
        self._logs = [root.log for root in roots]
        self._order = list(self._logs)
        self._file_bytes_max = file_bytes_max
        self._fsync = fsync
        self._clock = clock
        self._checkpoint = checkpoint
        self._one_at_a_time = threading.Lock()
        self._not_taken_back: StorageError | None = None
        self.position = LogPosition(0, 0)
        """No line that is not yet appended can stand before it; what stands before it stays."""
        self._file = 0
        """The file that all roots are to be in; they are, where `position` is in it."""
        self._opened_us = 0
        self._opened_s = 0.0
        self.times: dict[int, tuple[int, int]] = {}
        """Of files that this process left: when they were opened and closed, us since the epoch."""

    def begin(self, left: Left | None = None) -> int:
        """Take back what a crash left in some of the roots only, and go on in a new file. Bytes taken back.

        CorruptStateError if a file that unfinished batches may stand in is missing: they might be written
        again.
        """
        cut = 0
        if left is not None:
            old = {root.log: root.since for root in self.roots if root.since is not None}
            for log, since in old.items():
                _check_there(log, since, left)
            cut = self._level([*old], max(left.floor, LogPosition(max(old.values()), 0)))
        ends = [log.position for log in self._logs]
        self._file = max(end.file for end in ends)
        latest = LogPosition(0, 0) if left is None else left.latest
        if any(end != LogPosition(self._file, 0) or end < latest for end in ends):
            self._file = max(self._file, latest.file) + 1
        self._align()
        return cut

    @property
    def broken(self) -> bool:
        """No write will work before a restart."""
        return self._not_taken_back is not None or any(log.broken for log in self._logs)

    def append(self, lines: bytes, check_lease: Callable[[], None]) -> Range:
        """Write lines to every root, readable at once. DiskFullError or StorageError: they are in none.

        So it is with what `check_lease` raises, where it does so before or after the lines are written.
        """
        if not lines:
            end = self.position
            return Range(end.file, end.offset, end.offset)
        with self._one_at_a_time:  # what is taken back is the end of the log
            if self._not_taken_back is not None:
                raise StorageError(*self._not_taken_back.args)
            self._make_room(len(lines))
            check_lease()
            start = self.position
            self._write(lines, start)
            try:
                check_lease()
            except PhotonError:
                self._take_back(self._order, start)
                raise
            if not start.offset:
                self._opened_us, self._opened_s = self._clock.now_us(), self._clock.monotonic()
            self.position = LogPosition(start.file, start.offset + len(lines))
        return Range(start.file, start.offset, start.offset + len(lines))

    def sync(self, written: Range) -> None:
        """Return when the range is durable in every root. Threads that wait together share one fdatasync."""
        if self._fsync:
            for log in self._logs:
                log.sync(LogPosition(written.file, written.end))

    def rotate_if_older(self, age_s: float) -> None:
        """Go on in a new file if the first line of this one is so old. StorageError."""
        with self._one_at_a_time:
            if self.position.offset and self._clock.monotonic() - self._opened_s >= age_s:
                self._rotate()

    def end(self) -> None:
        """No line is appended any more: the last file is complete, and durable. StorageError."""
        with self._one_at_a_time:
            for log in self._logs:
                log.sync()
            if self.position.offset:
                self._note_times()
                self.position = LogPosition(self.position.file + 1, 0)
            self._not_taken_back = StorageError("the joined log is closed")

    def count(self, wanted: Container[bytes], start: LogPosition, but: Iterable[Range]) -> Counter[bytes]:
        """How often each wanted line (no newline) stands after `start`, outside of the ranges in `but`."""
        log, found = self._logs[0], Counter[bytes]()
        for number in log.file_numbers():
            if number >= start.file:
                skipped = {r.start: r.end for r in but if r.file == number and r.end > r.start}
                low = start.offset if number == start.file else 0
                found.update(line for line in _lines(log.path(number), low, skipped) if line in wanted)
        return found

    def finish_append(self) -> None:
        """Return when no append is under way. To be called before the process ends itself."""
        with self._one_at_a_time:
            pass

    def close(self) -> None:
        with self._one_at_a_time:
            for root in self.roots:
                root.close()

    def _write(self, lines: bytes, start: LogPosition) -> None:
        written: list[RotatingLog] = []
        for log in self._order:
            if written:
                self._checkpoint("one root appended")
            try:
                end = log.append(lines)
            except StorageError:
                # Next time it fails before there is anything to take back.
                self._order.remove(log)
                self._order.insert(0, log)
                if written:
                    self._take_back(written, start)
                raise
            assert end == LogPosition(start.file, start.offset + len(lines)), f"{log.path(end.file)} differs"
            written.append(log)

    def _take_back(self, written: Sequence[RotatingLog], start: LogPosition) -> None:
        """Cut the log, durably. StorageError leaves it broken: the lines may stand.

        It goes on in a new file: places that were given out or synced meanwhile must not come again.
        """
        try:
            for log in list(written):
                log.truncate(start)
                self._checkpoint("one root taken back")
            self._leave_file()
            for log in list(written):
                log.rotate()  # syncs the file it leaves
        except StorageError as error:
            self._not_taken_back = error
            raise

    def _make_room(self, size: int) -> None:
        position = self.position
        if position.file != self._file:
            self._align()
        elif position.offset and position.offset + size > self._file_bytes_max:
            self._rotate()

    def _rotate(self) -> None:
        self._leave_file()
        self._align()

    def _leave_file(self) -> None:
        self._note_times()
        self._file = self.position.file + 1

    def _note_times(self) -> None:
        if self.position.offset:
            self.times[self.position.file] = self._opened_us, self._clock.now_us()

    def _align(self) -> None:
        """Bring each root to the file that is meant. Only then is it a place that is given out."""
        for log in self._order:
            while log.position.file < self._file:
                log.rotate()
                self._checkpoint("one root rotated")
        self.position = LogPosition(self._file, 0)

    def _level(self, logs: Sequence[RotatingLog], floor: LogPosition) -> int:
        """Cut from each root what the others have not; bytes cut."""
        end = _common_end(logs, floor) if len(logs) > 1 else None
        if end is None:  # or a power cut without fsync: nothing was promised
            return 0
        cut = 0
        for log in logs:
            for number in (n for n in log.file_numbers() if n >= end.file):
                cut += _cut_file(log.path(number), end.offset if number == end.file else 0)
            self._checkpoint("one root levelled")
        return cut


def _check_there(log: RotatingLog, since: int, left: Left) -> None:
    wanted = range(max(since, left.earliest.file), max(log.position.file, left.latest.file) + 1)
    missing = sorted({*wanted}.difference(log.file_numbers()))
    if missing:
        raise CorruptStateError(
            f"{log.path(missing[0])} is missing, and lines of unfinished batches may stand in it; "
            "put it back, or move the joiner's intents away and let recovery find what was not written"
        )


def _lines(path: Path, low: int, skipped: Mapping[int, int]) -> Iterator[bytes]:
    """Lines from `low` on, without their newlines; from each start in `skipped` on to its end, none."""
    with storage_errors(path), path.open("rb", buffering=_READ_BYTES) as file:
        file.seek(low)
        while line := file.readline():
            if low in skipped:
                low = file.seek(skipped[low])
            else:
                low += len(line)
                yield line[:-1]


def _common_end(logs: Sequence[RotatingLog], floor: LogPosition) -> LogPosition | None:
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


def _cut_file(path: Path, size: int) -> int:
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
