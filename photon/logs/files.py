"""Log files: which there are, and which of them is which (paper 3.2).

A file is known by device, inode and a fingerprint of its head, not by its name: a rotated file that was
renamed goes on where it was; one that shrank or was replaced is another file and is read from its start
(the registry keeps its events from being joined twice).
"""

import contextlib
import fnmatch
import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from photon.core.errors import StorageError, UsageError
from photon.logs.chunks import HEAD_BYTES, Chunk, fingerprint, read_chunk, read_unended_line

# --- Patterns of log files: what they name, and in which directories that may appear.

_ANY_DEPTH: Final = "**"


def check_patterns(patterns: Sequence[str]) -> None:
    """UsageError if a pattern can't ever match: its fixed leading directory is not there."""
    for pattern in patterns:
        fixed = Path(pattern) if not glob.has_magic(pattern) else Path(_fixed_part(pattern))
        if not fixed.exists():
            kind = "file or directory" if not glob.has_magic(pattern) else "directory"
            raise UsageError(f"no such {kind}: {fixed} (from '{pattern}'); check the path or create it first")


def matching_files(pattern: str, directories: set[str] | None = None) -> Iterable[str]:
    """What a glob names, or what is in a directory; not yet looked at.

    `directories` gets those in which more may appear: all that were listed, or should have been.
    """
    if os.path.isdir(pattern):
        pattern = str(Path(glob.escape(pattern)) / "*")
    parts = Path(pattern).parts
    visited = set() if directories is None else directories
    if _ANY_DEPTH not in parts:
        if directories is not None:
            directories.update(_listed(parts))
        return glob.iglob(pattern)
    # glob itself walks in circles where a link leads to a directory above it.
    depth = parts.index(_ANY_DEPTH)
    visited.update(_listed(parts[: depth + 1]))
    roots = glob.iglob(str(Path(*parts[:depth]))) if depth else (".",)
    return (n for root in roots for n in _files_below(root, (), parts[depth:], _above(root), visited))


def named_files(patterns: Sequence[str]) -> list[str]:
    """The regular files that globs and directories name now, in order, one with several names once.

    UsageError for a pattern that can't ever match.
    """
    check_patterns(patterns)
    files: dict[tuple[int, int], str] = {}
    for name in sorted({name for pattern in patterns for name in matching_files(pattern)}):
        if os.path.isfile(name):
            status = os.stat(name)
            files.setdefault((status.st_dev, status.st_ino), name)
    return list(files.values())


def may_match(patterns: Sequence[str], name: str) -> bool:
    """Whether a file of this name (its last part) can be what one of the patterns means."""
    for pattern in patterns:
        last = os.path.basename(pattern)
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


def _fixed_part(pattern: str) -> str:
    parts = []
    for part in Path(pattern).parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return str(Path(*parts)) if parts else "."


def _listed(parts: Sequence[str]) -> Iterator[str]:
    """The directories that are listed for a pattern without `**` but at its end."""
    wild = (n for n, part in enumerate(parts) if glob.has_magic(part))
    for depth in range(next(wild, len(parts) - 1), len(parts)):
        above = str(Path(*parts[:depth]))
        if glob.has_magic(above):
            yield from filter(os.path.isdir, glob.iglob(above))
        else:
            yield above  # though it may not be there yet


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
    visited.add(directory)
    hidden = any(part.startswith(".") for part in pattern)
    for entry in entries:
        inner = (*path, entry.name)
        if entry.name.startswith(".") and not hidden:
            continue
        if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):
            yield from _files_below(entry.path, inner, pattern, above | {identity}, visited)
        elif glob_matches(pattern, inner):
            yield entry.path


__all__ = [
    "HEAD_BYTES",
    "Chunk",
    "FileState",
    "SeenFile",
    "check_patterns",
    "find",
    "fingerprint",
    "glob_matches",
    "matching_files",
    "pack_file_state",
    "read_chunk",
    "read_unended_line",
    "same_content",
    "same_head",
    "shown",
    "unpack_file_state",
]

Source = tuple[int, int]

TAIL_BYTES: Final = 1024


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
    source: Source = (0, 0)
    modified_ns: int = 0


@dataclass(frozen=True, slots=True)
class FileState:
    """What a reader remembers of a file; `offset` is the next byte to read, always at the start of a record.

    `head` is the digest of the first `head_bytes` bytes. `gone`: replaced, truncated or deleted since.
    `source` as in SeenFile. `tail`: digest of up to TAIL_BYTES bytes before `tail_at`, a place that was read
    up to. Of an archive: `version` of its content, and the bytes in it (0: not unpacked yet).
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
    source: Source = (0, 0)
    tail_at: int = 0
    tail: bytes = b""
    version: str = ""
    unpacked: int = 0


_PackedFileState = tuple[bytes, bytes, int, int, int, int, int, bytes, bool, Source, int, bytes, str, int]


def shown(text: str) -> str:
    """A file's name, or what tells of one, as text that can be written anywhere.

    Names need not be UTF-8: a byte that is none becomes `\\xe9`, so that the file can be found by it.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def pack_file_state(state: FileState) -> bytes:
    """For the disk. Names of files need not be UTF-8."""
    rest = (
        state.number,
        state.device,
        state.inode,
        state.offset,
        state.head_bytes,
        state.head,
        state.gone,
        state.source,
        state.tail_at,
        state.tail,
        state.version,
        state.unpacked,
    )
    return msgspec.msgpack.encode((os.fsencode(state.path), os.fsencode(state.name), *rest))


def unpack_file_state(packed: bytes) -> FileState:
    """The reverse. msgspec.DecodeError if it is none."""
    path, name, number, *rest = msgspec.msgpack.decode(packed, type=_PackedFileState)
    return FileState(number, os.fsdecode(path), os.fsdecode(name), *rest)


def find(
    patterns: Sequence[str],
    unreadable: Callable[[str, str], None] | None = None,
    directories: set[str] | None = None,
) -> list[SeenFile]:
    """The regular files that match the globs (`**` works), by name; a directory means the files in it.

    A pattern may match nothing yet; a file with several names counts once. Archives are not opened.
    `unreadable` is told name and reason of a file that can't be looked at, and the rest goes on; without it
    that is a StorageError. `directories` gets those in which more files may appear.
    """
    names: set[str] = set()
    for pattern in patterns:
        names.update(matching_files(pattern, directories))
    distinct: dict[Source, SeenFile] = {}
    for name in sorted(names):
        try:
            status = os.stat(name)
        except FileNotFoundError:
            continue  # deleted since the listing
        except OSError as error:
            reason = f"{name} cannot be read ({error.strerror}); see to its permissions"
            if unreadable is None:
                raise StorageError(reason) from error
            unreadable(name, reason)
            continue
        if stat.S_ISREG(status.st_mode):
            source = status.st_dev, status.st_ino
            changed_ns, modified_ns = status.st_ctime_ns, status.st_mtime_ns
            seen = SeenFile(name, name, *source, status.st_size, changed_ns, source, modified_ns)
            distinct.setdefault(source, seen)
    return list(distinct.values())


def same_head(seen: SeenFile, state: FileState, read: int) -> bool:
    """Whether it has at least the `read` bytes that were read and begins as they did. OSError."""
    if seen.size < read or seen.size < state.head_bytes:
        return False
    return not state.head_bytes or fingerprint(seen.path, state.head_bytes) == state.head


def same_content(seen: SeenFile, state: FileState) -> bool:
    """Whether another file holds what was read as `state`: the same head, and the same last bytes. OSError.

    Files that merely begin alike are none: an event skipped is worse than one read twice.
    """
    if not state.tail_at or not state.head_bytes or seen.size < state.tail_at:
        return False
    length = min(TAIL_BYTES, state.tail_at)
    tail = fingerprint(seen.path, length, start=state.tail_at - length)
    return tail == state.tail and same_head(seen, state, state.tail_at)
