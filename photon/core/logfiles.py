"""Growing log files: which there are, which of them is which, and their whole lines (paper 3.2).

A file is known by device, inode and a fingerprint of its head, not by its name: a rotated file that was
renamed goes on where it was; one that shrank or was replaced is another file and is read from its start
(the registry keeps its events from being joined twice).
"""

import errno
import fnmatch
import glob
import gzip
import hashlib
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from photon.core.errors import StorageError, UsageError

HEAD_BYTES: Final = 1024

_PackedFileState = tuple[bytes, bytes, int, int, int, int, int, bytes, bool]
_ANY_DEPTH: Final = "**"


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as a scan found it: `path` is what is read, `name` what the user knows (they differ for .gz).

    `changed_ns`: time of the last change; a file whose every field is as before need not be looked into.
    """

    path: str
    name: str
    device: int
    inode: int
    size: int
    changed_ns: int = 0


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


def pack_file_state(state: FileState) -> bytes:
    """For the disk. Names of files need not be UTF-8."""
    rest = (state.number, state.device, state.inode, state.offset, state.head_bytes, state.head, state.gone)
    return msgspec.msgpack.encode((os.fsencode(state.path), os.fsencode(state.name), *rest))


def unpack_file_state(packed: bytes) -> FileState:
    """The reverse. msgspec.DecodeError if it is none."""
    path, name, number, *rest = msgspec.msgpack.decode(packed, type=_PackedFileState)
    return FileState(number, os.fsdecode(path), os.fsdecode(name), *rest)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of a file: `data` stood at `start`; reading goes on at `end` (past blank or skipped bytes).

    `oversized`: instead of data, the line at `start` is longer than the bound and ends at `end`.
    """

    start: int
    end: int
    data: bytes
    oversized: bool = False


def scan(
    patterns: Sequence[str], spool: Path, unreadable: Callable[[str, str], None] | None = None
) -> list[SeenFile]:
    """The regular files that match the globs (`**` works), by name; a directory means the files in it.

    A pattern may match nothing yet; a file with several names counts once. A .gz file is unpacked once into
    `spool` and read from there. `unreadable` is told name and reason of a file that can't be read, and the
    rest goes on; without it that is a StorageError.
    """
    found: dict[str, SeenFile] = {}
    for pattern in patterns:
        for name in matching_files(pattern):
            if name in found:
                continue
            try:
                seen = _look_at(name, spool)
            except FileNotFoundError:
                continue  # deleted since the listing
            except StorageError as error:
                if unreadable is None:
                    raise
                unreadable(name, str(error))
                continue
            if seen is not None:
                found[name] = seen
    distinct: dict[tuple[int, int], SeenFile] = {}
    for _, seen in sorted(found.items()):
        distinct.setdefault((seen.device, seen.inode), seen)
    return list(distinct.values())


def _look_at(name: str, spool: Path) -> SeenFile | None:
    """None for what is no regular file."""
    try:
        status = os.stat(name)
        if not stat.S_ISREG(status.st_mode):
            return None
        path = name
        if name.endswith(".gz"):
            path = _unpacked(name, status, spool)
            status = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{name} cannot be read ({error.strerror}); see to its permissions") from error
    return SeenFile(path, name, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


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


def matching_files(pattern: str) -> Iterable[str]:
    """What a glob names, or what is in a directory; not yet looked at."""
    if os.path.isdir(pattern):
        pattern = str(Path(glob.escape(pattern)) / "*")
    parts = Path(pattern).parts
    if _ANY_DEPTH not in parts:
        return glob.iglob(pattern)
    # glob itself walks in circles where a link leads to a directory above it.
    depth = parts.index(_ANY_DEPTH)
    roots = glob.iglob(str(Path(*parts[:depth]))) if depth else (".",)
    return (name for root in roots for name in _files_below(root, (), parts[depth:], frozenset()))


def _files_below(
    directory: str, path: tuple[str, ...], pattern: tuple[str, ...], above: frozenset[tuple[int, int]]
) -> Iterator[str]:
    """What is no directory and matches; `path`, `above`: names and identities of directories passed."""
    try:
        status = os.stat(directory)
        entries = list(os.scandir(directory))
    except OSError:
        return
    identity = status.st_dev, status.st_ino
    if identity in above:
        return
    hidden = any(part.startswith(".") for part in pattern)
    for entry in entries:
        inner = (*path, entry.name)
        if entry.name.startswith(".") and not hidden:
            continue
        if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):
            yield from _files_below(entry.path, inner, pattern, above | {identity})
        elif glob_matches(pattern, inner):
            yield entry.path


def glob_matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether glob would find the path, part by part; `**`: any parts, but only a dot finds a dot."""
    if not pattern:
        return not path
    first, rest = pattern[0], pattern[1:]
    if first == _ANY_DEPTH:
        shown = next((n for n, part in enumerate(path) if part.startswith(".")), len(path))
        return any(glob_matches(rest, path[skipped:]) for skipped in range(shown + 1))
    if not path or (path[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatch.fnmatchcase(path[0], first) and glob_matches(rest, path[1:])


def _unpacked(name: str, status: os.stat_result, spool: Path) -> str:
    """The unpacked copy of a .gz file; made once for each content (inode, size, time of change)."""
    tag = f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    # Not named after the file: under another name it is the same file still.
    target = spool / f"{hashlib.blake2b(tag.encode(), digest_size=12).hexdigest()}.log"
    if target.exists():
        return str(target)
    broken = target.with_name(f"{target.name}.broken")
    if broken.exists():  # tried once for each content, not at every scan
        raise StorageError(broken.read_text("utf-8"))
    # A spool has one owner: what a killed one left is written over.
    partial = target.with_name(f"{target.name}.partial")
    try:
        spool.mkdir(parents=True, exist_ok=True)
        with gzip.open(name, "rb") as packed, partial.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
            plain.flush()
            os.fsync(plain.fileno())  # else a power cut may leave an empty file under the final name
        partial.replace(target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        partial.unlink(missing_ok=True)
        message = f"{name}: not a whole gzip file ({error}); replace it or leave it out"
        broken.write_text(message, "utf-8")
        raise StorageError(message) from error
    except OSError as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError):
            raise
        raise StorageError(f"{name}: cannot be unpacked into {spool} ({error.strerror})") from error
    return str(target)


def fingerprint(path: str, length: int, identity: tuple[int, int] | None = None) -> bytes:
    """Digest of the first `length` bytes. `identity` as in read_chunk."""
    with open(path, "rb", buffering=0) as file:
        _check_identity(file.fileno(), path, identity)
        return hashlib.blake2b(os.pread(file.fileno(), length, 0), digest_size=16).digest()


def _check_identity(fd: int, path: str, identity: tuple[int, int] | None) -> None:
    """OSError ESTALE if `path` names another file by now (log rotation renames files under their readers)."""
    if identity is not None:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != identity:
            raise OSError(errno.ESTALE, "another file has this name now", path)


def recognise(seen: SeenFile, known: Mapping[tuple[int, int], FileState]) -> FileState | None:
    """The state of a file seen before, under whatever name; None for one to be read from its start."""
    state = known.get((seen.device, seen.inode))
    if state is None or seen.size < state.offset:
        return None
    if state.head_bytes and fingerprint(seen.path, state.head_bytes) != state.head:
        return None
    return state


def read_chunk(
    path: str, offset: int, chunk_bytes: int, line_bytes_max: int, identity: tuple[int, int] | None = None
) -> Chunk | None:
    """The whole lines from `offset` on, at most `chunk_bytes` (a longer line comes alone), or None.

    A partly written last line is left until it is whole. OSError as `open` and `read` raise it; ESTALE if
    `identity` (device, inode) is given and `path` names another file.
    """
    step = min(chunk_bytes, line_bytes_max)  # so that a longer line never hides in a chunk
    with open(path, "rb", buffering=0) as file:
        _check_identity(file.fileno(), path, identity)
        data = os.pread(file.fileno(), step, offset)
        end = data.rfind(b"\n") + 1
        if end:
            return Chunk(offset, offset + end, data[:end] if end < len(data) else data)
        if len(data) < step:
            return None
        return _long_line(file.fileno(), offset, data, step, line_bytes_max)


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


def read_unended_line(
    path: str, offset: int, line_bytes_max: int, identity: tuple[int, int] | None = None
) -> bytes:
    """What stands at the end of a file after its last newline, for logs that will grow no more."""
    with open(path, "rb", buffering=0) as file:
        _check_identity(file.fileno(), path, identity)
        return os.pread(file.fileno(), line_bytes_max, offset)
