"""Before anything is read: whether the joiners make the same ids of the same events.

Lines that are read by other settings may all be malformed. They would be counted and passed over before any
batch came to a joiner, which refuses it.
"""

import random
from collections.abc import Callable
from typing import Final

from dispatcher.rules.backoff import Backoff
from photon.core.errors import UnavailableError

_BACKOFF: Final = Backoff(20_000, 250_000)
_TELL_AFTER_FAILURES: Final = 8  # about 1 s: a joiner that is just starting is not worth a line


def await_agreement(
    agree: Callable[[], None],
    wait: Callable[[float], bool],
    rng: random.Random,
    notice: Callable[[str], None],
) -> bool:
    """Ask until a joiner answers; False if it was time to stop before. SettingsMismatchError if it refuses.

    `agree` is JoinerClient's, `wait` as Sender's.
    """
    failures = 0
    while True:
        try:
            agree()
        except UnavailableError as error:
            failures += 1
            if failures >= _TELL_AFTER_FAILURES:
                notice(f"joiner: {error}; nothing is read until one answers")
            if wait(_BACKOFF.delay_us(failures, rng) / 1e6):
                return False
        else:
            return True
