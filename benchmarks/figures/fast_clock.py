"""A wall clock that runs faster than the machine's: days of event time in a minute, all else as it is."""

import time

from photon.core.clock import SystemClock


class FastClock(SystemClock):
    """`speed` seconds of wall time a second since `began_s` (Unix time); leases and time-outs are real."""

    def __init__(self, speed: float, began_s: float) -> None:
        self._speed = speed
        self._began_s = began_s

    def now_us(self) -> int:
        return int((self._began_s + (time.time() - self._began_s) * self._speed) * 1e6)
