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

from dispatcher.arrivals import Listener
from dispatcher.checkpoint import Book, cut_letters, restore, unpack_rows
from dispatcher.driver import Driver
from dispatcher.hold import Holder
from dispatcher.ledger import Ledger
from dispatcher.reader import LogReader
from dispatcher.rules.homes import Homes
from dispatcher.rules.pacing import Pacing
from dispatcher.sender import Gate, Sender
from dispatcher.workers import Inbox, mine_of, worker_directory
from eventstore.client import EventStoreClient
from idregistry.client import RegistryClient
from joiner.client import JoinerClient
from photon.core.clock import SteadyClock
from photon.core.disk import storage_errors
from photon.core.settings import Settings
from photon.core.status import Notices
from photon.logs.follow import LogFollower
from photon.logs.formats import json_lines


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
