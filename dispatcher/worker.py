"""A worker: reads a part of the foreign logs and sends their events; its parts wired together."""

import contextlib
import random
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from dispatcher.checkpoint import Book, cut_letters, restore, unpack_rows
from dispatcher.driver import Driver
from dispatcher.ledger import Ledger
from dispatcher.reader import LogReader
from dispatcher.rules.homes import Homes
from dispatcher.rules.pacing import Pacing
from dispatcher.sender import Gate, Sender
from dispatcher.workers import Inbox, mine_of, worker_directory
from eventstore.client import EventStoreClient
from idregistry.client import RegistryClient
from joiner.client import JoinerClient
from photon.core.clock import Background, Backoff, SteadyClock
from photon.core.columns import split_ids
from photon.core.disk import storage_errors
from photon.core.errors import UnavailableError, UsageError
from photon.core.settings import Settings
from photon.core.status import Notices
from photon.logs.follow import LogFollower
from photon.logs.formats import json_lines

_LISTEN_AGAIN: Final = Backoff(0.05, 2.0)
_GATHER_S: Final = 0.02
"""What follows within this time is told of together."""
_LOOKS_EVERY_S: Final = 1.0
"""For event stores that came or went."""

_REPORT_EVERY_S_MAX: Final = 300.0
_REPORT_AGAIN_S: Final = 5.0
_REPORTS: Final = 24
"""In the time that ids are kept, at least."""
_LATE_S_MAX: Final = 86_400.0
_DAY_S: Final = 86_400.0


class Listener:
    """What the event stores tell of primary events that have arrived, and of how far they have read: of each
    a thread that waits for it in a call.

    Passes ids to `arrive` and times (us) to `read_to`, from `start` to `stop`. Best effort: what it misses
    waits for its backoff. The time is the least of those of all event stores that answer.
    """

    def __init__(
        self,
        eventstore: EventStoreClient,
        gate: Gate,
        arrive: Callable[[Sequence[bytes]], None],
        read_to: Callable[[int], None],
    ) -> None:
        self._eventstore = eventstore
        self._gate = gate
        self._arrive = arrive
        self._read_to = read_to
        self._lock = threading.Lock()
        self._heard: dict[str, int] = {}
        self._listening: dict[str, threading.Thread] = {}
        self._work = Background("dispatcher-arrivals", self._look)

    def start(self) -> None:
        self._work.start()

    def stop(self) -> None:
        """After the gate was told to stop. Ends the calls under way."""
        self._eventstore.close()
        self._work.stop()
        for thread in self._listening.values():
            thread.join()

    def _look(self) -> float:
        self._eventstore.keep_up()
        for address in self._eventstore.addresses:
            if address not in self._listening or not self._listening[address].is_alive():
                thread = threading.Thread(target=self._listen, args=(address,), daemon=True)
                self._listening[address] = thread
                thread.start()
        return _LOOKS_EVERY_S

    def _listen(self, address: str) -> None:
        position, read_to_us, failures = 0, 0, 0
        while not self._gate.stopping.is_set() and address in self._eventstore.addresses:
            try:
                position, read_to_us, ids = self._eventstore.arrivals(address, position, read_to_us)
            except UnavailableError:
                failures += 1
                self._hear(address, None)
                self._gate.wait(_LISTEN_AGAIN, failures)
                continue
            failures = 0
            self._hear(address, read_to_us)
            if ids:
                self._arrive(split_ids(ids))
            self._gate.stopping.wait(_GATHER_S)
        self._hear(address, None)

    def _hear(self, address: str, read_to_us: int | None) -> None:
        """How far one has read; None: it does not say."""
        with self._lock:
            if read_to_us is None:
                self._heard.pop(address, None)
            else:
                self._heard[address] = read_to_us
            if self._heard:
                self._read_to(min(self._heard.values()))


class Holder:
    """Tells the registry what it must not let expire: how old the oldest open event is (paper 2.3).

    A datacenter that is down for longer than ids are kept finds its events neither joined nor expired when it
    comes back: its last report holds the registry's boundary back until then. Open are the events that wait
    in the ledger, and all that was not read and recorded. Of these nobody knows how old they are; but once
    all is recorded that stood in the logs when the registry's time was T, the rest is newer than T, but for
    lines that reach their log late.
    """

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
        self._every_s = min(_REPORT_EVERY_S_MAX, retention_s / _REPORTS)
        self._late_us = round(min(_LATE_S_MAX, retention_s / 2) * 1e6)
        self._ends: Mapping[int, int] | None = None
        """Where the files ended when the registry's time was `_ends_us`; None while none is waited for."""
        self._ends_us = 0
        self._read_us: int | None = None
        """What was logged before is recorded; None while that is not known."""
        self._boundary_us = 0
        again_s = min(self._every_s, _REPORT_AGAIN_S)
        self._work = Background("dispatcher-hold", self._report, Backoff(again_s, again_s))

    def start(self) -> None:
        self._work.start()

    def stop(self, drained: bool) -> None:
        """`drained`: nothing is open, and nothing will be."""
        self._work.stop()
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

    def _report(self) -> float:
        """Seconds until the next. UnavailableError, StorageError: others tell of it, and what was held stays
        so."""
        told = False
        try:
            told = self.report()
        except UsageError as error:
            self._gate.notice(f"registry: {error}; events may expire while this dispatcher is down")
        return self._every_s if told else min(self._every_s, _REPORT_AGAIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the workers of a process share: they read the logs that match `patterns`."""

    settings: Settings
    datacenter: str
    directory: Path
    """Their states are within."""
    number: int
    """Of this process in its datacenter."""
    patterns: Sequence[str]
    dead_letters: Path
    """Gets the events that end otherwise than joined or duplicate."""
    registry: RegistryClient
    joiner: JoinerClient
    make_eventstore: Callable[[], EventStoreClient] | None = None
    """Clients that tell of arrivals; without them waiting events have their backoff alone."""
    joiners: Mapping[str, str] = field(default_factory=dict)
    """Address -> datacenter of all that read the same events (rules/homes); none: this one alone."""
    clock: SteadyClock
    rng: random.Random
    drain: bool = False
    """The logs will grow no more."""
    notices: Notices = field(default_factory=lambda: Notices("dispatcher"))


INBOX_ONLY: Final = -1
"""Of how many workers: one that reads the inbox and no logs."""


class Worker:
    """The `number`th of so many: reads the files whose names say so. From `start` to `stop`, once.

    `name`: by which the registry knows what it holds. `moves`: another process may go on with its share;
    then the inbox is another worker's. Constructing opens the state: LockedError, CorruptStateError,
    DiskFullError.
    """

    def __init__(self, site: Site, number: int, of: int, name: str, moves: bool = False) -> None:
        settings, own = site.settings, site.settings.dispatcher
        self.number = number
        self._drain = site.drain
        place = worker_directory(site.directory, number)
        self.ledger = Ledger(
            place, site.dead_letters, own.state_bytes_max, number, site.number if moves else 0
        )
        self._gate_stopping, wake = threading.Event(), threading.Event()
        with contextlib.ExitStack() as undo:
            undo.callback(self.ledger.close)
            inbox = Inbox(site.directory, self.ledger.file.sync)
            states = self.ledger.files()
            if not moves:
                inbox.sweep(states)
            self.book = Book(self.ledger) if moves else None
            logs = site.patterns if of != INBOX_ONLY else ()
            follower = LogFollower(
                [*logs, *([] if moves else [inbox.pattern])],
                place / "spool",
                settings.logs,
                site.clock.wall,
                states,
                site.drain,
                site.notices.tell,
                mine_of(number, of) if of != INBOX_ONLY else None,
                wake.set,
                keep_copies=False,
                first=self.book.next_number if self.book else 1,
                by_name=inbox.holds,
            )
            lines, batch_events = json_lines(settings), own.batch_events_max
            self._reader = LogReader(
                follower, lines, settings.logs, batch_events, site.clock, states, site.notices.tell
            )
            pacing = Pacing(own.batches_in_flight_max, own.batch_events_max, settings.logs.chunk_bytes)
            self._gate = Gate(pacing, site.clock, site.rng, self._gate_stopping, site.notices.tell)
            looked_up = site.registry if own.lookup_before_send else None
            recognise = partial(site.registry.recognise, place)
            homes = Homes(site.datacenter, site.joiners, own.home_hedge_ms / 1000)
            self._sender = Sender(looked_up, site.joiner, self._gate, inbox.is_recovered, recognise, homes)
            self.driver = Driver(
                settings, self.ledger, self._reader, self._sender, self._gate, wake, inbox.sweep, self.book
            )
            undo.pop_all()
        told = self.driver.arrive, self.driver.read_to
        make = site.make_eventstore
        self._listener = Listener(make(), self._gate, *told) if make else None
        days = settings.registry.retention_days
        self._holder = (
            Holder(name, site.registry, self.ledger, follower, self._gate, days) if days > 0 else None
        )

    def start(self) -> None:
        self.driver.start()
        for beside in (self._listener, self._holder):
            if beside:
                beside.start()

    def rest(self) -> None:
        """Read no more and record what is under way. What no joiner answers is sent at the next start."""
        self.driver.stop()
        if self._listener:
            self._listener.stop()
        if self._holder:
            self._holder.stop(self._drain and self.driver.idle)

    def close(self) -> None:
        """After `rest`."""
        self._reader.follower.close()
        self.ledger.close()

    def status(self) -> dict[str, Any]:
        """How it goes now. Plain values."""
        return {
            "backlog": self._reader.backlog(),
            "waiting_bytes": self.ledger.waiting_bytes,
            "in_flight": self.driver.in_flight,
            "woken": self.driver.woken,
            "requests_max": self._gate.size,
            "homes": self._sender.homes(),
            "drained": self._drain and self.driver.idle,
            "paused": self.driver.paused,
            "unended": self._reader.follower.unended(),
            "unreadable": self._reader.follower.unreadable,
            "storage_error": self.driver.storage_error,
            "files": self._reader.follower.files,
        }


def restored(site: Site, number: int, rows: Mapping[bytes, bytes]) -> None:
    """Make the state of a worker anew from what is kept of its share. StorageError, CorruptStateError."""
    place = worker_directory(site.directory, number)
    forget(site, number)
    if not rows:
        return
    own, letters = site.settings.dispatcher, site.dead_letters
    kept = unpack_rows(rows)
    if kept.end is not None:
        cut_letters(letters, number, kept.end.process, kept.end.position)
    ledger = Ledger(place, letters, own.state_bytes_max, number, site.number)
    try:
        lost = restore(ledger, kept, site.patterns, letters, json_lines(site.settings), site.clock.now_us())
    except BaseException:
        ledger.close()
        forget(site, number)
        raise
    ledger.close()
    for count, what in ((lost.events, "events that waited"), (lost.letters, "dead letters")):
        if count:
            site.notices.tell(
                f"share {number}: {count} {what} are lost: the logs they stood in can't be read here"
            )


def forget(site: Site, number: int) -> None:
    """What is here of a share that another dispatcher has gone on with. StorageError."""
    place = worker_directory(site.directory, number)
    with storage_errors(place):
        if place.exists():
            shutil.rmtree(place)
