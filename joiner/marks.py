"""That a primary event is matched is registered before what is joined with it (photon.core.marks).

An event whose primary event was said to be unmatched by then is late. What is marked stays so, though its
event be joined by another joiner, or expire.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from photon.core.columns import take_ids, take_times
from photon.core.fates import LETTER_REASONS, Committed, Fate, Joined
from photon.core.marks import MATCHED, mark_ids
from photon.core.settings import Settings
from photon.logs.formats import json_lines

if TYPE_CHECKING:
    from idregistry.client import RegistryClient


class Marker:
    """For many threads at once."""

    def __init__(self, registry: "RegistryClient", settings: Settings) -> None:
        self._registry = registry
        self._lines = json_lines(settings)
        self._field = settings.primary.time
        self._lock = threading.Lock()

    def mark(self, ids: bytes, lines: Sequence[bytes]) -> dict[int, tuple[Joined, str]]:
        """Of N primary events, 16 x N ids: rows of those that can't be marked as matched, what that makes of
        the foreign event, and why. UnavailableError, OverloadedError: nothing may be joined with any of them.
        """
        with self._lock:
            times, wrong = self._lines.primary_times(ids, lines)
        told = {
            row: (Joined.ADAPTER_ERROR, f"joiner.mark_matched: its primary event's '{self._field}' {why}")
            for row, why in wrong.items()
        }
        rows = np.setdiff1d(np.arange(len(lines)), [*wrong])
        # An id that stands twice would lose against itself.
        _, first, row_of = np.unique(_keys(ids)[rows], return_index=True, return_inverse=True)
        kept = rows[first]
        committed = self._registry.commit(mark_ids(take_ids(ids, kept)), take_times(times, kept), MATCHED)
        outcomes = np.frombuffer(committed, np.uint8)[row_of]
        for row in rows[outcomes != Committed.WON].tolist():
            told[row] = Joined.LATE, LETTER_REASONS[Fate.LATE]
        for row in rows[outcomes == Committed.EXPIRED].tolist():
            told[row] = Joined.LATE, "its primary event is older than the registry remembers"
        return told


def _keys(ids: bytes) -> npt.NDArray[np.void]:
    return np.frombuffer(ids, "V16")
