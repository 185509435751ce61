"""When retries are sent before they are due: as primaries come in, those that wait may well succeed. Pure.

But an event may also be early by hours while all others join within moments: each time its retry comes
before its time and in vain, the next such try is put off for twice as long.
"""

from typing import Final

VAIN_JOINED: Final = 0.1
"""Fewer of a batch joined than that: it came too early."""

PAUSE_S_MIN: Final = 0.25
PAUSE_S_MAX: Final = 600.0
_DOUBLINGS_MAX: Final = 20  # keeps the power small; the cap decides long before


class EarlyRetries:
    """How many events to retry before they are due. Not for several threads at once."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._wanted = 0
        self._vain = 0
        self._not_before = float("-inf")

    def observe(self, count: int, again: int, early: bool, now: float) -> None:
        """What became of a batch of `count` retries: `again` of them must be tried once more."""
        if 2 * again < count:
            self._wanted = min(2 * count, self._count_max)
        if not early:
            return
        if count - again >= VAIN_JOINED * count:
            self._vain = 0
        else:
            self._vain += 1
            pause_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2 ** min(self._vain - 1, _DOUBLINGS_MAX))
            self._not_before = now + pause_s

    def take(self, now: float) -> int:
        """So many at once; 0 for none."""
        if now < self._not_before:
            return 0
        wanted, self._wanted = self._wanted, 0
        return wanted
