"""When to leave servers alone that failed. Pure."""

from typing import Final

PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 2.0


class Pause:
    """After each failure in a row twice as long. What comes meanwhile is the log path's: nothing is kept."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = float("-inf")

    def is_over(self, now: float) -> bool:
        return now >= self._until

    def failed(self, now: float) -> None:
        if now < self._until:
            return  # another request that was sent before the pause began
        self._until = now + min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(self._failures, 16))
        self._failures += 1

    def worked(self) -> None:
        self._failures = 0
