"""Disks that keep what was synced, and of the rest what they please.

Stands before `os`: the files are real, in memory where there is such a directory. It knows which bytes of
which file, and which names in which directory, were synced; a power loss leaves those and any part of the
rest. A sync that fails drops what it should have written, as Linux does: nobody writes it any more, though
it may still be read, until it is written once more.
"""

import errno
import fcntl
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.simulation.clock import Clock

_SYNC_S_MAX = 0.004
_SLOW_SYNC_S_MAX = 0.3


class SimulatedCrash(BaseException):
    """The process ended at a point that touches the disk."""


class _File:
    """One file, whatever it is called; `synced` is what a power loss leaves of it for sure.

    `dropped`: from where to where a failed sync has left what it should have written, and says so no more.
    """

    __slots__ = ("dropped", "synced")

    def __init__(self) -> None:
        self.synced = b""
        self.dropped: list[tuple[int, int]] = []

    def written(self, start: int, end: int) -> None:
        """The next sync writes this again."""
        parts = ((one, min(other, start)) for one, other in self.dropped)
        after = ((max(one, end), other) for one, other in self.dropped)
        self.dropped = [(one, other) for one, other in (*parts, *after) if one < other]

    def drop(self, data: bytes) -> None:
        """What is not on the disk of `data`, all that the file holds, never will be by itself."""
        keep = _alike(data, self.synced)
        self.dropped.append((keep, max(keep, len(data))))

    def on_disk(self, data: bytes) -> bytes:
        """Where all of `data` was written that was not dropped."""
        left = bytearray(data)
        for start, end in self.dropped:
            end = min(end, len(left))
            left[start:end] = self.synced[start:end].ljust(max(0, end - start), b"\0")
        return bytes(left)


class _Raw(io.FileIO):
    """What a buffered file writes to."""

    def __init__(self, path: Any, write: Callable[[int, Any], int]) -> None:
        super().__init__(path, "w")
        self._write = write
        self._ended = False

    def write(self, data: Any) -> int:
        if self._ended:
            return len(data)
        try:
            return self._write(self.fileno(), data)
        except SimulatedCrash:
            self._ended = True  # closing it must not write on
            raise


_Names = dict[str, "_File | None"]  # None: a directory


class Disks:
    """All nodes' disks. What runs while `node` is None is the test's own and is let through."""

    def __init__(self, rng: random.Random, clock: Clock, root: Path) -> None:
        self._rng = rng
        self._clock = clock
        self._root = root
        self._files: dict[int, _File] = {}
        self._names: dict[str, _Names] = {}
        self.node: str | None = None
        self.crash_chance = 0.0
        self.error_chance = 0.0
        self.slow_chance = 0.0
        self.liars: set[str] = set()
        self.syncs = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While it lasts, `os` is ours."""
        replaced: dict[str, Callable[..., Any]] = {
            "fsync": self._sync,
            "fdatasync": self._sync,
            "rename": self._rename,
            "replace": self._rename,
            "unlink": self._unlink,
            "mkdir": self._mkdir,
            "write": self._write,
            "pwrite": self._pwrite,
            "ftruncate": self._ftruncate,
            "urandom": self._rng.randbytes,  # salts
        }
        self._real = {name: getattr(os, name) for name in replaced}
        opened, io.open = io.open, self._open
        self._real["open"] = opened
        try:
            for name, function in replaced.items():
                setattr(os, name, function)
            yield
        finally:
            io.open = opened
            for name in replaced:
                setattr(os, name, self._real[name])

    def add(self, node: str) -> Path:
        """A new, empty disk."""
        path = self._root / node
        path.mkdir()
        self._names[str(path)] = {}
        return path

    # -- what stands before os --------------------------------------------------------------------------

    def _touch(self) -> None:
        if self.crash_chance and self._rng.random() < self.crash_chance:
            raise SimulatedCrash
        if self._fails():
            raise self._error()

    def _fails(self) -> bool:
        return bool(self.error_chance) and self._rng.random() < self.error_chance

    def _error(self) -> OSError:
        return OSError(self._rng.choice((errno.EIO, errno.ENOSPC)), "played")

    def _sync(self, fd: int) -> None:
        if self.node is None:
            self._real["fdatasync"](fd)
            return
        path = f"/proc/self/fd/{fd}"
        stat = os.fstat(fd)
        is_directory = bool(stat.st_mode & 0o040000)
        try:
            self._touch()
            self.syncs += 1
        except OSError:
            if not is_directory:
                self._drop(path, stat)
            raise
        slow = self.slow_chance > 0 and self._rng.random() < self.slow_chance
        self._clock.lag += self._rng.random() * (_SLOW_SYNC_S_MAX if slow else _SYNC_S_MAX)
        if self.node not in self.liars:
            if is_directory:
                self._sync_names(os.readlink(path))
            else:
                file = self._file(stat.st_ino)
                file.synced = file.on_disk(_read(path, stat.st_size))
        self._touch()

    def _drop(self, path: str, stat: os.stat_result) -> None:
        """Half of the time memory is needed, too, and what is not on the disk can't be read any more."""
        file, data = self._file(stat.st_ino), _read(path, stat.st_size)
        file.drop(data)
        if self._rng.random() < 0.5:
            fd = os.open(path, os.O_WRONLY)
            self._real["pwrite"](fd, file.on_disk(data), 0)
            os.close(fd)

    def _sync_names(self, directory: str) -> None:
        with os.scandir(directory) as entries:
            self._names[directory] = {
                entry.name: None if entry.is_dir(follow_symlinks=False) else self._file(entry.inode())
                for entry in entries
            }

    def _rename(self, source: Any, target: Any, **more: Any) -> None:
        if self.node is not None:
            self._touch()
        self._forget(target)
        self._real["rename"](source, target, **more)
        if self.node is not None:
            self._touch()

    def _unlink(self, path: Any, **more: Any) -> None:
        if self.node is not None:
            self._touch()
        if not more:
            self._forget(path)
        self._real["unlink"](path, **more)
        if self.node is not None:
            self._touch()

    def _mkdir(self, path: Any, *more: Any, **named: Any) -> None:
        if self.node is not None:
            self._touch()
        self._real["mkdir"](path, *more, **named)
        self._names[str(path)] = {}
        if self.node is not None:
            self._touch()

    def _write(self, fd: int, data: Any) -> int:
        appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        offset = os.fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR)
        return self._put(fd, data, offset, lambda part: self._real["write"](fd, part))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self._put(fd, data, offset, lambda part: self._real["pwrite"](fd, part, offset))

    def _put(self, fd: int, data: Any, offset: int, write: Callable[[Any], int]) -> int:
        """All of it, or a part where the process ends, or the disk is full or failing."""
        ends = self.node is not None and bool(self.crash_chance) and self._rng.random() < self.crash_chance
        fails = self.node is not None and not ends and self._fails()
        written = write(data[: self._rng.randrange(len(data) + 1)] if ends or fails else data)
        self._file(os.fstat(fd).st_ino).written(offset, offset + written)
        if ends:
            raise SimulatedCrash
        if fails and (not written or self._rng.random() < 0.5):
            raise self._error()
        return written

    def _ftruncate(self, fd: int, size: int) -> None:
        if self.node is not None:
            self._touch()
        self._real["ftruncate"](fd, size)

    def _open(self, path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        if self.node is None or mode != "wb":
            return self._real["open"](path, mode, *more, **named)
        return io.BufferedWriter(_Raw(path, self._write))

    def _file(self, inode: int) -> _File:
        return self._files.setdefault(inode, _File())

    def _forget(self, path: Any) -> None:
        """The file goes; its number may come back as another file's."""
        with suppress(FileNotFoundError):
            self._files.pop(os.stat(path).st_ino, None)

    # -- what is left after a power loss ----------------------------------------------------------------

    def lose_power(self, node: str) -> None:
        """Leave what was synced, and any part of the rest."""
        assert self.node is None
        self._restore(self._root / node)

    def _restore(self, directory: Path) -> None:
        durable = self._names.get(str(directory), {})
        now: _Names = {}
        for entry in sorted(directory.iterdir()):
            now[entry.name] = None if entry.is_dir() else self._file(entry.stat().st_ino)
        for name in sorted({*durable, *now}):
            path = directory / name
            if name not in now:
                gone = durable[name]
                if gone is not None and self._rng.random() < 0.5:  # its deletion, or renaming, is undone
                    path.write_bytes(gone.synced)
            elif name not in durable and self._rng.random() < 0.5:
                _remove(path)
            elif now[name] is None:
                self._restore(path)
            else:
                self._restore_file(path, now[name], durable.get(name))
        self._settle(directory)

    def _restore_file(self, path: Path, file: _File | None, before: _File | None) -> None:
        assert file is not None
        if before is not None and before is not file and self._rng.random() < 0.5:
            path.write_bytes(before.synced)
            return
        data = file.on_disk(path.read_bytes())
        path.write_bytes(data if data == file.synced else _torn(self._rng, data, file.synced))

    def _settle(self, directory: Path) -> None:
        """What is there now is on the disk."""
        self._sync_names(str(directory))
        for entry in directory.iterdir():
            if entry.is_file():
                file = self._file(entry.stat().st_ino)
                file.synced, file.dropped = entry.read_bytes(), []

    # -- backups ----------------------------------------------------------------------------------------

    def copy(self, node: str) -> dict[Path, bytes]:
        """All of its files."""
        return {path: path.read_bytes() for path in sorted((self._root / node).rglob("*")) if path.is_file()}

    def put_back(self, node: str, files: dict[Path, bytes]) -> None:
        """The disk is what it was when it was copied."""
        assert self.node is None
        for entry in sorted((self._root / node).iterdir()):
            _remove(entry)
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for directory in sorted((self._root / node).rglob("*")):
            if directory.is_dir():
                self._settle(directory)
        self._settle(self._root / node)

    # -- rot --------------------------------------------------------------------------------------------

    def rot(self, node: str) -> str | None:
        """Damage what was synced, in a place where it must be noticed; says where."""
        found = [
            path for path in sorted((self._root / node).rglob("*")) if path.name in ("hard_state", "snapshot")
        ]
        if not found:
            return None
        path = self._rng.choice(found)
        data = bytearray(path.read_bytes())
        if not data:
            return None
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(data)
        return str(path)


def _read(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


def _alike(data: bytes, synced: bytes) -> int:
    """How many bytes at their beginning are."""
    pairs = enumerate(zip(data, synced, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(data), len(synced)))


def _torn(rng: random.Random, data: bytes, synced: bytes) -> bytes:
    """What a file may be that was `synced` and has been changed to `data` since. What is alike stays."""
    keep = _alike(data, synced)
    if keep < len(synced) and rng.random() < 0.3:
        return synced  # it was cut, or written anew, and that is undone
    rest = bytearray(data[keep:])
    kind = rng.random()
    if kind < 0.5:
        del rest[rng.randint(0, len(rest)) :]
    elif kind < 0.9 and rest:
        hole = rng.randrange(len(rest))
        length = rng.randint(1, len(rest) - hole)
        rest[hole : hole + length] = bytes(length) if kind < 0.75 else rng.randbytes(length)
    return data[:keep] + bytes(rest)


def _remove(path: Path) -> None:
    if path.is_dir():
        for entry in path.iterdir():
            _remove(entry)
        path.rmdir()
    else:
        path.unlink()
