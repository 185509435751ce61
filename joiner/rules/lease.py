"""Leases: while an incarnation of a joiner may register and write (design: "Recovery is fenced"). Pure.

The IdRegistry fences an incarnation only when its lease, and some time more for clocks that differ, is over;
it releases ids of fenced incarnations only. The lease's end is reckoned here from before it was asked for, so
it is over here before it is over there: whoever looks at the clock after a step and finds the lease running
knows that the step came before any fence.
"""

import math
from dataclasses import dataclass
from typing import Final

RENEWALS_A_LEASE: Final = 3
"""A lease is asked for again when this part of it is over, so that one lost answer loses no lease."""

RETRIES_A_LEASE: Final = 10
RETRY_S_MAX: Final = 1.0
"""After a failure it is asked for so often, and at least so often."""


@dataclass(slots=True, eq=False)
class Lease:
    """One incarnation's. Times are monotonic seconds. Changed by one thread, read by all; `fence` by any."""

    address: str
    incarnation: int
    lease_s: float
    until_s: float = -math.inf
    """It runs until then."""
    due_s: float = -math.inf
    """It is to be asked for from then on."""
    fenced: bool = False
    """Never to be had again: what this incarnation registered and did not write is recovery's."""

    def holds(self, now_s: float) -> bool:
        return now_s < self.until_s and not self.fenced

    def left_s(self, now_s: float) -> float:
        """Seconds that it still runs; 0 where it does not."""
        return max(0.0, self.until_s - now_s) if self.holds(now_s) else 0.0

    def granted(self, asked_s: float) -> None:
        """The registry said yes to what was asked at `asked_s`."""
        self.until_s = asked_s + self.lease_s
        self.due_s = asked_s + self.lease_s / RENEWALS_A_LEASE

    def failed(self, now_s: float) -> None:
        """No answer: what was granted before still runs."""
        self.due_s = now_s + min(RETRY_S_MAX, self.lease_s / RETRIES_A_LEASE)

    def fence(self) -> None:
        self.fenced = True
