"""When to list the log files again, and what the kernel tells in between (paper 3.2)."""

import os
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final

from photon.core.clock import Clock
from photon.core.globs import may_match
from photon.core.logfiles import SeenFile, find
from photon.core.packed import is_packed
from photon.core.watch import Watch

_NET_SCANS: Final = 10  # the kernel may be wrong (hard links, mapped files) for so many scan intervals
_HURRY: Final = 0.1  # of a scan interval: so soon after the last one a new file is looked for
_REST_FACTOR: Final = 20  # scanning takes no more than a part in so many of the time
_ROUNDS: Final = 4  # of listing, while directories appear that were not watched before
_DIRECTORIES_CHECKED: Final = 64  # at a time, in turn


class Finder:
    """Lists the files of some patterns. For one thread."""

    def __init__(
        self,
        patterns: Sequence[str],
        interval_s: float,
        clock: Clock,
        wake: Callable[[], None] | None,
        notice: Callable[[str], None],
    ) -> None:
        """`wake`: as Watch; None is not to watch."""
        self.found: Sequence[SeenFile] = ()
        """As of the last `find`; the same object if nothing has changed."""
        self.unreadable: dict[str, str] = {}
        self._patterns = patterns
        self._interval_s = interval_s
        self._clock = clock
        self._notice = notice
        self._watch = None if wake is None else self._make_watch(wake)
        self._directories: dict[str, tuple[int, int] | None] = {}
        self._refused: dict[str, str] = {}
        self._turn = 0
        self._moved = False
        self._ended = self._rest_s = 0.0  # of the last `find`
        self._whole_at = float("-inf")

    @property
    def news(self) -> bool:
        return self._watch is not None and self._watch.news

    @property
    def watches_all(self) -> bool:
        """The kernel tells of all that happens, as far as is known."""
        return self._watch is not None and not self._refused and not self._moved

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def covers(self, path: str) -> bool:
        """Whether growth of the file is told."""
        return self._watch is not None and self._watch.covers(os.path.dirname(path) or ".")

    def grown(self, known: Container[str]) -> list[str]:
        """Those of the known files, by path_key, that were written to or truncated since the last call."""
        if self._watch is None or not (changes := self._watch.changes()):
            return []
        if changes.lost:
            self._whole_at = float("-inf")
        self._moved = self._moved or any(
            path in known or path.endswith("/") or may_match(self._patterns, os.path.basename(path))
            for path in (*changes.moved, *filter(is_packed, changes.grown))
        )
        return [path for path in changes.grown if path in known]

    def hurry(self, now: float) -> bool:
        """Files came or went, and the last `find` is long enough ago."""
        return self._moved and now >= self._ended + max(self._rest_s, _HURRY * self._interval_s)

    def due(self, now: float) -> bool:
        """Whether to list the files at this scan: something may be different."""
        if self._watch is None or self._moved or self._refused or now >= self._whole_at:
            return True
        return self._replaced()

    def find(self) -> None:
        """List the files, and watch all directories in which more may appear.

        Where directories are made all the time what is left over is for the next scan, which comes soon.
        """
        began = self._clock.monotonic()
        self._moved = False
        for _ in range(_ROUNDS):
            directories: set[str] = set()
            unreadable: dict[str, str] = {}
            found = find(self._patterns, unreadable.__setitem__, directories)
            # What comes between listing and watching would be missed.
            if self._watch is None or not self._cover(directories):
                break
        else:
            self._moved = True
        if found != self.found:
            self.found = found
        self.unreadable = unreadable
        self._ended = self._clock.monotonic()
        self._rest_s = _REST_FACTOR * (self._ended - began)
        self._whole_at = began + _NET_SCANS * self._interval_s

    def cover_also(self, directories: Iterable[str]) -> None:
        """Where files are that no pattern matches any more, or under another spelling of their path."""
        if self._watch is None:
            return
        more = set(directories) - self._directories.keys()
        if more:
            self._cover(self._directories.keys() | more)

    def _make_watch(self, wake: Callable[[], None]) -> Watch | None:
        try:
            return Watch(wake)
        except OSError as error:
            self._notice(f"the kernel does not tell of growing logs ({error.strerror}); they are polled")
            return None

    def _cover(self, directories: set[str]) -> bool:
        """Watch these. Whether there are any among them that were not watched before."""
        assert self._watch is not None
        before = {directory for directory in directories if self._watch.covers(directory)}
        refused = self._watch.cover(directories)
        for directory, reason in refused.items():
            if self._refused.get(directory) != reason and os.path.isdir(directory):
                self._notice(f"{directory} cannot be watched ({reason}); its files are polled")
        self._refused = refused
        self._directories = {directory: _identity(directory) for directory in directories}
        return bool(directories - before - refused.keys())

    def _replaced(self) -> bool:
        """Whether a path leads to another directory by now: one above it was renamed, or a link changed."""
        names = list(self._directories)
        self._turn = self._turn if self._turn < len(names) else 0
        some = names[self._turn : self._turn + _DIRECTORIES_CHECKED]
        self._turn += _DIRECTORIES_CHECKED
        return any(_identity(name) != self._directories[name] for name in some)


def _identity(directory: str) -> tuple[int, int] | None:
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return status.st_dev, status.st_ino
