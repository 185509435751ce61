"""Log lines on the executors: which bytes of which local files a task reads, in chunks, and Photon's parser.

Packed columns become Arrow arrays without a Python statement for each row.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from joiner.output_files import PARQUET
from photon.core.errors import StorageError
from photon.core.ids import ID_BYTES
from photon.core.settings import Logs, Settings
from photon.logs.files import Chunk, read_at, read_chunk, telling, unended_line
from photon.logs.formats import ForeignBatch, Malformed, PrimaryBatch, json_lines
from photon.logs.packed import is_packed, unpacked
from photon.logs.parquet import parquet_lines
from spark.reading.paths import local_name

Parse = Callable[[str, str, Chunk], Iterable[Any]]
"""Name of the log, path that was read ("": none), chunk -> record batches. For one thread."""
MakeParse = Callable[[], Parse]
"""Called once in each task."""

_JOINED_LINE_BYTES_MAX: Final = 128 << 20
"""A primary and a foreign event, each of the longest line, and what an adapter adds."""
_OPEN_BYTES: Final = 1 << 16
"""What opening a file costs, as bytes read: so that ten thousand little ones are no single task."""
_SPLIT_BYTES_MIN: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log on a disk that every executor sees: its first `size` bytes are read, from `start` on.

    What a log that grows has gained since is left for the next time. `number`: the caller's own. `inode`: of
    one that may be rotated meanwhile, and is read under the name that it has in its directory by then;
    `telling` (photon.logs.files) of what is read: by it a copy that was put back is found, too.
    """

    name: str
    size: int
    start: int = 0
    number: int = 0
    inode: int = 0
    telling: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """Of a file the lines that begin at `start` or later and before `end`."""

    file: LogFile
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LogSet:
    """What is to be read, and what becomes of it.

    `paths` as in spark.reading.paths; `make` is called once in each task, and parses chunks. `unended`: a
    last line without its newline counts if it is a JSON object, as it always does in an archive.
    `make_for_parquet`: for joined logs, which may be Parquet.
    """

    paths: Sequence[str]
    settings: Settings
    make: MakeParse
    unended: bool
    make_for_parquet: MakeParse | None = None

    def apart(self) -> "tuple[LogSet, LogSet]":
        """Those of lines, and those of Parquet."""
        if self.make_for_parquet is None:
            return self, replace(self, paths=[])
        tables = [path for path in self.paths if path.endswith(PARQUET)]
        lines = [path for path in self.paths if not path.endswith(PARQUET)]
        return replace(self, paths=lines), replace(self, paths=tables, make=self.make_for_parquet)


def local_file(name: str) -> LogFile:
    """As it is now, whatever is rotated before it is read. StorageError if it can't be looked at."""
    try:
        status = os.stat(name)
        return LogFile(name, status.st_size, inode=status.st_ino)
    except OSError as error:
        raise StorageError(f"{name} cannot be read ({error.strerror}); see to it and ask again") from error


def split_bytes(files: Iterable[LogFile], most: int, parallelism: int) -> int:
    """How much a task reads: `most`, or less where there would be fewer tasks than can run at a time."""
    total = sum(file.size - file.start + _OPEN_BYTES for file in files)
    return max(1, min(most, max(_SPLIT_BYTES_MIN, -(-total // max(1, parallelism)))))


def tasks_of(files: Sequence[LogFile], split: int) -> list[list[Range]]:
    """Each task's ranges, in the order of the files: about `split` bytes, of one large file or many small."""
    tasks: list[list[Range]] = []
    room = 0
    for file in files:
        for piece in _pieces(file, split):
            cost = piece.end - piece.start + _OPEN_BYTES
            if not tasks or cost > room:
                tasks.append([])
                room = split + _OPEN_BYTES
            tasks[-1].append(piece)
            room -= cost
    return tasks


def _pieces(file: LogFile, split: int) -> list[Range]:
    if file.start >= file.size:
        return []
    if is_packed(file.name) or file.size - file.start <= split:
        return [Range(file, file.start, file.size)]
    starts = range(file.start, file.size, split)
    return [Range(file, start, min(start + split, file.size)) for start in starts]


def chunks_of(one: Range, settings: Logs, unended: bool) -> Iterator[tuple[str, Chunk]]:
    """The records of a range: where they can be read again until the next (of an archive, its unpacked copy),
    and a chunk.

    `unended`: a last line without its newline counts if it is a JSON object, as it always does in an
    archive. StorageError if the file can't be read.
    """
    try:
        while not is_packed(name := _name_now(one.file)):
            with open(name, "rb") as log:
                path = f"/proc/self/fd/{log.fileno()}"  # of the same file, whatever is rotated meanwhile
                if _is_log(path, one.file):
                    yield from _chunks(path, one, settings, unended)
                    return
        with _unpacked(name) as (path, size):
            yield from _chunks(path, Range(one.file, one.start, size), settings, True, size)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{one.file.name} cannot be read ({reason}); see to it and ask again") from error


def _name_now(file: LogFile) -> str:
    """OSError; FileNotFoundError of one that has none any more, StorageError of one that can be put back."""
    with suppress(FileNotFoundError):
        if not file.inode or (os.stat(file.name).st_ino == file.inode and _holds(file.name, file)):
            return file.name
    directory = os.path.dirname(file.name) or "."
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.inode() != file.inode):
            if not file.telling and entry.inode() == file.inode:
                return entry.path
            with suppress(OSError):  # it is none of ours
                is_whole = file.telling and entry.is_file() and entry.stat().st_size >= file.size
                if is_whole and _holds(entry.path, file):
                    return entry.path
    if not file.telling:
        raise FileNotFoundError(errno.ENOENT, "it was replaced, or packed, meanwhile", file.name)
    raise StorageError(
        f"{file.name} was moved, packed, cut or deleted before its first {file.size} bytes were read; put it "
        f"back into {directory} as it was, under any name, and run the same command again; where no copy is "
        "left, begin anew, under another --datacenter or --work"
    )


def _is_log(path: str, file: LogFile) -> bool:
    """Whether that is it: its name may have been another's between two looks."""
    if file.inode and file.telling:
        return _holds(path, file)
    return not file.inode or os.stat(path).st_ino == file.inode


def _holds(path: str, file: LogFile) -> bool:
    """Whether it begins as the log did. One that is shorter is told apart where it is read."""
    if not file.telling or os.stat(path).st_size < file.size:
        return True
    return telling(path, file.size) == file.telling


def _chunks(
    path: str, one: Range, settings: Logs, unended: bool, size: int | None = None
) -> Iterator[tuple[str, Chunk]]:
    size = one.file.size if size is None else size
    held = os.stat(path).st_size
    if held < size:  # its missing lines would seem never to have been
        raise StorageError(
            f"{one.file.name} holds {held} bytes where {size} were listed: it was cut meanwhile, or this "
            "machine sees an old state of it; ask again"
        )
    offset = one.start if one.start == one.file.start else line_begins(path, one.start, size)
    while offset < one.end:
        # Never more than the size that was listed, so that every attempt reads the same of a growing file.
        step = min(settings.chunk_bytes, size - offset)
        chunk = read_chunk(path, offset, step, settings.line_bytes_max)
        if chunk is None or chunk.end > size:
            length = min(size - offset, settings.line_bytes_max)
            if unended and (line := unended_line(path, offset, length)) is not None:
                yield path, line
            return
        offset = chunk.end
        yield path, chunk if chunk.end <= one.end else _cut(chunk, one.end)


def line_begins(path: str, start: int, size: int) -> int:
    """Where the first line begins that begins at `start` or later; `size` if none does."""
    if start <= 0:
        return 0
    with open(path, "rb") as file:
        file.seek(start - 1)
        while (piece := file.readline(_PIECE_BYTES)) and not piece.endswith(b"\n"):
            pass
        return min(file.tell(), size)


def _cut(chunk: Chunk, end: int) -> Chunk:
    """Without the lines that begin at `end` or later: they are another range's."""
    stop = chunk.data.find(b"\n", max(0, end - 1 - chunk.start)) + 1
    if chunk.oversized or not stop:
        return chunk
    return Chunk(chunk.start, chunk.start + stop, chunk.data[:stop])


@contextmanager
def _unpacked(name: str) -> Iterator[tuple[str, int]]:
    """A copy of what is in an archive, for as long as the block; StorageError if it is damaged."""
    with tempfile.NamedTemporaryFile(prefix="photon-unpacked-") as copy:
        size = 0
        try:
            for piece in unpacked(name):
                copy.write(piece)
                size += len(piece)
        except FileNotFoundError:
            raise
        except Exception as error:  # each of the libraries has its own
            raise StorageError(
                f"{name}: not a whole archive ({error}); replace it or leave it out"
            ) from error
        copy.flush()
        yield copy.name, size


OVERSIZED_KEPT_BYTES: Final = 1024
"""Of a line that is longer than logs.line_bytes_max."""


class ChunkParser:
    """photon.logs.formats, for chunks of logs: `path` is what was read, places are offsets in the chunk. For
    one thread, as a packer of ids is."""

    def __init__(self, settings: Settings) -> None:
        self._lines = json_lines(settings)
        self._line_bytes_max = settings.logs.line_bytes_max

    def primary(self, path: str, chunk: Chunk) -> PrimaryBatch:
        batch = self._lines.parse_primary(b"" if chunk.oversized else chunk.data)
        batch.malformed.extend(self._oversized(path, chunk))
        return batch

    def foreign(self, path: str, chunk: Chunk) -> ForeignBatch:
        batch = self._lines.parse_foreign(b"" if chunk.oversized else chunk.data)
        batch.malformed.extend(self._oversized(path, chunk))
        return batch

    def _oversized(self, path: str, chunk: Chunk) -> Iterator[Malformed]:
        if chunk.oversized:
            reason = (
                f"line of {chunk.end - chunk.start} bytes, 'logs.line_bytes_max' is "
                f"{self._line_bytes_max}; only its beginning is kept here"
            )
            yield Malformed(0, chunk.data or read_at(path, chunk.start, OVERSIZED_KEPT_BYTES), reason)


def fixed_binary(column: bytes, width: int = ID_BYTES) -> Any:
    """width x N bytes -> a binary array of N values; the bytes are not copied."""
    count = len(column) // width
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(column)])


def batch_of(schema: Any, count: int, **columns: Any) -> Any:
    """A record batch of so many rows; a column that is not given is null."""
    nulls = {field.name: pa.nulls(count, field.type) for field in schema}
    return pa.RecordBatch.from_pydict(nulls | columns, schema=schema)


def rows_of_parquet(logs: LogSet, source: Any) -> Iterator[Any]:
    """What becomes of the rows of one file, as lines."""
    parse = logs.make()
    for data in parquet_lines(source):
        yield from parse("", "", Chunk(0, len(data), data))


def for_joined(settings: Settings) -> Settings:
    """With lines as long as joined ones may be."""
    return replace(settings, logs=replace(settings.logs, line_bytes_max=_JOINED_LINE_BYTES_MAX))


def log_files(paths: Sequence[str]) -> tuple[list[LogFile], list[str]]:
    """The files that Python reads, as they are now; and the other paths, for Spark. StorageError."""
    names = {path: local_name(path) for path in paths}
    files = [local_file(name) for name in names.values() if name is not None]
    return files, [path for path in paths if names[path] is None]


def rows_of_ranges(logs: LogSet, ranges: Sequence[Range]) -> Iterator[Any]:
    """What becomes of the lines of the ranges. StorageError as chunks_of."""
    parse = logs.make()
    for one in ranges:
        for path, chunk in chunks_of(one, logs.settings.logs, logs.unended):
            yield from parse(one.file.name, path, chunk)
