"""How long an event waits before its next try (paper 3.2.1), with jitter and a cap. Pure.

After a failure the wait doubles (photon.core.backoff). What waits for its primary is tried again when half
its age has passed once more: an event early by T seconds is joined T/2 after its primary at the latest, be
that a moment or hours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.backoff import Backoff

Uniform = Callable[[float, float], float]
"""A random.Random's."""

_DOUBLINGS_MAX: Final = 40  # keeps the power small; the cap decides long before


AGE_STEPS: Final = 8
"""Ages are told apart by eighths of an octave: what is about as old and was sent together stays together."""
AGE_JITTER: Final = 0.2
_SLOWEST: Final = 1.2  # what the age brings anyway; it holds where a clock that was set back hides the age


@dataclass(frozen=True, slots=True)
class AgeBackoff:
    """Delays of half the age of an event, from `delay_us_min` to `delay_us_max`."""

    delay_us_min: int
    delay_us_max: int

    def delays_us(
        self, ages_us: npt.NDArray[np.int64], tries: npt.NDArray[np.uint32], uniform: Uniform
    ) -> npt.NDArray[np.int64]:
        """The waits of events that were tried together, after `tries` (1 or more) in vain each.

        One draw for all of them: those of about the same age travel together, other batches at other moments.
        Never more than doubling brings: an old event that was hardly tried, as after a stop, is tried soon.
        """
        doublings = np.minimum(tries, _DOUBLINGS_MAX) - 1.0
        octaves: npt.NDArray[np.float64] = np.log2(np.maximum(ages_us, 1))
        ages = np.exp2(np.floor(octaves * AGE_STEPS) / AGE_STEPS)
        slowest, fastest = self.delay_us_min * _SLOWEST**doublings, self.delay_us_min * 2.0**doublings
        delays = (ages / 2 * (1 - AGE_JITTER * uniform(0.0, 1.0))).clip(slowest, fastest)
        return delays.clip(self.delay_us_min, self.delay_us_max).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Backoffs:
    """`absent`: of an event whose primary is not there yet, which may take hours; `failed`: of one whose try
    failed, which mostly is a matter of seconds."""

    absent: AgeBackoff
    failed: Backoff

    @property
    def delay_us_max(self) -> int:
        return max(self.absent.delay_us_max, int(self.failed.delay_s_max * 1e6))
