"""A file that is followed, and how to look for it where it was (paper 3.2)."""

import contextlib
import dataclasses
import os
import stat
from dataclasses import dataclass
from typing import Final

from photon.core.chunks import HEAD_BYTES, digest, fingerprint, read_at
from photon.core.logfiles import TAIL_BYTES, FileState, SeenFile, Source, same_content, same_head

GONE_DEVICE: Final = (1 << 64) - 1
"""Of the source of a file that is gone; the inode is its number, as its own may be another file's by now."""


@dataclass(slots=True, eq=False)
class Followed:
    """A file that is followed, or was: `state` as its owner knows it, `read`: handed out up to here."""

    state: FileState
    read: int
    tail_at: int = 0
    last: bytes = b""  # before tail_at: up to TAIL_BYTES bytes, or none if that was before the start
    seen: SeenFile | None = None  # as the last scan found it
    linked: bool = True  # it may be written through a name elsewhere
    suspect: bool = False  # not the file it was, says a read
    paused: bool = False
    waiting: bool = False
    stalled_at: int = -1  # size at which nothing could be read on
    failed: str = ""

    @property
    def identity(self) -> Source:
        return self.state.device, self.state.inode

    @property
    def key(self) -> Source:
        """What it is known by while it is there: an archive by its content, as copies come and go."""
        return archive_key(self.state.version) if self.state.version else self.identity

    @property
    def state_now(self) -> FileState:
        """With what was read, though it is not yet recorded."""
        if not self.last:
            return self.state
        return dataclasses.replace(self.state, tail_at=self.tail_at, tail=digest(self.last))

    @property
    def packed(self) -> bool:
        return bool(self.state.version)


class Content:
    """What a file holds, to be compared with many that were read: its head is read once."""

    def __init__(self, file: SeenFile) -> None:
        """OSError."""
        self._file = file
        self._head = read_at(file.path, 0, HEAD_BYTES)
        self._digests: dict[int, bytes] = {}

    def begins_as(self, state: FileState) -> bool:
        length = state.head_bytes
        if not length or length > len(self._head):
            return False
        if length not in self._digests:
            self._digests[length] = digest(self._head[:length])
        return self._digests[length] == state.head

    def holds(self, state: FileState) -> bool:
        """As same_content. OSError."""
        return self.begins_as(state) and same_content(self._file, state)


def goes_on(seen: SeenFile, file: Followed) -> bool:
    """Whether it begins as what was read of the file, and what was read last stands where it stood. OSError.

    One that was cut and has grown past that place may still have its head.
    """
    state = file.state_now
    if seen.size < max(file.read, state.tail_at):
        return False
    length = min(TAIL_BYTES, state.tail_at)
    if length and fingerprint(seen.path, length, start=state.tail_at - length) != state.tail:
        return False
    return same_head(seen, state, file.read)


def path_key(path: str) -> str:
    """As a watch names a file: directory, slash, name."""
    return f"{os.path.dirname(path) or '.'}/{os.path.basename(path)}"


def file_size(path: str, key: Source) -> int | None:
    """Size of the file if it is still the one with this device and inode."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if (status.st_dev, status.st_ino) == key else None


def archive_key(version: str) -> Source:
    return -1, int(version, 16)


def key_of(seen: SeenFile) -> Source:
    """As Followed.key."""
    plain = seen.path == seen.name
    return (seen.device, seen.inode) if plain else archive_key(version_of(seen))


def version_of(copy: SeenFile) -> str:
    return os.path.basename(copy.path).partition(".")[0]


def renamed_to(file: Followed, listings: dict[str, dict[int, str]]) -> str | None:
    """The name that the file has in its directory now."""
    directory = os.path.dirname(file.state.path) or "."
    if directory not in listings:
        listings[directory] = _inodes(directory)
    path = listings[directory].get(file.state.inode, "")
    size = file_size(path, file.identity)
    if size is None or not file.state.head_bytes:
        return None
    with contextlib.suppress(OSError):
        if goes_on(SeenFile(path, path, *file.identity, size), file):
            return path
    return None


def _inodes(directory: str) -> dict[int, str]:
    try:
        with os.scandir(directory) as entries:
            return {entry.inode(): entry.path for entry in entries if entry.is_file(follow_symlinks=False)}
    except OSError:
        return {}


def is_linked(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return True
    return status.st_nlink != 1 or not stat.S_ISREG(status.st_mode)
