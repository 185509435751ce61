"""Sinks: files that have each line once, and a manifest of those that are complete.

Lines are durable in the store before a file gets them, so what a reader sees is never taken back. Lines
of weak productions (paper 6.1.3) leave a growing file again if their commit never was. Once a file is synced
past them, lines leave the store in the commit that notes how far the file is; after a crash the file gets
from the store what it lacks.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from millwheel.engine.wheel import Lines
from millwheel.topology import LogSink
from photon.core.columns import count_lines
from photon.core.disk import storage_errors, write_file
from photon.core.errors import UsageError
from photon.logs.writer import LogPosition, RotatingLog

_encode: Final = msgspec.msgpack.encode
_place: Final = msgspec.msgpack.Decoder(tuple[int, int, str]).decode
_json: Final = msgspec.json.Encoder()
_BLOCK_BYTES: Final = 1 << 20


class Complete(msgspec.Struct, frozen=True):
    """A file that never changes again, as a manifest lists it."""

    file: str
    bytes: int
    lines: int


_entry: Final = msgspec.json.Decoder(Complete).decode


class SinkFiles:
    """The files of one sink and one lane. For one thread, but for `sync`."""

    def __init__(
        self, sink: LogSink, name: str, lane: int, place: bytes, left: Iterable[tuple[int, bytes]]
    ) -> None:
        """`place`: as noted, at first by `begin`; `left`: lines in the store by number. StorageError."""
        self._directory = Path(sink.directory)
        self._stem = f"{name}-{lane}"
        position = LogPosition(*_place(place)[:2])
        self._log = RotatingLog(self._directory, self._stem, sink.file_bytes_max, position.file, True)
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
        """The store has it: files before the place never change again, and are listed."""
        file = _place(place)[0]
        if file == self._listed:
            return
        self._listed = file
        there = [number for number in self._log.file_numbers() if number < file]
        self._entries = {
            number: self._entries.get(number) or complete(self._log.path(number)) for number in there
        }
        write_manifest(self._manifest, list(self._entries.values()))

    def close(self) -> None:
        self._log.close()

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


def complete(path: Path) -> Complete:
    """What is in it. StorageError."""
    with storage_errors(path), open(path, "rb") as file:
        lines = sum(count_lines(block) for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
        return Complete(path.name, file.tell(), lines)


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
