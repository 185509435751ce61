"""What a process does when it is asked to end. Main thread only.

Nothing is done in a handler itself: it interrupts the main thread, which may hold the very lock that the
handler would wait for. An event that is set there while its `wait` begins or ends stands still for ever.
"""

import signal
import threading
from collections.abc import Callable
from typing import Any


def on_signals(act: Callable[[], object], *numbers: int) -> dict[int, Any]:
    """Have each of these signals call `act` in a thread of its own. The handlers before, by signal."""

    def handler(*_: object) -> None:
        threading.Thread(target=act, daemon=True).start()

    return {number: signal.signal(number, handler) for number in numbers}


def on_termination(stop: Callable[[], object]) -> None:
    """First SIGTERM or SIGINT calls `stop`, in a thread of its own; a second one ends the process at once."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        threading.Thread(target=stop, daemon=True).start()

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGINT, first)
