"""What the event store tells of primary events that have arrived: a thread that waits for it in a call."""

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
"""Arrivals that follow within this time are told of together."""


class Listener:
    """Passes ids to `arrive`, from `start` to `stop`. Best effort: what it misses waits for its backoff."""

    def __init__(
        self, eventstore: EventStoreClient, gate: Gate, arrive: Callable[[Sequence[bytes]], None]
    ) -> None:
        self._eventstore = eventstore
        self._gate = gate
        self._arrive = arrive
        self._thread = threading.Thread(target=self._listen, name="dispatcher-arrivals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the gate was told to stop. Ends the call under way."""
        self._eventstore.close()
        if self._thread.is_alive():
            self._thread.join()

    def _listen(self) -> None:
        position, failures = 0, 0
        while not self._gate.stopping.is_set():
            try:
                position, ids = self._eventstore.arrivals(position)
            except UnavailableError:
                failures += 1
                self._gate.wait(_AGAIN, failures)
                continue
            failures = 0
            if ids:
                self._arrive(split_ids(ids))
                self._gate.stopping.wait(_GATHER_S)
