"""The one way in which tests wait for something to come about."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], seconds: float = 60.0, what: str | Callable[[], str] = ""
) -> None:
    """Returns as soon as `condition` is true; fails after `seconds`, and says `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (
            what() if callable(what) else what
        ) or "it did not happen in time"
        time.sleep(0.005)
