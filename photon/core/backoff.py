"""Exponential backoff: how long to wait after a number of failures in a row. Pure."""

from collections.abc import Callable
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

        With `uniform` (a `random.Random`'s), it lies in the upper half of the full delay, equal jitter: never so
        short that a failing server is hammered, never the same for everybody.
        """
        doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
        full = min(self.delay_s_max, self.delay_s_min * 2.0**doublings)
        return full if uniform is None else full * uniform(0.5, 1.0)
