"""The joined log: DIR/joined/<datacenter>/<joiner>-NNNNNN.jsonl, a joined event a line (paper 3.3.1).

Lines are written under a lease (joiner.lease), which is looked at before and after each append. A process may
stand still anywhere (SIGSTOP, a starved machine) while its lease runs out, it is fenced, recovery reads the
joined logs, releases what is missing there, and another joiner writes it. Where it stood still:

* before the first look: nothing is written. The batch waits for the lease; if it is fenced, it is dropped.
* between the looks: the lines are taken back, whether recovery saw them or not. If it did not, they may stand
  elsewhere by now; if it did, the ids are still registered, and its next reading finds them missing.
* after the second look: the lines were readable before the lease was over, so before the fence, and recovery,
  which reads after it, saw them: they stay. So nothing is looked at after the sync; a crash of the machine
  before its end loses lines as any crash does, and the next reading finds that. (A file system that shows
  other machines what was appended only later must do so within the registry's margin for clocks.)

A process that stood still between the looks must not end before it took its lines back: `finish_append` sees
to that for every end of its own choice. A kill from outside that hits those few instructions leaves the
lines; recovery closes that hole where it sees, by the lock of the joiner's directory, that the process is
dead.
"""

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Final

from joiner.intent_records import Range
from photon.core.disk import storage_errors
from photon.core.errors import CorruptStateError, PhotonError, StorageError
from photon.core.logwriter import LogPosition, RotatingLog

_READ_BYTES: Final = 1 << 20


class JoinedLog:
    """Appends columns of joined lines. For many threads at once; a log has one writing process."""

    def __init__(self, directory: Path, stem: str, file_bytes_max: int, fsync: bool) -> None:
        self._fsync = fsync
        self._log = RotatingLog(directory, stem, file_bytes_max)
        self._one_at_a_time = threading.Lock()
        self._not_taken_back: StorageError | None = None
        self.torn_bytes = self._log.cut_torn_line()
        """Bytes of an unfinished last line that a crash had left; cut off."""

    def position(self) -> LogPosition:
        """No line that is not yet appended can stand before it."""
        return self._log.position

    @property
    def broken(self) -> bool:
        """No write will work before a restart."""
        return self._log.broken or self._not_taken_back is not None

    def append(self, lines: bytes, check_lease: Callable[[], None]) -> Range:
        """Write lines, readable at once. DiskFullError or StorageError: none of them is there.

        So it is with what `check_lease` raises, where it does so before or after the lines are written.
        """
        if not lines:
            end = self._log.position
            return Range(end.file, end.offset, end.offset)
        with self._one_at_a_time:  # what is taken back is the end of the log
            if self._not_taken_back is not None:
                raise StorageError(*self._not_taken_back.args)
            check_lease()
            end = self._log.append(lines)
            start = end.offset - len(lines)
            try:
                check_lease()
            except PhotonError:
                self._take_back(LogPosition(end.file, start))
                raise
        return Range(end.file, start, end.offset)

    def sync(self, written: Range) -> None:
        """Return when the range is durable. Threads that wait together share one fdatasync."""
        if self._fsync:
            self._log.sync(LogPosition(written.file, written.end))

    def _take_back(self, start: LogPosition) -> None:
        """Cut the log, durably. StorageError leaves it broken: the lines may stand.

        It goes on in a new file: places that were given out or synced meanwhile must not come again.
        """
        try:
            self._log.truncate(start)
            self._log.rotate()  # syncs the file it leaves
        except StorageError as error:
            self._not_taken_back = error
            raise

    def prepare(self, earliest: LogPosition, latest: LogPosition) -> None:
        """See that all lines that were written after `earliest` will be found, also by the next start.

        CorruptStateError if a file is missing: lines might be written a second time.
        """
        current = self._log.position
        there = {*self._log.file_numbers()}
        missing = [n for n in range(earliest.file, max(current.file, latest.file) + 1) if n not in there]
        if missing:
            raise CorruptStateError(
                f"{self._log.path(missing[0])} is missing, and lines of unfinished batches may stand in it; "
                "put it back, or move the joiner's intents away and let recovery find what was not written"
            )
        if current < latest:
            # A power cut took lines that were not synced. What comes now must stand after `latest`, or the
            # next start would not look for it.
            self._log.rotate()

    def count(self, wanted: Container[bytes], start: LogPosition, but: Iterable[Range]) -> Counter[bytes]:
        """How often each wanted line (no newline) stands after `start`, outside of the ranges in `but`."""
        found: Counter[bytes] = Counter()
        end = self._log.position
        for number in self._log.file_numbers():
            if not start.file <= number <= end.file:
                continue
            path = self._log.path(number)
            with storage_errors(path):
                size = path.stat().st_size
                low = start.offset if number == start.file else 0
                skipped = sorted((r.start, r.end) for r in but if r.file == number and r.end > r.start)
                for gap in _gaps(low, size, skipped):
                    found.update(line for line in _lines(path, *gap) if line in wanted)
        return found

    def finish_append(self) -> None:
        """Return when no append is under way. To be called before the process ends itself."""
        with self._one_at_a_time:
            pass

    def close(self) -> None:
        with self._one_at_a_time:
            self._log.close()


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
