"""Clears tokens (paper 3.3.3): once a joined event is safe, the IdRegistry need not know who registered it.

An event is safe when its file is listed in the manifest of the first output root: it is durable in every root
then, and so is the end of its intent, so that no life of this joiner registers it again (joiner.completing).
What is left with a token is what recovery looks for. To clear a token again has no effect: how far this has
come is noted from time to time, and the next start goes on from there.

A line tells whose token it is by the id in it, and the IdRegistry clears whatever token the id has. So files
with lines of an adapter that may write another event's id (joiner.adapter.Adapter.keeps_id) are passed over.

The thread goes on slowly: it rests as long as it works, and clears no more ids a second than the settings
allow, a tenth of that while the joiner is busy. Nothing waits for it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from joiner.cleared_place import Place, read_place, write_place
from joiner.joined_ids import JoinedIds, JoinedPart
from joiner.manifest import file_number
from joiner.output_files import CompleteFile
from joiner.ports import Checkpoint, Notice, Registry
from joiner.roots import Root
from photon.core.clock import Clock
from photon.core.disk import storage_errors
from photon.core.errors import StorageError, UnavailableError
from photon.core.fates import Cleared
from photon.core.ids import ID_BYTES

INTERVAL_S: Final = 1.0
RETRY_S_MAX: Final = 60.0
TRIES_MAX: Final = 8
"""A file that could not be read so often is passed over: three minutes, as the waits grow."""
FAILURES_TOLD: Final = 3
"""Before the operator is told of a registry that does not answer; it may be busy."""
BATCH_IDS_MAX: Final = 4096
"""No commit waits longer for one than for the dispatcher's full batch."""
NOTE_S: Final = 5.0
BUSY_SHARE: Final = 0.1
"""Of the rate, at load: a saturated system joined a fifth less at the full one."""
_REST_S_MAX: Final = 1.0
_STOP_WAIT_S: Final = 1.0
_DAY_US: Final = 86_400_000_000
_TIME_BYTES: Final = 8


class _ClosedError(Exception):
    """The joiner closes: let go of everything at once."""


_CLOSED: Final = Place("", "", 0)


class Clearer:
    """A thread of its own; `step` is what it does, for those who have no thread."""

    def __init__(
        self,
        roots: Sequence[Root],
        state: Path,
        first: int,
        joined_ids: JoinedIds,
        registry: Registry,
        ids_per_s: int,
        busy: Callable[[], bool],
        retention_days: float,
        clock: Clock,
        notice: Notice,
        checkpoint: Checkpoint = lambda _: None,
    ) -> None:
        """`state`: the joiner's own directory; `first`: number of the first file to clear
        (joiner.cleared_place); `busy`: whether joins wait for each other just now; `retention_days`: of the
        IdRegistry, 0 for ever. StorageError."""
        self._roots = roots
        self._state = state
        self._first = first
        self._joined_ids = joined_ids
        self._registry = registry
        self._ids_per_s = ids_per_s
        self._busy = busy
        self._batch_ids = max(1, min(BATCH_IDS_MAX, ids_per_s))
        self._retention_us = int(retention_days * _DAY_US)
        self._clock = clock
        self._notice = notice
        self._checkpoint = checkpoint
        self._listed = roots[0].manifest.entries
        self._place = self._noted = read_place(state)
        self._noted_s = time.monotonic()
        self._next = self._index_of(self._place)
        self._counts = dict.fromkeys(("cleared", "absent", "unclearable", "passed_over"), 0)
        self._troubles: dict[str, str] = {}
        self._failures = 0
        self._unreadable = 0
        self._allowed_s = self._rested_s = 0.0
        self._one_step = threading.Lock()
        self._noting = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clearer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End at once, whatever the registry is asked just now; the next start goes on."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_WAIT_S)
        self._note()
        with self._noting:
            self._noted = _CLOSED  # the directory may be another's now

    def step(self) -> None:
        """Clear all that is listed. What fails is told, and tried again by the next step."""
        with self._one_step:
            try:
                while self._next < len(self._listed):
                    self._clear_next()
                self._note()
            except _ClosedError:
                raise
            except UnavailableError as error:
                self._failures += 1
                self._tell("registry", str(error), self._failures == FAILURES_TOLD)
            except Exception as error:
                # Without this thread the registry would keep all tokens, and nobody would know.
                self._failures += 1
                self._could_not_read(error)
            else:
                self._failures = 0
                self._troubles.pop("registry", None)

    def status(self) -> dict[str, Any]:
        """Of this process: ids cleared, and `absent` ones (expired, or released since); lines that are
        `unclearable` (an adapter wrote no id or time); files `passed_over` (taken away, expired, unreadable,
        written with an adapter that keeps no ids); files that are listed and `behind`."""
        behind = len(self._listed) - self._next
        return {**self._counts, "behind": behind, "trouble": next(iter([*self._troubles.values()]), None)}

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            try:
                self.step()
            except _ClosedError:
                return
            wait_s = min(RETRY_S_MAX, INTERVAL_S * 2.0 ** min(self._failures, 16))

    # --- files

    def _clear_next(self) -> None:
        entry = self._listed[self._next]
        place = self._place
        start = place.end if place is not None and place.is_in(entry) else 0
        while (path := self._found(entry)) is not None:
            try:
                with storage_errors(path):
                    self._clear_file(path, entry, start)
                break
            except StorageError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise  # else it was taken away meanwhile
        else:
            self._pass_over(entry)
        self._go_on()

    def _go_on(self) -> None:
        self._next += 1
        self._failures = self._unreadable = 0
        self._troubles.pop("file", None)

    def _found(self, entry: CompleteFile) -> Path | None:
        """Where the file is to be read, None for nowhere. StorageError if the root itself is not there."""
        if file_number(entry.file) < self._first or self._is_expired(entry):
            return None
        for root in self._roots:
            path = root.directory / entry.file
            if path.exists():
                return path
        manifest = self._roots[0].manifest.path
        if not manifest.exists():
            raise StorageError(f"{manifest} is gone, so its root is, perhaps; mount it, or bring it back")
        return None

    def _is_expired(self, entry: CompleteFile) -> bool:
        """Whether the registry has forgotten all its ids: none is of a later time than it was closed, but for
        the skew of clocks."""
        if not self._retention_us:
            return False
        return entry.closed_us + self._retention_us + _DAY_US < self._clock.now_us()

    def _pass_over(self, entry: CompleteFile) -> None:
        self._counts["passed_over"] += 1
        self._place = Place.after(entry)

    def _clear_file(self, path: Path, entry: CompleteFile, start: int) -> None:
        self._rested_s = time.monotonic()
        for part in self._joined_ids.parts(path, start, self._batch_ids, self._rest):
            self._clear(part)
            self._count_unclearable(part.unclearable)
            self._place = Place(entry.file, entry.crc32, part.end)
            if time.monotonic() - self._noted_s >= NOTE_S:
                self._note()
            self._rested_s = time.monotonic()

    def _clear(self, part: JoinedPart) -> None:
        """UnavailableError: some may be cleared, and are again."""
        for low in range(0, len(part.ids) // ID_BYTES, self._batch_ids):
            self._wait(self._allowed_s - time.monotonic())
            high = low + self._batch_ids
            ids = part.ids[ID_BYTES * low : ID_BYTES * high]
            times = part.times[_TIME_BYTES * low : _TIME_BYTES * high]
            count = len(ids) // ID_BYTES
            rate = self._ids_per_s * (BUSY_SHARE if self._busy() else 1.0)
            self._allowed_s = time.monotonic() + count / rate
            outcomes = self._registry.clear(ids, times)
            self._checkpoint("tokens cleared")
            cleared = outcomes.count(Cleared.CLEARED)
            self._counts["cleared"] += cleared
            self._counts["absent"] += count - cleared
            self._troubles.pop("registry", None)

    def _rest(self) -> None:
        """As long as it worked."""
        self._wait(min(_REST_S_MAX, time.monotonic() - self._rested_s))
        self._rested_s = time.monotonic()

    def _wait(self, seconds: float) -> None:
        if self._stopping.wait(max(0.0, seconds)):
            raise _ClosedError

    def _count_unclearable(self, lines: int) -> None:
        if lines and not self._counts["unclearable"]:
            self._notice(
                "some joined lines hold no id and time of a foreign event as the settings name them (the "
                "adapter's doing?): the IdRegistry keeps the tokens of those events"
            )
        self._counts["unclearable"] += lines

    # --- troubles

    def _could_not_read(self, error: Exception) -> None:
        said = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
        self._unreadable += 1
        if self._unreadable < TRIES_MAX or self._next >= len(self._listed):
            self._tell("file", said, "file" not in self._troubles)
            return
        entry = self._listed[self._next]
        self._notice(f"{entry.file} is passed over, the IdRegistry keeps the tokens of its events: {said}")
        self._pass_over(entry)
        self._go_on()

    def _tell(self, what: str, trouble: str, aloud: bool) -> None:
        self._troubles[what] = trouble
        if aloud:
            self._notice(f"tokens can't be cleared for now: {trouble}")

    # --- the place

    def _note(self) -> None:
        """Remember the place, durably. If that fails, the next start does some of it again."""
        with self._noting:
            place = self._place
            self._noted_s = time.monotonic()
            if self._noted is _CLOSED or place is None or place == self._noted:
                return
            try:
                write_place(self._state, place)
            except StorageError as error:
                self._tell("place", str(error), "place" not in self._troubles)
                return
            self._noted = place
            self._troubles.pop("place", None)
        self._checkpoint("clearing noted")

    def _index_of(self, place: Place | None) -> int:
        """Of the file to go on with; the first where the manifest has no such file (another output)."""
        if place is None:
            return 0
        for index, entry in enumerate(self._listed):
            if place.is_in(entry):
                return index + place.is_after(entry)
        return 0
