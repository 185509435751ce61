"""Histogram of the time from first read to joined."""

from typing import Final

import numpy as np
import numpy.typing as npt

_FINEST_US: Final = 100
_STEPS_PER_DOUBLING: Final = 4
_STEPS: Final = 26 * _STEPS_PER_DOUBLING + 1  # up to 1.9 hours

EDGES_US: Final = np.unique(
    np.round(_FINEST_US * 2.0 ** (np.arange(_STEPS) / _STEPS_PER_DOUBLING)).astype(np.int64)
)
"""Upper edges of the buckets, inclusive; one more bucket counts what is longer."""

BUCKETS: Final = len(EDGES_US) + 1


def count_latencies(latencies_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """N latencies -> counts of the buckets (BUCKETS,)."""
    buckets = np.searchsorted(EDGES_US, latencies_us)
    return np.bincount(buckets, minlength=BUCKETS).astype(np.int64)


def no_latencies() -> npt.NDArray[np.int64]:
    return np.zeros(BUCKETS, np.int64)
