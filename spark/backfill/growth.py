"""What logs have grown by, as numbered files of ranges that Spark follows: each is made once and stays so.

    HOME/follow/looked.json      how far each log is given out, and the number of the last file of ranges
    HOME/follow/ranges/N.json    ranges of logs (RANGE); Spark deletes what it has read

`looked.json` has the last file's ranges too and is written first, so a kill between the two leaves none out.
A log is known by device and inode and by what was given out of it, whatever its name is by now; what another
log with its name has is given out from its start. One that was cut ends the run.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from photon.core.clock import Clock
from photon.core.disk import make_directory, read_json, storage_errors, write_file, write_json
from photon.core.errors import UsageError
from photon.logs.files import SeenFile, end_of_last_line, named_files, names_by_inode, seen_as, telling
from photon.logs.packed import is_packed
from spark.backfill.job import FILES_MAX, LogInput
from spark.reading.paths import check_name, escaped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark.reading.lines import Range

RANGE: Final = (
    "side int, number int, name string, start long, end long, at_us long, inode long, telling string"
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
Grown = tuple[int, SeenFile, int]
"""Number of a log, the file that it is now; where its last whole line ends."""


class Given(msgspec.Struct):
    """A log, and how much of it is given out; `telling` of that."""

    name: str
    side: int
    identity: tuple[int, int] = (0, 0)
    size: int = 0
    telling: str = ""


class Looked(msgspec.Struct):
    """`logs`: by their numbers; `number`, `at_us`, `ranges`: of the last file of ranges."""

    logs: list[Given] = []
    number: int = -1
    at_us: int = 0
    ranges: list[str] = []


def ranges_of(session: "SparkSession", directory: Path) -> "DataFrame":
    """What Spark follows: files of ranges that are whole, and deleted once they are read."""
    given = session.readStream.schema(RANGE).option("cleanSource", "delete")
    return given.option("pathGlobFilter", "*.json").json(escaped(str(directory.absolute())))


def range_of(row: Mapping[str, Any]) -> "Range":
    """As an executor reads it."""
    from spark.reading.lines import LogFile, Range

    start, end = row["start"], row["end"]
    return Range(LogFile(row["name"], end, start, row["number"], row["inode"], row["telling"]), start, end)


class Growth:
    """For one process. `patterns`: of each side's logs."""

    def __init__(
        self,
        home: Path,
        patterns: Sequence[Sequence[str]],
        clock: Clock,
        ticks: bool = False,
        reads: Callable[[int, str], bool] = lambda side, name: True,
        bytes_max: int = GIVEN_BYTES_MAX,
        shared: bool = False,
    ) -> None:
        """`ticks`: each look makes a file of ranges, with a TICK. `reads`: whether a side's file is read
        yet. `shared`: a log may be of several sides, and is given out for each.
        CorruptStateError, StorageError."""
        self.ranges = home / "ranges"
        self._path = home / "looked.json"
        self._patterns, self._reads, self._bytes_max = patterns, reads, bytes_max
        self._clock, self._ticks, self._shared = clock, ticks, shared
        self._awaits = False
        """Something that is there is left for a later look: as an archive that was just written to."""
        make_directory(self.ranges)
        self._looked = read_json(self._path, Looked) or Looked()
        self._numbers: dict[tuple[int, object], int] = {}
        """Of logs, by side and name, and by side and identity."""
        for number in range(len(self._looked.logs)):
            self._note(number)
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
        if not ranges and not self._ticks and now_us - looked.at_us < TICK_S * 1e6:
            return False
        if not ranges or self._ticks:
            whole = whole and not self._awaits
            ranges.append(_line(Given("", TICK), 0, 0, int(whole), at_us))
        looked.number, looked.at_us, looked.ranges = looked.number + 1, at_us, ranges
        write_json(self._path, looked)
        self._write()
        return True

    def _write(self) -> None:
        """The last file of ranges. Spark knows what it has read by its name."""
        path = self.ranges / f"{self._looked.number:010d}.json"
        with storage_errors(path):
            write_file(path, "".join(self._looked.ranges).encode())

    def _found(self) -> list[Grown]:
        """Logs that have more lines than were given out, and up to where."""
        self._awaits = False
        found: dict[int, SeenFile] = {}
        for side, patterns in enumerate(self._patterns):
            for named in named_files(patterns):
                file = replace(named, name=os.path.abspath(named.name))
                check_name(file.name)
                if self._reads(side, file.name):
                    with self._passed_over(file.name):
                        found[self._known(side, file)] = file
        found |= self._renamed(found)
        grown = []
        for number, file in found.items():
            with self._passed_over(file.name):
                if (end := self._end(number, file)) > self._looked.logs[number].size:
                    grown.append((number, file, end))
        return grown

    @contextmanager
    def _passed_over(self, name: str) -> Iterator[None]:
        """What was deleted or renamed this moment is for the next look. StorageError."""
        with storage_errors(Path(name)):
            try:
                yield
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                self._awaits = True

    def _known(self, side: int, file: SeenFile) -> int:
        """The number of the log that this is, whatever its name was before. UsageError, OSError."""
        logs, named = self._looked.logs, self._numbers.get((side, file.name))
        if not self._shared and (PRIMARY + FOREIGN - side, file.name) in self._numbers:
            raise UsageError(f"{file.name} is named twice, for two kinds of events; name each log once")
        number = self._numbers.get((side, file.source))
        if number is None or not self._is(number, file):
            number = named if named is not None and self._is_copy(named, file) else None
        if number is None:
            if (number := len(logs)) == FILES_MAX:
                raise UsageError(f"more than {FILES_MAX} logs; begin anew under another --datacenter")
            logs.append(Given(file.name, side, file.source))
        given = logs[number]
        if given.name != file.name and self._numbers.get((side, given.name)) == number:
            del self._numbers[side, given.name]
        given.name, given.identity = file.name, file.source
        self._note(number)
        return number

    def _note(self, number: int) -> None:
        given = self._looked.logs[number]
        self._numbers[given.side, given.name] = self._numbers[given.side, given.identity] = number

    def _is(self, number: int, file: SeenFile) -> bool:
        """Whether this is that log, under its name or another. OSError."""
        given = self._looked.logs[number]
        if (file.name, file.source, file.size) == (given.name, given.identity, given.size):
            return True
        if file.size < given.size:
            return False
        return not given.telling or telling(file.name, given.size, file.source) == given.telling

    def _is_copy(self, number: int, file: SeenFile) -> bool:
        """Whether a file with the log's name goes on where it was, though it is another by device and inode:
        a copy that replaced it. UsageError for one that was cut, OSError."""
        given = self._looked.logs[number]
        if given.identity == file.source:
            raise UsageError(
                f"{file.name} has {file.size} bytes, and {given.size} of it were read: it was cut, or is "
                "another log by now; rotate logs by renaming them, give each a name of its own "
                "(clicks-2026-01-01.jsonl), or follow these by `photon join`"
            )
        old = names_by_inode(os.path.dirname(file.name)).get(given.identity[1], file.name)
        return given.size > 0 and old == file.name and self._is(number, file)

    def _renamed(self, seen: Collection[int]) -> dict[int, SeenFile]:
        """Of the logs that no pattern names now those that have another name in their directory."""
        names, found = cache(names_by_inode), {}
        for number, given in enumerate(self._looked.logs):
            if number not in seen:
                with self._passed_over(given.name):
                    name = names(os.path.dirname(given.name)).get(given.identity[1], given.name)
                    # Nothing is known of one that was not given out: its inode may be any file's by now.
                    if name != given.name and (given.size or name.startswith(given.name)):
                        file = seen_as(name, os.stat(name))
                        if self._is(number, file):
                            found[number] = file
        return found

    def _end(self, number: int, file: SeenFile) -> int:
        """Up to where the log can be given out. OSError."""
        given = self._looked.logs[number].size
        if file.size == given:
            return given
        if not is_packed(file.name):
            with open(file.name, "rb", buffering=0) as log:
                return end_of_last_line(log.fileno(), file.size)
        is_new = not given and self._clock.now_us() / 1e6 - file.modified_ns / 1e9 >= ARCHIVE_AGE_S
        self._awaits |= not given and not is_new
        return file.size if is_new else given

    def _pieces(self, found: list[Grown], at_us: int) -> tuple[list[str], bool]:
        """Of each log in its turn, so that all advance; what is given out counts at once. And whether that is
        all there is."""
        left = self._bytes_max
        pieces: list[str] = []
        while found and left > 0:
            more = []
            for one in found:
                number, file, end = one
                given = self._looked.logs[number]
                start = given.size
                with self._passed_over(file.name):
                    size = end if is_packed(file.name) else self._cut(file.name, start, end)
                    given.telling = telling(file.name, size, file.source)
                    given.size = size
                    left -= size - start
                    pieces.append(_line(given, number, start, size, at_us))
                    if size < end:
                        more.append(one)
                if left <= 0:
                    return pieces, one == found[-1] and not more
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


def _line(given: Given, number: int, start: int, end: int, at_us: int) -> str:
    """As RANGE has it."""
    row = {"side": given.side, "number": number, "name": given.name, "start": start, "end": end}
    row |= {"at_us": at_us, "inode": given.identity[1], "telling": given.telling}
    return msgspec.json.encode(row).decode() + "\n"
