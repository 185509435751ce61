"""The joined log: joined/<datacenter>/<joiner>-NNNNNN.jsonl in each output root, a joined event a line.

Every root gets the same bytes in the same files, so a place in the log is the same place in all of them. A
batch is written to all roots or to none: what fails in one is taken back from those before it.

What a crash leaves of batches without an end is cut off by the next start (`begin`), unread: it may stand in
some of the roots only, be half a line, or be in the page cache alone, for a sync of it has failed. The
intents hold the same lines, and are written once more.

Lines are written under a lease (joiner.leases), which is looked at before the first root's append and after
the last one's. A process may stand still anywhere (SIGSTOP, a starved machine) while its lease runs out, it
is fenced, recovery reads the joined logs, releases what is missing there, and another joiner writes it:

* before the first look: nothing is written. The batch waits for the lease.
* between the looks, in whatever root: the lines are taken back from all roots, whether recovery saw them or
  not.
* after the second look: the lines were readable in every root before the lease was over, so before the fence,
  and recovery, which reads after it, saw them, whichever root it reads: they stay. So nothing is looked at
  after the sync; a crash of the machine before its end loses lines as any crash does, and the next start
  writes them. (A file system that shows other machines what was appended only later must do so within the
  registry's margin for clocks.)

A process that stood still between the looks takes its lines back before it ends (`finish_append`). One that
is killed from outside there leaves them for its next start to cut.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from joiner.intents import Left, Range
from joiner.output_files import Root
from photon.core.clock import Clock
from photon.core.disk import storage_errors
from photon.core.errors import PhotonError, StorageError
from photon.logs.writer import LogPosition, RotatingLog

Checkpoint = Callable[[str], None]
"""Told before each IO step of a request what the step before was; tests kill the process there."""

NOTHING_LEFT: Final = Left(None, LogPosition(0, 0))


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

    def begin(self, left: Left = NOTHING_LEFT) -> int:
        """Cut what the life before left without an end, durably, and go on in a new file. Bytes cut.
        StorageError."""
        cut = 0
        if left.cut is not None:
            for log in self._logs:
                for number in (n for n in log.file_numbers() if n >= left.cut.file):
                    cut += _cut_file(log.path(number), left.cut.offset if number == left.cut.file else 0)
                self._checkpoint("one root cut")
        ends = [log.position for log in self._logs]
        self._file = max(end.file for end in ends)
        if left.cut or any(end != LogPosition(self._file, 0) or end < left.latest for end in ends):
            self._file = max(self._file, left.latest.file) + 1
        self._align()
        return cut

    @property
    def broken(self) -> bool:
        """No write will work before a restart."""
        return self._not_taken_back is not None or any(log.broken for log in self._logs)

    def append(
        self, lines: bytes, check_lease: Callable[[], None], written: Callable[[Range], None] = lambda _: None
    ) -> Range:
        """Write lines to every root, readable at once. DiskFullError or StorageError: they are in none.

        So it is with what `check_lease` raises, where it does so before or after the lines are written.
        `written` is told where they stand before more are appended.
        """
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
            place = Range(start.file, start.offset, start.offset + len(lines))
            written(place)
            self.position = LogPosition(place.file, place.end)
            return place

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


def _cut_file(path: Path, size: int) -> int:
    """Cut a file, durably; how many bytes it was longer. The file stays, were it empty."""
    with storage_errors(path), path.open("r+b", buffering=0) as file:
        longer = max(0, os.fstat(file.fileno()).st_size - size)
        if longer:
            os.ftruncate(file.fileno(), size)
            os.fsync(file.fileno())
        return longer
