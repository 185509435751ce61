"""Ends the batches whose request could not: unknown registration, full disk, crash of the process before.

It registers them again, with the same token, until the IdRegistry answers: then it is known which events are
this joiner's (paper 3.3.2), and they are written.
"""

import threading
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from joiner.ports import Notice
from joiner.settling import Unended
from photon.core.background import Background
from photon.core.backoff import Backoff
from photon.core.errors import PhotonError

DELAYS: Final = Backoff(0.05, 2.0)


class Resolver:
    """A thread that works off the unresolved batches in turn, with growing pauses while none can be ended."""

    def __init__(self, settle: Callable[[Unended], object], rng: Random, notice: Notice) -> None:
        self._settle = settle
        self._rng = rng
        self._notice = notice
        self._changed = threading.Condition()
        self._batches: deque[Unended] = deque()
        self._bytes = 0
        self._failures = 0
        self._trouble = ""
        self._work = Background("resolver", self._step)

    @property
    def unresolved(self) -> int:
        """How many batches wait for their end."""
        return len(self._batches)

    @property
    def unresolved_bytes(self) -> int:
        """Bytes of joined lines that they hold."""
        return self._bytes

    def add(self, batch: Unended) -> None:
        with self._changed:
            self._batches.append(batch)
            self._bytes += len(batch.intent.lines)
            first = len(self._batches) == 1
        if first:  # else it is at work, or pauses
            self._work.wake()

    def start(self) -> None:
        self._work.start()

    def stop(self, patience_s: float) -> bool:
        """End, when all is resolved or after so long; whether all is. The rest waits for the next start."""
        with self._changed:
            self._changed.wait_for(lambda: not self._batches, patience_s)
        self._work.stop(patience_s)
        return not self._batches

    def _step(self) -> float:
        """Take one batch; the seconds until the next one."""
        if not self._batches:
            return float("inf")
        batch = self._batches[0]
        resolved = self._resolve(batch)
        with self._changed:
            self._batches.popleft()
            if resolved:
                self._bytes -= len(batch.intent.lines)
            else:
                self._batches.append(batch)  # the others may do better: each shard has its own leader
            self._changed.notify_all()
        self._failures = 0 if resolved else self._failures + 1
        return self._pause_s() if self._failures else 0.0

    def _resolve(self, batch: Unended) -> bool:
        try:
            self._settle(batch)
        except PhotonError as error:
            self._tell(str(error))
            return False
        except Exception as error:
            # Not ours to mend, but the batch must not be forgotten with the thread: it shows in the status.
            self._tell(f"{type(error).__name__}: {error}")
            return False
        self._trouble = ""
        return True

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._notice(f"{len(self._batches)} batches wait for their end: {trouble}")

    def _pause_s(self) -> float:
        # All that wait share the pauses: one turn around the queue is as long as a single batch's pause.
        return DELAYS.delay_s(self._failures, self._rng.uniform) / max(1, len(self._batches))
