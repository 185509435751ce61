"""Completes files of the joined log: closes those that are old, lists those that no intent needs (or first
makes Parquet of them).

Until then a file may still lose lines (joiner.output) or be read by the next start. Each step can be taken
again by the next start: a file that was made and not listed is made anew; of one that is listed, the lines
that are still there are removed.

The thread is of low priority by resting as long as it works, unless files pile up. The kernel's own
priorities would not do: a thread that is put aside while it holds the interpreter's lock holds up all others.
"""

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from joiner.intents import IntentJournal
from joiner.output import Checkpoint, JoinedLog
from joiner.output_files import PARQUET, CompleteFile, Root, numbers_in
from photon.core.clock import Background, Backoff
from photon.core.disk import replace, storage_errors
from photon.core.errors import PhotonError, StorageError, told
from photon.core.settings import Joiner
from photon.logs import parquet
from photon.logs.writer import LogPosition, RotatingLog

PACE: Final = Backoff(1.0, 60.0)
"""Between two steps; longer after those that failed."""
FINISH_S_MAX: Final = 600.0
"""What is not complete so long after the joined log's end is left to the next start."""
_BLOCK_BYTES: Final = 1 << 20
_RESTS: Final = 9
"""After a block comes a rest of so many times the time it took, unless files pile up: requests come first."""
_REST_S_MAX: Final = 1.0
_STOP_WAIT_S: Final = 60.0
_TEMPORARY: Final = ".tmp"
_LOG: Final = -1  # where roots have their numbers


class _ClosedError(Exception):
    """The joiner closes, or has no time left: let go of everything at once."""


class Completer:
    """A thread of its own; `step` and `finish` are what it does, for those who have no thread."""

    def __init__(
        self,
        output: JoinedLog,
        journal: IntentJournal,
        settings: Joiner,
        notice: Callable[[str], None],
        checkpoint: Checkpoint,
        needed_from: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`needed_from`: the first file that somebody else needs as it is; None: nobody needs any."""
        self._output = output
        self._journal = journal
        self._to_parquet = settings.output_format == "parquet"
        self._file_s = settings.output_file_s
        self._notice = notice
        self._checkpoint = checkpoint
        self._needed_from = needed_from
        self._next = [min(root.log.file_numbers()) for root in output.roots]
        self._troubles: dict[int, str] = {}
        self._failures = 0
        self._one_step = threading.Lock()
        self._closed = False
        self._until = float("inf")
        self._blocks = 0
        self._rested = time.monotonic()
        self._work = Background("completer", self.step)

    def start(self) -> None:
        self._work.start()

    def close(self) -> None:
        """End at once; the next start goes on."""
        self._closed = True
        self._work.stop(_STOP_WAIT_S)

    def finish(self) -> None:
        """Complete all that the log holds, after `JoinedLog.end`. What fails is told, and left, and so is
        what there is no time for (FINISH_S_MAX)."""
        self._until = time.monotonic() + FINISH_S_MAX
        try:
            if not self._work.stop(max(0.0, FINISH_S_MAX) + _STOP_WAIT_S):
                raise _ClosedError
            self.step()
        except _ClosedError:
            self._tell(_LOG, f"{self._waiting()} files took too long; they are left for the next start")

    def step(self) -> float:
        """Close the file if it is due, list what can be listed. Seconds until the next one."""
        with self._one_step:
            needed = 0
            with self._telling(_LOG):
                needed = self._close_what_is_due().file
            if (also := self._needed_from()) is not None:
                needed = min(needed, also)
            for place, root in enumerate(self._output.roots):
                with self._telling(place):  # in the order of their numbers: what is listed has no gap
                    while self._next[place] < needed:
                        self._complete(root, self._next[place])
                        self._next[place] += 1
            done = min(self._next)
            for number in [number for number in self._output.times if number < done]:
                del self._output.times[number]
            self._failures = self._failures + 1 if self._troubles else 0
            return PACE.delay_s(self._failures + 1)

    def status(self) -> dict[str, Any]:
        """`listed`: files in the first root's manifest; `waiting`: files, in all roots, that are closed and
        not yet listed; `progress` grows while one of them is worked on."""
        return {
            "file": self._output.position.file,
            "roots": [str(root.directory) for root in self._output.roots],
            "listed": len(self._output.roots[0].manifest.listed),
            "waiting": self._waiting(),
            "progress": self._blocks,
            "trouble": next(iter(self._troubles.values()), None),
        }

    def _close_what_is_due(self) -> LogPosition:
        """The place before which all is complete. StorageError."""
        if self._file_s:
            self._output.rotate_if_older(self._file_s)
        needed = self._journal.needed_from(lambda: self._output.position)
        if min(self._next) < needed.file:
            # An intent whose end a power cut takes is open again, and its lines are looked for.
            self._journal.sync_ends()
        return needed

    def _waiting(self) -> int:
        file = self._output.position.file
        return sum(max(0, file - number) for number in self._next)

    def _complete(self, root: Root, number: int) -> None:
        lines = root.log.path(number)
        rows = lines.with_suffix(PARQUET)
        listed = root.manifest.listed
        self._rested = time.monotonic()
        with storage_errors(lines):
            if lines.name in listed or not lines.exists():
                return
            if self._to_parquet and not lines.stat().st_size:
                lines.unlink()
                return
            if rows.name not in listed:
                convert = self._convert if self._to_parquet else self._entry
                root.manifest.add(convert(lines, number))
                self._checkpoint("listed")
            if rows.name in listed:
                lines.unlink()
                self._checkpoint("lines removed")

    def _convert(self, lines: Path, number: int) -> CompleteFile:
        rows = lines.with_suffix(PARQUET)
        temporary = rows.with_name(rows.name + _TEMPORARY)
        count = parquet.convert(lines, temporary, self._rest)
        expected = self._sums(lines)[1]
        assert count == expected, f"{count} rows made of {expected} lines"
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        self._checkpoint("converted")
        replace(temporary, rows)
        self._checkpoint("renamed")
        return self._entry(rows, number, count, lines.stat().st_size)

    def _entry(
        self, path: Path, number: int, rows: int | None = None, line_bytes: int | None = None
    ) -> CompleteFile:
        crc, newlines = self._sums(path)
        status = path.stat()
        opened_us, closed_us = self._output.times.get(number, (None, status.st_mtime_ns // 1_000))
        count = newlines if rows is None else rows
        return CompleteFile(path.name, status.st_size, count, f"{crc:08x}", opened_us, closed_us, line_bytes)

    def _sums(self, path: Path) -> tuple[int, int]:
        """CRC-32 and number of newlines."""
        crc = newlines = 0
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                crc = zlib.crc32(block, crc)
                newlines += block.count(b"\n")
                self._rest()
        return crc, newlines

    def _rest(self) -> None:
        now_s = time.monotonic()
        if self._closed or now_s >= self._until:
            raise _ClosedError
        self._blocks += 1
        if self._output.position.file - min(self._next) <= 1:
            self._work.rest(min(_REST_S_MAX, _RESTS * (now_s - self._rested)))
        self._rested = time.monotonic()

    @contextmanager
    def _telling(self, place: int) -> Iterator[None]:
        """Whatever fails: without this thread the files would stay unlisted in silence."""
        try:
            yield
        except _ClosedError:
            raise
        except Exception as error:
            tells_where = isinstance(error, PhotonError) or place == _LOG
            where = "" if tells_where else f"{self._output.roots[place].log.path(self._next[place])}: "
            self._tell(place, where + told(error))
        else:
            self._troubles.pop(place, None)

    def _tell(self, place: int, trouble: str) -> None:
        if self._troubles.get(place) != trouble:
            self._troubles[place] = trouble
            self._notice(f"a file of the joined log could not be completed: {trouble}")


@dataclass(frozen=True, slots=True)
class SettledLog:
    """A root as photon.connect.publishing.PublishedLog: lines whose intents have ended, durably. No crash and
    no fence takes such lines back."""

    root: Root
    output: JoinedLog
    journal: IntentJournal

    @property
    def files(self) -> RotatingLog:
        return self.root.log

    def end(self) -> LogPosition:
        return self.journal.needed_from(lambda: self.output.position)

    def sync_end(self) -> None:
        self.journal.sync_ends()

    def beginning(self) -> LogPosition:
        """Behind what is Parquet, whose lines nobody has any more."""
        rows = (name for name in list(self.root.manifest.listed) if name.endswith(PARQUET))
        first = 1 + max(numbers_in(rows), default=-1)
        numbers = [n for n in self.root.log.file_numbers() if n >= first]
        return LogPosition(min(numbers, default=first), 0)

    def check_whole(self, at: LogPosition, upto: int, sink: str) -> None:
        """Also of a file that became Parquet, which happens while the sink is not named."""
        for entry in list(self.root.manifest.listed.values()):
            (number,) = numbers_in([entry.file])
            has = at.offset if number == at.file else 0
            if not at.file <= number < upto or (entry.line_bytes or entry.bytes) <= has:
                continue
            what, mend = "was taken away", "bring it back until it has"
            if entry.line_bytes:
                what = "became Parquet, in a run without this sink,"
                mend = "load its rows and those of later Parquet files by other means, and name another sink"
            raise StorageError(
                f"{self.root.directory / entry.file} {what} before {sink} had all of it; {mend}"
            )
