"""What a task does with its ranges: whole lines in chunks, as Photon's own readers cut them.

On the executors; local files only.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from photon.core.chunks import Chunk, read_at, read_chunk
from photon.core.errors import StorageError
from photon.core.packed import is_packed, unpacked
from photon.core.settings import Logs
from spark.reading.ranges import Range


def chunks_of(one: Range, settings: Logs, unended: bool) -> Iterator[tuple[str, Chunk]]:
    """The lines of a range: the path that was read (of an archive, its unpacked copy), and a chunk.

    `unended`: a last line without its newline counts if it is a JSON object, as it always does in an
    archive. StorageError if the file can't be read.
    """
    try:
        if not is_packed(one.file.name):
            yield from _chunks(one.file.name, one, settings, unended)
            return
        with _unpacked(one.file.name) as (path, size):
            yield from _chunks(path, Range(one.file, one.start, size), settings, True, size)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{one.file.name} cannot be read ({reason}); see to it and ask again") from error


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
            if unended:
                line = read_at(path, offset, min(size - offset, settings.line_bytes_max))
                if is_object(line):
                    yield path, Chunk(offset, offset + len(line), line + b"\n")
            return
        offset = chunk.end
        yield path, chunk if chunk.end <= one.end else _cut(chunk, one.end)


def line_begins(path: str, start: int, size: int) -> int:
    """Where the first line begins that begins at `start` or later; `size` if none does."""
    if start <= 0:
        return 0
    at = start - 1
    while at < size:
        data = read_at(path, at, min(1 << 16, size - at))
        if not data:
            break
        newline = data.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += len(data)
    return size


def _cut(chunk: Chunk, end: int) -> Chunk:
    """Without the lines that begin at `end` or later: they are another range's."""
    stop = chunk.data.find(b"\n", max(0, end - 1 - chunk.start)) + 1
    if chunk.oversized or not stop:
        return chunk
    return Chunk(chunk.start, chunk.start + stop, chunk.data[:stop])


def is_object(line: bytes) -> bool:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return isinstance(msgspec.json.decode(line), dict)
    return False


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


def beginning(path: str, start: int, length: int) -> bytes:
    """Of a line that is too long to be kept whole."""
    with suppress(OSError), open(path, "rb", buffering=0) as log:
        return os.pread(log.fileno(), length, start)
    return b""
