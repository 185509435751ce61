"""Work in the background: one thread that takes the same step again and again until it is stopped."""

import threading
from collections.abc import Callable
from typing import Final

from photon.core.backoff import Backoff
from photon.core.errors import PhotonError

RETRIES: Final = Backoff(1.0, 60.0)


class Background:
    """`step` returns for how many seconds it is not wanted again (inf: until `wake`).

    One that raises is taken again after a growing wait, which `wake` does not cut short. Whoever owns the
    work shows `trouble`, why the last step failed, in its status.
    """

    def __init__(self, name: str, step: Callable[[], float], retries: Backoff = RETRIES) -> None:
        self._step = step
        self._retries = retries
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failures = 0
        """In a row."""
        self.trouble: str | None = None

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Take the next step now."""
        self._woken.set()

    def rest(self, seconds: float) -> bool:
        """Within a step: wait, but not past `stop`. Whether to give up, as this is stopping."""
        return self._stopping.wait(seconds)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self, within_s: float | None = None) -> bool:
        """Take no more steps; whether the one under way ended in time. It may be called again."""
        self._stopping.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                wait_s = self._step()
                self.failures, self.trouble = 0, None
            except Exception as error:
                known = isinstance(error, PhotonError)
                self.trouble = str(error) if known else f"{type(error).__name__}: {error}"
                self.failures += 1
                self._stopping.wait(self._retries.delay_s(self.failures))
            else:
                self._woken.wait(min(wait_s, threading.TIMEOUT_MAX))
                self._woken.clear()
