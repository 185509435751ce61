"""Primary events that lookups asked for before they were there: remembered, and told of when they arrive. And
how far the logs are read, so that a dispatcher asks for few of them too early.

Best effort: what is forgotten here is asked for again, when its backoff is over.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from secrets import randbits
from typing import Final

from photon.core.columns import split_ids
from photon.core.errors import OverloadedError, UnavailableError

AWAITED_MAX: Final = 1 << 18
"""Ids that are remembered; then the older half is forgotten. 110 bytes each."""
ARRIVED_MAX: Final = 1 << 16
"""Arrivals that are kept for those who ask for them late."""
_POSITION_BITS: Final = 62


class Arrivals:
    """For many threads at once. At most `listeners_max` may wait in `after` at a time."""

    def __init__(self, listeners_max: int = 2, awaited_max: int = AWAITED_MAX) -> None:
        self._listeners_max = listeners_max
        self._half = awaited_max // 2
        self._lock = threading.RLock()
        self._newer: set[bytes] = set()
        self._older: set[bytes] = set()
        self._arrived: deque[bytes] = deque(maxlen=ARRIVED_MAX)
        self._position = randbits(_POSITION_BITS) + 1  # another one after a restart
        self._listeners: set[threading.Event] = set()
        self._closed = False
        self._read_to_us = 0
        self.count = 0
        """Ids that have arrived so far."""

    @property
    def awaited(self) -> int:
        return len(self._newer) + len(self._older)

    def expect(self, keys: Sequence[bytes]) -> None:
        """These are about to be looked for. Call it before the logs' map is read: so none slips through."""
        with self._lock:
            if len(self._newer) + len(keys) > self._half:
                self._older, self._newer = self._newer, set()
            self._newer.update(islice(keys, self._half))

    def forget(self, keys: Iterable[bytes]) -> None:
        """These were found."""
        with self._lock:
            self._newer.difference_update(keys)
            if self._older:
                self._older.difference_update(keys)

    def arrive(self, ids: bytes) -> None:
        """16 x N bytes: these can be found from now on."""
        if not self.awaited:  # one that is expected only now will be found
            return
        keys = split_ids(ids)
        with self._lock:
            arrived = self._newer.intersection(keys) | self._older.intersection(keys)
            if not arrived:
                return
            self._newer -= arrived
            self._older -= arrived
            self._arrived.extend(arrived)
            self._position += len(arrived)
            self.count += len(arrived)
            self.tell_all()

    def read_to(self, time_us: int) -> None:
        """Up to about this time of events the logs are read."""
        with self._lock:
            if time_us != self._read_to_us:
                self._read_to_us = time_us
                self.tell_all()

    def after(
        self, position: int, read_to_us: int, ended: threading.Event, wait_s: float
    ) -> tuple[int, int, bytes]:
        """What has arrived since `position`: the position and `read_to` as they are now, and 16 x N bytes.
        Waits while all is as the caller knows it.

        Of a position that it does not know, as after a restart: all that it still has. `ended` ends the wait.
        OverloadedError if too many wait; UnavailableError once it is closed.
        """
        with self._lock:
            known = (position, read_to_us) == (self._position, self._read_to_us)
            waits = known and not self._closed
            if waits:
                if len(self._listeners) >= self._listeners_max:
                    raise OverloadedError(f"{self._listeners_max} wait for arrivals already; ask again later")
                self._listeners.add(ended)
        if waits:
            ended.wait(wait_s)
        with self._lock:
            self._listeners.discard(ended)
            if self._closed:
                raise UnavailableError("the event store stops; ask again later")
            kept = len(self._arrived)
            since = self._position - position
            skipped = kept - since if 0 <= since <= kept else 0
            arrived = b"".join(islice(self._arrived, skipped, None))
            return self._position, self._read_to_us, arrived

    def tell_all(self) -> None:
        """End the waits of now: there is something else that those who wait must know."""
        with self._lock:
            for listener in self._listeners:
                listener.set()

    def close(self) -> None:
        """End all waits."""
        with self._lock:
            self._closed = True
            self.tell_all()
