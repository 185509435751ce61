"""Growing log files: which there are, which of them is which, and their whole lines (paper 3.2).

A file is known by device, inode and a fingerprint of its head, not by its name: a rotated file that was
renamed goes on where it was; one that shrank or was replaced is another file and is read from its start
(the registry keeps its events from being joined twice).
"""

import glob
import gzip
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from photon.core.errors import StorageError, UsageError

HEAD_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as a scan found it: `path` is what is read, `name` what the user knows (they differ for .gz)."""

    path: str
    name: str
    device: int
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class FileState:
    """What a reader remembers of a file; `offset` is the next byte to read, always at the start of a line.

    `head` is the digest of the first `head_bytes` bytes. `gone`: replaced, truncated or deleted since.
    """

    number: int
    path: str
    name: str
    device: int
    inode: int
    offset: int = 0
    head_bytes: int = 0
    head: bytes = b""
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of a file: `data` stood at `start`; reading goes on at `end` (past blank or skipped bytes).

    `oversized`: instead of data, the line at `start` is longer than the bound and ends at `end`.
    """

    start: int
    end: int
    data: bytes
    oversized: bool = False


def scan(patterns: Sequence[str], spool: Path) -> list[SeenFile]:
    """The regular files that match the globs (`**` works), by name; a directory means the files in it.

    A .gz file is unpacked once into `spool` and read from there. UsageError for a pattern without a
    wildcard that names nothing; a glob may match nothing yet.
    """
    found: dict[str, SeenFile] = {}
    for pattern in patterns:
        for name in _matches(pattern):
            if name in found:
                continue
            try:
                path = name if not name.endswith(".gz") else _unpacked(name, spool)
                status = os.stat(path)
            except FileNotFoundError:
                continue  # deleted since the listing
            found[name] = SeenFile(path, name, status.st_dev, status.st_ino, status.st_size)
    return [found[name] for name in sorted(found)]


def check_patterns(patterns: Sequence[str]) -> None:
    """UsageError if a pattern can't ever match: its fixed leading directory is not there."""
    for pattern in patterns:
        fixed = Path(pattern) if not glob.has_magic(pattern) else Path(_fixed_part(pattern))
        if not fixed.exists():
            kind = "file or directory" if not glob.has_magic(pattern) else "directory"
            raise UsageError(f"no such {kind}: {fixed} (from '{pattern}'); check the path or create it first")


def _fixed_part(pattern: str) -> str:
    parts = []
    for part in Path(pattern).parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return str(Path(*parts)) if parts else "."


def _matches(pattern: str) -> Iterable[str]:
    if Path(pattern).is_dir():
        pattern = str(Path(pattern) / "*")
    return (name for name in glob.iglob(pattern, recursive=True) if Path(name).is_file())


def _unpacked(name: str, spool: Path) -> str:
    """The unpacked copy of a .gz file; made once for each content (inode, size, time of change)."""
    status = os.stat(name)
    tag = f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    target = spool / f"{hashlib.blake2b(tag.encode(), digest_size=8).hexdigest()}-{Path(name).stem}"
    if not target.exists():
        spool.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            with gzip.open(name, "rb") as packed, partial.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            partial.unlink(missing_ok=True)
            raise StorageError(
                f"{name}: not a whole gzip file ({error}); replace it or leave it out"
            ) from error
        partial.replace(target)
    return str(target)


def fingerprint(path: str, length: int) -> bytes:
    """Digest of the first `length` bytes."""
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(length), digest_size=16).digest()


def recognise(seen: SeenFile, known: Mapping[tuple[int, int], FileState]) -> FileState | None:
    """The state of a file seen before, under whatever name; None for one to be read from its start."""
    state = known.get((seen.device, seen.inode))
    if state is None or seen.size < state.offset:
        return None
    if state.head_bytes and fingerprint(seen.path, state.head_bytes) != state.head:
        return None
    return state


def read_chunk(path: str, offset: int, chunk_bytes: int, line_bytes_max: int) -> Chunk | None:
    """The whole lines from `offset` on, at most `chunk_bytes` (a longer line comes alone), or None.

    A partly written last line is left until it is whole. OSError as `open` and `read` raise it.
    """
    with open(path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), chunk_bytes, offset)
        end = data.rfind(b"\n") + 1
        if end:
            return Chunk(offset, offset + end, data[:end])
        if len(data) < chunk_bytes:
            return None
        return _long_line(file.fileno(), offset, data, chunk_bytes, line_bytes_max)


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


def read_unended_line(path: str, offset: int, line_bytes_max: int) -> bytes:
    """What stands at the end of a file after its last newline, for logs that will grow no more."""
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), line_bytes_max, offset)
