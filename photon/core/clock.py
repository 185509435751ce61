"""Time: clocks, how long to wait after failures, and work that is done again and again in the background.

Time is passed in. Only the wiring (photon.cluster) knows the real clock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from photon.core.errors import told

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
    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        return time.clock_gettime(_MONOTONIC)


class SteadyClock:
    """The time that `wall` showed when this was made, and what has passed since: setting the machine's clock
    changes no age."""

    def __init__(self, wall: Clock) -> None:
        self.wall = wall
        self._zero_us = wall.now_us() - round(wall.monotonic() * 1e6)

    def now_us(self) -> int:
        return self._zero_us + round(self.wall.monotonic() * 1e6)

    def monotonic(self) -> float:
        return self.wall.monotonic()

    @property
    def set_by_us(self) -> int:
        """By how much `wall` was set forward since."""
        return self.wall.now_us() - self.now_us()


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
        self.set_forward(seconds)
        self._monotonic += seconds

    def set_forward(self, seconds: float) -> None:
        """As by hand, while no time passes."""
        self._now_us += round(seconds * 1_000_000)


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


RETRIES: Final = Backoff(1.0, 60.0)


class Background:
    """One thread takes the same step again and again; it returns the seconds until the next (inf: `wake`).

    A step that raises is taken again after a growing wait, which `wake` does not cut short. Whoever owns the
    work shows `trouble`, why the last step failed, in its status.
    """

    def __init__(self, name: str, step: Callable[[], float], retries: Backoff = RETRIES) -> None:
        self._step = step
        self._retries = retries
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failures = 0
        """In a row."""
        self.trouble: str | None = None

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Take the next step now."""
        self._woken.set()

    def rest(self, seconds: float) -> bool:
        """Within a step: wait, but not past `stop`. Whether to give up, as this is stopping."""
        return self._stopping.wait(seconds)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self, within_s: float | None = None) -> bool:
        """Take no more steps; whether the one under way ended in time. It may be called again."""
        self._stopping.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                wait_s = self._step()
                self.failures, self.trouble = 0, None
            except Exception as error:
                self.trouble = told(error)
                self.failures += 1
                self._stopping.wait(self._retries.delay_s(self.failures))
            else:
                self._woken.wait(min(wait_s, threading.TIMEOUT_MAX))
                self._woken.clear()
