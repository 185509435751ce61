"""Leases and tokens: in whose name a joiner registers, and while it may (design: "Recovery is fenced").

The IdRegistry fences an incarnation only when its lease, and some time more for clocks that differ, is over;
it releases ids of fenced incarnations only. The lease's end is reckoned here from before it was asked for, so
it is over here before it is over there: whoever looks at the clock after a step and finds the lease running
knows that the step came before any fence.

A batch is registered and written under the lease of its token's incarnation, not of the process that happens
to do it: recovery may fence and release what a dead life registered while a new one, whose own lease runs, is
at work on it. No two processes keep the same incarnation, for the joiner's directory has one owner.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from idregistry.client import RegistryClient
from photon.core.clock import Background, Clock
from photon.core.errors import (
    CorruptStateError,
    FencedError,
    OverloadedError,
    PhotonError,
    SettingsMismatchError,
    told,
)
from photon.core.ids import Token

FIRST_LEASE_WAIT_S: Final = 1.0
_STOP_WAIT_S: Final = 1.0
RENEWALS_A_LEASE: Final = 3
"""So that one lost answer loses no lease."""
RETRIES_A_LEASE: Final = 10
RETRY_S_MAX: Final = 1.0
"""Between tries after a failure, at most."""


class TokenSource:
    """Gives out the tokens of one incarnation (paper 3.3.2). For many threads at once."""

    def __init__(self, address: str, clock: Clock, rng: Random) -> None:
        """`rng` must not be seeded alike in two lives of a joiner: equal tokens would both win."""
        self.incarnation = rng.getrandbits(64)
        self._address = address
        self._clock = clock
        self._last_us = -(1 << 62)
        self._lock = threading.Lock()

    def next(self) -> bytes:
        """A packed token, later than all before it, whatever the clock does."""
        with self._lock:
            self._last_us = max(self._clock.now_us(), self._last_us + 1)
            return Token(self._address, self.incarnation, self._last_us).pack()


@dataclass(slots=True, eq=False)
class Lease:
    """One incarnation's. Times are monotonic seconds. Changed by one thread, read by all; `fenced` by any."""

    address: str
    incarnation: int
    lease_s: float
    until_s: float = -math.inf
    """It runs until then."""
    due_s: float = -math.inf
    """It is to be asked for from then on."""
    fenced: bool = False
    """Never to be had again: what this incarnation registered and did not write is recovery's."""

    def holds(self, now_s: float) -> bool:
        return now_s < self.until_s and not self.fenced

    def left_s(self, now_s: float) -> float:
        """Seconds that it still runs; 0 where it does not."""
        return max(0.0, self.until_s - now_s) if self.holds(now_s) else 0.0

    def granted(self, asked_s: float) -> None:
        """The registry said yes to what was asked at `asked_s`."""
        self.until_s = asked_s + self.lease_s
        self.due_s = asked_s + self.lease_s / RENEWALS_A_LEASE

    def failed(self, now_s: float) -> None:
        """No answer: what was granted before still runs."""
        self.due_s = now_s + min(RETRY_S_MAX, self.lease_s / RETRIES_A_LEASE)


class LeaseKeeper:
    """Keeps leases alive: this joiner's own, and those of lives before it that left batches without an end.

    `check`, `fenced` and `ended` are for many threads at once.
    """

    def __init__(
        self,
        registry: RegistryClient,
        own: Lease,
        clock: Clock,
        notice: Callable[[str], None],
        on_fatal: Callable[[BaseException], None],
        settings: bytes = b"",
        home: Path | None = None,
    ) -> None:
        """`on_fatal` is told, once, that `own` is fenced, or that no lease is to be had with these `settings`
        (core.settings.identity_digest), or of this registry, which `home` does not remember.
        """
        self.own = own
        self.refused: PhotonError | None = None
        """Why no lease is ever to be had: none is asked for any more. What is under way is not given up."""
        self._settings = settings
        self._home = home
        """Until the registry is known to be the one that it remembers."""
        self._registry = registry
        self._monotonic = clock.monotonic
        self._notice = notice
        self._on_fatal = on_fatal
        self._lock = threading.Lock()
        self._inherited: dict[int, tuple[Lease, int]] = {}  # incarnation -> lease, batches that need it
        self._trouble: str | None = None
        self._asked = threading.Event()
        self._work = Background("leases", self.renew_due)

    def check(self, lease: Lease) -> None:
        """OverloadedError where it does not run: nothing may be registered or written under it."""
        if not lease.holds(self._monotonic()):
            raise OverloadedError(
                "the joiner holds no lease, so it registers and writes nothing until the IdRegistry gives it "
                "one; send again later"
            )

    def inherit(self, token: Token) -> Lease:
        """The lease for one more batch of an earlier life, until it has `ended`. Before `start` only."""
        new = Lease(token.address, token.incarnation, self.own.lease_s)
        lease, batches = self._inherited.get(token.incarnation, (new, 0))
        self._inherited[token.incarnation] = lease, batches + 1
        return lease

    def ended(self, lease: Lease) -> None:
        """A batch has its end. A lease that no batch needs is let go, so that recovery may fence it."""
        if lease is self.own:
            return
        with self._lock:
            _, batches = self._inherited.pop(lease.incarnation)
            if batches > 1:
                self._inherited[lease.incarnation] = lease, batches - 1

    def fenced(self, lease: Lease, told: FencedError | None = None) -> None:
        """The registry says so."""
        with self._lock:
            if lease.fenced:
                return
            lease.fenced = True
        if lease is not self.own:
            self._notice(
                f"incarnation {lease.incarnation:016x} is fenced: what it had not written is recovery's"
            )
        elif not self._work.stopping:
            self._on_fatal(told or FencedError(f"joiner incarnation {lease.incarnation:016x} is fenced"))

    def start(self) -> None:
        """Begin. On return the lease is there if the registry answers; while it is away it is asked on."""
        self._work.start()
        self._asked.wait(FIRST_LEASE_WAIT_S)

    def stop(self) -> None:
        """Ask no more; what was granted runs out."""
        self._work.stop(_STOP_WAIT_S)

    def renew_due(self) -> float:
        """Ask for the leases that are due, this joiner's own first. Seconds until the next one is."""
        with self._lock:
            leases = [self.own, *(lease for lease, _ in self._inherited.values())]
        for lease in leases:
            if self.refused is None and not lease.fenced and lease.due_s <= self._monotonic():
                self._renew(lease)
        self._asked.set()
        if self.refused is not None:
            return self.own.lease_s
        next_s = min((lease.due_s for lease in leases if not lease.fenced), default=float("inf"))
        return min(max(0.0, next_s - self._monotonic()), self.own.lease_s)

    def status(self) -> dict[str, Any]:
        """`trouble`: why the last try to renew it failed, None if it did not."""
        return {
            "incarnation": f"{self.own.incarnation:016x}",
            "seconds_left": round(self.own.left_s(self._monotonic()), 3),
            "fenced": self.own.fenced,
            "trouble": self._trouble,
        }

    def _renew(self, lease: Lease) -> None:
        try:
            if self._home is not None:
                self._registry.recognise(self._home)
                self._home = None
            asked_s = self._monotonic()
            self._registry.keep_alive(lease.address, lease.incarnation, lease.lease_s, self._settings)
        except FencedError as error:
            self.fenced(lease, error)
        except (SettingsMismatchError, CorruptStateError) as error:
            # The registry keeps what it was founded with: the answer is the same for every lease, for ever.
            self.refused, self._trouble = error, str(error)
            if not self._work.stopping:
                self._on_fatal(error)
        except Exception as error:
            # Whatever it is: without this thread the joiner would stand still and not say why.
            lease.failed(self._monotonic())
            if self._trouble is None:
                self._notice(f"no answer to the request for a lease: {told(error)}")
            self._trouble = told(error)
        else:
            lease.granted(asked_s)
            self._trouble = None
