"""A backfill's questions to the registry, asked until they are answered."""

import time
from collections.abc import Callable
from typing import Final

from photon.core.backoff import Backoff
from photon.core.errors import UnavailableError

PATIENCE_S: Final = 300.0
"""So long a registry is asked that does not answer."""
_PAUSES: Final = Backoff(0.1, 5.0)


def patiently(ask: Callable[[], bytes], patience_s: float = PATIENCE_S) -> bytes:
    """The answer, asked for again while the registry is away: `ask` may be done twice. UnavailableError."""
    deadline = time.monotonic() + patience_s
    failures = 0
    while True:
        try:
            return ask()
        except UnavailableError:
            failures += 1
            pause_s = _PAUSES.delay_s(failures)
            if time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
