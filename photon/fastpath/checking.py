"""Whether the joiners read events by the same settings; if not, nothing may be sent to them."""

import threading
from collections.abc import Callable
from typing import Any, Final

from photon.core.clock import Clock

CHECKED_FOR_S: Final = 10.0


class SameReading:
    """For many threads at once; one of them asks."""

    def __init__(
        self,
        fingerprint: str,
        status: Callable[[], dict[str, Any]],
        clock: Clock,
        notice: Callable[[str], None],
    ) -> None:
        self._fingerprint = fingerprint
        self._status = status
        self._clock = clock
        self._notice = notice
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._is_same = False

    def holds(self) -> bool:
        """As of the last seconds. UnavailableError if the joiner does not answer: then it is not known."""
        with self._lock:
            if self._clock.monotonic() < self._asked_at + CHECKED_FOR_S:
                return self._is_same
            self._is_same = self._status().get("reading") == self._fingerprint
            self._asked_at = self._clock.monotonic()
        if not self._is_same:
            self._notice(
                "the joiner reads events by other settings ([primary], [foreign], ids.key, "
                "logs.line_bytes_max), so its ids could be others than these; nothing is sent: "
                "give this process the photon.toml of the system"
            )
        return self._is_same
