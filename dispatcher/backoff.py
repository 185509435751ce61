"""How long to wait before the next try (paper 3.2.1): exponential, with jitter and a cap. Pure."""

import random
from dataclasses import dataclass
from typing import Final

_DOUBLINGS_MAX: Final = 40  # keeps the shift small; the cap decides long before


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays of `delay_us_min` doubling up to `delay_us_max`."""

    delay_us_min: int
    delay_us_max: int

    def delay_us(self, tries: int, rng: random.Random) -> int:
        """The wait after `tries` failed tries (1 or more), at random in the upper half of the full delay.

        Equal jitter: never so short that a failing server is hammered, never all at one moment.
        """
        full = min(self.delay_us_max, self.delay_us_min << min(max(tries - 1, 0), _DOUBLINGS_MAX))
        half = full // 2
        return full - int(rng.random() * half)


@dataclass(frozen=True, slots=True)
class Backoffs:
    """`absent`: of an event whose primary is not there yet, which may take hours; `failed`: of one whose try
    failed, which mostly is a matter of seconds."""

    absent: Backoff
    failed: Backoff

    @property
    def delay_us_max(self) -> int:
        return max(self.absent.delay_us_max, self.failed.delay_us_max)
