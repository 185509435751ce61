"""Gives out the tokens of one life of a joiner (paper 3.3.2)."""

import threading
from random import Random

from photon.core.clock import Clock
from photon.core.tokens import Token


class TokenSource:
    """The tokens of one incarnation. For many threads at once."""

    def __init__(self, address: str, clock: Clock, rng: Random) -> None:
        """`rng` must not be seeded alike in two lives of a joiner: equal tokens would both win."""
        self.incarnation = rng.getrandbits(64)
        self._address = address
        self._clock = clock
        self._last_us = -(1 << 62)
        self._lock = threading.Lock()

    def next(self) -> bytes:
        """A packed token, later than all before it, whatever the clock does."""
        with self._lock:
            self._last_us = max(self._clock.now_us(), self._last_us + 1)
            return Token(self._address, self.incarnation, self._last_us).pack()
