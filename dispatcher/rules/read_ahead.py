"""How many fresh batches may be on their way (paper 3.2.2). Pure.

A batch of 200 lines costs as much as one of 2,000. So while batches are small only a few are read ahead: what
is written while they are on their way makes the next one larger. If none of them comes back within PATIENCE_S
(a distant registry, a poison event) more are read, but no more than the senders can take: what would wait for
a sender makes the next one larger, too. One that is answered and can't be recorded yet, since an older one is
not, holds nobody up.
"""

from typing import Final

PER_SENDER: Final = 12
"""Large batches read ahead for each sender: the more to choose from, the fewer joins are wasted."""
SMALL: Final = 2
"""Small ones: one on its way to the registry, one on its way to the disk."""
PATIENCE_S: Final = 0.05
_SMALL_SHARE: Final = 4  # of a full batch, by events and by bytes


class ReadAhead:
    """The fresh batches that are read and not recorded. Not for several threads at once."""

    def __init__(self, senders: int, events_max: int, bytes_max: int) -> None:
        """`events_max`, `bytes_max`: of a full batch; what reaches either is full."""
        self._batches_max = PER_SENDER * senders
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._senders = senders
        self._moved_at = float("-inf")
        self._bytes = 0
        self._unanswered = 0
        self.batches = 0
        self.events = 0

    def sent(self, events: int, size: int, now: float) -> None:
        """One more of so many events and bytes, at `now` (seconds)."""
        self._unanswered += 1
        self._count(1, events, size, now)

    def answered(self) -> None:
        """One needs its sender no more."""
        self._unanswered -= 1

    def recorded(self, events: int, size: int, now: float) -> None:
        self._count(-1, -events, -size, now)

    def room(self, now: float) -> bool:
        """Whether one more may be read."""
        if self._small and self.batches >= SMALL:
            taken = self._unanswered > self._senders or now - self._moved_at < PATIENCE_S
            return self.batches < self._batches_max and not taken
        return self.batches < self._batches_max

    @property
    def _small(self) -> bool:
        enough = max(1, self.batches) / _SMALL_SHARE
        return self.events < enough * self._events_max and self._bytes < enough * self._bytes_max

    def _count(self, batches: int, events: int, size: int, now: float) -> None:
        self.batches += batches
        self.events += events
        self._bytes += size
        self._moved_at = now
