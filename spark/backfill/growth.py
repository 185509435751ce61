"""What logs have grown by, as numbered files of ranges that Spark follows: each is made once and stays so.

    HOME/follow/looked.json      how far each log is given out, and the number of the last file of ranges
    HOME/follow/ranges/N.json    ranges of logs (RANGE); Spark deletes what it has read

`looked.json` has the last file's ranges too and is written first, so a kill between the two leaves none out.
A log is known by its name. One that was cut, or renamed so that another has its name, ends the run.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from photon.core.clock import Clock
from photon.core.disk import make_directory, read_json, storage_errors, write_file
from photon.core.errors import UsageError
from photon.logs.files import end_of_last_line, named_files
from photon.logs.packed import is_packed
from spark.backfill.job import FILES_MAX, LogInput
from spark.reading.paths import check_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RANGE: Final = (
    "side int, number int, name string, file_start long, size long, start long, end long, at_us long"
)
"""Of log `number` the lines from `start` to before `end`, as spark.reading.lines.Range has them."""
GIVEN_BYTES_MAX: Final = 512 << 20
"""In a file of ranges, so in a batch: more of a backlog is for the next ones."""
PIECE_BYTES: Final = 32 << 20
TICK_S: Final = 60.0
"""So often there is a file without a range where nothing grows: by its TICK Spark knows how late it is. The
`end` of one is 1 if all that there was is given out with it."""
ARCHIVE_AGE_S: Final = 10.0
"""An archive is read whole, once nobody has written to it for so long."""
TICK, PRIMARY, FOREIGN = -1, 0, 1


class Given(msgspec.Struct):
    """A log, and how much of it is given out."""

    name: str
    side: int
    size: int = 0


class Looked(msgspec.Struct):
    """`logs`: by their numbers; `number`, `at_us`, `ranges`: of the last file of ranges."""

    logs: list[Given] = []
    number: int = -1
    at_us: int = 0
    ranges: list[str] = []


def ranges_of(session: "SparkSession", directory: Path) -> "DataFrame":
    """What Spark follows: files of ranges that are whole, and deleted once they are read."""
    given = session.readStream.schema(RANGE).option("cleanSource", "delete")
    return given.option("pathGlobFilter", "*.json").json(str(directory.absolute()))


class Growth:
    """For one process. `patterns`: of each side's logs."""

    def __init__(
        self,
        home: Path,
        patterns: Sequence[Sequence[str]],
        clock: Clock,
        tick_s: float | None = None,
        reads: Callable[[int, str], bool] = lambda side, name: True,
        bytes_max: int = GIVEN_BYTES_MAX,
    ) -> None:
        """`tick_s`: a TICK is in each file of ranges, and there is one so often. `reads`: whether a side's
        file is read yet. CorruptStateError, StorageError."""
        self.ranges = home / "ranges"
        self._path = home / "looked.json"
        self._patterns, self._reads, self._bytes_max = patterns, reads, bytes_max
        self._clock, self._tick_s = clock, tick_s
        self._awaits = False
        """An archive, that it has not been written to for a while."""
        make_directory(self.ranges)
        self._looked = read_json(self._path, Looked) or Looked()
        self._numbers = {log.name: number for number, log in enumerate(self._looked.logs)}
        if self._looked.number >= 0:
            self._write()

    @property
    def logs(self) -> tuple[LogInput, ...]:
        """By their numbers."""
        return tuple(LogInput(log.name, log.size, "") for log in self._looked.logs)

    def look(self) -> bool:
        """Give out what is new: whether anything was. UsageError, StorageError."""
        looked, now_us = self._looked, self._clock.now_us()
        at_us = max(now_us, looked.at_us + 1)  # whatever a clock does, no row is late
        found = self._found()
        ranges, whole = self._pieces(found, at_us)
        tick_s = TICK_S if self._tick_s is None else self._tick_s
        if not ranges and now_us - looked.at_us < tick_s * 1e6:
            return False
        if not ranges or self._tick_s is not None:
            ranges.append(_line(TICK, 0, "", (0, 0, 0, int(whole and not self._awaits)), at_us))
        looked.number, looked.at_us, looked.ranges = looked.number + 1, at_us, ranges
        with storage_errors(self._path):
            write_file(self._path, msgspec.json.encode(looked))
        self._write()
        return True

    def _write(self) -> None:
        """The last file of ranges. Spark knows what it has read by its name."""
        path = self.ranges / f"{self._looked.number:010d}.json"
        with storage_errors(path):
            write_file(path, "".join(self._looked.ranges).encode())

    def _found(self) -> list[tuple[Given, int]]:
        """Logs that have more lines than were given out, and up to where."""
        grown: list[tuple[Given, int]] = []
        self._awaits = False
        for side, patterns in enumerate(self._patterns):
            for name in map(os.path.abspath, named_files(patterns)):
                check_name(name)
                if not self._reads(side, name):
                    continue
                with storage_errors(Path(name)), suppress(FileNotFoundError):  # it was deleted meanwhile
                    grown += self._grown(name, side)
        return grown

    def _grown(self, name: str, side: int) -> Iterable[tuple[Given, int]]:
        status, number = os.stat(name), self._numbers.get(name)
        given = Given(name, side) if number is None else self._looked.logs[number]
        if given.side != side:
            raise UsageError(f"{name} is named twice, for two kinds of events; name each log once")
        if status.st_size < given.size:
            raise UsageError(
                f"{name} has {status.st_size} bytes, and {given.size} of it were read: it was cut, or is "
                "another log by now; give each log a name of its own (clicks-2026-01-01.jsonl), or follow "
                "these by `photon join`"
            )
        end = status.st_size
        if end == given.size:
            return
        if is_packed(name):
            if given.size or self._clock.now_us() / 1e6 - status.st_mtime < ARCHIVE_AGE_S:
                self._awaits |= not given.size
                return
        else:
            with open(name, "rb", buffering=0) as file:
                end = end_of_last_line(file.fileno(), end)
        if end > given.size:
            if number is None:
                self._number(given)
            yield given, end

    def _number(self, given: Given) -> None:
        if len(self._looked.logs) == FILES_MAX:
            raise UsageError(f"more than {FILES_MAX} logs; begin anew under another --datacenter")
        self._numbers[given.name] = len(self._looked.logs)
        self._looked.logs.append(given)

    def _pieces(self, found: list[tuple[Given, int]], at_us: int) -> tuple[list[str], bool]:
        """Of each log in its turn, so that all advance; what is given out counts at once. And whether that is
        all there is."""
        left = self._bytes_max
        pieces: list[str] = []
        while found and left > 0:
            more = []
            for given, end in found:
                start = given.size
                given.size = end if is_packed(given.name) else self._cut(given.name, start, end)
                left -= given.size - start
                place = (start, given.size, start, given.size)
                pieces.append(_line(given.side, self._numbers[given.name], given.name, place, at_us))
                if given.size < end:
                    more.append((given, end))
                if left <= 0:
                    return pieces, (given, end) == found[-1] and not more
            found = more
        return pieces, True

    @staticmethod
    def _cut(name: str, start: int, end: int) -> int:
        """The end of a piece, after a whole line."""
        if end - start <= PIECE_BYTES:
            return end
        with open(name, "rb") as file:
            file.seek(start + PIECE_BYTES - 1)
            file.readline()
            return min(file.tell(), end)


def _line(side: int, number: int, name: str, place: tuple[int, int, int, int], at_us: int) -> str:
    fields = ("file_start", "size", "start", "end")
    row = {"side": side, "number": number, "name": name, "at_us": at_us}
    row |= dict(zip(fields, place, strict=True))
    return msgspec.json.encode(row).decode() + "\n"
