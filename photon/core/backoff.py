"""Exponential backoff: how long to wait after a number of failures in a row, and until when to try. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

_DOUBLINGS_MAX: Final = 40  # keeps the power small; the cap decides long before


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays of `delay_s_min` that double up to `delay_s_max`."""

    delay_s_min: float
    delay_s_max: float

    def delay_s(self, failures: int, uniform: Callable[[float, float], float] | None = None) -> float:
        """The wait after `failures` (1 or more) in a row.

        With `uniform` (a `random.Random`'s), it lies in the upper half of the full delay, equal jitter: never
        so short that a failing server is hammered, never the same for everybody.
        """
        doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
        full = min(self.delay_s_max, self.delay_s_min * 2.0**doublings)
        return full if uniform is None else full * uniform(0.5, 1.0)


class Pause:
    """Leaves alone what failed, each time longer, until it works again. Times are monotonic seconds."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0
        self._until = float("-inf")

    def is_over(self, now: float) -> bool:
        return now >= self._until

    def failed(self, now: float) -> None:
        if now < self._until:
            return  # another request that was sent before the pause began
        self._failures += 1
        self._until = now + self._backoff.delay_s(self._failures)

    def worked(self) -> None:
        self._failures = 0


class Attempts:
    """The tries of one call until its time is up, with a growing wait between two: `for left_s in attempts`.

    `wait` sleeps; it raises where there is no sense in another try.
    """

    def __init__(
        self,
        backoff: Backoff,
        timeout_s: float,
        now: Callable[[], float],
        wait: Callable[[float], object],
        uniform: Callable[[float, float], float] | None = None,
    ) -> None:
        self._backoff = backoff
        self._now = now
        self._wait = wait
        self._uniform = uniform
        self._at_once = False
        self._deadline = now() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - self._now())

    def next_at_once(self) -> None:
        """Let the next try follow without a wait."""
        self._at_once = True

    def __iter__(self) -> Iterator[float]:
        """The seconds left, before each try."""
        waits = 0
        while (left_s := self.left_s) > 0:
            self._at_once = False
            yield left_s
            if self._at_once:
                continue
            waits += 1
            self._wait(min(self._backoff.delay_s(waits, self._uniform), self.left_s))
