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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

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
_GATHER_MS: Final = 2
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

    `wake` is called in that thread when there are changes, every 2 ms at most.
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
        self._mutex = threading.Lock()  # over the two below
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
        """Watch no more."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
        with self._mutex:
            os.close(self._fd)
            os.close(self._stop)
            self._stop = -1

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
        while True:
            if any(fd == self._stop for fd, _ in both.poll()):
                return
            with self._mutex:
                read = self._read()
            if read:
                self._wake()
            if stop.poll(_GATHER_MS):
                return

    def _read(self) -> bool:
        """Take what the kernel has to tell, if anything. With the mutex."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        changes, at, size = self._changes, 0, len(data)
        while at < size:
            number, mask, _, length = _EVENT.unpack_from(data, at)
            start, at = at + _EVENT.size, at + _EVENT.size + length
            name = os.fsdecode(data[start:at].rstrip(b"\0"))
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
