"""When the garbage collection boundary is due to move (paper 2.3). Pure."""

from typing import Final

_STEP_US_MIN: Final = 10_000_000
_STEP_SHARE: Final = 1000
DAY_US: Final = 86_400_000_000

COLLECT_IDS: Final = 8_192
"""Ids deleted in one step; small, so that no commit waits long behind it (some milliseconds)."""


def boundary_due(now_us: int, boundary_us: int, retention_days: float) -> int | None:
    """The new boundary to propose, or None while the present one is good enough.

    It moves in steps of a thousandth of the retention, or ten seconds where that is longer. 0 days keep all.
    """
    if retention_days <= 0:
        return None
    retention_us = round(retention_days * DAY_US)
    wanted_us = now_us - retention_us
    step_us = max(_STEP_US_MIN, retention_us // _STEP_SHARE)
    return wanted_us if wanted_us - boundary_us >= step_us else None
