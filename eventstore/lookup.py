"""A lookup: the cache first, the logs for what it does not have (paper 3.4)."""

from collections.abc import Callable
from typing import Final, NamedTuple

from eventstore.cache import CacheEventStore
from eventstore.logs_store import LogsEventStore
from photon.core.columns import split_ids
from photon.core.fates import Found

# Below the bound of a message. What does not fit is BEHIND: asked again without the others, it fits.
ANSWER_BYTES_MAX: Final = 48 << 20


class ReaderState(NamedTuple):
    """`caught_up`: all that is in the logs is in map and cache; `unreadable`: but for some file."""

    caught_up: bool
    unreadable: bool


class EventLookup:
    """Thread-safe. `reader_state` is asked before the map is read: only so "absent" can be believed."""

    def __init__(
        self, cache: CacheEventStore, logs: LogsEventStore, reader_state: Callable[[], ReaderState]
    ) -> None:
        self._cache = cache
        self._logs = logs
        self._reader_state = reader_state

    def look_up(self, ids: bytes) -> tuple[bytes, list[bytes]]:
        """16 x N bytes -> core.fates.Found column and N lines, b"" where not found. StorageError."""
        keys = split_ids(ids)
        lines = self._cache.get_many(keys)
        outcomes = bytearray(len(keys))
        if None in lines:
            self._look_into_logs(keys, lines, outcomes)
        found = [line or b"" for line in lines] if None in lines else lines
        answer: list[bytes] = found  # type: ignore[assignment]
        if sum(map(len, answer)) > ANSWER_BYTES_MAX:
            _cut_short(answer, outcomes)
        return bytes(outcomes), answer

    def _look_into_logs(
        self, keys: tuple[bytes, ...], lines: list[bytes | None], outcomes: bytearray
    ) -> None:
        state = self._reader_state()
        missed = [row for row, line in enumerate(lines) if line is None]
        wanted = list(dict.fromkeys([keys[row] for row in missed]))
        in_logs, doubtful = self._logs.get_many(wanted)
        found = {key: line for key, line in zip(wanted, in_logs, strict=True) if line is not None}
        unreadable = {key for key, doubt in zip(wanted, doubtful, strict=True) if doubt}
        absent = _absence(state)
        for row in missed:
            key = keys[row]
            if key in found:
                lines[row] = found[key]
            else:
                outcomes[row] = Found.UNREADABLE if key in unreadable else absent
        if found:
            self._cache.put_many(list(found), list(found.values()))


def _absence(state: ReaderState) -> Found:
    """What it means that an event was not found."""
    if not state.caught_up:
        return Found.BEHIND
    return Found.UNREADABLE if state.unreadable else Found.ABSENT


def _cut_short(lines: list[bytes], outcomes: bytearray) -> None:
    total = 0
    for row, line in enumerate(lines):
        if total and total + len(line) > ANSWER_BYTES_MAX:
            lines[row] = b""
            outcomes[row] = Found.BEHIND
        else:
            total += len(line)
