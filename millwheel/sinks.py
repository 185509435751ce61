"""Sinks: files that have each line once, and a manifest of those that are complete.

Lines are durable in the store before a file gets them, so what a reader sees is never taken back. Lines
of weak productions (paper 6.1.3) leave a growing file again if their commit never was. Once a file is synced
past them, lines leave the store in the commit that notes how far the file is; after a crash the file gets
from the store what it lacks.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from millwheel.engine.wheel import Lines
from millwheel.topology import LogSink
from photon.connect.publishing import Publisher
from photon.core.clock import Clock
from photon.core.disk import lines_in, storage_errors, write_file
from photon.core.errors import StorageError, UsageError
from photon.logs.writer import LogPosition, RotatingLog

_encode: Final = msgspec.msgpack.encode
_place: Final = msgspec.msgpack.Decoder(tuple[int, int, str]).decode
_json: Final = msgspec.json.Encoder()
_CLOSE_S: Final = 1.0


class Complete(msgspec.Struct, frozen=True):
    """A file that never changes again, as a manifest lists it."""

    file: str
    bytes: int
    lines: int


_entry: Final = msgspec.json.Decoder(Complete).decode


class SinkFiles:
    """The files of one sink and one lane; what of them is published is up to the place that is noted, for no
    crash takes back what stands before it (photon.connect.publishing.PublishedLog). For one thread, but for
    `sync` and what publishes."""

    def __init__(
        self, sink: LogSink, name: str, lane: int, place: bytes, left: Iterable[tuple[int, bytes]]
    ) -> None:
        """`place`: as noted, at first by `begin`; `left`: lines in the store by number. StorageError."""
        self._directory = Path(sink.directory)
        self._stem = f"{name}-{lane}"
        position = LogPosition(*_place(place)[:2])
        self._log = RotatingLog(self._directory, self._stem, sink.file_bytes_max, position.file, True)
        self._noted = position
        self._published_to = sink.published_to
        self.publisher: Publisher | None = None
        self._listed = -1
        self._manifest = self._directory / f"{self._stem}.manifest"
        listed = complete_files(self._manifest)
        self._entries = {_number_of(entry.file): entry for entry in listed}
        self._unsynced: list[int] = []
        self.noted(place)  # it may have been killed before it listed them
        self._take_up(position, list(left))

    @property
    def waiting(self) -> bool:
        """It has lines that are to be synced."""
        return bool(self._unsynced)

    def append(self, lines: Lines) -> None:
        """StorageError."""
        self._log.append(lines.lines)
        self._unsynced.append(lines.number)

    def begin_sync(self, end: bool = False) -> tuple[list[int], LogPosition]:
        """The numbers of the lines that the files have, and where they end. `end`: of the run, and of the
        file.
        """
        numbers, self._unsynced = self._unsynced, []
        if end and self._log.position.offset:
            self._log.rotate()
        return numbers, self._log.position

    def sync(self, position: LogPosition) -> bytes:
        """From any thread: all before it is durable, as the store is to note it. StorageError."""
        self._log.sync(position)
        return _encode((position.file, position.offset, str(self._directory)))

    def noted(self, place: bytes) -> None:
        """The store has it: files before the place never change again, and are listed. Those that somebody
        took away are, too, until all is published of them."""
        file, offset, _ = _place(place)
        if file != self._listed:
            self._listed = file
            there = [number for number in self._log.file_numbers() if number < file]
            entries = {
                number: self._entries.get(number) or complete(self._log.path(number)) for number in there
            }
            needed = self._needed_from()
            gone = {number: one for number, one in self._entries.items() if needed <= number < file}
            self._entries = dict(sorted({**gone, **entries}.items()))
            write_manifest(self._manifest, list(self._entries.values()))
        self._noted = LogPosition(file, offset)
        if self.publisher is not None:
            self.publisher.wake()

    def close(self) -> None:
        self._log.close()

    # What is published

    def publish(self, clock: Clock, drain: bool, notice: Callable[[str], None]) -> None:
        """From now on, if it is to be. `drain`: the logs grow no more. UsageError, StorageError."""
        if self._published_to:
            self.publisher = Publisher(self._published_to, self._stem, self, clock, drain, notice)
            self.publisher.start()

    @property
    def files(self) -> RotatingLog:
        return self._log

    def end(self) -> LogPosition:
        return self._noted

    def sync_end(self) -> None:
        """It is."""

    def beginning(self) -> LogPosition:
        return LogPosition(min(self._log.file_numbers(), default=0), 0)

    def check_whole(self, at: LogPosition, upto: int, sink: str) -> None:
        for number in range(at.file, upto):
            entry = self._entries.get(number)
            has = at.offset if number == at.file else 0
            if entry is None or entry.bytes > has:
                raise StorageError(
                    f"{self._log.path(number)} was taken away, and {sink} is not known to have all of it; "
                    "bring it back until it has, or name another sink"
                )

    def _needed_from(self) -> float:
        """The first file that is not published wherever it is to be."""
        if self.publisher is None:
            return 0 if self._published_to else math.inf
        needed = self.publisher.needed_from()
        return math.inf if needed is None else needed

    def _take_up(self, position: LogPosition, left: list[tuple[int, bytes]]) -> None:
        """What the files have of `left` stays, for a reader may be past it; what differs is cut."""
        begun = b""
        while left:
            number, lines = left[0]
            if position.offset and self._log.path(position.file + 1).exists():
                after = LogPosition(position.file + 1, 0)
                if self._has(position, lines) < len(lines) and self._has(after, lines):
                    position = after
            length = self._has(position, lines)
            position = LogPosition(position.file, position.offset + length)
            if length < len(lines):
                begun = lines[:length]
                break
            self._unsynced.append(number)
            del left[0]
        self._log.truncate(position)
        if begun:
            number, lines = left.pop(0)
            self._log.append(lines[len(begun) :], rotate=False)
            self._unsynced.append(number)
        for number, lines in left:
            self.append(Lines(self._stem, number, lines))

    def _has(self, position: LogPosition, lines: bytes) -> int:
        """How many bytes of `lines` stand there."""
        path = self._log.path(position.file)
        with storage_errors(path), open(path, "rb") as file:
            file.seek(position.offset)
            there = file.read(len(lines))
        if lines.startswith(there):
            return len(there)
        wrong = np.frombuffer(there, np.uint8) != np.frombuffer(lines, np.uint8, len(there))
        return int(wrong.argmax())


Opened = Mapping[tuple[str, int], SinkFiles]
"""By sink and lane."""


def published(opened: Opened) -> list[dict[str, Any]]:
    """Where each of them has got to, as Publisher.status; `stream`: whose lines."""
    publishers = [(name, files.publisher) for (name, _), files in opened.items()]
    return [{"stream": name, **one} for name, made in publishers if made for one in made.status()]


def end_publishing(opened: Opened, clock: Clock) -> None:
    """What is under way may end in _CLOSE_S."""
    publishers = [files.publisher for files in opened.values() if files.publisher]
    until = clock.monotonic() + _CLOSE_S
    for publisher in publishers:
        publisher.stop()
    for publisher in publishers:
        publisher.close(max(0.0, until - clock.monotonic()))


def complete(path: Path) -> Complete:
    """What is in it. StorageError."""
    with storage_errors(path):
        return Complete(path.name, path.stat().st_size, lines_in(path))


def write_manifest(manifest: Path, entries: Sequence[Complete]) -> None:
    """StorageError."""
    with storage_errors(manifest):
        write_file(manifest, _json.encode_lines(entries))


def begin(sink: LogSink, name: str, lane: int) -> bytes:
    """The place that the store is to note before there is any file. UsageError for a directory in which
    another run has written, or this one before it was given another.
    """
    stem = f"{name}-{lane}"
    if files_of(Path(sink.directory), name, str(lane)):
        raise UsageError(
            f"{sink.directory}: has {stem}-*.jsonl of another run, or of this one before it had "
            "another directory; move them away, or name another directory"
        )
    return _encode((0, 0, str(Path(sink.directory))))


def is_elsewhere(place: bytes, sink: LogSink, name: str, lane: int) -> bool:
    """Whether the place is in another directory, which still has its files: new code names this one."""
    former = Path(_place(place)[2])
    differs = former.resolve() != Path(sink.directory).resolve() and str(former) != str(Path(sink.directory))
    return differs and bool(files_of(former, name, str(lane)))


def files_of(directory: Path, sink: str, lane: str = r"\d+") -> list[Path]:
    """The files of a sink there, of a lane or all; none of a sink whose name only begins like its."""
    named = re.compile(rf"{re.escape(sink)}-{lane}-\d+\.jsonl")
    return sorted(path for path in directory.glob("*.jsonl") if named.fullmatch(path.name))


def complete_files(manifest: Path) -> list[Complete]:
    """What it lists; files that somebody took away since are among them. StorageError."""
    with storage_errors(manifest), contextlib.suppress(FileNotFoundError):
        return [_entry(line) for line in manifest.read_bytes().splitlines()]
    return []


def _number_of(file: str) -> int:
    return int(file.rpartition("-")[2].partition(".")[0])
