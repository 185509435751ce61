"""When the garbage collection boundary is due to move, and by which clock (paper 2.3). Pure."""

from collections.abc import Iterable
from typing import Final

_STEP_US_MIN: Final = 10_000_000
_STEP_SHARE: Final = 1000
DAY_US: Final = 86_400_000_000


def boundary_due(now_us: int, boundary_us: int, retention_days: float) -> int | None:
    """The new boundary to propose, or None while the present one is good enough.

    It moves in steps of a thousandth of the retention, or ten seconds where that is longer (but not longer
    than an eighth of it). 0 days keep all.
    """
    if retention_days <= 0:
        return None
    retention_us = round(retention_days * DAY_US)
    wanted_us = now_us - retention_us
    step_us = max(min(_STEP_US_MIN, retention_us // 8), retention_us // _STEP_SHARE)
    return wanted_us if wanted_us - boundary_us >= step_us else None


def majority_time_us(clocks_us: Iterable[int], replicas: int) -> int | None:
    """The latest time that the clocks of a majority of `replicas` have reached; None if too few are known.

    `clocks_us`: what each clock that is known says now, our own as one among them. A single clock that is far
    ahead, the leader's own above all, then moves no boundary: what it let expire would never be joined.
    """
    latest_first = sorted(clocks_us, reverse=True)
    majority = replicas // 2 + 1
    return latest_first[majority - 1] if len(latest_first) >= majority else None
