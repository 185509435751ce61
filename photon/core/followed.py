"""A file that is followed, and how to look for it where it was (paper 3.2)."""

import contextlib
import dataclasses
import os
import stat
from dataclasses import dataclass

from photon.core.chunks import digest
from photon.core.framing import Framing
from photon.core.logfiles import FileState, SeenFile, Source, same_head


@dataclass(slots=True, eq=False)
class Followed:
    """A file that is followed, or was: `state` as its owner knows it, `read`: handed out up to here."""

    state: FileState
    read: int
    framing: Framing
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
        if same_head(SeenFile(path, path, *file.identity, size), file.state, file.read):
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
