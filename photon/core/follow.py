"""Following a set of growing log files: what is new in which file, with little cost while nothing is.

Holds reading positions in memory; its owner keeps FileStates on disk and decides when an offset counts.
"""

import contextlib
import dataclasses
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

_HOT_S: Final = 10.0
_HOT_FILES: Final = 256  # so many are polled however long they have been silent


class LogFollower:
    """Finds files by globs and hands out their whole lines, one chunk of one file at a time, in turn.

    `drain`: the logs will grow no more, so a last line without its newline counts if it is a JSON object.
    `notice` is told, in a line, of files that were replaced, shrank, vanished or could not be read.
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
        self._next_number = max(self._files, default=-1) + 1
        self._next_scan = float("-inf")
        self._growing: deque[int] = deque()
        self._hot: dict[int, float] = {}
        self._caught_up = False

    @property
    def caught_up(self) -> bool:
        """Every whole line is read: of all files (drain), or of those that were last seen to grow."""
        return self._caught_up

    def scan_if_due(self) -> list[FileState]:
        """Look for new, renamed and replaced files every `scan_interval_s`, and for growth of all.

        The states that are new or changed, for the owner to keep: also those that are `gone` now.
        """
        if self._clock.monotonic() < self._next_scan:
            return []
        seen = scan(self._patterns, self._spool)
        self._next_scan = self._clock.monotonic() + self._settings.scan_interval_s
        changed: list[FileState] = []
        for file in seen:
            state = self._known(file, changed)
            if file.size > self._read[state.number]:
                self._wake(state.number)
        changed += self._forget_deleted({(f.device, f.inode) for f in seen})
        if not self._growing:
            self._caught_up = True
        return changed

    def poll(self) -> None:
        """Look for growth of the files that grew lately (a stat each)."""
        horizon = self._clock.monotonic() - _HOT_S
        for number, grew in list(self._hot.items()):
            if grew < horizon and len(self._hot) > _HOT_FILES:
                del self._hot[number]
                continue
            try:
                size = os.stat(self._files[number].path).st_size
            except OSError:
                continue  # the next scan tells what became of it
            if size > self._read[number]:
                self._wake(number)
            elif size < self._read[number]:
                self._next_scan = float("-inf")

    def next_chunk(self) -> tuple[FileState, Chunk] | None:
        """The next unread whole lines of some file; None when all that is known is read."""
        while self._growing:
            number = self._growing.popleft()
            state = self._files[number]
            if state.gone:
                continue
            chunk = self._read_on(state)
            if chunk is not None:
                self._read[number] = chunk.end
                self._hot[number] = self._clock.monotonic()
                self._growing.append(number)
                return state, chunk
        if self._drain and not self._caught_up:
            self._next_scan = float("-inf")  # only a whole scan can say that nothing is left
        elif not self._drain:
            self._caught_up = True
        return None

    def advanced(self, number: int, offset: int) -> FileState:
        """The state of a file whose events before `offset` are taken care of; the owner keeps it."""
        state = dataclasses.replace(self._files[number], offset=offset)
        if state.head_bytes < HEAD_BYTES and offset > state.head_bytes and not state.gone:
            length = min(HEAD_BYTES, offset)
            with contextlib.suppress(OSError):  # deleted meanwhile: the next scan says so
                state = dataclasses.replace(state, head_bytes=length, head=fingerprint(state.path, length))
        self._files[number] = state
        if not state.gone:
            self._current[state.device, state.inode] = state
        return state

    def unended(self) -> dict[str, int]:
        """Files whose last line is not whole -> its bytes so far."""
        tails = {}
        for state in self._current.values():
            try:
                rest = os.stat(state.path).st_size - self._read[state.number]
            except OSError:
                continue
            if rest > 0:
                tails[state.name] = rest
        return tails

    def _known(self, file: SeenFile, changed: list[FileState]) -> FileState:
        state = recognise(file, self._current)
        if state is None:
            old = self._current.get((file.device, file.inode))
            if old is not None:
                what = f"shrank to {file.size} bytes" if file.size < old.offset else "was overwritten"
                self._notice(f"{file.name} {what}; read again from its start")
                changed.append(self._drop(old))
            state = FileState(self._next_number, file.path, file.name, file.device, file.inode)
            self._next_number += 1
            self._read[state.number] = 0
        elif (state.path, state.name) != (file.path, file.name):
            state = dataclasses.replace(state, path=file.path, name=file.name)
        else:
            return state
        self._files[state.number] = self._current[file.device, file.inode] = state
        changed.append(state)
        return state

    def _forget_deleted(self, present: set[tuple[int, int]]) -> list[FileState]:
        gone = []
        for key, state in list(self._current.items()):
            if key not in present and not _still_there(state):
                self._notice(f"{state.name} is gone; {self._read[state.number]} bytes of it were read")
                gone.append(self._drop(state))
        return gone

    def _drop(self, state: FileState) -> FileState:
        self._current.pop((state.device, state.inode), None)
        self._hot.pop(state.number, None)
        dropped = self._files[state.number] = dataclasses.replace(state, gone=True)
        return dropped

    def _wake(self, number: int) -> None:
        self._caught_up = False
        self._hot[number] = self._clock.monotonic()
        if number not in self._growing:
            self._growing.append(number)

    def _read_on(self, state: FileState) -> Chunk | None:
        offset = self._read[state.number]
        settings = self._settings
        try:
            chunk = read_chunk(state.path, offset, settings.chunk_bytes, settings.line_bytes_max)
            if chunk is None and self._drain:
                return self._last_line(state.path, offset)
        except OSError as error:
            self._notice(f"{state.name} cannot be read ({error.strerror}); tried again at the next scan")
            return None
        return chunk

    def _last_line(self, path: str, offset: int) -> Chunk | None:
        line = read_unended_line(path, offset, self._settings.line_bytes_max)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            if isinstance(msgspec.json.decode(line), dict):
                return Chunk(offset, offset + len(line), line + b"\n")
        return None


def _still_there(state: FileState) -> bool:
    try:
        status = os.stat(state.path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (state.device, state.inode)
