"""A lookup: the cache first, the logs for what it does not have (paper 3.4)."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from eventstore.cache import CacheEventStore
from eventstore.logs_store import LogsEventStore
from eventstore.read_on import ReadOn
from photon.core.clock import Clock
from photon.core.columns import split_ids
from photon.core.fates import Found
from photon.core.histogram import Histogram

# Below the bound of a message. What does not fit is BEHIND: asked again without the others, it fits.
ANSWER_BYTES_MAX: Final = 48 << 20
_FINEST_CACHE_US: Final = 1.0


class ReaderState(NamedTuple):
    """`caught_up`: all that is in the logs is in map and cache; `unreadable`: but for some file."""

    caught_up: bool
    unreadable: bool


class Fill(Protocol):
    """Takes events for the cache."""

    def __call__(self, keys: Sequence[bytes], lines: Sequence[bytes]) -> None: ...


class EventLookup:
    """Thread-safe. `reader_state` is asked before the map is read: only so "absent" can be believed.

    `fill` gets what the logs gave; `read_on` what neither they nor the map have while the reader is behind.
    """

    def __init__(
        self,
        cache: CacheEventStore,
        logs: LogsEventStore,
        reader_state: Callable[[], ReaderState],
        clock: Clock,
        fill: Fill | None = None,
        read_on: ReadOn | None = None,
    ) -> None:
        self._cache = cache
        self._logs = logs
        self._reader_state = reader_state
        self._clock = clock
        self._fill = fill or cache.put_many
        self._read_on = read_on
        self.cache_latency = Histogram(_FINEST_CACHE_US)
        """Of each call's look into the cache."""
        self.logs_latency = Histogram()
        """Of each call's search in the logs, if it needed one."""

    def look_up(self, ids: bytes, missed: bool = False) -> tuple[bytes, list[bytes]]:
        """16 x N bytes -> core.fates.Found column and N lines, b"" where not found. StorageError.

        `missed`: their owners' caches were asked and are where misses are counted.
        """
        keys = split_ids(ids)
        began = self._clock.monotonic()
        lines = self._cache.get_many(keys, counted=not missed)
        cached = self._clock.monotonic()
        self.cache_latency.count((cached - began) * 1e6)
        if missed and lines.count(None) < len(lines):
            # Its owner is new and does not have it yet.
            here = [row for row, line in enumerate(lines) if line is not None]
            self._fill([keys[row] for row in here], [lines[row] or b"" for row in here])
        outcomes = bytearray(len(keys))
        if None not in lines:
            return _finish(lines, outcomes)  # type: ignore[arg-type]
        self._look_into_logs(keys, lines, outcomes)
        self.logs_latency.count((self._clock.monotonic() - cached) * 1e6)
        return _finish([line or b"" for line in lines], outcomes)

    def _look_into_logs(
        self, keys: tuple[bytes, ...], lines: list[bytes | None], outcomes: bytearray
    ) -> None:
        state = self._reader_state()
        missed = [row for row, line in enumerate(lines) if line is None]
        wanted = list(dict.fromkeys([keys[row] for row in missed]))
        in_logs, doubtful = self._logs.get_many(wanted)
        found = {key: line for key, line in zip(wanted, in_logs, strict=True) if line is not None}
        unreadable = {key for key, doubt in zip(wanted, doubtful, strict=True) if doubt}
        if found:
            self._fill(list(found), list(found.values()))
        if self._read_on is not None and not state.caught_up and len(found) < len(wanted):
            # Not for the caches: the reader itself fills them when it comes by, the first of repeated ones.
            found |= self._read_on.get_many([key for key in wanted if key not in found])
        absent = _absence(state)
        for row in missed:
            key = keys[row]
            if key in found:
                lines[row] = found[key]
            else:
                outcomes[row] = Found.UNREADABLE if key in unreadable else absent


def bounded(lines: list[bytes], outcomes: bytearray) -> list[bytes]:
    """The lines, those left out (and BEHIND) that would make the answer too great. Both changed in place."""
    if sum(map(len, lines)) <= ANSWER_BYTES_MAX:
        return lines
    total = 0
    for row, line in enumerate(lines):
        if total and total + len(line) > ANSWER_BYTES_MAX:
            lines[row] = b""
            outcomes[row] = Found.BEHIND
        else:
            total += len(line)
    return lines


def _finish(lines: list[bytes], outcomes: bytearray) -> tuple[bytes, list[bytes]]:
    lines = bounded(lines, outcomes)
    return bytes(outcomes), lines


def _absence(state: ReaderState) -> Found:
    """What it means that an event was not found."""
    if not state.caught_up:
        return Found.BEHIND
    return Found.UNREADABLE if state.unreadable else Found.ABSENT
