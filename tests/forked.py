"""Child processes that are forked from one that has imported all already: a start takes milliseconds."""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "pytest",
        "tests.joiner.crash_child",
        "tests.joiner.serving_child",
        "tests.dispatcher.child",
        "tests.idregistry.replica",
    ]
)


class Child:
    """As subprocess.Popen has it: `main(*arguments)` in a process of its own, which ends as a command does.

    What it says goes to `told`, if there is one, and else to where the test's own output goes.
    """

    def __init__(self, main: Callable[..., object], *arguments: object, told: Path | None = None) -> None:
        self._process = _FORKS.Process(target=_run, args=(main, arguments, told), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit status; minus the number of the signal that killed it."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([str(self._process)], seconds)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(main: Callable[..., object], arguments: tuple[object, ...], told: Path | None) -> None:
    if told is not None:
        with told.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    raise SystemExit(main(*arguments))
