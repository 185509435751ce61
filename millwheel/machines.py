"""Which machines compute a run whose state is in a store that all of them reach, and who of them leads (paper
7.1).

Each machine renews a row of its own in the store, and so does the one that leads with its lease; both end by
the server's clock. Workers go on as long as their machine could renew. Who computes what is a round: whenever
a machine has come or gone, the one that leads begins another. All stop their workers and say so, or their
rows end; then the machines that are there get the key intervals, each as many as it has workers. So no two
workers ever write to the same sink, which knows nothing of sequencers; and in the store itself a claim counts
only in the round that stands there (millwheel.postgresql).
"""

import contextlib
import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from millwheel.engine.records import SLOTS
from millwheel.engine.shares import Shares, fitting
from photon.core.addresses import joined, split
from photon.core.clock import Background, Backoff, Clock
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import PhotonError, UsageError

if TYPE_CHECKING:
    from millwheel.postgresql import PostgresqlStore

LEASE_S: Final = 2.0
SKEW_S: Final = 0.5
"""Clocks of two servers, one of which takes over from the other, may differ by less."""
RENEW_S: Final = 0.25
HURRY_S: Final = 0.1
"""The same while workers are to stop."""
BACK_S: Final = 1.0
"""After a store was away for longer than the lease, within which all machines are back that wait for it."""
STANDS_STILL_S: Final = 15.0
"""A run that looks after nothing for so long (storage that hangs) is given up."""
HOLDER: Final = "holder"
"""Names a work directory, however its machine is called."""


class Machine(msgspec.Struct, frozen=True, array_like=True):
    """`shown`: host and work directory. `address`: where it listens, empty if it is to be the only one.
    `shape`: names of what its topology has, as of `millwheel.engine.plan.shape`."""

    holder: str
    shown: str
    address: str
    workers: int
    shape: tuple[str, ...] = ()


class Round(msgspec.Struct, frozen=True, array_like=True):
    """`machines`: who computes, once all workers of the round before have stopped. `shares`: of one that has
    none, those of the round before, or what who leads wants instead. `deploys`: how
    often all have loaded new code. `reign`: the round with which `lead` began to, once it runs."""

    number: int = 0
    lead: str = ""
    stage: Literal["stopping", "running", "ended"] = "ended"
    machines: tuple[Machine, ...] = ()
    summary: dict[str, Any] = {}
    """Of one that has ended."""
    stores: int = 1
    shares: Shares = Shares()
    deploys: int = 0
    reign: int = 0

    @property
    def workers(self) -> list[Machine]:
        """The machine of each worker: of each store as many have slots, so there may be some more of them
        than was asked for."""
        asked = [machine for machine in self.machines for _ in range(machine.workers)]
        wanted = min(-(-len(asked) // self.stores), SLOTS // self.stores) * self.stores if asked else 0
        return list(itertools.islice(itertools.cycle(asked), wanted))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of each worker: the ports behind its machine's; none if the only machine has no address."""
        found: list[str] = []
        taken = Counter[str]()
        for machine in self.workers:
            if machine.address:
                taken[machine.holder] += 1
                host, port = split(machine.address)
                found.append(joined(host, port + taken[machine.holder]))
        return tuple(found)


class Member(NamedTuple):
    """A machine whose row has not ended. `at`: the last round in which it stopped the workers before."""

    machine: Machine
    at: int


class View(NamedTuple):
    """What a machine saw in the store. `members`: for who leads; `awaited`: some of them may be on their way
    back. `lead`: who leads, for the others."""

    leads: bool
    round: Round
    members: Sequence[Member] = ()
    awaited: bool = False
    lead: Machine | None = None


def holder_of(work: Path) -> str:
    """StorageError."""
    path = work / HOLDER
    with storage_errors(path):
        if not path.exists():
            make_directory(work)
            write_file(path, secrets.token_hex(16).encode())
        return path.read_text("ascii")


def next_round(me: Machine, at: int, knows: int, view: View, stores: int = 1) -> Round | None:
    """What who leads is to publish, if anything. `at`: as of its own Member, which knows best; `knows`: the
    round that it has led since its beginning; `stores`: how many have the state."""
    if view.awaited:
        return None
    now = view.round
    others = [member for member in view.members if member.machine.holder != me.holder]
    like = [member.machine for member in others if member.machine.shape == me.shape]
    beside = [machine for machine in like if me.address and machine.address]
    there = tuple(sorted((me, *beside), key=lambda one: (one.shown, one.holder)))
    if now.lead == me.holder and now.stage == "stopping":
        if at < now.number or any(member.at < now.number for member in others):
            return None
        running = Round(now.number, me.holder, "running", there, stores=stores, deploys=now.deploys)
        return msgspec.structs.replace(running, shares=fitting(now.shares, len(running.workers), stores))
    if now.stage == "running" and now.number == knows and now.machines == there:
        return None
    return stopping(now, me)


def stopping(now: Round, me: Machine, shares: Shares | None = None) -> Round:
    """The round after, for which all stop. `shares`: from then on, if others."""
    return Round(now.number + 1, me.holder, "stopping", shares=shares or now.shares, deploys=now.deploys)


def unlike(me: Machine, view: View) -> str:
    """What this machine's topology lacks, and has beyond that of who leads this round: then it gets no part.
    Empty if they are alike."""
    now, lead = view.round, view.lead
    led = next((one for one in now.machines if one.holder == now.lead), None)
    if now.stage != "running" or led is None or lead is None or lead.holder != led.holder:
        return ""
    if me.shape in (led.shape, lead.shape):  # the round may be older than a start, the lease than a deploy
        return ""
    here, there = set(me.shape), set(led.shape)
    differ = [("without", there - here), ("with", here - there)]
    return " and ".join(f"{how} {_shown(names)}" for how, names in differ if names)


def _shown(names: set[str]) -> str:
    """Inputs where nothing else differs."""
    return ", ".join(sorted({name for name in names if not name.startswith("input ")} or names))


class Alone:
    """The only machine of a run whose state is on its own disk."""

    until = float("inf")
    stores = 1
    wrong = ""
    turned: float | None = None

    def __init__(self, workers: int) -> None:
        self.me = Machine("", "", "", workers)
        self.at = 0
        self.view = View(True, Round())

    def publish(self, _former: Round, following: Round) -> None:
        self.view = self.view._replace(round=following)

    def deposed(self) -> None:
        raise AssertionError("there is no other machine")

    def stopped(self, number: int, _shape: tuple[str, ...]) -> None:
        self.at = number

    def end(self) -> None:
        pass


class Machines:
    """This machine among those of the store's run: renewed by a thread from `enter` to `end`."""

    def __init__(self, store: "PostgresqlStore", me: Machine, clock: Clock, stores: int = 1) -> None:
        """`store`: the first of so many."""
        self.me, self.stores, self._store, self._clock = me, stores, store, clock
        self._lock = threading.Lock()
        self._renewing = Background("machines", self._renew, Backoff(RENEW_S, RENEW_S))
        self.at = 0
        self._renewed = self._awaited = 0.0
        """When it was last; until when others are awaited."""
        self.until = 0.0
        """Its workers may go on, by the monotonic clock, which all processes of a machine share."""
        self.view = View(False, Round())
        self.turned: float | None = None
        """When this machine's process last looked after its workers; None while that may take long."""

    def enter(self) -> None:
        """UsageError if another one runs this and renews it, and one of the two is to be the only one."""
        seen: float | None = None
        while (other := self._store.hold(self.me, LEASE_S)) is not None:
            who, until = other
            if self.me.address and who.address:
                break
            if seen is not None and until > seen:
                raise UsageError(
                    f"{who.shown} runs what is in {self._store.shown}: stop it, or give both --machine"
                )
            seen = until
            self._renewing.rest(RENEW_S / 2)
        self._look()
        self._renewing.start()

    @property
    def wrong(self) -> str:
        """Why it could not be renewed lately."""
        return self._renewing.trouble or ""

    def publish(self, former: Round, following: Round) -> None:
        """`former`: by which it was decided. ZombieError if another one leads, or has led since."""
        with self._lock:
            self._store.publish(self.me.holder, former, following)
        self._look()  # who was there before, and did not know of it, is seen now

    def deposed(self) -> None:
        """Another one leads."""
        with self._lock:
            self.view = self.view._replace(leads=False)

    def stopped(self, number: int, shape: tuple[str, ...]) -> None:
        """None of this machine's workers runs; those of this round may begin, by a topology of this shape."""
        with self._lock:
            self.at, self.me = number, msgspec.structs.replace(self.me, shape=shape)
        self._renewing.wake()

    def end(self) -> None:
        """Its workers are gone: others need not wait."""
        self._renewing.stop()
        if self._renewed:
            with contextlib.suppress(PhotonError):  # it ends by itself
                self._store.leave(self.me.holder)
        self._store.close()

    def _look(self) -> None:
        with self._lock:
            began = self._clock.monotonic()
            view = self._store.renew(self.me, self.at, LEASE_S)
            now = self._clock.monotonic()
            if self._renewed and now > self._renewed + LEASE_S - 2 * RENEW_S:
                self._awaited = now + BACK_S  # rows of others may have ended as its own nearly had
            self._renewed = now
            self.view = view._replace(awaited=now < self._awaited)
            if self.view.round.number == self.at:
                self.until = began + LEASE_S - SKEW_S

    def _renew(self) -> float:
        """Where it fails, nobody else gets this machine's part from a server that is silent."""
        if self.turned is not None and self._clock.monotonic() > self.turned + STANDS_STILL_S:
            raise PhotonError("this machine's run stands still")  # others go on without it
        self._look()
        return HURRY_S if self.view.round.stage == "stopping" else RENEW_S
