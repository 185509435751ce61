"""How many requests may be on their way to the servers below: additive increase, multiplicative decrease.

While a backlog is caught up everything that waits is sent as fast as it is taken (paper 3.2.2); servers that
say that it is too much, or take long, get half as much at a time, and then slowly more again. The rules are
pure (`Window`); `Gate` holds threads to them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from photon.core.clock import Clock
from photon.core.errors import OverloadedError

SLOW_S: Final = 2.0
"""An answer that took so long counts as a sign of overload; one takes tens of milliseconds as a rule."""

_LOOK_S: Final = 0.1  # a thread that waits looks so often whether it is time to stop


class Window:
    """Not for several threads at once. Times in seconds of one clock."""

    def __init__(self, largest: int, slow_s: float = SLOW_S) -> None:
        self._largest = largest
        self._slow_s = slow_s
        self._size = float(largest)
        self._cut_at = float("-inf")

    @property
    def size(self) -> int:
        """So many requests may be under way, at least 1."""
        return int(self._size)

    def answered(self, sent_at: float, now: float) -> None:
        if now - sent_at > self._slow_s:
            self.refused(sent_at, now)
        else:
            self._size = min(float(self._largest), self._size + 1 / self._size)

    def refused(self, sent_at: float, now: float) -> None:
        """The server is overloaded."""
        if sent_at > self._cut_at:  # what was sent before the last cut says nothing of its effect
            self._size = max(1.0, self._size / 2)
            self._cut_at = now


class Gate:
    """Lets as many threads through as the window says."""

    def __init__(self, window: Window, clock: Clock) -> None:
        self._window = window
        self._clock = clock
        self._changed = threading.Condition()
        self._inside = 0

    @property
    def size(self) -> int:
        return self._window.size

    def enter(self, stopping: Callable[[], bool]) -> bool:
        """False if it was time to stop before there was room. `leave` must follow where it is True."""
        with self._changed:
            while self._inside >= self._window.size:
                if stopping():
                    return False
                self._changed.wait(_LOOK_S)
            self._inside += 1
            return True

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Around a request, after `enter`: what becomes of it is learned, and the thread leaves."""
        sent_at = self._clock.monotonic()
        refused = False
        try:
            yield
        except OverloadedError:
            refused = True
            raise
        finally:
            now = self._clock.monotonic()
            with self._changed:
                self._inside -= 1
                if refused:
                    self._window.refused(sent_at, now)
                else:
                    self._window.answered(sent_at, now)
                self._changed.notify_all()
