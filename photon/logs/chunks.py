"""Whole lines of a growing log file (paper 3.2)."""

import errno
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

HEAD_BYTES: Final = 1024
_DIGEST_BYTES: Final = 16

Identity = tuple[int, int]
"""Device and inode."""
Head = tuple[int, bytes]
"""How many bytes, and their digest."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of a file: `data` stood at `start`; reading goes on at `end` (past skipped bytes).

    `oversized`: instead of data, the line at `start` is longer than the bound and ends at `end`.
    `more`: there may be more bytes behind it already.
    """

    start: int
    end: int
    data: bytes
    oversized: bool = False
    more: bool = field(default=True, compare=False)


def whole_lines(data: bytes) -> int:
    """How many of the bytes are whole lines; 0 if the first one has no end yet."""
    return data.rfind(b"\n") + 1


def digest(data: bytes) -> bytes:
    """What a head or a tail of a file is known by."""
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def fingerprint(path: str, length: int, identity: Identity | None = None, start: int = 0) -> bytes:
    """Digest of `length` bytes from `start` on. `identity` as in read_chunk."""
    return digest(read_at(path, start, length, identity))


def read_at(path: str, start: int, length: int, identity: Identity | None = None) -> bytes:
    """Up to `length` bytes from `start` on. OSError; ESTALE as read_chunk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(fd, path, 0, identity, None)
        return os.pread(fd, length, start)
    finally:
        os.close(fd)


def read_chunk(
    path: str,
    offset: int,
    chunk_bytes: int,
    line_bytes_max: int,
    identity: Identity | None = None,
    head: Head | None = None,
    tail: bytes = b"",
) -> Chunk | None:
    """The whole lines from `offset` on, at most `chunk_bytes` (a longer one comes alone), or None.

    A partly written last line is left until it is whole. OSError as `open` and `read` raise it; ESTALE if
    `identity` is given and `path` names another file, if `head` is given and the file no longer begins so,
    if `tail` does not stand before `offset`, or if the file is shorter than that.
    """
    step = min(chunk_bytes, line_bytes_max)  # so that a longer line never hides in a chunk
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = _check(fd, path, offset, identity, head)
        if tail and os.pread(fd, len(tail), offset - len(tail)) != tail:
            raise OSError(errno.ESTALE, "the file was cut and has grown again", path)
        # Room for what is there, not for a whole chunk: most growth is little.
        data = os.pread(fd, step if size is None else min(step, size - offset), offset)
        end = whole_lines(data)
        if end:
            more = len(data) == step or end < len(data)
            return Chunk(offset, offset + end, data[:end] if end < len(data) else data, more=more)
        if len(data) < step:
            return None
        return _long_line(fd, offset, data, step, line_bytes_max)
    finally:
        os.close(fd)


def read_unended_line(path: str, offset: int, line_bytes_max: int, identity: Identity | None = None) -> bytes:
    """What stands at the end of a file after its last newline, for logs that will grow no more."""
    return read_at(path, offset, line_bytes_max, identity)


def _check(fd: int, path: str, offset: int, identity: Identity | None, head: Head | None) -> int | None:
    """OSError ESTALE if this is not the file that was read until now, as far as a look can tell.

    Log rotation renames files under their readers, and some writers start over in the same file. The file's
    size, if it was looked at.
    """
    if identity is None and head is None:
        return None
    status = os.fstat(fd)
    if identity is not None and (status.st_dev, status.st_ino) != identity:
        raise OSError(errno.ESTALE, "another file has this name now", path)
    if status.st_size < offset:
        raise OSError(errno.ESTALE, "the file is shorter than what was read of it", path)
    if head is not None and head[0] and digest(os.pread(fd, head[0], 0)) != head[1]:
        raise OSError(errno.ESTALE, "the file was overwritten", path)
    return status.st_size


def _long_line(fd: int, offset: int, data: bytes, chunk_bytes: int, line_bytes_max: int) -> Chunk | None:
    parts, length = [data], len(data)
    while True:
        more = os.pread(fd, chunk_bytes, offset + length)
        if not more:
            return None
        newline = more.find(b"\n") + 1
        length += newline or len(more)
        if length <= line_bytes_max:
            parts.append(more[:newline] if newline else more)
        else:
            parts.clear()
        if newline:
            return Chunk(offset, offset + length, b"".join(parts), oversized=not parts)
