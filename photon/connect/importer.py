"""Copies what sources have into log files (photon.connect.copies): all else works as with any logs."""

import contextlib
import itertools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from photon.connect.copies import CopiedLogs, Copies, copies_of
from photon.connect.ports import Fields, Loss, State, shown
from photon.connect.uris import make_source, parse_uri
from photon.core.clock import Background, Backoff
from photon.core.errors import DiskFullError, PhotonError, StorageError, UnavailableError, UsageError, told
from photon.core.settings import Imports, Settings
from photon.logs.writer import RotatingLog

CAUGHT_UP_RECORDS: Final = 10_000
WAIT_S: Final = 0.5
"""For the first record of a turn."""
_RETRIES: Final = Backoff(0.2, 10.0)
_LOOK_S: Final = 0.1
_SWEEP_EVERY_S: Final = 30.0
_STOP_WAIT_S: Final = 15.0
_DAY_S: Final = 86_400.0

SIDES: Final = ("primary", "foreign")


def fields_of(settings: Settings, side: str) -> Fields:
    if side == "primary":
        primary = settings.primary
        return Fields((primary.id,), primary.time, primary.time_unit)
    foreign = settings.foreign
    return Fields((foreign.id, foreign.primary_id), foreign.time, foreign.time_unit)


class Import:
    """One source on its way into its copies, in a thread of its own."""

    def __init__(
        self,
        text: str,
        side: str,
        directory: Path,
        fields: Fields,
        settings: Imports,
        drain: bool,
        notice: Callable[[str], None],
        fail: Callable[[BaseException], None],
        may_begin: Callable[[], bool] = lambda: True,
        notices: Callable[[], Sequence[str]] | None = None,
        opened: Callable[[Path, int, str], CopiedLogs] | None = None,
    ) -> None:
        """UsageError for a source that can't be; CorruptStateError, StorageError. `fail` is told of what no
        other try will mend; until `may_begin`, nothing is read. `notices`: the last ones; where they are
        given, what the copies have is told as `known_to` reads it. `opened`: as Copies, if other ones."""
        self._name, self.side, self._drain = parse_uri(text).shown, side, drain
        self._source = make_source(text, fields)
        self._directory, self._settings, self._notices = copies_of(directory, side, text), settings, notices
        self._known_to = 0
        self._notice, self._fail, self._may_begin = notice, fail, may_begin
        self._opening = opened or Copies
        self._given = self._directory, settings.file_bytes_max, text
        self._copies: CopiedLogs = self._opening(*self._given)
        self._opened = self._stale = False
        self.caught_up = False
        """Whether all but the last records have been copied, once since the start."""
        self._fatal: str | None = None
        self._records = self._bytes = 0
        self._state = State.ACTIVE
        self._behind: int | None = None
        self._held = 0
        self._swept_s = float("-inf")
        self._work = Background(f"import {self._name}", self._step, _RETRIES)

    def start(self) -> None:
        self._work.start()

    def stop(self) -> None:
        if self._work.stop(_STOP_WAIT_S):
            self._source.close()
            self._copies.close()

    @property
    def finished(self) -> bool:
        return self._state is State.FINISHED

    @property
    def trouble(self) -> str | None:
        """Why the last turn failed."""
        return self._fatal or self._work.trouble

    def status(self) -> dict[str, Any]:
        return {
            "source": self._name,
            "side": self.side,
            "state": self._state.value,
            "partitions": len(self._copies.after),
            "records": self._records,
            "bytes": self._bytes,
            "behind": self._behind,
            "kept_bytes": self._held,
            "lost": self._copies.lost,
            "trouble": self.trouble,
        }

    def _step(self) -> float:
        try:
            return self._turn()
        except UsageError as error:
            self._fatal = str(error)
            self._fail(error)
            return float("inf")
        except Exception as error:
            if told(error) != self.trouble:
                self._notice(told(error))
                with contextlib.suppress(StorageError):
                    self._tell(told(error))
            if not isinstance(error, UnavailableError):
                self._reopen()  # whatever was read and is not in the logs is asked for again
            raise

    def _turn(self) -> float:
        if not (self._opened or self._may_begin()):
            return _LOOK_S
        if self._stale:
            self._copies.close()
            self._copies = self._opening(*self._given)
            self._stale = False
        if not self._opened:
            self._source.open(self._copies.after, self._drain)
            self._opened = True
        self._sweep()
        if self._held >= self._settings.bytes_max:
            holds = f"{self._directory}: holds {self._held} bytes; raise imports.bytes_max"
            if self._notices is not None:
                mend = "wait until more of them is read"
            elif self._drain:  # nothing is deleted then
                raise UsageError(holds)
            else:
                mend = "lower imports.keep_days"
            self._copies.end_files()
            raise StorageError(f"{holds}, or {mend}")
        batches = self._source.read(WAIT_S)
        for loss in self._source.losses():
            self._note_loss(loss)
        if batches:
            if anew := self._copies.made_anew(batches):
                joins = "what has joined does not join twice; what the former had that was not read is lost"
                counts = "what was read of the former counts beside it"
                self._notice(
                    f"{self._name}: made anew, so read from the start: {', '.join(sorted(anew))}; "
                    + (f"{joins} to the join" if self._notices is None else counts)
                )
            upto = self._copies.append(batches)
            self._records += sum(count for batch in batches for _, count in batch.runs)
            size = sum(len(batch.lines) for batch in batches)
            self._bytes += size
            self._held += size
            self._source.kept(upto)
        self._behind = self._source.behind()
        self._state = self._source.state()
        few = self._behind is not None and self._behind <= CAUGHT_UP_RECORDS
        self.caught_up |= few or self._state is not State.ACTIVE
        if self._notices is not None:
            self._known_to = max(self._known_to, self._source.known_to())
            self._tell()
        return float("inf") if self.finished else 0.0

    def _tell(self, trouble: str = "") -> None:
        if self._notices is not None:
            self._copies.tell(self._known_to, self.finished, trouble, self._notices())

    def _note_loss(self, loss: Loss) -> None:
        reader = "join" if self._notices is None else "run"
        self._copies.note(loss)
        last = loss.first + loss.count - 1
        self._notice(
            f"{self._name}: {shown(loss.partition)} has records {loss.first} to {last} no more "
            f"({loss.count}): they were deleted before they were read, and are lost to the {reader}"
        )

    def _sweep(self) -> None:
        now_s = time.monotonic()
        if now_s - self._swept_s >= _SWEEP_EVERY_S:
            self._swept_s = now_s
            keep_s = 0.0 if self._drain else self._settings.keep_days * _DAY_S
            self._held = self._copies.sweep(keep_s, time.time())

    def _reopen(self) -> None:
        """What an append that failed has left is found as after a crash."""
        self._swept_s = float("-inf")
        self._opened, self._stale = False, True


@contextlib.contextmanager
def copying(
    sources: Mapping[str, Iterable[str]],
    directory: Path,
    settings: Settings,
    notice: Callable[[str], None],
    fail: Callable[[BaseException], None],
    drain: bool = False,
    fields: Fields | None = None,
    notices: Callable[[], Sequence[str]] | None = None,
    opened: Callable[[Path, int, str], CopiedLogs] | None = None,
) -> Iterator[list[Import]]:
    """Copy what the sources of each side have and gain, within the block. `fields`: of all sources, if not
    those of their sides in the settings; the rest as of Import. UsageError, CorruptStateError,
    StorageError."""
    with contextlib.ExitStack() as running:
        imports = []
        for side, texts in sources.items():
            given = directory, fields or fields_of(settings, side), settings.imports, drain, notice, fail
            for text in texts:
                one = Import(text, side, *given, notices=notices, opened=opened)
                running.callback(one.stop)
                one.start()
                imports.append(one)
        yield imports


def copy_all(
    sources: Mapping[str, Iterable[str]], directory: Path, settings: Settings, notice: Callable[[str], None]
) -> None:
    """Copy what the sources of each side have now; again it goes on where it was.

    UsageError, CorruptStateError, StorageError. One that is away is told of and waited for.
    """
    failed: list[BaseException] = []
    with copying(sources, directory, settings, notice, failed.append, drain=True) as imports:
        while not (failed or all(one.finished for one in imports)):
            time.sleep(_LOOK_S)
    if failed:
        raise failed[0]


# --- Standard input: it is copied into a log file, and read there as any other.
#
# It can't be asked for again what it brought before, so each run has a file of its own. Who pipes the same
# events into the next run has them told as duplicates.

STDIN: Final = "-"
_READ_BYTES: Final = 1 << 20


def side_of_stdin(sides: Mapping[str, Sequence[str]]) -> str | None:
    """The one that it is, of the sources of each. UsageError where it is more than one."""
    piped = [side for side, texts in sides.items() for text in texts if text == STDIN]
    if len(piped) > 1:
        raise UsageError("standard input (-) can be one of the logs only")
    if piped and sys.stdin is None:  # its number may be another file's by now
        raise UsageError("standard input (-) is closed; pipe something into it, or name a file")
    return next(iter(piped), None)


def stdin_pattern(directory: Path, side: str) -> str:
    """Of the log files that standard input is copied into."""
    return str(directory / f"stdin-{side}-*.jsonl")


def copy_stdin(
    directory: Path,
    side: str,
    file_bytes_max: int,
    fd: int = 0,
    await_room: Callable[[DiskFullError, int], None] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Return when it ends, or `is_over`, and all of it is durable, the last line too if it has no end.
    DiskFullError, StorageError, OSError. `await_room`: told of a full disk, and how often in a row, before
    another try."""
    with contextlib.closing(RotatingLog(directory, f"stdin-{side}", file_bytes_max)) as log:
        if log.position.offset:
            log.rotate()

        def append(lines: bytes) -> None:
            for failures in itertools.count(1):
                try:
                    log.append(lines)
                    return
                except DiskFullError as error:
                    if await_room is None or log.broken:
                        raise
                    await_room(error, failures)

        rest = b""
        while block := _block(fd, is_over):
            lines, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                append(lines + newline)
        if rest and not is_over():  # else it may be a part of a line
            append(rest + b"\n")
        log.sync()


def _block(fd: int, is_over: Callable[[], bool]) -> bytes:
    """Nothing at the end: a read alone goes on after a signal."""
    while not is_over():
        if select.select([fd], [], [], _LOOK_S)[0]:
            return os.read(fd, _READ_BYTES)
    return b""


def follow_stdin(directory: Path, side: str, file_bytes_max: int, notice: Callable[[str], None]) -> None:
    """The same in a thread, which waits for room on a full disk, and tells how it ended."""

    def await_room(error: DiskFullError, failures: int) -> None:
        if failures == 1:
            notice(f"standard input waits: {error}")
        time.sleep(_RETRIES.delay_s(failures))

    def copy() -> None:
        try:
            copy_stdin(directory, side, file_bytes_max, await_room=await_room)
        except (PhotonError, OSError) as error:
            notice(f"standard input is read no more: {told(error)}")
        else:
            notice("standard input has ended")

    threading.Thread(target=copy, name="stdin", daemon=True).start()
