"""Whether to ask the registry before sending (paper 3.2): it pays only where it knows some of the events.

A lookup costs about a tenth of a join. Where hardly an event is known to it (one datacenter, nothing joined
before), only now and then a batch asks, to notice when that changes.
"""

import threading
from typing import Final

PAYS_FROM: Final = 0.03
"""The share of known events from which each batch asks. So much may be wasted: the paper's wasted joins are
below 5 % (4.4). By CPU alone a lookup would pay from a tenth."""

PROBE_EVERY: Final = 16
"""While it does not pay, one batch in so many asks all the same."""

_WEIGHT: Final = 0.25  # of the newest answer in the moving average


class LookupShare:
    """A moving average of how many looked-up events were known. For many threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._share = 1.0  # until told otherwise
        self._skipped = 0

    def pays(self) -> bool:
        """Whether this batch should ask."""
        with self._lock:
            if self._share >= PAYS_FROM or self._skipped + 1 >= PROBE_EVERY:
                self._skipped = 0
                return True
            self._skipped += 1
            return False

    def observe(self, known: int, count: int) -> None:
        """Of `count` events that were asked for, `known` had been registered."""
        if count:
            with self._lock:
                self._share += _WEIGHT * (known / count - self._share)
        self.joined(known, count)

    def joined(self, in_vain: int, count: int) -> None:
        """Of `count` events that were sent, `in_vain` had been registered: a lookup would have told."""
        if count and in_vain >= PAYS_FROM * count:
            with self._lock:
                self._share = max(self._share, PAYS_FROM)  # it pays again: no waiting for the average
