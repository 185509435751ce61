"""The last things worth telling: for Status, and for the log of the process."""

import logging
import threading
from collections import deque
from typing import Final

_KEPT: Final = 20


class Notices:
    """Keeps the last few lines; one that says what is already told is not told again."""

    def __init__(self, room: str) -> None:
        """`room` names the log they also go to."""
        self._log = logging.getLogger(f"photon.{room}")
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def tell(self, line: str) -> None:
        line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        with self._lock:
            if line in self._lines:
                return
            self._lines.append(line)
        self._log.warning("%s", line)

    def lines(self) -> list[str]:
        with self._lock:
            return list(self._lines)
