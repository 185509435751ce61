"""Compressed logs: their unpacked copies in a spool directory, which its users share.

A copy is made whole under a name of its maker's own and then gets the name that its content (inode, size and
time of change of the archive) stands for, so several processes may make the same one at a time.
"""

import contextlib
import errno
import gzip
import hashlib
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

import zstandard

from photon.core.errors import StorageError
from photon.logs.files import Identity, SeenFile

PACKED_SUFFIXES: Final = (".gz", ".zst")
_COPY: Final = ".log"
_PARTIAL: Final = ".partial"
_STEP_BYTES: Final = 1 << 20
PLAIN_STEP_BYTES: Final = 4 << 20
_ZSTD_STEP_BYTES: Final = 2048  # a bomb makes at most 64 MiB of it

_numbers: Final = itertools.count()


class TruncatedError(StorageError):
    """An archive that ends too early: cut off, or still being written."""


def is_packed(name: str) -> bool:
    return name.endswith(PACKED_SUFFIXES)


class Spool:
    """Unpacked copies of archives, `bytes_max` of them in all. For one thread, and one more that unpacks."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._refused: dict[str, int] = {}  # version -> room it would have taken at least
        self._broken: dict[str, StorageError] = {}  # version -> why
        self._making: set[str] = set()

    @staticmethod
    def version(archive: SeenFile) -> str:
        """Names what is in it; the same under any name and on any mount."""
        tag = f"{archive.inode}-{archive.size}-{archive.modified_ns}"
        return hashlib.blake2b(tag.encode(), digest_size=12).hexdigest()

    def copy(self, archive: SeenFile) -> SeenFile | None:
        """The unpacked copy if there is one already."""
        path = str(self._path(archive))
        try:
            status = os.stat(path)
        except OSError:
            return None
        identity, source = (status.st_dev, status.st_ino), (archive.device, archive.inode)
        return SeenFile(path, archive.name, *identity, status.st_size, status.st_ctime_ns, source)

    def unpack(self, archive: SeenFile) -> SeenFile:
        """The unpacked copy, made now if there is none. One that is not whole is tried once a content.

        TruncatedError; StorageError for one that is damaged, can't be read or takes too much room;
        FileNotFoundError if it was deleted meanwhile.
        """
        found = self.copy(archive)
        if found is not None:
            return found
        if (broken := self._broken.get(self.version(archive))) is not None:
            raise type(broken)(*broken.args)
        self._make(archive)
        found = self.copy(archive)
        if found is None:
            raise StorageError(f"{archive.name}: its unpacked copy in {self._directory} was taken away")
        return found

    def remove(self, path: str) -> None:
        """A copy that will not be read again. Anything else is left alone."""
        if Path(path).parent == self._directory and path.endswith(_COPY):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def sweep(self, present: set[str], held: set[str]) -> None:
        """Delete what is left of archives that are gone. `present`: versions; `held`: copies in use."""
        for entry in self._entries():
            version = entry.name.partition(".")[0]
            if version in present or entry.path in held or entry.path in self._making:
                continue
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
        for version in (self._refused.keys() | self._broken.keys()) - present:
            self._refused.pop(version, None)
            self._broken.pop(version, None)

    def _path(self, archive: SeenFile) -> Path:
        return self._directory / f"{self.version(archive)}{_COPY}"

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._directory) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def _used(self) -> int:
        used = 0
        for entry in self._entries():
            with contextlib.suppress(OSError):
                used += entry.stat().st_size
        return used

    def _make(self, archive: SeenFile) -> None:
        target = self._path(archive)
        room = self._bytes_max - self._used()
        if room < self._refused.get(target.stem, 0):
            raise self._no_room(archive)
        partial = target.with_name(f"{target.stem}-{os.getpid()}-{next(_numbers)}{_PARTIAL}")
        self._making.add(str(partial))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(archive, partial, room)
            with contextlib.suppress(FileExistsError):  # another process was faster: that one is read
                os.link(partial, target)
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
            kind = "gzip" if archive.name.endswith(".gz") else "zstd"
            reason = f"{archive.name}: not a whole {kind} file ({error}); replace it or leave it out"
            broken = TruncatedError(reason) if isinstance(error, EOFError) else StorageError(reason)
            self._broken[target.stem] = broken
            raise broken from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise StorageError(
                f"{archive.name}: cannot be unpacked into {self._directory} ({error.strerror}); "
                "see to permissions and space"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
            self._making.discard(str(partial))

    def _write(self, archive: SeenFile, partial: Path, room: int) -> None:
        size = 0
        with partial.open("xb") as plain:
            for piece in unpacked(archive.path, (archive.device, archive.inode)):
                size += len(piece)
                if size > room:
                    self._refused[self.version(archive)] = size
                    raise self._no_room(archive)
                plain.write(piece)
            plain.flush()
            os.fsync(plain.fileno())  # else a power cut may leave an empty file under the final name

    def _no_room(self, archive: SeenFile) -> StorageError:
        return StorageError(
            f"{archive.name}: unpacked logs would take more than 'logs.spool_bytes_max' ({self._bytes_max}) "
            f"in {self._directory}; raise it, or remove archives that are read"
        )


def unpacked(path: str, identity: Identity | None = None) -> Iterator[bytes]:
    """What is in an archive. As `contents`; FileNotFoundError if another one has its name by now."""
    with open(path, "rb") as packed_file:
        status = os.fstat(packed_file.fileno())
        if identity not in (None, (status.st_dev, status.st_ino)):
            raise FileNotFoundError(errno.ENOENT, "another file has this name now", path)
        yield from contents(path, packed_file)


def contents(name: str, file: IO[bytes]) -> Iterator[bytes]:
    """What is in a file of this name; of an archive, in all its members or frames. EOFError if that ends too
    early."""
    if not is_packed(name):
        yield from iter(lambda: file.read(PLAIN_STEP_BYTES), b"")
        return
    if name.endswith(".gz"):
        with gzip.open(file, "rb") as packed:
            while piece := packed.read(_STEP_BYTES):
                yield piece
        return
    begun, frame = False, zstandard.ZstdDecompressor().decompressobj()
    while data := file.read(_ZSTD_STEP_BYTES):
        while data:
            begun = True
            piece = frame.decompress(data)
            if piece:
                yield piece
            data = b""
            if frame.eof:
                data = frame.unused_data
                begun, frame = False, zstandard.ZstdDecompressor().decompressobj()
    if begun:
        raise EOFError("it ends inside a frame")


# --- Archives are unpacked beside the reading of other logs, one at a time (paper 3.2).

SMALL_BYTES: Final = 1 << 20
"""An archive of so many bytes is unpacked at once."""


class Unpacker:
    """For one thread. `wake` is called in another when `get` has something new to tell."""

    def __init__(self, spool: Spool, wake: Callable[[], None]) -> None:
        self._spool = spool
        self._wake = wake
        self._working_at: str | None = None
        self._failed: tuple[str, StorageError] | None = None
        self.news = False
        """Something is unpacked, or can't be, since its user last set this to False."""

    def get(self, archive: SeenFile) -> SeenFile | None:
        """The copy; None while it is made, or until its turn comes. Raises as Spool.unpack."""
        if archive.size <= SMALL_BYTES:
            return self._spool.unpack(archive)
        copy = self._spool.copy(archive)
        if copy is not None:
            return copy
        version = self._spool.version(archive)
        failed = self._failed
        if failed is not None and failed[0] == version:
            self._failed = None
            raise failed[1]
        if self._working_at is None:
            self._working_at = version
            # Not waited for at the end: what it leaves half made is swept away.
            threading.Thread(target=self._work, args=(archive, version), name="unpack", daemon=True).start()
        return None

    def _work(self, archive: SeenFile, version: str) -> None:
        try:
            self._spool.unpack(archive)
        except FileNotFoundError:
            pass  # the next scan will not find it either
        except StorageError as error:
            self._failed = version, error
        except Exception as error:  # it must be told to somebody, and tried again
            reason = f"{archive.name}: cannot be unpacked ({error!r}); see to the spool"
            self._failed = version, StorageError(reason)
        self._working_at = None
        self.news = True
        self._wake()
