"""Publishes a log that rotates: what stands in it for good goes on to the sinks that its owner names.

The log is the truth; a sink has a copy of it. Lines are published once no crash takes them back. A sink says
itself up to where it has them, so nothing is remembered here, and after any error it is asked again.

`<stem>.publisher` beside the files holds the name that sinks know them by: it goes where they go, and with
them.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from photon.connect.ports import Refusing, Sink
from photon.connect.uris import make_sink, parse_uri
from photon.core.clock import Background, Backoff, Clock
from photon.core.disk import storage_errors, write_file
from photon.core.errors import StorageError, told
from photon.logs.files import whole_lines
from photon.logs.writer import LogPosition, RotatingLog

NAME: Final = ".publisher"
RETRIES: Final = Backoff(0.2, 10.0)
LOOK_S: Final = 5.0
"""Between two looks at lines that nobody told of."""
DRAIN_LINGER_S: Final = 2.0
"""Lines wait for others no longer where all that will come is there."""
STUCK_S_MAX: Final = 5.0
"""At the end a sink that takes nothing for so long is not waited for: less than a joiner is given to end."""
SILENT_S_MAX: Final = 60.0
"""A sink that has not answered for so long is in trouble."""
_MOVE_S: Final = 0.2
_STOP_WAIT_S: Final = 60.0
_NAME_BYTES: Final = 4


class PublishedLog(Protocol):
    """As far as it stands for good. For any thread."""

    @property
    def files(self) -> RotatingLog: ...

    def end(self) -> LogPosition:
        """No crash takes what stands before it, once `sync_end` has returned."""
        ...

    def sync_end(self) -> None: ...

    def beginning(self) -> LogPosition:
        """Where a sink begins that has nothing."""
        ...

    def check_whole(self, at: LogPosition, upto: int, sink: str) -> None:
        """StorageError if a file before this one was taken away before the sink, which has all up to `at`,
        had all of it."""
        ...


class Publisher:
    """All sinks of a log, each with a thread of its own: one that stands still holds up no other."""

    def __init__(
        self,
        sinks: Sequence[str],
        stem: str,
        log: PublishedLog,
        clock: Clock,
        drain: bool,
        notice: Callable[[str], None],
    ) -> None:
        """UsageError for a sink that can't be; StorageError."""

        writer = f"{stem}.{_name_beside(log.files.directory, stem)}" if sinks else ""
        self._ways = [
            _Way(parse_uri(text).shown, make_sink(text, writer), log, clock, drain, notice) for text in sinks
        ]

    def start(self) -> None:
        for way in self._ways:
            way.work.start()

    def wake(self) -> None:
        """More is settled."""
        for way in self._ways:
            way.work.wake()

    def needed_from(self) -> int | None:
        """The first file that some sink has not all lines of; None where there is no sink."""
        return min((way.at.file for way in self._ways), default=None)

    def finish(self) -> None:
        """Return when each sink has all that is settled, or takes nothing for STUCK_S_MAX, which is told."""
        for way in self._ways:
            way.finish()

    def stop(self) -> None:
        """Begin nothing more."""
        for way in self._ways:
            way.work.stop(0.0)

    def close(self, within_s: float = _STOP_WAIT_S) -> None:
        """What is under way to each sink may end in that time."""
        for way in self._ways:
            way.close(within_s)

    def status(self) -> list[dict[str, Any]]:
        """`published`: lines by this process; `refused`: of them, for good; `behind`: whether there are
        settled lines that it has not."""
        return [way.status() for way in self._ways]


class _Way:
    """To one sink."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        log: PublishedLog,
        clock: Clock,
        drain: bool,
        notice: Callable[[str], None],
    ) -> None:
        self._name, self._sink, self._log = name, sink, log
        self._settled, self._notice, self._monotonic = log.end, notice, clock.monotonic
        self._linger_s = min(sink.linger_s, DRAIN_LINGER_S) if drain else sink.linger_s
        self._waiting_since: float | None = None
        self._opened = False
        self._asked_s: float | None = None
        """Since when the sink has been at work."""
        self._moved = threading.Event()
        self._published = 0
        self._told_refused: set[str] = set()
        self.at = LogPosition(0, 0)
        """The sink has all lines before it. Until it says so, it is taken to have none."""
        self.work = Background(f"publish {name}", self._step, RETRIES)

    def status(self) -> dict[str, Any]:
        return {
            "sink": self._name,
            "published": self._published,
            "refused": sum(self._refused().values()),
            "behind": self._settled() > self.at,
            "trouble": self._trouble(),
        }

    def _trouble(self) -> str | None:
        asked_s = self._asked_s
        if asked_s is not None and self._monotonic() - asked_s > SILENT_S_MAX:
            return f"{self._name}: no answer for over {SILENT_S_MAX:g} s"
        return self.work.trouble

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Sink]:
        self._asked_s = self._monotonic()
        try:
            yield self._sink
        finally:
            self._asked_s = None

    def finish(self) -> None:
        self._linger_s = 0.0
        seen, still_s = self.at, 0.0
        while self._settled() > self.at and still_s < STUCK_S_MAX:
            self.work.wake()
            self._moved.wait(_MOVE_S)
            self._moved.clear()
            still_s = still_s + _MOVE_S if self.at == seen else 0.0
            seen = self.at
        if self._settled() > self.at:
            why = self._trouble() or "it takes nothing"
            self._notice(f"{self._name} has not all lines ({why}); the next start goes on")

    def close(self, within_s: float) -> None:
        if self.work.stop(within_s):
            self._sink.close()

    def _step(self) -> float:
        try:
            return self._turn()
        except Exception as error:
            if told(error) != self.work.trouble:
                path = self._log.files.path(self.at.file)
                place = f" from byte {self.at.offset} of {path} on" if self._opened else ""
                self._notice(f"lines{place} are not published: {told(error)}")
            self._opened = False
            raise

    def _turn(self) -> float:
        """Seconds until the next one."""
        if not self._opened:
            with self._asking() as sink:
                at = sink.open()
            self.at = self._log.beginning() if at is None else at
            self._opened = True
        settled = self._settled()
        if settled < self.at:
            raise StorageError(
                f"{self._name} has lines up to {self.at}, and the log ends at {settled}: was it put "
                "back from a copy? Name another sink, or compare the two"
            )
        if settled > self.at and self._wait_s(settled) <= 0:
            self._log.sync_end()
        while settled > self.at and not self.work.stopping:
            if (wait_s := self._wait_s(settled)) > 0:
                return wait_s
            lines, end = self._read(settled)
            if lines:
                with self._asking() as sink:
                    sink.write(lines, self.at, end)
                self._published += lines.count(b"\n")
                self._tell_refused()
            self.at = end
            self._waiting_since = None
            self._moved.set()
        return LOOK_S

    def _tell_refused(self) -> None:
        for reason, count in self._refused().items():
            if reason not in self._told_refused:
                self._told_refused.add(reason)
                self._notice(f"{count} lines were refused for good by {self._name}: {reason}")

    def _refused(self) -> dict[str, int]:
        return dict(self._sink.refused) if isinstance(self._sink, Refusing) else {}

    def _wait_s(self, settled: LogPosition) -> float:
        """How long what is settled and not published may wait for more of its file."""
        if settled.file > self.at.file or settled.offset - self.at.offset >= self._sink.batch_bytes:
            return 0.0
        now_s = self._monotonic()
        if self._waiting_since is None:
            self._waiting_since = now_s
        return self._waiting_since + self._linger_s - now_s

    def _read(self, settled: LogPosition) -> tuple[bytes, LogPosition]:
        """Whole lines from `at` on, and the place behind them; none at the end of a file. StorageError."""
        number, offset = self.at.file, self.at.offset
        path = self._log.files.path(number)
        with storage_errors(path):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                if number == settled.file:
                    raise StorageError(f"{path} was taken away while it grows; bring it back") from error
                return b"", self._next(settled)
            try:
                size = settled.offset if number == settled.file else os.fstat(fd).st_size
                wanted = self._sink.batch_bytes
                while offset < size:
                    data = os.pread(fd, min(wanted, size - offset), offset)
                    if whole := whole_lines(data):
                        return data[:whole], LogPosition(number, offset + whole)
                    if wanted >= size - offset:
                        raise StorageError(f"{path} has been cut; bring it back as it was")
                    wanted *= 2
            finally:
                os.close(fd)
        return b"", self._next(settled)

    def _next(self, settled: LogPosition) -> LogPosition:
        later = [n for n in self._log.files.file_numbers() if self.at.file < n <= settled.file]
        number = min(later, default=settled.file)
        self._log.check_whole(self.at, number, self._name)
        return LogPosition(number, 0)


def _name_beside(directory: Path, stem: str) -> str:
    path = directory / f"{stem}{NAME}"
    with storage_errors(path):
        if not path.exists():
            write_file(path, secrets.token_hex(_NAME_BYTES).encode())
        return path.read_text("ascii", "replace")
