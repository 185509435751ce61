"""The bounds of the fast path in one process."""

from dataclasses import dataclass

from photon.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each of the two sides, primary and foreign."""

    queue_events_max: int = 10_000
    queue_bytes_max: int = 32 << 20
    """Lines beyond are dropped: the log path has them."""
    batch_events_max: int = 1_024
    batch_bytes_max: int = 4 << 20
    linger_s: float = 0.001
    """How long a line waits for others to share its request."""
    requests_in_flight_max: int = 2
    """Joins; puts go one at a time, in their order."""
    timeout_s: float = 2.0
    """Of a request. What was not answered by then is left to the log."""
    primaries_first_s: float = 0.05
    """A foreign event waits so long for primary events that were handed in before it."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"fast path: '{name}' must be above 0, not {getattr(self, name)!r}")
