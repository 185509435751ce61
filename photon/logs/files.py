"""Log files: which there are, which of them is which, and their whole lines (paper 3.2).

A file is known by device, inode and a fingerprint of its head, not by its name: a rotated file that was
renamed goes on where it was; one that shrank or was replaced is another file and is read from its start
(the registry keeps its events from being joined twice).
"""

import contextlib
import dataclasses
import errno
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from photon.core.errors import StorageError, UsageError

HEAD_BYTES: Final = 1024
_DIGEST_BYTES: Final = 16
_TELLING_BYTES: Final = 4096
_MAGIC_BYTES: Final = 10
_MAGIC: Final = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<xz>\xfd7zXZ\0)|(?P<bzip2>BZh[1-9]1AY&SY)"
    rb"|(?P<zip>PK\x03\x04)|(?P<lz4>\x04\x22\x4d\x18)|(?P<parquet>PAR1)"
)
_NAMED: Final = {
    "gzip": "compressed by gzip: its name must end in .gz (mv FILE FILE.gz)",
    "zstd": "compressed by zstd: its name must end in .zst (mv FILE FILE.zst)",
    "parquet": "Parquet: read by a pattern that ends in .parquet, or as parquet://FILE",
}

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


def tail_of(data: bytes) -> bytes:
    """What a place is known by, of what stands before it: the last line, as long ones may end alike, and
    TAIL_BYTES at least; at most TAIL_BYTES_MAX."""
    line = data.rfind(b"\n", 0, -1) + 1
    return data[-min(TAIL_BYTES_MAX, max(TAIL_BYTES, len(data) - line)) :]


def tail_at(path: str, offset: int, identity: Identity) -> bytes:
    """`tail_of` what stands before the offset. OSError as read_at."""
    start = max(0, offset - TAIL_BYTES_MAX)
    return tail_of(read_at(path, start, offset - start, identity))


def telling(path: str, size: int, identity: Identity | None = None) -> str:
    """What a file's first `size` bytes are known by: a digest of their ends. OSError as read_at."""
    length = min(size, _TELLING_BYTES)
    ends = read_at(path, 0, length, identity) + read_at(path, size - length, length, identity)
    return blake2b(ends, digest_size=8).hexdigest()


def names_by_inode(directory: str) -> dict[int, str]:
    """Of the regular files in it; none where it is gone. OSError."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return {entry.inode(): entry.path for entry in entries if entry.is_file(follow_symlinks=False)}
    return {}


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
    searched: int = -1,
) -> Chunk | None:
    """The whole lines from `offset` on, at most `chunk_bytes` (a longer one comes alone), or None.

    A partly written last line is left until it is whole. The chunk starts later where a hole is before the
    line. `searched`: no newline stands between `offset` and there. OSError as `open` and `read` raise it;
    ESTALE if `identity` is given and `path` names another file, if `head` is given and the file no longer
    begins so, if `tail` does not stand before `offset`, or if the file is shorter than that; EBADMSG at the
    start of what is compressed or Parquet.
    """
    step = min(chunk_bytes, line_bytes_max)  # so that a longer line never hides in a chunk
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = _check(fd, path, offset, identity, head)
        if tail and os.pread(fd, len(tail), offset - len(tail)) != tail:
            raise OSError(errno.ESTALE, "the file was cut and has grown again", path)
        check_begins(fd, path, offset)
        # Room for what is there, not for a whole chunk: most growth is little.
        data = os.pread(fd, step if size is None else min(step, size - offset), offset)
        end = whole_lines(data)
        if not end and searched > offset + step and not _has_newline(fd, searched, step):
            return None  # what was looked through before is not read at each growth of a long line
        if end:
            more = len(data) == step or end < len(data)
            return Chunk(offset, offset + end, data[:end] if end < len(data) else data, more=more)
        if len(data) < step:
            return None
        return _long_line(fd, offset, data, step, line_bytes_max)
    finally:
        os.close(fd)


def check_begins(fd: int, path: str, offset: int) -> None:
    """OSError EBADMSG if it is to be read from its start and holds no lines there, by its first bytes."""
    if not offset and (kind := no_text(os.pread(fd, _MAGIC_BYTES, 0))):
        raise OSError(errno.EBADMSG, kind, path)


def no_text(first: bytes) -> str:
    """What a file is that begins so and holds no lines, and the mend; "" where it may hold some."""
    found = _MAGIC.match(first)
    if found is None:
        return ""
    kind = found.lastgroup or ""
    other = f"compressed by {kind}, which Photon does not read: unpack it, or use .gz or .zst"
    return _NAMED.get(kind, other)


def unended_line(path: str, offset: int, length: int, identity: Identity | None = None) -> Chunk | None:
    """The last line, which has no newline in the file and gets one, if it is a JSON object. OSError as
    read_at."""
    line = read_at(path, offset, length, identity)
    return Chunk(offset, offset + len(line), line + b"\n") if is_object(line) else None


def is_object(line: bytes) -> bool:
    """Whether it is one whole JSON object, behind any NULs."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return isinstance(msgspec.json.decode(line.lstrip(b"\0")), dict)
    return False


def end_of_last_line(fd: int, size: int) -> int:
    """Where a file of that size ends without what stands after its last newline."""
    position = size
    while position > 0:
        step = min(1 << 16, position)
        newline = os.pread(fd, step, position - step).rfind(b"\n")
        if newline >= 0:
            return position - step + newline + 1
        position -= step
    return 0


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


def _has_newline(fd: int, start: int, chunk_bytes: int) -> bool:
    while data := os.pread(fd, chunk_bytes, start):
        if b"\n" in data:
            return True
        start += len(data)
    return False


def _long_line(fd: int, offset: int, data: bytes, chunk_bytes: int, line_bytes_max: int) -> Chunk | None:
    """It begins behind any NULs: the hole that a cut left under its writer, or what a power cut zeroed."""
    start, length, more = offset, 0, data
    parts: list[bytes] = []
    while more:
        newline = more.find(b"\n") + 1
        piece = more[:newline] if newline else more
        if not length:
            start += len(piece) - len(piece := piece.lstrip(b"\0"))
        length += len(piece)
        if length <= line_bytes_max:
            parts.append(piece)
        else:
            parts.clear()
        if newline:
            return Chunk(start, start + length, b"".join(parts), oversized=not parts)
        more = os.pread(fd, chunk_bytes, start + length)
    return None


_ANY_DEPTH: Final = "**"


def as_glob(pattern: str) -> str:
    """The same, where what leads to the files, or is one, has brackets in its name: these are escaped.

    A part without `*` and `?` that is there by its very name means that.
    """
    parts = list(Path(pattern).parts) if "[" in pattern else []
    for n, part in enumerate(parts):
        if not glob.has_magic(part):
            continue
        above = [named.replace("[[]", "[") for named in parts[:n]]
        if "*" in part or "?" in part or not os.path.lexists(os.path.join(*above, part)):
            break
        parts[n] = glob.escape(part)
    return str(Path(*parts)) if parts else pattern


def check_patterns(patterns: Sequence[str]) -> None:
    """UsageError if a pattern can't ever match: its fixed leading directory is not there, or not for us."""
    if "" in patterns:
        raise UsageError("a pattern is empty; name the logs to read (`.` for the current directory)")
    for pattern in map(as_glob, patterns):
        parts = Path(pattern).parts
        fixed = Path(*parts[: _fixed_parts(parts)])
        try:
            is_there = fixed.exists()
        except PermissionError as error:
            raise UsageError(
                f"{fixed} cannot be looked at ({error.strerror}, from '{pattern}'); see to the permissions "
                "of the directories above it"
            ) from error
        if is_there and stat.S_ISFIFO(fixed.stat().st_mode):
            raise UsageError(
                f"{fixed} is a pipe, which can be read once only: pipe it into photon join and write - for it"
            )
        if not is_there and pattern == "-":
            raise UsageError(
                "standard input (-) is read by photon join alone, which keeps it in OUT/.photon/stdin: name "
                "that, or other log files"
            )
        if not is_there:
            kind = "file or directory" if not glob.has_magic(pattern) else "directory"
            raise UsageError(f"no such {kind}: {fixed} (from '{pattern}'); check the path or create it first")


def matching_files(
    pattern: str, directories: set[str] | None = None, closed: dict[str, str] | None = None
) -> Iterator[str]:
    """What a glob names, or what is in a directory; not yet looked at.

    `directories` gets those in which more may appear: all that were listed, or should have been. `closed`
    gets those that can't be listed or entered, and why: what is in them is not named.
    """
    pattern = str(Path(glob.escape(pattern)) / "*") if os.path.isdir(pattern) else as_glob(pattern)
    parts = Path(pattern).parts
    fixed = min(_fixed_parts(parts), len(parts) - 1)
    listed = set() if directories is None else directories
    root = str(Path(*parts[:fixed]))
    listed.add(root)  # also one that is not there yet
    return _named_below(root, parts[fixed:], listed, {} if closed is None else closed)


def _named_below(
    directory: str, pattern: tuple[str, ...], listed: set[str], closed: dict[str, str]
) -> Iterator[str]:
    """What the parts of a pattern name in the directory."""
    first, rest, names = pattern[0], pattern[1:], list[str]()
    try:
        names = fnmatch.filter(os.listdir(directory), first) if (wild := glob.has_magic(first)) else [first]
        os.stat(os.path.join(directory, "."))  # which takes the right to enter it
        listed.add(directory)
    except OSError as error:
        _note_closed(directory, error, closed)
        listed.update(closed.keys() & {directory})
    if first == _ANY_DEPTH:
        # glob itself walks in circles where a link leads to a directory above it.
        yield from _files_below(directory, (), pattern, _above(directory), listed, closed)
        return
    for name in names:
        path = name if directory == "." else os.path.join(directory, name)
        if name.startswith(".") and not first.startswith("."):
            continue
        if rest:
            yield from _named_below(path, rest, listed, closed)
        elif wild or os.path.lexists(path):
            yield path


def may_match(patterns: Sequence[str], name: str) -> bool:
    """Whether a file of this name (its last part) can be what one of the patterns means."""
    for pattern in patterns:
        last = os.path.basename(as_glob(pattern))
        if last in ("", _ANY_DEPTH) or os.path.isdir(pattern) or fnmatch.fnmatchcase(name, last):
            return True
    return False


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


def _fixed_parts(parts: Sequence[str]) -> int:
    """How many of a pattern's parts lead to the first that is a glob."""
    return next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))


def _leads_on(link: str, closed: dict[str, str]) -> bool:
    """Whether it leads to a directory; one that leads where nobody may look is noted."""
    try:
        return stat.S_ISDIR(os.stat(link).st_mode)
    except OSError as error:
        _note_closed(link, error, closed)
        return False


def _note_closed(directory: str, error: OSError, closed: dict[str, str]) -> None:
    """Not what is no directory or went this moment, nor the one that each file system of Linux has for its
    own use, closed to others."""
    gone = isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ELOOP
    if not gone and os.path.basename(directory) != "lost+found":
        closed[directory] = error.strerror or str(error)


def _above(directory: str) -> frozenset[tuple[int, int]]:
    """Identities of the directories above it: a link to one of them leads out of what the pattern means."""
    identities = set()
    for parent in Path(os.path.realpath(directory)).parents:
        with contextlib.suppress(OSError):
            status = os.stat(parent)
            identities.add((status.st_dev, status.st_ino))
    return frozenset(identities)


def _files_below(
    directory: str,
    path: tuple[str, ...],
    pattern: tuple[str, ...],
    above: frozenset[tuple[int, int]],
    visited: set[str],
    closed: dict[str, str],
) -> Iterator[str]:
    """What is no directory and matches; `path`, `above`: names and identities of directories passed."""
    try:
        status = os.stat(os.path.join(directory, "."))
        entries = list(os.scandir(directory))
    except OSError as error:
        _note_closed(directory, error, closed)
        visited.update(closed.keys() & {directory})
        return
    identity = status.st_dev, status.st_ino
    if identity in above:
        return
    visited.add(directory)
    hidden = any(part.startswith(".") for part in pattern)
    for entry in entries:
        inner = (*path, entry.name)
        if entry.name.startswith(".") and not hidden:
            continue
        if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and _leads_on(entry.path, closed)):
            yield from _files_below(entry.path, inner, pattern, above | {identity}, visited, closed)
        elif glob_matches(pattern, inner):
            yield entry.path


TAIL_BYTES: Final = 1024
TAIL_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A file as a scan found it: `path` is what is read, `name` what the user knows (they differ for .gz).

    `changed_ns`, `modified_ns`: times of the last change and write; a file whose every field is as before
    need not be looked into. `source`: device and inode of the file that the user knows; `device` and `inode`
    are of what is read.
    """

    path: str
    name: str
    device: int
    inode: int
    size: int
    changed_ns: int = 0
    source: Identity = (0, 0)
    modified_ns: int = 0


def seen_as(name: str, status: os.stat_result) -> SeenFile:
    """A plain file, or an archive as it is."""
    source = status.st_dev, status.st_ino
    return SeenFile(name, name, *source, status.st_size, status.st_ctime_ns, source, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class FileState:
    """What a reader remembers of a file; `offset` is the next byte to read, always at the start of a record.

    `head` is the digest of the first `head_bytes` bytes. `gone`: replaced, truncated or deleted since.
    `source` as in SeenFile. `tail`: digest of up to `tail_bytes` bytes before `tail_at`, a place that was
    read up to. Of an archive: `version` of its content, and the bytes in it (0: not unpacked yet). `size`:
    the most that it was known to hold when this was recorded.
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
    source: Identity = (0, 0)
    tail_at: int = 0
    tail: bytes = b""
    version: str = ""
    unpacked: int = 0
    size: int = 0
    tail_bytes: int = TAIL_BYTES


def shown(text: str) -> str:
    """A file's name, or what tells of one, as text that can be written anywhere.

    Names need not be UTF-8: a byte that is none becomes `\\xe9`, so that the file can be found by it.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def pack_file_state(state: FileState) -> bytes:
    """For the disk. Names of files need not be UTF-8."""
    names = os.fsencode(state.path), os.fsencode(state.name)
    return msgspec.msgpack.encode((*names, dataclasses.replace(state, path="", name="")))


def unpack_file_state(packed: bytes) -> FileState:
    """The reverse. msgspec.DecodeError if it is none."""
    path, name, state = msgspec.msgpack.decode(packed, type=tuple[bytes, bytes, FileState])
    return dataclasses.replace(state, path=os.fsdecode(path), name=os.fsdecode(name))


def find(
    patterns: Sequence[str],
    unreadable: Callable[[str, str], None] | None = None,
    directories: set[str] | None = None,
) -> list[SeenFile]:
    """The regular files that match the globs (`**` works), by name; a directory means the files in it.

    A pattern may match nothing yet; a file with several names counts once. Archives are not opened.
    `unreadable` is told name and reason of a file or a directory that can't be looked at, and the rest goes
    on; without it that is a StorageError. `directories` gets those in which more files may appear.
    """
    names: set[str] = set()
    refused: dict[str, str] = {}
    for pattern in patterns:
        names.update(matching_files(pattern, directories, refused))
    distinct: dict[Identity, SeenFile] = {}
    for name in sorted(names):
        try:
            status = os.stat(name)
        except FileNotFoundError:
            continue  # deleted since the listing
        except OSError as error:
            refused[name] = error.strerror or str(error)
            continue
        if stat.S_ISREG(status.st_mode):
            seen = seen_as(name, status)
            distinct.setdefault(seen.source, seen)
    for name, why in refused.items():
        reason = f"{name} cannot be read ({why}); see to its permissions"
        if unreadable is None:
            raise StorageError(reason)
        unreadable(name, reason)
    return list(distinct.values())


def named_files(patterns: Sequence[str]) -> list[SeenFile]:
    """The regular files that globs and directories name now, in order, one with several names once.

    UsageError for a pattern that can't ever match; StorageError for what can't be looked at.
    """
    check_patterns(patterns)
    return find(patterns)


def file_size(path: str, key: Identity) -> int | None:
    """Size of the file if it is still the one with this device and inode."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if (status.st_dev, status.st_ino) == key else None


def goes_on(seen: SeenFile, state: FileState, read: int) -> bool:
    """Whether it begins as the file of which `read` bytes were read, and what was read last stands where it
    stood. OSError; ESTALE if another file has its name by now.

    A file that was cut and has grown past that place may still have its head.
    """
    identity = seen.device, seen.inode
    if seen.size < max(read, state.tail_at, state.head_bytes):
        return False
    start = max(0, state.tail_at - state.tail_bytes)
    if state.tail_at and digest(read_at(seen.path, start, state.tail_at - start, identity)) != state.tail:
        return False
    return not state.head_bytes or digest(read_at(seen.path, 0, state.head_bytes, identity)) == state.head


def same_content(seen: SeenFile, state: FileState) -> bool:
    """Whether another file holds what was read as `state`: the same head, and the same last bytes. OSError.

    Files that merely begin alike do not: an event skipped is worse than one read twice.
    """
    return bool(state.tail_at and state.head_bytes) and goes_on(seen, state, state.tail_at)
