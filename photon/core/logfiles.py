"""Log files: which there are, and which of them is which (paper 3.2).

A file is known by device, inode and a fingerprint of its head, not by its name: a rotated file that was
renamed goes on where it was; one that shrank or was replaced is another file and is read from its start
(the registry keeps its events from being joined twice).
"""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from photon.core.chunks import HEAD_BYTES, Chunk, fingerprint, read_chunk, read_unended_line
from photon.core.errors import StorageError
from photon.core.globs import check_patterns, glob_matches, matching_files

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
