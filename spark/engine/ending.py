"""How a command on Spark ends before its time: by Ctrl-C and SIGTERM, with its JVM."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Ctrl-C and SIGTERM end the block as an exit does, so that the JVM and the scratch files go.

    Until the function given is called with the JVM they wait: one that is just starting can't be stopped. It
    is called again when Spark runs.
    Then they end the JVM too: a call into it that waits for a job holds up all that follow, so that none
    could cancel the job. Spark's own handler of Ctrl-C makes such a call, and fills the screen.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: None
        return
    ended_by: list[int] = []
    machines: list[subprocess.Popen[bytes]] = []

    def end(number: int, _frame: FrameType | None) -> None:
        if not ended_by:
            ended_by.append(number)
            if machines:
                leave()

    def leave() -> None:
        machines[0].terminate()  # Spark in it tells the cluster, and removes its files
        raise SystemExit(128 + ended_by[0])

    def arm(machine: subprocess.Popen[bytes]) -> None:
        for number in previous:  # Spark sets its own where it starts
            signal.signal(number, end)
        machines.append(machine)
        if ended_by:
            leave()

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield arm
    except Exception as error:
        if ended_by:  # what the end of the JVM made fail
            raise SystemExit(128 + ended_by[0]) from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
