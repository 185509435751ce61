"""What the event stores tell of primary events that have arrived, and of how far they have read: of each a
thread that waits for it in a call."""

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
_LOOKS_EVERY_S: Final = 1.0
"""For event stores that came or went."""


class Listener:
    """Passes ids to `arrive` and times (us) to `read_to`, from `start` to `stop`. Best effort: what it misses
    waits for its backoff. The time is the least of those of all event stores that answer."""

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
        self._lock = threading.Lock()
        self._heard: dict[str, int] = {}
        self._listening: dict[str, threading.Thread] = {}
        self._thread = threading.Thread(target=self._look, name="dispatcher-arrivals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the gate was told to stop. Ends the calls under way."""
        self._eventstore.close()
        if self._thread.is_alive():
            self._thread.join()
        for thread in self._listening.values():
            thread.join()

    def _look(self) -> None:
        while True:
            self._eventstore.keep_up()
            for address in self._eventstore.addresses:
                if address not in self._listening or not self._listening[address].is_alive():
                    thread = threading.Thread(target=self._listen, args=(address,), daemon=True)
                    self._listening[address] = thread
                    thread.start()
            if self._gate.stopping.wait(_LOOKS_EVERY_S):
                return

    def _listen(self, address: str) -> None:
        position, read_to_us, failures = 0, 0, 0
        while not self._gate.stopping.is_set() and address in self._eventstore.addresses:
            try:
                position, read_to_us, ids = self._eventstore.arrivals(address, position, read_to_us)
            except UnavailableError:
                failures += 1
                self._hear(address, None)
                self._gate.wait(_AGAIN, failures)
                continue
            failures = 0
            self._hear(address, read_to_us)
            if ids:
                self._arrive(split_ids(ids))
            self._gate.stopping.wait(_GATHER_S)
        self._hear(address, None)

    def _hear(self, address: str, read_to_us: int | None) -> None:
        """How far one has read; None: it does not say."""
        with self._lock:
            if read_to_us is None:
                self._heard.pop(address, None)
            else:
                self._heard[address] = read_to_us
            if self._heard:
                self._read_to(min(self._heard.values()))
