"""How long a caller still waits for its answer."""

from photon.core.clock import Clock
from photon.core.errors import OverloadedError


class Deadline:
    """Of one request. What waits for it waits no longer; nothing is registered when it is over."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        """None: the caller waits for ever."""
        self._clock = clock
        self._until_s = None if timeout_s is None else clock.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """None: for ever."""
        return None if self._until_s is None else max(0.0, self._until_s - self._clock.monotonic())

    def check(self) -> None:
        """OverloadedError if it is over: nothing was done."""
        if self._until_s is not None and self._clock.monotonic() >= self._until_s:
            raise OverloadedError(
                "the request's deadline has passed and nothing was registered; send it again"
            )
