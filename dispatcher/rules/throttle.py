"""When reading new events pauses, because what is read would only wait (paper 3.2.2). Pure.

While the event store is behind, nearly every fresh event comes back with its primary not there yet;
writing a million of them down to try each again is a waste: reading waits until the primaries come.
"""

from typing import Final

CATCHING_UP_EVENTS: Final = 16_384  # so many waiting retries are a few batches: enough to see progress
MOSTLY: Final = 0.75
SOME: Final = 0.05
PROBE_INTERVAL_S: Final = 0.5
VAIN_RETRY_S: Final = 30e-6
"""What a retry in vain costs everybody, several times over: retries pause so long for each."""

_MEMORY: Final = 0.5  # how much of the past a new batch leaves
_ENOUGH_EVENTS: Final = 64  # fewer say nothing of the rest


class Throttle:
    """Decides how many new events may be read. Not for several threads at once."""

    def __init__(self, retry_queue_events_max: int) -> None:
        self._retry_queue_events_max = retry_queue_events_max
        self._answered = 0.0
        self._retried = 0.0
        self._probe_at = float("-inf")
        self._retry_at = float("-inf")

    def observe(self, answered: int, retried: int) -> None:
        """What became of fresh events: how many were answered, how many of those must be retried."""
        # Small batches add up, large ones replace what was known.
        keep = _MEMORY if self._answered >= _ENOUGH_EVENTS else 1.0
        self._answered = self._answered * keep + answered
        self._retried = self._retried * keep + retried

    def observe_retry(self, retried: int, now: float) -> None:
        """So many events of a retried batch must be retried once more."""
        self._retry_at = max(self._retry_at, now) + retried * VAIN_RETRY_S

    def retry_wait(self, now: float) -> float:
        """Seconds until the next retries may be sent; 0 or less for at once."""
        return self._retry_at - now

    def room(self, pending: int, in_flight: int, now: float) -> int | None:
        """How many batches of new events may be read at `now` (seconds); None for no limit.

        `pending` events wait for a retry, `in_flight` fresh ones may come to. When most fresh events fail, a
        batch is let through now and then: nothing else tells that new ones would fare better.
        """
        if self.full(pending, in_flight):
            return 0
        if pending < CATCHING_UP_EVENTS or not self._mostly_retried():
            return None
        return 1 if now >= self._probe_at else 0

    def full(self, pending: int, in_flight: int) -> bool:
        """No more events may wait for a retry."""
        return pending + in_flight >= self._retry_queue_events_max

    @property
    def ahead_of_primaries(self) -> bool:
        """Whether fresh events are read before their primaries, as when both logs are being caught up."""
        return self._answered == 0 or self._retried > SOME * self._answered

    def probed(self, now: float) -> None:
        """A batch was let through at `now`: the next one waits."""
        self._probe_at = now + PROBE_INTERVAL_S

    def _mostly_retried(self) -> bool:
        return self._retried > MOSTLY * self._answered
