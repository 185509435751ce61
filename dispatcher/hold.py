"""What the registry must not let expire: it is told how old the oldest open event is (paper 2.3).

A datacenter that is down for longer than ids are kept finds its events neither joined nor expired when it
comes back: its last report holds the registry's boundary back until then. Open are the events that wait in
the ledger, and all that was not read and recorded. Of these nobody knows how old they are; but once all is
recorded that stood in the logs when the registry's time was T, the rest is newer than T, but for lines that
reach their log late.
"""

import contextlib
import threading
from collections.abc import Mapping
from typing import Final

from dispatcher.ledger import Ledger
from dispatcher.sender import Gate
from idregistry.client import RegistryClient
from photon.core.errors import StorageError, UnavailableError, UsageError
from photon.logs.follow import LogFollower

_EVERY_S_MAX: Final = 300.0
_AGAIN_S: Final = 5.0
_REPORTS: Final = 24
"""In the time that ids are kept, at least."""
_LATE_S_MAX: Final = 86_400.0
_DAY_S: Final = 86_400.0


class Holder:
    """Reports, from `start` to `stop`, in a thread of its own."""

    def __init__(
        self,
        name: str,
        registry: RegistryClient,
        ledger: Ledger,
        follower: LogFollower,
        gate: Gate,
        retention_days: float,
    ) -> None:
        """`name`: the dispatcher's, among all of the registry. Ids are kept for `retention_days`, > 0."""
        self._name = name
        self._registry = registry
        self._ledger = ledger
        self._follower = follower
        self._gate = gate
        retention_s = retention_days * _DAY_S
        self._every_s = min(_EVERY_S_MAX, retention_s / _REPORTS)
        self._late_us = round(min(_LATE_S_MAX, retention_s / 2) * 1e6)
        self._ends: Mapping[int, int] | None = None
        """Where the files ended when the registry's time was `_ends_us`; None while none is waited for."""
        self._ends_us = 0
        self._read_us: int | None = None
        """What was logged before is recorded; None while that is not known."""
        self._boundary_us = 0
        self._thread = threading.Thread(target=self._run, name="dispatcher-hold", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drained: bool) -> None:
        """After the gate was told to stop. `drained`: nothing is open, and nothing will be."""
        if self._thread.is_alive():
            self._thread.join()
        if drained:
            with contextlib.suppress(UnavailableError):  # then it is held until somebody releases it
                self._registry.release_hold(self._name)

    def report(self) -> bool:
        """One report; whether the registry knows the time, without which it may have written nothing down.
        UnavailableError, UsageError; StorageError where the ledger can't be read."""
        if self._ends is not None:
            offsets = {state.number: state.offset for state in self._ledger.files()}
            if self._follower.is_past(self._ends, offsets):
                self._read_us, self._ends = self._ends_us, None
        oldest_us = None
        if self._read_us is not None:
            # Later than the offsets, or what is recorded between would be missed.
            waiting_us = self._ledger.oldest_waiting_us(self._boundary_us)
            unread_us = self._read_us - self._late_us
            oldest_us = unread_us if waiting_us is None else min(unread_us, waiting_us)
        held = self._registry.hold(self._name, oldest_us)
        self._boundary_us = held.boundary_us
        if held.reached_us is None:
            return False
        if self._ends is None:
            self._ends, self._ends_us = self._follower.ends(), held.reached_us
        return True

    def _run(self) -> None:
        while not self._gate.stopping.is_set():
            told = False
            try:
                told = self.report()
            except (UnavailableError, StorageError):
                pass  # others tell of it, and what was held stays so
            except UsageError as error:
                self._gate.notice(f"registry: {error}; events may expire while this dispatcher is down")
            self._gate.stopping.wait(self._every_s if told else min(self._every_s, _AGAIN_S))
