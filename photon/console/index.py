"""Where the joined line of each event is: a log file map (paper 3.4.2) over the joined logs.

A line is found by the foreign event's id in the place of a primary event's. It follows the logs as they
grow, from where it was when it stopped.
"""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from eventstore.log_file_map import LogFileMap
from eventstore.lookup import LogsEventStore
from eventstore.reader import Reader, follower_of
from eventstore.segments import identity_of
from photon.core.clock import Clock
from photon.core.settings import MIB, Primary, Settings
from photon.core.status import Notices
from photon.logs.formats import json_lines
from photon.logs.writer import RotatingLog

_LETTER_BYTES_MAX: Final = 64 * MIB


class JoinedIndex:
    """From `start` to `stop`. Lines that an adapter has made without the foreign event's id and time are not
    found, nor is what was completed as Parquet before it was read here."""

    def __init__(self, settings: Settings, joined: Path, directory: Path, clock: Clock) -> None:
        """CorruptStateError, LockedError, StorageError."""
        foreign = settings.foreign
        own = replace(
            settings,
            primary=Primary(id=foreign.id, time=foreign.time, time_unit=foreign.time_unit),
        )
        self._notices = Notices("console")
        wake = threading.Event()
        self._map = LogFileMap(directory / "map", own.eventstore, identity_of(own))
        self._letters = RotatingLog(directory / "unknown-lines", "joined", _LETTER_BYTES_MAX)
        logs = [str(joined / "*" / "*.jsonl")]
        follower = follower_of(self._map, logs, directory, own.logs, clock, self._notices, wake)
        self._reader = Reader(
            follower,
            self._map,
            _no_cache,
            json_lines(own),
            self._letters,
            own.logs,
            clock,
            self._notices,
            wake=wake,
        )
        self._logs = LogsEventStore(self._map, lambda: json_lines(own), self._notices.tell)

    def start(self) -> None:
        """Read on, in a thread."""
        self._reader.start()

    def stop(self) -> None:
        self._reader.stop()
        self._letters.close()
        self._map.close()

    def find(self, packed: bytes) -> list[dict[str, Any]]:
        """{datacenter, file, offset, line} of the event's joined line, as photon.cluster.explain has them."""
        [line], _ = self._logs.get_many([packed])
        if line is None:
            return []
        places, states = self._map.places_of(packed)
        for file, offset in zip(places["file"].tolist(), places["offset"].tolist(), strict=True):
            if (state := states.get(file)) is not None:
                path = Path(state.path)
                text = line.decode("utf-8", "replace")
                return [{"datacenter": path.parent.name, "file": str(path), "offset": offset, "line": text}]
        return []

    def status(self) -> dict[str, Any]:
        """{events, caught_up}"""
        return {"events": self._map.counts.primary_events, "caught_up": self._reader.caught_up}


def _no_cache(_block: object) -> None:
    """The kernel keeps what was read lately."""
