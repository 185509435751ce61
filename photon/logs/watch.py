"""The kernel's word on what happens in directories (inotify), so that silent files cost nothing.

Straight to the kernel: measured against watchfiles' RustNotify, which sleeps in steps of a few ms, it tells
of a write after 0.1 ms instead of 2 to 8, and costs nothing while nothing happens instead of 0.4 to 4 % of a
core. Where it can't be had (other systems, limits, network file systems) its user polls.
"""

import contextlib
import ctypes
import errno
import os
import select
import struct
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from photon.core.clock import Clock
from photon.logs.files import SeenFile, find, may_match
from photon.logs.packed import is_packed

_MODIFY: Final = 0x2
_MOVED_FROM: Final = 0x40
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE: Final = 0x200
_DELETE_SELF: Final = 0x400
_MOVE_SELF: Final = 0x800
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_ONLY_DIRECTORY: Final = 0x0100_0000
_UNLINKED_NOT: Final = 0x0400_0000  # of deleted files that are still open nothing is told
_IS_DIRECTORY: Final = 0x4000_0000
_MASK: Final = (
    _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
) | (_ONLY_DIRECTORY | _UNLINKED_NOT)  # fmt: skip

_EVENT: Final = struct.Struct("iIII")
_READ_BYTES: Final = 1 << 16
_GATHER_MS: Final = 5
_REMOTE: Final = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "glusterfs", "afs", "lustre"),
        *("gpfs", "beegfs", "vboxsf", "vmhgfs", "ncpfs"),
    )
)


@dataclass(slots=True)
class Changes:
    """What was told since the last time; paths as directory, slash, name.

    `grown`: written or truncated. `moved`: came, went or were renamed; of directories with a slash at the
    end. `lost`: there was more, which nobody knows.
    """

    grown: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    lost: bool = False

    def __bool__(self) -> bool:
        return self.lost or bool(self.grown) or bool(self.moved)


class Watch:
    """Watches directories from a thread of its own until `close`; the other methods are for one thread.

    `wake` is called in that thread when there are changes, every 5 ms at most.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """OSError if the kernel has none to give."""
        self._wake = wake
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "inotify_init1"):
            raise OSError(errno.ENOSYS, "this system has no inotify")
        self._fd: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise _error()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        # Over all below, and whether the descriptors are open. Garbage collection may `close` a watch within
        # a call of its own thread.
        self._mutex = threading.RLock()
        self._changes = Changes()
        self._names: dict[int, list[str]] = {}  # one directory may go by several names
        self._watched: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def news(self) -> bool:
        """Whether `wake` was called since `changes`."""
        return bool(self._changes)

    def changes(self) -> Changes:
        """What happened since the last call: all that was written before this one."""
        with self._mutex:
            while self._stop >= 0 and self._read():
                pass
            changes, self._changes = self._changes, Changes()
        return changes

    def covers(self, directory: str) -> bool:
        """Whether every change of the files in it is told."""
        return directory in self._watched

    def cover(self, directories: Iterable[str]) -> dict[str, str]:
        """Watch exactly these from now on; those that can't be -> why.

        Asked for again, a directory that was replaced by another of its name is watched instead of it.
        """
        refused: dict[str, str] = {}
        watched: dict[str, int] = {}
        names: dict[int, list[str]] = {}
        remote = _remote_devices()
        with self._mutex:
            for directory in directories:
                try:
                    if os.stat(directory).st_dev in remote:
                        raise OSError(0, "a network file system")
                    watched[directory] = number = self._add(directory)
                except OSError as error:
                    refused[directory] = error.strerror or str(error)
                    continue
                names.setdefault(number, []).append(directory)
            for number in self._names.keys() - names.keys():
                self._libc.inotify_rm_watch(self._fd, number)
            self._names, self._watched = names, watched
        return refused

    def close(self) -> None:
        """Any thread, and again. The thread that reads the descriptors closes them, at its end."""
        with self._mutex:
            if self._stop >= 0:
                os.eventfd_write(self._stop, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _add(self, directory: str) -> int:
        number: int = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK)
        if number < 0:
            raise _error()
        return number

    def _run(self) -> None:
        both, stop = select.poll(), select.poll()
        both.register(self._fd, select.POLLIN)
        for poll in (both, stop):
            poll.register(self._stop, select.POLLIN)
        try:
            while not any(fd == self._stop for fd, _ in both.poll()):
                with self._mutex:
                    read = self._read()
                if read:
                    self._wake()
                if stop.poll(_GATHER_MS):
                    break
        finally:
            with self._mutex:
                os.close(self._fd)
                os.close(self._stop)
                self._fd = self._stop = -1

    def _read(self) -> bool:
        """Take what the kernel has to tell, if anything. With the mutex."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        changes, at, size = self._changes, 0, len(data)
        told = set()  # most of what is told at once are the writes to a few files, each many times
        while at < size:
            number, mask, _, length = _EVENT.unpack_from(data, at)
            event = data[at : at + _EVENT.size + length]
            at += len(event)
            if event in told:
                continue
            told.add(event)
            name = os.fsdecode(event[_EVENT.size :].rstrip(b"\0"))
            if mask & _OVERFLOW:
                changes.lost = True
            for directory in self._names.get(number, ()):
                if mask & _MODIFY:
                    changes.grown.add(f"{directory}/{name}")
                else:
                    slash = "/" if mask & (_IS_DIRECTORY | _DELETE_SELF | _MOVE_SELF) else ""
                    changes.moved.add(f"{directory}/{name}{slash}")
            if mask & _IGNORED:
                for directory in self._names.pop(number, ()):
                    self._watched.pop(directory, None)
                    changes.moved.add(f"{directory}/")
        return True


def _error() -> OSError:
    number = ctypes.get_errno()
    reason = os.strerror(number)
    if number == errno.ENOSPC:
        reason = "the limit fs.inotify.max_user_watches is reached"
    elif number == errno.EMFILE:
        reason = "the limit fs.inotify.max_user_instances is reached"
    return OSError(number, reason)


def _remote_devices() -> set[int]:
    """Devices whose files may change without this kernel's knowing."""
    devices = set()
    with contextlib.suppress(OSError, ValueError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            own, _, rest = line.partition(" - ")
            kind = rest.split(" ", 1)[0]
            if kind in _REMOTE or kind.startswith("fuse"):
                major, _, minor = own.split(" ")[2].partition(":")
                devices.add(os.makedev(int(major), int(minor)))
    return devices


# --- Which of the files that no kernel watch covers are looked at now: those that grew lately. Pure.

LIVELY_S: Final = 1.0  # looked at every time for so long after they grew
HOT_S: Final = 10.0
HOT_FILES: Final = 256  # so many are looked at however long they have been silent
QUIET_FILES: Final = 64  # of the silent ones, so many at a time, in turn


class Polling:
    """Numbers of files, and when they last grew."""

    def __init__(self) -> None:
        self._hot: dict[int, float] = {}  # the latest last
        self._turn = 0

    def __len__(self) -> int:
        return len(self._hot)

    def grew(self, number: int, now: float) -> None:
        self._hot.pop(number, None)
        self._hot[number] = now

    def forget(self, number: int) -> None:
        self._hot.pop(number, None)

    def turn(self, now: float) -> list[int]:
        """Those to look at now: the lively ones, and some of the others."""
        numbers = list(self._hot)
        quiet = len(numbers)
        fewest = max(0, quiet - HOT_FILES)
        while quiet > fewest and self._hot[numbers[quiet - 1]] >= now - LIVELY_S:
            quiet -= 1
        self._turn = self._turn + QUIET_FILES if self._turn + QUIET_FILES < quiet else 0
        due = numbers[quiet:]
        for number in numbers[self._turn : min(self._turn + QUIET_FILES, quiet)]:
            if self._hot[number] < now - HOT_S and len(self._hot) > HOT_FILES:
                del self._hot[number]
            else:
                due.append(number)
        return due


# --- When to list the log files again, and what the kernel tells in between (paper 3.2).

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
        self.listed_us = 0  # when the last `find` began
        self._ended = self._rest_s = 0.0  # of that
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
        self._moved = (
            self._moved
            or changes.lost
            or any(
                path in known or path.endswith("/") or may_match(self._patterns, os.path.basename(path))
                for path in (*changes.moved, *filter(is_packed, changes.grown))
            )
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
        began, self.listed_us = self._clock.monotonic(), self._clock.now_us()
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
