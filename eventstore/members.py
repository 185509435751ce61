"""Which cache processes there are, as the home process knows it. Pure but for its lock; time is passed in."""

import secrets
import threading
from dataclasses import dataclass
from typing import Final

ANNOUNCE_EVERY_S: Final = 1.0
SILENT_S_MAX: Final = 3.0
MEMBERS_MAX: Final = 256
"""With home. More are refused: each costs the others a call in every lookup."""


@dataclass(frozen=True, slots=True)
class Membership:
    """`version` is another one with each change and over restarts of home; 0 where there are no caches."""

    version: int = 0
    caches: tuple[str, ...] = ()


class Members:
    """For many threads at once. One that was not heard of for SILENT_S_MAX is a member no more."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._lock = threading.Lock()
        self._membership = Membership()

    def announce(self, address: str, now: float) -> bool:
        """A cache process is there, at `now` (monotonic seconds). False: there are too many already."""
        with self._lock:
            self._forget_silent(now)
            if address not in self._heard and len(self._heard) >= MEMBERS_MAX - 1:
                return False
            self._heard[address] = now
            self._renew()
            return True

    def leave(self, address: str) -> None:
        with self._lock:
            self._heard.pop(address, None)
            self._renew()

    def membership(self, now: float) -> Membership:
        if not self._heard:  # without a lock: the common case of one process
            return self._membership
        with self._lock:
            self._forget_silent(now)
            return self._membership

    def _forget_silent(self, now: float) -> None:
        silent = [address for address, heard in self._heard.items() if now - heard > SILENT_S_MAX]
        for address in silent:
            del self._heard[address]
        if silent:
            self._renew()

    def _renew(self) -> None:
        caches = tuple(sorted(self._heard))
        if caches != self._membership.caches:
            version = secrets.randbits(63) + 1 if caches else 0
            self._membership = Membership(version, caches)
