"""What kills or stops a joiner inside its adapter is found out, and isolated: one event, not its batch.

An adapter is the user's code in the joiner's process. What it raises stays its event's; but it may run for
ever (one regular expression is enough, and holds the interpreter's lock meanwhile), or end the process. So
the id of the event that it works on stands in a mapped page, which outlives the process, and a watchdog,
a thread of C that needs no lock, ends a process whose adapter does not return. A joiner that starts finds
the id there; an event at which it ended DEATHS_MAX times is answered without asking the adapter.
"""

import faulthandler
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from photon.core.disk import storage_errors, write_file
from photon.core.ids import ID_BYTES

DEATHS_MAX: Final = 3
"""One may be anybody's: a machine that fails, a person who kills the process."""
SUSPECTS_MAX: Final = 1_000
_NOBODY: Final = bytes(ID_BYTES)
_MARK, _SUSPECTS, _TRACE = "adapter.mark", "adapter.suspects", "adapter.trace"


class Guard:
    """Around the calls of one process's adapter; one batch at a time."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        """`directory`: the joiner's own, whose earlier lives' deaths are counted. StorageError."""
        self._timeout_s = timeout_s
        self.arm_every_s = timeout_s / 10
        self._path = directory / _SUSPECTS
        self.found: str | None = None
        """What is to be told of the life before."""
        with storage_errors(self._path):
            self._deaths = _read(self._path)
            self._trace: IO[Any] = (directory / _TRACE).open("a+b", buffering=0)
            self._mark = _mapped(directory / _MARK)
            self._note_death()

    def close(self) -> None:
        """No batch follows."""
        self._mark.close()
        self._trace.close()

    @contextmanager
    def batch(self, ids: Sequence[bytes]) -> Iterator["Calls"]:
        """Around the calls for the events of a batch. StorageError."""
        calls = Calls(self, ids)
        try:
            yield calls
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._mark[:] = _NOBODY
        self._answered(ids)

    def enter(self, id_: bytes) -> str | None:
        """The adapter is about to be called for the event: or why it must not be."""
        if self._deaths and self._deaths.get(id_.hex(), 0) >= DEATHS_MAX:
            return (
                f"its joiner ended {DEATHS_MAX} times while the adapter worked on this event: killed, out of "
                f"memory, or not back within {self._timeout_s:g} s (adapter.timeout_s)"
            )
        self._mark[:] = id_
        return None

    def arm(self) -> None:
        """The adapter has its whole time, and up to `arm_every_s` more: this is too dear for each event."""
        faulthandler.dump_traceback_later(self._timeout_s + self.arm_every_s, exit=True, file=self._trace)

    def _answered(self, ids: Sequence[bytes]) -> None:
        """Who was adapted is suspected no more, and whoever was refused is: the adapter may be mended."""
        cleared = [id_.hex() for id_ in ids if id_.hex() in self._deaths] if self._deaths else []
        if cleared:
            for name in cleared:
                del self._deaths[name]
            self._store()

    def _note_death(self) -> None:
        id_ = bytes(self._mark)
        if id_ == _NOBODY:
            return
        deaths = self._deaths[id_.hex()] = self._deaths.pop(id_.hex(), 0) + 1
        while len(self._deaths) > SUSPECTS_MAX:
            del self._deaths[next(iter(self._deaths))]
        self._store()
        self._mark[:] = _NOBODY
        self._trace.seek(0)
        hung = _frames(self._trace.read().decode("utf-8", "replace"))
        self._trace.truncate(0)
        why = f"it was not back within {self._timeout_s:g} s ({hung})" if hung else "the process was killed"
        self.found = (
            f"the joiner ended while its adapter worked on an event ({deaths} of {DEATHS_MAX}): {why}"
        )

    def _store(self) -> None:
        with storage_errors(self._path):
            write_file(self._path, msgspec.json.encode(self._deaths))


class Calls:
    """Of one batch."""

    def __init__(self, guard: Guard, ids: Sequence[bytes]) -> None:
        self._guard, self._ids = guard, ids
        self._armed = float("-inf")

    def enter(self, row: int) -> str | None:
        """As Guard.enter, of the batch's event in this row."""
        now = time.monotonic()
        if now - self._armed >= self._guard.arm_every_s:
            self._armed = now
            self._guard.arm()
        return self._guard.enter(self._ids[row])


def _mapped(path: Path) -> mmap.mmap:
    with path.open("a+b") as file:
        file.truncate(ID_BYTES)
        return mmap.mmap(file.fileno(), ID_BYTES)


def _read(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (FileNotFoundError, msgspec.DecodeError):  # a hint, worth no stop
        return {}


def _frames(trace: str) -> str:
    """Where the adapter's thread was: the two innermost frames."""
    threads = [thread for thread in trace.split("\n\n") if "join_one" in thread]
    frames = [line.strip() for line in (threads or [trace])[0].splitlines() if "File " in line]
    return ", ".join(frames[:2])
