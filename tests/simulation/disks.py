"""Disks that keep what was synced, and of the rest what they please.

Stands before `os`: the files are real, in memory where there is such a directory. It knows which bytes of
which file, and which names in which directory, were synced; a power loss leaves those and any part of the
rest.
"""

import errno
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
    """One file, whatever it is called; `synced` is what a power loss leaves of it for sure."""

    __slots__ = ("synced",)

    def __init__(self) -> None:
        self.synced = b""


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
            "urandom": self._rng.randbytes,  # salts
        }
        self._real = {name: getattr(os, name) for name in replaced}
        try:
            for name, function in replaced.items():
                setattr(os, name, function)
            yield
        finally:
            for name, function in self._real.items():
                setattr(os, name, function)

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
        if self.error_chance and self._rng.random() < self.error_chance:
            raise OSError(self._rng.choice((errno.EIO, errno.ENOSPC)), "played")

    def _sync(self, fd: int) -> None:
        if self.node is None:
            self._real["fdatasync"](fd)
            return
        self._touch()
        slow = self.slow_chance > 0 and self._rng.random() < self.slow_chance
        self._clock.lag += self._rng.random() * (_SLOW_SYNC_S_MAX if slow else _SYNC_S_MAX)
        if self.node not in self.liars:
            path = f"/proc/self/fd/{fd}"
            stat = os.fstat(fd)
            if stat.st_mode & 0o040000:
                self._sync_names(os.readlink(path))
            else:
                self._file(stat.st_ino).synced = _read(path, stat.st_size)
        self._touch()

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
        if self.node is not None and self.crash_chance and self._rng.random() < self.crash_chance:
            self._real["write"](fd, data[: self._rng.randrange(len(data) + 1)])
            raise SimulatedCrash
        written: int = self._real["write"](fd, data)
        return written

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
        data = path.read_bytes()
        if data != file.synced:
            path.write_bytes(_torn(self._rng, data, file.synced))

    def _settle(self, directory: Path) -> None:
        """What is there now is on the disk."""
        self._sync_names(str(directory))
        for entry in directory.iterdir():
            if entry.is_file():
                self._file(entry.stat().st_ino).synced = entry.read_bytes()

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


def _torn(rng: random.Random, data: bytes, synced: bytes) -> bytes:
    """What a file may be that was `synced` and has been changed to `data` since. What is alike stays."""
    pairs = enumerate(zip(data, synced, strict=False))
    keep = next((at for at, (one, other) in pairs if one != other), min(len(data), len(synced)))
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
