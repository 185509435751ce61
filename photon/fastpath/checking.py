"""Whether the joiners read events by the same settings; if not, nothing may be sent to them."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from photon.core.clock import Clock
from photon.core.errors import UnavailableError

CHECKED_FOR_S: Final = 10.0


class SameReading:
    """For many threads at once; one of them asks."""

    def __init__(
        self,
        fingerprint: str,
        statuses: Callable[[], Mapping[str, dict[str, Any] | UnavailableError]],
        clock: Clock,
        notice: Callable[[str], None],
    ) -> None:
        self._fingerprint = fingerprint
        self._statuses = statuses
        self._clock = clock
        self._notice = notice
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._is_same = False

    def holds(self) -> bool:
        """As of the last seconds, of all that answer: a batch may go to any of them.

        UnavailableError if none answers: then it is not known.
        """
        with self._lock:
            if self._clock.monotonic() < self._asked_at + CHECKED_FOR_S:
                return self._is_same
            self._is_same = self._ask()
            self._asked_at = self._clock.monotonic()
        if not self._is_same:
            self._notice(
                "a joiner reads events by other settings ([primary], [foreign], ids.key, "
                "logs.line_bytes_max), so its ids could be others than these; nothing is sent: "
                "give this process the photon.toml of the system"
            )
        return self._is_same

    def _ask(self) -> bool:
        answers = list(self._statuses().values())
        readings = [answer.get("reading") for answer in answers if not isinstance(answer, UnavailableError)]
        if not readings:
            raise next(answer for answer in answers if isinstance(answer, UnavailableError))
        return all(reading == self._fingerprint for reading in readings)
