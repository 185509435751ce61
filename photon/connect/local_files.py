"""CSV and Parquet files on disks as sources.

A file must be whole when it gets its name: write it under another and rename it.
"""

import contextlib
import glob
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from photon.connect.ports import Fields
from photon.connect.tables import csv_rows, delimiter_of, parquet_rows
from photon.connect.uris import Uri
from photon.connect.whole_files import Opened, WholeFiles
from photon.logs.files import matching_files

_STILL_S: Final = 10.0
"""So long a file that was read must not have changed before it is read anew: else one that grows is, at each
look."""


def make_csv(uri: Uri, fields: Fields) -> WholeFiles:
    """Of `csv://GLOB`, or a pattern that ends in `.csv` or `.csv.gz`. Option: `delimiter`."""
    delimiter = delimiter_of(uri, uri.take({"delimiter": ","})["delimiter"])
    return WholeFiles(uri.text, LocalFiles(uri.path), csv_rows(delimiter), fields)


def make_parquet(uri: Uri, fields: Fields) -> WholeFiles:
    """Of `parquet://GLOB`, or a pattern that ends in `.parquet`."""
    uri.take({})
    return WholeFiles(uri.text, LocalFiles(uri.path), parquet_rows, fields)


class LocalFiles:
    """photon.connect.whole_files.Shelf. A version is size and time."""

    look_every_s = 1.0

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._found: dict[str, str] = {}
        self._closed: dict[str, str] = {}
        """Directories that can't be looked into, as of the last look, and why."""
        self._told = ""

    def find(self) -> Mapping[str, str]:
        found, closed = dict[str, str](), dict[str, str]()
        magic = glob.has_magic(self._pattern)
        paths = sorted(matching_files(self._pattern, closed=closed)) if magic else [self._pattern]
        for path in paths:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode):
                    may_grow = path in self._found and abs(time.time() - status.st_mtime) <= _STILL_S
                    found[path] = self._found[path] if may_grow else _version_of(status)
        told = [f"{name} cannot be read ({why})" for name, why in closed.items() if name not in self._closed]
        self._told = f"{'; '.join(told)}; see to its permissions" if told else ""
        self._found, self._closed = found, closed
        return found

    def told(self) -> str:
        return self._told

    def open(self, name: str, following: Iterator[str]) -> Opened:
        file = Path(name).open("rb")  # noqa: SIM115
        self._found[name] = _version_of(os.fstat(file.fileno()))
        return Opened(self._found[name], file)

    def has(self, name: str) -> bool:
        return os.path.exists(name)

    def close(self) -> None:
        pass


def _version_of(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"
