"""What logs have grown by, as numbered files of ranges that Spark follows: each is made once and stays so.

    HOME/follow/looked.json      how far each log is given out, and the number of the last file of ranges
    HOME/follow/ranges/N.json    ranges of logs (RANGE); Spark deletes what it has read

`looked.json` has the last file's ranges too and is written first, so a kill between the two leaves none out.
A log is known by device and inode and by what was given out of it, whatever its name is by now; what another
log with its name has is given out from its start. One that was cut ends the run.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from photon.core.clock import Clock
from photon.core.disk import make_directory, read_json, storage_errors, write_file
from photon.core.errors import UsageError
from photon.logs.files import Identity, end_of_last_line, named_files, names_by_inode, telling
from photon.logs.packed import is_packed
from spark.backfill.job import FILES_MAX, LogInput
from spark.reading.paths import check_name, escaped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark.reading.lines import Range

RANGE: Final = (
    "side int, number int, name string, file_start long, size long, start long, end long, at_us long, "
    "inode long, telling string"
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
Grown = tuple[int, str, Identity, int]
"""Number of a log, the name that it has now, which file that is; where its last whole line ends."""


class Given(msgspec.Struct):
    """A log, and how much of it is given out; `telling` of that."""

    name: str
    side: int
    identity: Identity = (0, 0)
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

    place = row["name"], row["size"], row["file_start"], row["number"]
    return Range(LogFile(*place, row["inode"], row["telling"]), row["start"], row["end"])


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
        shared: bool = False,
    ) -> None:
        """`tick_s`: a TICK is in each file of ranges, and there is one so often. `reads`: whether a side's
        file is read yet. `shared`: a log may be of several sides, and is given out for each.
        CorruptStateError, StorageError."""
        self.ranges = home / "ranges"
        self._path = home / "looked.json"
        self._patterns, self._reads, self._bytes_max = patterns, reads, bytes_max
        self._clock, self._tick_s, self._shared = clock, tick_s, shared
        self._awaits = False
        """Something that is there is left for a later look: as an archive that was just written to."""
        make_directory(self.ranges)
        self._looked = read_json(self._path, Looked) or Looked()
        self._names: dict[tuple[int, str], int] = {}
        self._identities: dict[tuple[int, Identity], int] = {}
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
        tick_s = TICK_S if self._tick_s is None else self._tick_s
        if not ranges and now_us - looked.at_us < tick_s * 1e6:
            return False
        if not ranges or self._tick_s is not None:
            whole = whole and not self._awaits
            ranges.append(_line(Given("", TICK), 0, (0, 0, 0, int(whole)), at_us))
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

    def _found(self) -> list[Grown]:
        """Logs that have more lines than were given out, and up to where."""
        grown: list[Grown] = []
        seen: set[int] = set()
        self._awaits = False
        for side, patterns in enumerate(self._patterns):
            for name in map(os.path.abspath, named_files(patterns)):
                check_name(name)
                if self._reads(side, name):
                    with self._passed_over(name):
                        status = os.stat(name)
                        number = self._known(name, side, status)
                        seen.add(number)
                        grown += self._grown(number, name, status)
        for number, name in self._renamed(seen):
            with self._passed_over(name):
                status = os.stat(name)
                if self._is(number, name, status):
                    grown += self._grown(number, name, status)
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

    def _known(self, name: str, side: int, status: os.stat_result) -> int:
        """The number of the log that this is, whatever its name was before. UsageError, OSError."""
        logs, identity, named = self._looked.logs, _identity(status), self._names.get((side, name))
        if not self._shared and (PRIMARY + FOREIGN - side, name) in self._names:
            raise UsageError(f"{name} is named twice, for two kinds of events; name each log once")
        number = self._identities.get((side, identity))
        if number is None or not self._is(number, name, status):
            number = named if named is not None and self._is_again(named, name, status) else None
        if number is None:
            if (number := len(logs)) == FILES_MAX:
                raise UsageError(f"more than {FILES_MAX} logs; begin anew under another --datacenter")
            logs.append(Given(name, side, identity))
        given = logs[number]
        if (given.name, given.identity) != (name, identity):
            if self._names.get((side, given.name)) == number:
                del self._names[side, given.name]
            given.name, given.identity = name, identity
        self._note(number)
        return number

    def _note(self, number: int) -> None:
        given = self._looked.logs[number]
        self._names[given.side, given.name] = self._identities[given.side, given.identity] = number

    def _is(self, number: int, name: str, status: os.stat_result) -> bool:
        """Whether this is that log, under its name or another. OSError."""
        given, identity = self._looked.logs[number], _identity(status)
        if (name, identity, status.st_size) == (given.name, given.identity, given.size):
            return True
        if status.st_size < given.size:
            return False
        return not given.telling or telling(name, given.size, identity) == given.telling

    def _is_again(self, number: int, name: str, status: os.stat_result) -> bool:
        """Whether a file with the log's name goes on where it was, though it is another by device and inode:
        a copy that replaced it. UsageError for one that was cut, OSError."""
        given, identity = self._looked.logs[number], _identity(status)
        if given.identity != identity:
            old = _names(os.path.dirname(name)).get(given.identity[1], name)
            return given.size > 0 and old == name and self._is(number, name, status)
        if not self._is(number, name, status):
            raise UsageError(
                f"{name} has {status.st_size} bytes, and {given.size} of it were read: it was cut, or is "
                "another log by now; rotate logs by renaming them, give each a name of its own "
                "(clicks-2026-01-01.jsonl), or follow these by `photon join`"
            )
        return True

    def _renamed(self, seen: Collection[int]) -> Iterator[tuple[int, str]]:
        """Of the logs that no pattern names now those that may have another name in their directory."""
        gone: dict[str, dict[int, str]] = {}
        for number, given in enumerate(self._looked.logs):
            if number not in seen:
                directory = os.path.dirname(given.name)
                if directory not in gone:
                    gone[directory] = _names(directory)
                name = gone[directory].get(given.identity[1], given.name)
                # Nothing is known of one that was not given out: its inode may be any file's by now.
                if name != given.name and (given.size or name.startswith(given.name)):
                    yield number, name

    def _grown(self, number: int, name: str, status: os.stat_result) -> Iterable[Grown]:
        given, end = self._looked.logs[number], status.st_size
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
            yield number, name, _identity(status), end

    def _pieces(self, found: list[Grown], at_us: int) -> tuple[list[str], bool]:
        """Of each log in its turn, so that all advance; what is given out counts at once. And whether that is
        all there is."""
        left = self._bytes_max
        pieces: list[str] = []
        while found and left > 0:
            more = []
            for one in found:
                number, name, identity, end = one
                given = self._looked.logs[number]
                start = given.size
                with self._passed_over(name):
                    size = end if is_packed(name) else self._cut(name, start, end)
                    given.telling = telling(name, size, identity)
                    given.size = size
                    left -= size - start
                    pieces.append(_line(given, number, (start, size, start, size), at_us))
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


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _names(directory: str) -> dict[int, str]:
    """By inode. StorageError."""
    with storage_errors(Path(directory)), suppress(FileNotFoundError):
        return names_by_inode(directory)
    return {}


def _line(given: Given, number: int, place: tuple[int, int, int, int], at_us: int) -> str:
    fields = ("file_start", "size", "start", "end")
    row: dict[str, object] = {"side": given.side, "number": number, "name": given.name, "at_us": at_us}
    row |= dict(zip(fields, place, strict=True))
    row |= {"inode": given.identity[1], "telling": given.telling}
    return msgspec.json.encode(row).decode() + "\n"
