"""What a power cut leaves of LMDB environments and the files beside them.

A commit syncs its pages and, with them, the meta page of the commit before. Its own meta page is on disk
only after a later commit or a sync. That a file was unlinked is taken to be on disk at once: the worst that
a file system may do.
"""

import mmap
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

from photon.core.disk import LmdbFile

_META_BYTES = 2 * mmap.PAGESIZE


class _Environment:
    """LMDB's, of which it is noted what of its meta pages is on disk."""

    def __init__(self, real, data: Path, synced: dict[Path, bytes]) -> None:
        self._real, self._data, self._synced = real, data, synced
        synced.setdefault(data, self._metas())

    def __getattr__(self, name):
        return getattr(self._real, name)

    @contextmanager
    def begin(self, write: bool = False):
        with self._committing(), self._real.begin(write=write) as transaction:
            yield transaction

    def open_db(self, *args, **options):
        with self._committing():
            return self._real.open_db(*args, **options)

    def sync(self, force: bool = False) -> None:
        self._real.sync(force)
        self._synced[self._data] = self._metas()

    @contextmanager
    def _committing(self):
        before = self._metas()
        yield
        if self._metas() != before:
            self._synced[self._data] = before

    def _metas(self) -> bytes:
        with self._data.open("rb") as file:
            return file.read(_META_BYTES)


class PowerCuts:
    """After each unlink under `root` a copy of it, as a power cut at that moment leaves it.

    For one process, of which one thread writes and unlinks. `into`: where the copies are put.
    """

    def __init__(self, monkeypatch, root: Path, into: Path) -> None:
        self._root = root
        self._into = into
        self._synced: dict[Path, bytes] = {}
        self.left: list[tuple[str, Path]] = []
        """Name of the file that was unlinked, and the copy."""
        real_open, real_unlink = LmdbFile.open, os.unlink

        def open_(file, *args, **options):
            return _Environment(real_open(file, *args, **options), file.path / "data.mdb", self._synced)

        def unlink(path, **options):
            real_unlink(path, **options)
            if Path(path).is_relative_to(root):
                self.left.append((Path(path).name, self.cut()))

        monkeypatch.setattr(LmdbFile, "open", open_)
        monkeypatch.setattr(os, "unlink", unlink)

    def restore(self, copy: Path) -> None:
        """Put the copy in the place of what it was made of, as after the power came back."""
        shutil.rmtree(self._root)
        shutil.copytree(copy, self._root)

    def cut(self) -> Path:
        """A copy as a power cut leaves it now."""
        copy = self._into / f"cut-{len(self.left)}"
        shutil.copytree(self._root, copy)
        for data, metas in self._synced.items():
            with (copy / data.relative_to(self._root)).open("r+b") as file:
                file.write(metas)
        return copy
