"""Keys with so many of a computation's records that no other worker can relieve the one that has them.

Counted is the first key of each batch, if it is the first of many (Misra and Gries, 1982): a key has at least
the share that is told.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from millwheel.computation import Codes

HOT_SHARE: Final = 0.25
"""Of a computation's records in a worker."""
_KEYS_MAX: Final = 16
_RECORDS: Final = 1 << 17
"""After which what came before counts half."""


class Heavy:
    """Of one stage, lately."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._records = 0

    def add(self, names: Sequence[str], codes: Codes) -> None:
        """Records, by the place of each one's key in `names`."""
        if not len(codes):
            return
        of_names = np.bincount(codes)
        first = int(of_names.argmax())
        key, count = names[first], int(of_names[first])
        self._records += len(codes)
        counts = self._counts
        if key in counts or len(counts) < _KEYS_MAX:
            counts[key] = counts.get(key, 0) + count
        else:
            self._less(min(count, *counts.values()))
        if self._records >= _RECORDS:
            self._records //= 2
            self._counts = {known: times // 2 for known, times in counts.items()}

    def _less(self, by: int) -> None:
        self._counts = {known: times - by for known, times in self._counts.items() if times > by}

    def first(self) -> tuple[str, float] | None:
        """The key with the most, and its share, if that is HOT_SHARE or more of many."""
        key = max(self._counts, key=self._counts.__getitem__, default=None)
        if key is None or self._records < _RECORDS // 64:
            return None
        share = self._counts[key] / self._records
        return (key, share) if share >= HOT_SHARE else None
