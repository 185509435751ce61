"""The one way in which tests wait for something to come about."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found],
    seconds: float = 60.0,
    what: str | Callable[[], str] = "",
    pause: float = 0.005,
) -> Found:
    """What `condition` finds, as soon as there is something; fails after `seconds` and says `what` it was."""
    deadline = time.monotonic() + seconds
    while True:
        looked = time.monotonic()
        if found := condition():
            return found
        now = time.monotonic()
        assert now < deadline, (what() if callable(what) else what) or "it did not happen in time"
        time.sleep(max(pause, 2 * (now - looked)))  # the system that is waited for needs the processor
