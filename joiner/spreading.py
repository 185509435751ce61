"""Whose turn it is among joiners that are all alike (paper 3.3.1). Pure: time is passed in."""

from dataclasses import dataclass, field
from typing import Final

COOL_DOWN_S_MIN: Final = 0.05
COOL_DOWN_S_MAX: Final = 5.0


@dataclass(slots=True)
class _Joiner:
    failures: int = 0
    left_out_until_s: float = float("-inf")


@dataclass(slots=True)
class Turns:
    """Joiners 0 to N-1 in turn, but those that cool down after a failure, while there are others.

    A failure that follows another takes twice as long as that. Times are monotonic seconds.
    """

    joiners: int
    _all: list[_Joiner] = field(init=False)
    _last: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._all = [_Joiner() for _ in range(self.joiners)]

    def next(self, now_s: float) -> int:
        """Whose turn it is; where all cool down, the one that is soonest ready."""
        order = [(self._last + step) % self.joiners for step in range(1, self.joiners + 1)]
        ready = [number for number in order if self._all[number].left_out_until_s <= now_s]
        self._last = ready[0] if ready else min(order, key=lambda n: self._all[n].left_out_until_s)
        return self._last

    def worked(self, number: int) -> None:
        if self._all[number].failures:
            self._all[number] = _Joiner()

    def refused(self, number: int, now_s: float) -> None:
        """It has too much to do, or no lease: others first, for a moment."""
        joiner = self._all[number]
        joiner.left_out_until_s = max(joiner.left_out_until_s, now_s + COOL_DOWN_S_MIN)

    def failed(self, number: int, now_s: float) -> None:
        """It did not answer, or could not."""
        joiner = self._all[number]
        if joiner.left_out_until_s > now_s and joiner.failures:
            return  # a call that was sent with the one that failed before tells nothing new
        joiner.left_out_until_s = now_s + min(COOL_DOWN_S_MAX, COOL_DOWN_S_MIN * 2.0**joiner.failures)
        joiner.failures = min(joiner.failures + 1, 16)
