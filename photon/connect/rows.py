"""Which row of which table a line of its copy is, for who complains of it.

Beside a copy stands `<its name>.rows`: where in it the rows of a batch begin, and which these are. It is no
more than a help: it is not synced, and where it is lost the copy is named.
"""

import contextlib
import operator
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from photon.connect.ports import Batch, shown
from photon.connect.uris import OBJECTS, parse_uri, table_of
from photon.core.disk import storage_errors
from photon.logs.files import read_at

_decode: Final = msgspec.json.Decoder(tuple[int, str, int]).decode


def rows_path(copy: Path) -> Path:
    return copy.with_suffix(".rows")


def note_rows(copy: Path, offset: int, batches: Sequence[Batch], source: str) -> None:
    """The batches are going to stand there, one after the other; of sources that are no tables nothing is
    noted. StorageError."""
    kind = parse_uri(source).scheme
    if kind not in ("csv", "parquet", *OBJECTS):
        return
    with storage_errors(rows_path(copy)), rows_path(copy).open("ab") as file:
        for batch in batches:
            name = shown(batch.partition)
            table = table_of(name) if kind in OBJECTS else kind
            begins = 2 if table == "csv" else 1  # people count the header, too
            row = batch.runs[0][0] + begins
            file.write(msgspec.json.encode((offset, name, row)) + b"\n")
            offset += len(batch.lines)


def place_of(file: str, offset: int) -> str:
    """A place in a log as a person knows it: table and row, where it is in a copy of one."""
    with contextlib.suppress(OSError, ValueError):
        begins = _begins(file, rows_path(Path(file)).stat().st_size)
        number = bisect_right(begins, offset, key=operator.itemgetter(0))
        if number:
            start, table, row = begins[number - 1]
            end = begins[number][0] if number < len(begins) else os.path.getsize(file)
            return f"{table}, row {row + bisect_left(_line_ends(file, start, end), offset):,}"
    return f"{file} at {offset}"


# Complaints come one after the other, of the same copies.
@lru_cache(maxsize=4)
def _begins(file: str, size: int) -> list[tuple[int, str, int]]:
    """As noted; `size`: of the notes, as of now. OSError."""
    begins: list[tuple[int, str, int]] = []
    for line in rows_path(Path(file)).read_bytes()[:size].splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            one = _decode(line)
            while begins and begins[-1][0] >= one[0]:
                begins.pop()  # of an append that did not get into the copy
            begins.append(one)
    return begins


@lru_cache(maxsize=4)
def _line_ends(file: str, start: int, end: int) -> list[int]:
    """Where in the file the newlines between are. OSError."""
    ends = np.flatnonzero(np.frombuffer(read_at(file, start, end - start), np.uint8) == ord("\n")) + start
    return ends.tolist()
