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
        self._stopping = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="resolver", daemon=True)

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
            self._changed.notify_all()

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float) -> bool:
        """End, when all is resolved or after so long; whether all is. The rest waits for the next start."""
        with self._changed:
            self._changed.wait_for(lambda: not self._batches, patience_s)
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        return not self._batches

    def _run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._stopping)
                if self._stopping:
                    return
                batch = self._batches[0]
            resolved = self._resolve(batch)
            with self._changed:
                self._batches.popleft()
                if resolved:
                    self._bytes -= len(batch.intent.lines)
                    failures = 0
                else:
                    self._batches.append(batch)  # the others may do better: each shard has its own leader
                    failures += 1
                self._changed.notify_all()
                if not resolved:
                    self._changed.wait_for(lambda: self._stopping, self._delay_s(failures))

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

    def _delay_s(self, failures: int) -> float:
        # All that wait share the pauses: one turn around the queue is as long as a single batch's pause.
        return DELAYS.delay_s(failures, self._rng.uniform) / max(1, len(self._batches))
