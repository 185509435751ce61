"""Time is passed in. Only the wiring (photon.cluster) knows the real clock."""

import time
from collections.abc import Callable
from typing import Final, Protocol

# Leases run on it: unlike time.monotonic on Linux, it counts the time a machine was suspended.
_MONOTONIC: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Wall time for events, monotonic time for waits and timeouts."""

    def now_us(self) -> int:
        """Microseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        return time.clock_gettime(_MONOTONIC)


class ManualClock:
    """A clock that moves when told; for tests and simulations."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self._monotonic = 0.0

    def now_us(self) -> int:
        return self._now_us

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now_us += round(seconds * 1_000_000)
        self._monotonic += seconds


TimeSource = Callable[[], int]
"""Asks a trusted time server (TrueTime in the paper) for microseconds since the epoch."""
