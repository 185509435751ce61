"""Who runs what is in a store that several machines reach: whoever has the lease, as of the server's clock.

A run renews it, and tells its workers until when they may go on; one that takes over waits until it has ended
on the server. So no two runs write to the same sinks, which know nothing of sequencers. In the store itself
claims decide: only the lease's holder may make one (millwheel.postgresql).
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from photon.core.clock import Clock
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import PhotonError, StorageError, UsageError

LEASE_S: Final = 5.0
SKEW_S: Final = 1.0
"""Clocks of two servers, one of which takes over from the other, may differ by less."""
RENEW_S: Final = 1.0
HOLDER: Final = "holder"
"""Names a work directory, however its machine is called."""


class LeaseStore(Protocol):
    """millwheel.postgresql.PostgresqlStore."""

    shown: str

    def hold(self, holder: str, shown: str, seconds: float) -> tuple[str, float] | None:
        """Have the lease for so long, if it is free or the holder's own. Else who has it, and until when.

        StorageError: it does not answer.
        """
        ...

    def let_go(self, holder: str) -> None: ...

    def close(self) -> None: ...


def holder_of(work: Path) -> str:
    """StorageError."""
    path = work / HOLDER
    with storage_errors(path):
        if not path.exists():
            make_directory(work)
            write_file(path, secrets.token_hex(16).encode())
        return path.read_text("ascii")


class Lease:
    """Renewed by a thread from `take` to `end`."""

    def __init__(self, store: LeaseStore, work: Path, clock: Clock) -> None:
        self._store, self._holder, self._clock = store, holder_of(work), clock
        self._shown = f"{socket.gethostname()}:{work.absolute()}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.until = 0.0
        """By the monotonic clock, which all processes of a machine share."""
        self.lost_to = ""
        """Who has it now, if it was lost."""

    def take(self, standby: bool, tell: Callable[[str], None]) -> None:
        """UsageError if another run has it and renews it, unless this one is to wait for its end."""
        seen: float | None = None
        while True:
            try:
                other = self._hold()
            except StorageError:
                if seen is None or not standby:
                    raise
                continue  # it has tried for a while
            if other is None:
                break
            who, until = other
            if seen is None and standby:
                tell(f"{who} runs this; waiting to take over")
            elif seen is not None and until > seen and not standby:
                raise UsageError(
                    f"{who} runs what is in {self._store.shown}: stop it, or wait for its end with --standby"
                )
            seen = until
            time.sleep(RENEW_S / 2)
        self._thread.start()

    def end(self) -> None:
        """Others need not wait."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
            with contextlib.suppress(PhotonError):  # it ends by itself
                self._store.let_go(self._holder)
        self._store.close()

    def _hold(self) -> tuple[str, float] | None:
        began = self._clock.monotonic()
        other = self._store.hold(self._holder, self._shown, LEASE_S)
        if other is None:
            self.until = began + LEASE_S - SKEW_S
        return other

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            try:
                other = self._hold()
            except PhotonError:
                continue  # nobody else gets it from a server that does not answer
            if other is not None:
                self.lost_to = other[0]
                return
