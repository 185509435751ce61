"""Files that a task of a backfill writes, for the driver to publish."""

import os
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

import msgspec

from joiner import parquet
from joiner.output_files import PARQUET

_WRITE_BYTES: Final = 4 << 20


class Staged(msgspec.Struct, frozen=True):
    """A file that waits to be published: its name in the staging directory, what the manifest will say."""

    name: str
    bytes: int
    lines: int
    crc32: str


class StagedFile:
    """Made when something is written; `lines` in it."""

    def __init__(self, path: Path, fsync: bool, opened: ExitStack) -> None:
        self._path = path
        self._fsync = fsync
        self._opened = opened
        self._file: IO[bytes] | None = None
        self._crc = 0
        self._bytes = 0
        self.lines = 0

    def write(self, data: bytes, lines: int) -> None:
        if not data:
            return
        if self._file is None:
            self._file = self._opened.enter_context(self._path.open("xb", buffering=_WRITE_BYTES))
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._bytes += len(data)
        self.lines += lines

    def close(self, as_parquet: bool = False) -> Staged | None:
        """None if nothing was written."""
        if self._file is None:
            return None
        self._file.flush()
        if as_parquet:
            return self._converted()
        self._sync(self._file)
        return Staged(self._path.name, self._bytes, self.lines, f"{self._crc:08x}")

    def _converted(self) -> Staged:
        rows = self._path.with_suffix(PARQUET)
        count = parquet.convert(self._path, rows)
        assert count == self.lines, f"{count} rows made of {self.lines} lines"
        self._path.unlink()
        crc = size = 0
        with rows.open("rb") as file:
            while block := file.read(_WRITE_BYTES):
                crc, size = zlib.crc32(block, crc), size + len(block)
            self._sync(file)
        return Staged(rows.name, size, count, f"{crc:08x}")

    def _sync(self, file: IO[bytes]) -> None:
        if self._fsync:
            os.fsync(file.fileno())
