"""New lines of the foreign logs as batches, and how far each file is taken care of (paper 3.2)."""

import bisect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dispatcher.rules.events import NO_EVENTS, Events, FreshBatch, OffsetTracker, Span
from photon.core.clock import SteadyClock
from photon.core.errors import StorageError
from photon.core.fates import Fate
from photon.core.settings import Logs
from photon.logs.files import FileState
from photon.logs.follow import LogFollower
from photon.logs.formats import ForeignBatch, JsonLines
from photon.logs.text import LINGER_S, Part, Starts, Text, gather, oversized_letter
from photon.logs.writer import DeadLetter

BATCH_BYTES_MAX: Final = 8 << 20
"""Lines of a batch; a longer line goes alone. Keeps a message well under its limit."""


class LogReader:
    """Reads in one thread (`look`, `next_batch`); another says what is finished and asks for file states."""

    def __init__(
        self,
        follower: LogFollower,
        log_format: JsonLines,
        settings: Logs,
        batch_events_max: int,
        clock: SteadyClock,
        states: Sequence[FileState],
        notice: Callable[[str], None],
    ) -> None:
        """`states`: of the files as the ledger knows them, and `follower` was told."""
        self._tracker = OffsetTracker({state.number: state.offset for state in states})
        self._mutex = threading.Lock()  # over the tracker, `_changed` and `_lost_bytes`
        self.follower = follower
        follower.order = lambda number: self._newest_of.get(number, 0)
        self._format = log_format
        self._settings = settings
        self._batch_events_max = batch_events_max
        self._clock = clock
        self._notice = notice
        self._ready: deque[FreshBatch] = deque()
        self._next_number = 0
        self._poll_at = self._scan_at = self.looks_at = float("-inf")
        """`looks_at`: until then `look` does nothing; monotonic."""
        self._changed: set[int] = set()
        self._lost_bytes = 0
        self._parsed_bytes = self._given_bytes = self._given_lines = 0
        self._newest_us = 0
        """The latest time of an event that was given out."""
        self._newest_of: dict[int, int] = {}
        """The time up to which each file is read, while there is more: all advance together."""

    @property
    def caught_up(self) -> bool:
        """All whole lines that are there were given out as batches."""
        return self.follower.caught_up and not self._ready

    def backlog(self) -> dict[str, float]:
        """What was not given out yet: `bytes`, `events` by the mean line so far, and `seconds`, by how much
        the newest event given out is older than now. Any thread."""
        waiting = self.follower.unread_bytes() + self._parsed_bytes - self._given_bytes
        if waiting <= 0:
            return {"bytes": 0, "events": 0, "seconds": 0.0}
        behind_us = self._clock.wall.now_us() - self._newest_us if self._newest_us else 0
        return {
            "bytes": waiting,
            "events": round(waiting * self._given_lines / self._given_bytes) if self._given_bytes else 0,
            "seconds": round(max(0, behind_us) / 1e6, 3),
        }

    def look(self) -> bool:
        """Look for new and grown files, as often as the settings say. True if a file's state changed."""
        now = self._clock.monotonic()
        if now < self.looks_at or (now < self._poll_at and not self.follower.news):
            return False
        self._poll_at = now + self._settings.poll_interval_ms / 1000
        changed: list[FileState] = []
        if now >= self._scan_at:
            try:
                changed = self.follower.scan_if_due()
            except (OSError, StorageError) as error:
                self._notice(f"looking for foreign logs: {error}; tried again at the next scan")
                self._scan_at = now + self._settings.scan_interval_s
        self.follower.poll()
        with self._mutex:
            self._changed.update(state.number for state in changed)
            self._lost_bytes += self.follower.take_lost()
        return bool(changed)

    def next_batch(self) -> FreshBatch | None:
        """The next unread lines, whatever few there are; None when all that is known is read."""
        if not self._ready:
            parts, oversized = gather(self.follower, self._settings.chunk_bytes // 2)
            if parts:
                self._ready.extend(self._batches(parts))
                self.looks_at = self._clock.monotonic() + LINGER_S
            if oversized is not None:
                self._ready.append(self._oversized(oversized))
            with self._mutex:
                for batch in self._ready:
                    self._tracker.sent(batch.number, batch.spans)
                    self._parsed_bytes += batch.size
        if not self._ready:
            return None
        batch = self._ready.popleft()
        self._given_bytes += batch.size
        self._given_lines += batch.count
        self._newest_us = max(self._newest_us, batch.events.newest_us)
        return batch

    def finished(self, batch: int) -> list[int]:
        """The batches to be recorded now that this one is finished, in order."""
        with self._mutex:
            return self._tracker.finished(batch)

    def states(self, files: Iterable[int]) -> tuple[list[FileState], int]:
        """The states to record: of these files and of all that changed since the last call. And the bytes
        lost since, of those that are gone. One that is gone is told once, and forgotten."""
        with self._mutex:
            numbers = filter(self.follower.knows, sorted(self._changed.union(files)))
            self._changed.clear()
            lost, self._lost_bytes = self._lost_bytes, 0
            offset = self._tracker.offset
            states = [self.follower.advanced(number, offset(number)) for number in numbers]
            for state in states:
                if state.gone:
                    self._newest_of.pop(state.number, None)
                    self.follower.forget(state.number)
                    self._tracker.forget(state.number)
            return states, lost

    def _batches(self, parts: list[Part]) -> list[FreshBatch]:
        now_us = self._clock.now_us()
        text = Text(parts)
        parsed = self._format.parse_foreign(text.data)
        numbers = np.array([file.number for file, _ in parts], np.uint32)
        bad_starts = [bad.start for bad in parsed.malformed]
        letters = [
            DeadLetter(Fate.MALFORMED, bad.reason, bad.line, *text.origin(bad.start), int(log))
            for bad, log in zip(
                parsed.malformed, numbers[text.parts_of(np.array(bad_starts, np.int64))], strict=True
            )
        ]
        for (file, chunk), last in zip(parts, text.last_rows(parsed.starts), strict=True):
            if chunk.more and last is not None:
                self._newest_of[file.number] = int(np.frombuffer(parsed.times, "<i8", 1, 8 * last)[0])
        offsets = text.offsets(parsed.starts)
        files = numbers[text.parts_of(parsed.starts)]
        batches = []
        for low, high, start, end in self._cuts(parsed, len(text.data)):
            names = text.names(parsed.starts, low, high)
            events = _slice(parsed, files, offsets, low, high, now_us, *names)
            bad = slice(bisect.bisect_left(bad_starts, start), bisect.bisect_left(bad_starts, end))
            spans = [Span(*span) for span in text.spans(start, end)]
            batches.append(FreshBatch(self._number(), events, letters[bad], spans))
        return batches

    def _cuts(self, parsed: ForeignBatch, length: int) -> list[tuple[int, int, int, int]]:
        """Rows from, to and bytes from, to of each batch; other lines go with the events before them."""
        starts = parsed.starts
        cuts, low, start = [], 0, 0
        while True:
            high = min(low + self._batch_events_max, len(starts))
            if high > low and int(starts[high - 1]) - int(starts[low]) > BATCH_BYTES_MAX:
                high = max(low + 1, int(np.searchsorted(starts, starts[low] + BATCH_BYTES_MAX)))
            end = int(starts[high]) if high < len(starts) else length
            cuts.append((low, high, start, end))
            if end == length:
                return cuts
            low, start = high, end

    def _oversized(self, part: Part) -> FreshBatch:
        letter = oversized_letter(part, self._settings.line_bytes_max)
        span = Span(letter.log, part[1].start, part[1].end)
        return FreshBatch(self._number(), NO_EVENTS, [letter], (span,))

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1


def _slice(
    parsed: ForeignBatch,
    files: npt.NDArray[np.uint32],
    offsets: Starts,
    low: int,
    high: int,
    now_us: int,
    names: list[str],
    name_from: list[int],
) -> Events:
    count = high - low
    whole = count == len(parsed.lines)
    return Events(
        ids=parsed.ids[16 * low : 16 * high],
        primary_ids=parsed.primary_ids[16 * low : 16 * high],
        times=parsed.times[8 * low : 8 * high],
        lines=parsed.lines if whole else parsed.lines[low:high],
        tries=np.zeros(count, np.uint32),
        sends=np.zeros(count, np.uint32),
        first_seen=np.full(count, now_us, np.int64),
        files=files[low:high],
        offsets=offsets[low:high],
        names=names,
        name_from=name_from,
    )
