"""Following a set of growing log files: what is new in which file, with little cost while nothing is.

Holds reading positions in memory; its owner keeps FileStates on disk and decides when an offset counts.
"""

import contextlib
import dataclasses
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from photon.core.clock import Clock
from photon.core.logfiles import (
    HEAD_BYTES,
    Chunk,
    FileState,
    SeenFile,
    fingerprint,
    read_chunk,
    read_unended_line,
    recognise,
    scan,
)
from photon.core.settings import Logs

_LIVELY_S: Final = 1.0  # polled every time for so long after they grew
_HOT_S: Final = 10.0
_HOT_FILES: Final = 256  # so many are polled however long they have been silent
_QUIET_POLLED: Final = 64  # of the silent ones, so many at a time, in turn
_NOW: Final = float("-inf")


class LogFollower:
    """Finds files by globs and hands out their whole lines, one chunk of one file at a time, in turn.

    `drain`: the logs will grow no more, so a last line without its newline counts if it is a JSON object.
    `notice` is told, in a line, of files that were replaced, shrank, vanished or could not be read.
    Not for several threads at once.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        spool: Path,
        settings: Logs,
        clock: Clock,
        states: Iterable[FileState] = (),
        drain: bool = False,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._patterns = patterns
        self._spool = spool
        self._settings = settings
        self._clock = clock
        self._drain = drain
        self._notice = notice
        self._files: dict[int, FileState] = {s.number: s for s in states}
        self._current = {(s.device, s.inode): s for s in self._files.values() if not s.gone}
        self._read: dict[int, int] = {s.number: s.offset for s in self._current.values()}
        self._seen: dict[tuple[int, int], SeenFile] = {}
        self._next_number = max(self._files, default=-1) + 1
        self._next_scan = _NOW
        self._growing: deque[int] = deque()
        self._waiting: set[int] = set()  # those in _growing
        self._sizes: dict[int, int] = {}  # as last seen, of those that grew
        self._stalled: dict[int, int] = {}  # size at which nothing could be read on
        self._failed: dict[int, str] = {}
        self._unlisted: dict[str, str] = {}
        self._hot: dict[int, float] = {}  # number -> when it last grew, the latest last
        self._turn = 0
        self._caught_up = False

    @property
    def caught_up(self) -> bool:
        """Every whole line is read: of all files (drain), or of those that were last seen to grow.

        Files in `unreadable` don't count: the owner says what they mean to it.
        """
        return self._caught_up

    @property
    def unreadable(self) -> dict[str, str]:
        """Name -> reason of files that could not be read when last tried (each scan tries again)."""
        failed = {self._files[number].name: reason for number, reason in self._failed.items()}
        return failed | self._unlisted

    def scan_if_due(self) -> list[FileState]:
        """Look for new, renamed and replaced files every `scan_interval_s`, and for growth of all.

        The states that are new or changed, for the owner to keep: also those that are `gone` now.
        """
        if self._clock.monotonic() < self._next_scan:
            return []
        unlisted: dict[str, str] = {}
        seen = scan(self._patterns, self._spool, unlisted.__setitem__)
        for name, reason in unlisted.items():
            if self._unlisted.get(name) != reason:
                self._notice(f"{reason}; tried again at every scan")
        self._unlisted = unlisted
        self._next_scan = self._clock.monotonic() + self._settings.scan_interval_s
        changed: list[FileState] = []
        for file in seen:
            state = self._known(file, changed)
            self._look(state, file.size)
        present = {(file.device, file.inode): file for file in seen}
        changed += self._follow_renamed(present)
        self._seen = present
        if not self._growing:
            self._caught_up = True
        return changed

    def poll(self) -> None:
        """Look for growth of the files that grew lately (a stat each), and of some others in turn."""
        now = self._clock.monotonic()
        numbers = list(self._hot)
        quiet = len(numbers)
        fewest = max(0, quiet - _HOT_FILES)
        while quiet > fewest and self._hot[numbers[quiet - 1]] >= now - _LIVELY_S:
            quiet -= 1
        self._turn = self._turn + _QUIET_POLLED if self._turn + _QUIET_POLLED < quiet else 0
        for number in numbers[quiet:] + numbers[self._turn : min(self._turn + _QUIET_POLLED, quiet)]:
            if self._hot[number] < now - _HOT_S and len(self._hot) > _HOT_FILES:
                del self._hot[number]
                continue
            state = self._files[number]
            try:
                status = os.stat(state.path)
            except FileNotFoundError:
                self._scan_now()
                continue
            except OSError:
                continue  # the next scan tells what became of it
            replaced = (status.st_dev, status.st_ino) != (state.device, state.inode)
            if replaced or status.st_size < self._read[number]:
                self._scan_now()
            else:
                self._look(state, status.st_size)

    def next_chunk(self) -> tuple[FileState, Chunk] | None:
        """The next unread whole lines of some file; None when all that is known is read."""
        while self._growing:
            number = self._growing.popleft()
            self._waiting.discard(number)
            state = self._files[number]
            if state.gone:
                continue
            chunk = self._read_on(state)
            if chunk is not None:
                self._read[number] = chunk.end
                self._stalled.pop(number, None)
                self._heat(number)
                self._waiting.add(number)
                self._growing.append(number)
                return state, chunk
        if self._drain and not self._caught_up:
            self._scan_now()  # only a whole scan can say that nothing is left
        elif self._next_scan != _NOW:
            self._caught_up = True
        return None

    def advanced(self, number: int, offset: int) -> FileState:
        """The state of a file whose events before `offset` are taken care of; the owner keeps it."""
        state = dataclasses.replace(self._files[number], offset=offset)
        if state.head_bytes < HEAD_BYTES and offset > state.head_bytes and not state.gone:
            length = min(HEAD_BYTES, offset)
            with contextlib.suppress(OSError):  # renamed or deleted meanwhile: the next scan says so
                head = fingerprint(state.path, length, (state.device, state.inode))
                state = dataclasses.replace(state, head_bytes=length, head=head)
        self._files[number] = state
        if not state.gone:
            self._current[state.device, state.inode] = state
        return state

    def unended(self) -> dict[str, int]:
        """Files whose end can't be read, mostly as their last line is not whole -> bytes so far."""
        return {
            self._files[number].name: size - self._read[number]
            for number, size in self._stalled.items()
            if size > self._read[number] and not self._files[number].gone
        }

    def _known(self, file: SeenFile, changed: list[FileState]) -> FileState:
        key = (file.device, file.inode)
        old = self._current.get(key)
        if old is not None and self._seen.get(key) == file:
            return old
        state = self._recognised(file)
        if state is None:
            if old is not None:
                shrank = file.size < self._read[old.number]
                what = f"shrank to {file.size} bytes" if shrank else "was overwritten"
                self._notice(f"{file.name} {what}; read again from its start")
                changed.append(self._drop(old))
            state = FileState(self._next_number, file.path, file.name, file.device, file.inode)
            self._next_number += 1
            self._read[state.number] = 0
            self._heat(state.number)
        elif (state.path, state.name) != (file.path, file.name):
            state = dataclasses.replace(state, path=file.path, name=file.name)
        else:
            return state
        self._files[state.number] = self._current[key] = state
        changed.append(state)
        return state

    def _recognised(self, file: SeenFile) -> FileState | None:
        old = self._current.get((file.device, file.inode))
        if old is None or file.size < self._read[old.number]:
            return None
        try:
            return recognise(file, self._current)
        except OSError:
            return old  # reading on will tell the reason

    def _follow_renamed(self, present: dict[tuple[int, int], SeenFile]) -> list[FileState]:
        """Files that no pattern matches any more: renamed in their directory (read on), or gone."""
        changed = []
        listings: dict[str, dict[int, str]] = {}
        for key, known in list(self._current.items()):
            if key in present:
                continue
            state, size = known, _size(known.path, key)
            if size is None:
                directory = os.path.dirname(known.path) or "."
                if directory not in listings:
                    listings[directory] = _inodes(directory)
                path = listings[directory].get(known.inode, "")
                size = _size(path, key)
                seen = SeenFile(path, path, *key, size or 0)
                if size is None or not known.head_bytes or self._recognised(seen) is None:
                    self._notice(f"{known.name} is gone; {self._read[known.number]} bytes of it were read")
                    changed.append(self._drop(known))
                    continue
                state = dataclasses.replace(known, path=path, name=path)
                self._files[state.number] = self._current[key] = state
                changed.append(state)
            if size < self._read[state.number]:
                self._notice(f"{state.name} shrank to {size} bytes")
                changed.append(self._drop(state))
            else:
                self._look(state, size)
        return changed

    def _drop(self, state: FileState) -> FileState:
        self._current.pop((state.device, state.inode), None)
        for notes in (self._hot, self._stalled, self._failed, self._sizes):
            notes.pop(state.number, None)
        dropped = self._files[state.number] = dataclasses.replace(state, gone=True)
        return dropped

    def _look(self, state: FileState, size: int) -> None:
        """Note that a file has `size` bytes now; it waits to be read if that is news."""
        number = state.number
        if size <= self._read[number] or number in self._waiting:
            return
        if self._stalled.get(number) == size and (
            number not in self._failed or not _readable(state.path, self._read[number])
        ):
            return
        self._caught_up = False
        self._sizes[number] = size
        self._heat(number)
        self._waiting.add(number)
        self._growing.append(number)

    def _scan_now(self) -> None:
        self._next_scan = _NOW
        self._caught_up = False

    def _heat(self, number: int) -> None:
        self._hot.pop(number, None)
        self._hot[number] = self._clock.monotonic()

    def _read_on(self, state: FileState) -> Chunk | None:
        number, offset, identity = state.number, self._read[state.number], (state.device, state.inode)
        bounds = (self._settings.chunk_bytes, self._settings.line_bytes_max)
        try:
            chunk = read_chunk(state.path, offset, *bounds, identity)
            if chunk is None and self._drain:
                chunk = _last_line(state.path, offset, self._settings.line_bytes_max, identity)
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):
                self._scan_now()  # renamed or replaced: the scan finds it again
                return None
            reason = error.strerror or str(error)
            if self._failed.get(number) != reason:
                self._notice(f"{state.name} cannot be read ({reason}); tried again at every scan")
            self._failed[number] = reason
            self._stall(number)
            return None
        self._failed.pop(number, None)
        if chunk is None:
            self._stall(number)
        return chunk

    def _stall(self, number: int) -> None:
        # The size seen before it was read: had the file grown since, it is read once more.
        size = self._sizes.get(number, 0)
        if size > self._read[number]:
            self._stalled[number] = size
        else:
            self._stalled.pop(number, None)


def _last_line(path: str, offset: int, line_bytes_max: int, identity: tuple[int, int]) -> Chunk | None:
    line = read_unended_line(path, offset, line_bytes_max, identity)
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if isinstance(msgspec.json.decode(line), dict):
            return Chunk(offset, offset + len(line), line + b"\n")
    return None


def _size(path: str, key: tuple[int, int]) -> int | None:
    """Size of the file if it is still the one with this device and inode."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if (status.st_dev, status.st_ino) == key else None


def _inodes(directory: str) -> dict[int, str]:
    try:
        with os.scandir(directory) as entries:
            return {entry.inode(): entry.path for entry in entries if entry.is_file(follow_symlinks=False)}
    except OSError:
        return {}


def _readable(path: str, offset: int) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            os.pread(file.fileno(), 1, offset)
    except OSError:
        return False
    return True
