"""What the event store tells of primary events that have arrived, and of how far it has read: a thread that
waits for it in a call."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from dispatcher.sender import Gate
from eventstore.client import EventStoreClient
from photon.core.clock import Backoff
from photon.core.columns import split_ids
from photon.core.errors import UnavailableError

_AGAIN: Final = Backoff(0.05, 2.0)
_GATHER_S: Final = 0.02
"""What follows within this time is told of together."""


class Listener:
    """Passes ids to `arrive` and times (us) to `read_to`, from `start` to `stop`. Best effort: what it misses
    waits for its backoff."""

    def __init__(
        self,
        eventstore: EventStoreClient,
        gate: Gate,
        arrive: Callable[[Sequence[bytes]], None],
        read_to: Callable[[int], None],
    ) -> None:
        self._eventstore = eventstore
        self._gate = gate
        self._arrive = arrive
        self._read_to = read_to
        self._thread = threading.Thread(target=self._listen, name="dispatcher-arrivals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the gate was told to stop. Ends the call under way."""
        self._eventstore.close()
        if self._thread.is_alive():
            self._thread.join()

    def _listen(self) -> None:
        position, read_to_us, failures = 0, 0, 0
        while not self._gate.stopping.is_set():
            try:
                position, read_to_us, ids = self._eventstore.arrivals(position, read_to_us)
            except UnavailableError:
                failures += 1
                self._gate.wait(_AGAIN, failures)
                continue
            failures = 0
            self._read_to(read_to_us)
            if ids:
                self._arrive(split_ids(ids))
            self._gate.stopping.wait(_GATHER_S)
