"""Batches that wait for a sender: retries first, fresh ones in random order.

Pipelines in several datacenters read the same logs. Would they send in log order, they would all work on the
same events at the same moment, and all but one in vain; in random order most of what one sends, another has
done before and the lookup says so (paper 4.4, wasted joins). But while the event store is behind, the oldest
go first: their primaries come first. No batch waits for long: only so many are read ahead, and reading goes
on only as the oldest of them ends.
"""

import random
import threading
from collections import deque

from dispatcher.rules.batches import Batch, RetryBatch


class WaitingBatches:
    """Filled by one thread, emptied by many. Its user bounds it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._changed = threading.Condition()
        self._retries: deque[Batch] = deque()
        self._fresh: list[Batch] = []
        self._closed = False
        self.in_order = True
        """Whether fresh batches go in the order of the logs."""

    def put(self, batch: Batch) -> None:
        with self._changed:
            (self._retries if isinstance(batch, RetryBatch) else self._fresh).append(batch)
            self._changed.notify()

    def take(self) -> Batch | None:
        """The next to send; None when it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._retries or self._fresh or self._closed)
            if self._retries:
                return self._retries.popleft()
            if not self._fresh:
                return None
            chosen = 0 if self.in_order else self._rng.randrange(len(self._fresh))
            return self._fresh.pop(chosen)

    def close(self) -> None:
        """Nothing is put any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
