"""Sinks: files that have each line once, and a manifest of those that are complete.

Lines are durable in the store before a file gets them, so what a reader sees is never taken back. Once a file
is synced past them they leave the store, in the commit that notes how far the file is; after a crash the file
is cut to what was noted, and gets the rest again.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from millwheel.engine.wheel import Lines
from millwheel.topology import LogSink
from photon.core.columns import count_lines
from photon.core.disk import storage_errors, write_file
from photon.core.errors import UsageError
from photon.logs.writer import LogPosition, RotatingLog

_encode: Final = msgspec.msgpack.encode
_place: Final = msgspec.msgpack.Decoder(tuple[int, int]).decode


class SinkFiles:
    """The files of one sink and one lane. For one thread, but for `sync`."""

    def __init__(
        self, sink: LogSink, name: str, lane: int, place: bytes | None, left: Iterable[tuple[int, bytes]]
    ) -> None:
        """`place`: as noted, None for a run that begins; `left`: lines in the store by number.

        UsageError for a directory in which another run has written.
        """
        self._directory = Path(sink.directory)
        self._stem = f"{name}-{lane}"
        if place is None and any(self._directory.glob(f"{self._stem}-*.jsonl")):
            raise UsageError(
                f"{self._directory}: has {self._stem}-*.jsonl of another run; move them away, "
                "or name another directory"
            )
        position = LogPosition(*_place(place)) if place is not None else LogPosition(0, 0)
        self._log = RotatingLog(self._directory, self._stem, sink.file_bytes_max, first=position.file)
        self._log.truncate(position)
        self._listed = -1
        self._unsynced: list[int] = []
        if place is not None:
            self.noted(place)  # it may have been killed before it listed them
        for number, lines in left:
            self._append(number, lines)

    @property
    def waiting(self) -> bool:
        """It has lines that are to be synced."""
        return bool(self._unsynced)

    def append(self, lines: Lines) -> None:
        """StorageError."""
        self._append(lines.number, lines.lines)

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
        return _encode((position.file, position.offset))

    def noted(self, place: bytes) -> None:
        """The store has it: files before the place never change again, and are listed."""
        file = _place(place)[0]
        if file == self._listed:
            return
        self._listed = file
        entries: list[dict[str, Any]] = []
        for number in self._log.file_numbers():
            path = self._log.path(number)
            if number < file:
                with storage_errors(path):
                    data = path.read_bytes()
                entries.append({"file": path.name, "bytes": len(data), "lines": count_lines(data)})
        path = self._directory / f"{self._stem}.manifest"
        with storage_errors(path):
            write_file(path, b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))

    def close(self) -> None:
        self._log.close()

    def _append(self, number: int, lines: bytes) -> None:
        self._log.append(lines)
        self._unsynced.append(number)


def first_place() -> bytes:
    return _encode((0, 0))
