"""A joiner without its network. A request in it (paper 3.3.1): look up, adapt, intend, register, write.

Register before writing: a crash between the two loses a join, which the intent brings back; the other order
would double one. It remembers nothing of an event but its intent.

What a restarted joiner takes over (design: "No loss when a joiner crashes"): the intents without an end. What
it finds of their lines in the joined log it cuts off, in every root, whatever that is; then the resolver
registers them again, with the same token, and writes the winners, from the intents (joiner.commit).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from eventstore.client import EventStoreClient
from idregistry.client import RegistryClient
from joiner import rules
from joiner.accounts import Accountant
from joiner.adapter import BatchAdapter, Guard, keeps_default_line, load_adapter
from joiner.commit import Resolver, Settler, Slots, StorageGate, Unended
from joiner.completion import Completer, SettledLog
from joiner.intents import Intent, IntentJournal
from joiner.leases import Lease, LeaseKeeper, TokenSource
from joiner.output import Checkpoint, JoinedLog
from joiner.output_files import Life, check_new, note_life, open_roots, output_directories, write_known
from joiner.rules import ForeignColumns, JoinOutcomes
from photon.connect.publishing import Publisher
from photon.core.clock import Clock
from photon.core.columns import take_ids, take_times
from photon.core.disk import DirectoryLock
from photon.core.errors import OverloadedError, StorageError, UnavailableError
from photon.core.fates import LETTER_REASONS, Committed, Fate, Found, Joined
from photon.core.ids import ID_BYTES, MATCHED, mark_ids, parse_token
from photon.core.settings import Settings, identity_digest, reading_fingerprint
from photon.core.status import Notices
from photon.logs.formats import json_lines

UNRESOLVED_MAX: Final = 64
UNRESOLVED_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Home:
    """Where a joiner works, and as whom."""

    name: str
    datacenter: str
    address: str
    """`host:port` that it listens on; goes into the tokens."""
    directory: Path
    """Its own: keeps its intents."""
    output_root: Path
    drain: bool = False
    """The primary logs grow no more, so an absent primary event is final."""
    is_sole: bool = False
    """No other joiner of the system ever had the address: each is planned by its settings."""


class Deadline:
    """Of one request. What waits for it waits no longer; nothing is registered when it is over."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        """None: the caller waits for ever."""
        self._clock = clock
        self._until_s = None if timeout_s is None else clock.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """None: for ever."""
        return None if self._until_s is None else max(0.0, self._until_s - self._clock.monotonic())

    def check(self) -> None:
        """OverloadedError if it is over: nothing was done."""
        if self.left_s() == 0.0:
            raise OverloadedError(
                "the request's deadline has passed and nothing was registered; send it again"
            )


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Events with a joined line, each id once: K of the batch's rows (None: all of them)."""

    rows: rules.Rows | None
    ids: bytes
    times: bytes
    lines: bytes
    repeats: dict[int, int]
    """Rows of the batch whose id stands at a candidate, too -> that one's row."""

    def part(self, rows: rules.Rows, mask: npt.NDArray[np.bool_]) -> "_Candidates":
        """The chosen ones of K, which are these rows; the repeats of all."""
        return _Candidates(
            rows[mask],
            take_ids(self.ids, mask),
            take_times(self.times, mask),
            rules.take_lines(self.lines, mask),
            self.repeats,
        )


class Marker:
    """Registers that a primary event is matched, before what is joined with it (photon.core.ids.MATCHED).

    An event whose primary event was said to be unmatched by then is late. What is marked stays so, though its
    event be joined by another joiner, or expire. For many threads at once.
    """

    def __init__(self, registry: RegistryClient, settings: Settings) -> None:
        self._registry = registry
        self._lines = json_lines(settings)
        self._field = settings.primary.time
        self._lock = threading.Lock()

    def mark(self, ids: bytes, lines: Sequence[bytes]) -> dict[int, tuple[Joined, str]]:
        """Of N primary events, 16 x N ids: rows of those that can't be marked as matched, what that makes of
        the foreign event, and why. UnavailableError, OverloadedError: nothing may be joined with any of them.
        """
        with self._lock:
            times, wrong = self._lines.primary_times(ids, lines)
        told = {
            row: (Joined.ADAPTER_ERROR, f"joiner.mark_matched: its primary event's '{self._field}' {why}")
            for row, why in wrong.items()
        }
        rows = np.setdiff1d(np.arange(len(lines)), [*wrong])
        # An id that stands twice would lose against itself.
        keys = np.frombuffer(ids, f"V{ID_BYTES}")[rows]
        _, first, row_of = np.unique(keys, return_index=True, return_inverse=True)
        kept = rows[first]
        committed = self._registry.commit(mark_ids(take_ids(ids, kept)), take_times(times, kept), MATCHED)
        outcomes = np.frombuffer(committed, np.uint8)[row_of]
        for row in rows[outcomes != Committed.WON].tolist():
            told[row] = Joined.LATE, LETTER_REASONS[Fate.LATE]
        for row in rows[outcomes == Committed.EXPIRED].tolist():
            told[row] = Joined.LATE, "its primary event is older than the registry remembers"
        return told


class Worker:
    """Joins batches, several at a time; writes `joined/<datacenter>/<name>-NNNNNN.jsonl` in each output root.

    One restarted after a crash must find the same directory, output and name.
    """

    def __init__(
        self,
        settings: Settings,
        home: Home,
        registry: RegistryClient,
        eventstore: EventStoreClient,
        clock: Clock,
        on_fatal: Callable[[BaseException], None] = lambda _: None,
        checkpoint: Checkpoint = lambda _: None,
    ) -> None:
        """Opens and repairs the logs. AdapterError, CorruptStateError, LockedError, SettingsError,
        StorageError.

        `on_fatal` is told, from any thread, of what only a restart can mend.
        """
        wanted = settings.joiner
        self.settings, self.home = settings, home
        self._eventstore, self._clock, self._checkpoint = eventstore, clock, checkpoint
        self._notices = Notices("joiner")
        adapter = load_adapter(settings.adapter.use, settings.adapter.field)
        self._requests = Slots(
            wanted.requests_in_flight_max,
            "requests are in flight; send again later or raise joiner.requests_in_flight_max",
        )
        rng = Random()
        self._tokens = TokenSource(home.address, clock, rng)
        own = Lease(home.address, self._tokens.incarnation, settings.registry.lease_s)

        def end(error: BaseException) -> None:
            self._output.finish_append()
            on_fatal(error)

        self._gate = StorageGate(clock, end)
        digest = identity_digest(settings)
        self._marker = Marker(registry, settings) if wanted.mark_matched else None
        self.leases = LeaseKeeper(registry, own, clock, self._notices.tell, end, digest, home.directory)
        with contextlib.ExitStack() as opened:
            opened.enter_context(DirectoryLock(home.directory))
            guard = None if keeps_default_line(adapter) else Guard(home.directory, settings.adapter.timeout_s)
            if guard is not None:
                opened.callback(guard.close)
                if guard.found is not None:
                    self._notices.tell(guard.found)
            self._adapter = BatchAdapter(adapter, guard)
            directories = output_directories(home.output_root, wanted.output_roots, home.datacenter)
            roots = open_roots(home.directory, directories, home.name)
            self._output = JoinedLog(roots, wanted.output_file_bytes_max, wanted.fsync, clock, checkpoint)
            opened.callback(self._output.close)
            self._journal = IntentJournal(home.directory / "intents", wanted.fsync)
            opened.callback(self._journal.close)
            logs = (self._journal, self._output, self._gate)
            commits_max = wanted.commits_in_flight_max
            log = SettledLog(roots[0], self._output, self._journal)
            self._publisher = Publisher(wanted.sinks, home.name, log, clock, home.drain, self._notices.tell)
            opened.callback(self._publisher.close)
            self._settler = Settler(
                registry, *logs, self.leases, commits_max, checkpoint, self._publisher.wake
            )
            self._resolver = Resolver(self._end, rng, self._notices.tell)
            self._take_over()
            write_known(home.directory, roots)
            # Recovery releases what a life registered only when it reads an output that tells of that life.
            life = Life(own.incarnation, own.address, clock.now_us())
            for root in roots:
                note_life(root.directory, home.name, life)
            self._completer = Completer(
                self._output,
                self._journal,
                wanted,
                self._notices.tell,
                checkpoint,
                self._publisher.needed_from,
            )
            opened.callback(self._completer.close)
            self._accountant = Accountant(
                registry,
                roots,
                home.name,
                own.incarnation,
                own.address if home.is_sole else "",
                self._journal,
                clock,
            )
            opened.callback(self._accountant.stop)
            self._opened = opened.pop_all()

    def start(self) -> None:
        """Ask for the lease, without which nothing is done, and begin to end what a crashed process left.

        Requests need not wait for that end: a new one for the same event wins or loses against it in the
        registry as against any other joiner.
        """
        self.leases.start()
        self._resolver.start()
        self._completer.start()
        self._publisher.start()
        self._accountant.start()

    def can_work(self) -> bool:
        """Whether a batch would be taken: the lease runs and the disks take writes. Those that did not are
        tried again."""
        self._gate.probe([self.home.directory, *(root.directory for root in self._output.roots)])
        return self.leases.own.holds(self._clock.monotonic()) and self._gate.error is None

    def join(self, batch: ForeignColumns, timeout_s: float | None = None) -> JoinOutcomes:
        """Each event's outcome. OverloadedError, StorageError: the request was refused, nothing was done.

        `timeout_s`: how long the caller waits, None for ever. Past it nothing more is registered.
        """
        deadline = Deadline(self._clock, timeout_s)
        with self._admitted():
            try:
                found, primaries = self._eventstore.lookup(batch.primary_ids, deadline.left_s())
            except UnavailableError:
                return JoinOutcomes(bytes([Joined.RETRY_UNAVAILABLE]) * len(batch), {})
            self._checkpoint("looked up")
            outcomes, reasons = rules.outcomes_of_lookup(found, batch, self.settings.joiner, self.home.drain)
            candidates = self._adapt(batch, found, primaries, outcomes, reasons)
            if candidates.ids and self._marker is not None:
                candidates = self._mark(candidates, batch.primary_ids, primaries, outcomes, reasons)
            if candidates.ids:
                _place(candidates, self._register(candidates, deadline), outcomes, reasons)
            _repeat(candidates.repeats, outcomes, reasons)
            return JoinOutcomes(outcomes.tobytes(), reasons)

    def stop(self, grace_s: float) -> bool:
        """Give unresolved batches `grace_s` to end, complete the joined log, close; whether all did. The next
        start ends the rest."""
        ended = self._resolver.stop(grace_s) and not self._requests.in_flight
        settled = False
        if ended and not self._output.broken:
            try:
                self._output.end()
                self._publisher.finish()
                self._completer.finish()
                settled = self.leases.own.holds(self._clock.monotonic())  # so the registry answers
            except StorageError as error:
                self._notices.tell(
                    f"the joined log's last file is left for the next start to complete: {error}"
                )
        self.close()
        if settled:
            self._accountant.dismiss()
        return ended

    def close(self) -> None:
        """Let go of all files at once."""
        self.leases.stop()
        self._opened.close()

    def status(self) -> dict[str, Any]:
        """While something is `in_flight` or `unresolved` (intents without an end), lines may still come.

        `reading`: a fast path that reads events otherwise must send nothing.
        """
        return {
            "reading": reading_fingerprint(self.settings),
            "joined": self._settler.joined,
            "in_flight": self._requests.in_flight,
            "commits_in_flight": self._settler.slots.in_flight,
            "unresolved": self._journal.open_count,
            "lease": self.leases.status(),
            "output": self._completer.status(),
            "account": self._accountant.status(),
            "sinks": self._publisher.status(),
            "storage_error": None if self._gate.error is None else str(self._gate.error),
            "notices": self._notices.lines(),
        }

    def _take_over(self) -> None:
        """SettingsError if a root can't be new."""
        intents, left = self._journal.take_over()
        if left.cut is not None:
            for root in self._output.roots:
                if root.is_new:
                    check_new(root, left.cut)
        cut = self._output.begin(left)
        for intent in intents:
            self._resolver.add(Unended(intent, self.leases.inherit(parse_token(intent.token))))
        torn_bytes = sum(root.torn_bytes for root in self._output.roots)
        if torn_bytes:
            self._notices.tell(f"cut {torn_bytes} bytes of an unfinished line off the joined log")
        if cut:
            self._notices.tell(
                f"cut {cut} bytes of unfinished batches off the joined log; they are written again"
            )
        if intents:
            self._notices.tell(f"{len(intents)} batches were under way when the joiner ended; ending them")

    def _end(self, batch: Unended) -> None:
        """One that its request, or the life before, has left; errors as of Settler.settle."""
        if batch.lease.fenced and batch.lease is not self.leases.own and batch.place is None:
            self._settler.begin_anew(batch, self._tokens.next())
        self._settler.settle(batch)

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """Throttle (paper 3.3.1, 3.3.2): what is in flight or unresolved is what a crash leaves to repair."""
        self.leases.check(self.leases.own)
        resolver = self._resolver
        if resolver.unresolved >= UNRESOLVED_MAX or resolver.unresolved_bytes >= UNRESOLVED_BYTES_MAX:
            raise OverloadedError(
                f"{resolver.unresolved} batches wait for their registration or for the disk; send again later"
            )
        with self._requests.taken(0.0):
            self._gate.check()
            yield

    def _adapt(
        self,
        batch: ForeignColumns,
        found: bytes,
        primaries: list[bytes],
        outcomes: rules.Outcomes,
        reasons: dict[int, str],
    ) -> _Candidates:
        """Joined lines of the events whose primary was found. Notes what the adapter filters."""
        rows: rules.Rows | None = None
        events = batch.events
        if found.count(Found.FOUND) != len(found):
            mask = np.frombuffer(found, np.uint8) == Found.FOUND
            rows = np.flatnonzero(mask)
            events = rules.take_lines(events, mask)
            primaries = [primaries[row] for row in rows]
        ids, times = batch.ids, batch.times
        if rows is not None:
            ids, times = take_ids(ids, rows), take_times(times, rows)
        adapted = self._adapter.join(primaries, events, ids)
        if adapted.rows is not None:
            places = np.arange(len(batch)) if rows is None else rows
            for outcome, why in (
                (Joined.FILTERED, adapted.skipped),
                (Joined.ADAPTER_ERROR, adapted.failed),
            ):
                outcomes[places[list(why)]] = outcome
                reasons.update(zip(places[list(why)].tolist(), why.values(), strict=True))
            outcomes[places[adapted.again]] = Joined.RETRY_UNAVAILABLE
            kept = np.asarray(adapted.rows, np.intp)
            rows, ids, times = places[kept], take_ids(ids, kept), take_times(times, kept)
        return _once_each(_Candidates(rows, ids, times, adapted.lines, {}), len(batch))

    def _mark(
        self,
        candidates: _Candidates,
        primary_ids: bytes,
        primaries: list[bytes],
        outcomes: rules.Outcomes,
        reasons: dict[int, str],
    ) -> _Candidates:
        """Those whose primary event is matched now, and may not be called unmatched any more."""
        assert self._marker is not None
        rows = np.arange(len(primaries)) if candidates.rows is None else candidates.rows
        mask = np.ones(len(rows), np.bool_)
        try:
            told = self._marker.mark(take_ids(primary_ids, rows), [primaries[row] for row in rows])
        except UnavailableError:
            outcomes[rows] = Joined.RETRY_UNAVAILABLE
            mask[:] = False
        else:
            self._checkpoint("marked")
            for row, (outcome, why) in told.items():
                outcomes[rows[row]], reasons[int(rows[row])] = outcome, why
            mask[list(told)] = False
        return candidates if mask.all() else candidates.part(rows, mask)

    def _register(self, candidates: _Candidates, deadline: Deadline) -> bytes | None:
        """Intend, register, write. K core.fates.Committed; None where the outcome will be known later."""
        batch: Unended | None = None
        settled = False
        try:
            with self._settler.slots.taken(deadline.left_s()):
                self.leases.check(self.leases.own)  # lookup and slot may have taken long
                deadline.check()
                token = self._tokens.next()
                intent = Intent(token, candidates.ids, candidates.times, candidates.lines)
                batch = self._settler.intend(intent, deadline.check)
                self._settler.register(batch)
            committed = self._settler.finish(batch)
            settled = True
            return committed
        except (UnavailableError, StorageError):
            if batch is None:
                raise
            return None
        finally:
            if batch is not None and not settled:
                self._resolver.add(batch)


def _place(
    candidates: _Candidates, committed: bytes | None, outcomes: rules.Outcomes, reasons: dict[int, str]
) -> None:
    """Put the registry's answers in their rows."""
    rows = slice(None) if candidates.rows is None else candidates.rows
    if committed is None:
        outcomes[rows] = Joined.RETRY_UNAVAILABLE
    else:
        outcomes[rows] = np.frombuffer(rules.outcomes_of_commit(committed), np.uint8)
        if Committed.EXPIRED in committed:
            expired = np.flatnonzero(outcomes == Joined.EXPIRED)
            reasons.update(dict.fromkeys(expired.tolist(), rules.EXPIRED_REASON))


def _repeat(repeats: dict[int, int], outcomes: rules.Outcomes, reasons: dict[int, str]) -> None:
    """What became of an id's chosen row is said of its others."""
    for row, original in repeats.items():
        joined = outcomes[original] == Joined.JOINED
        outcomes[row] = Joined.DUPLICATE if joined else outcomes[original]
        if original in reasons:
            reasons[row] = reasons[original]


def _once_each(candidates: _Candidates, batch_events: int) -> _Candidates:
    """An id can win only once with one token: its other candidates go with the chosen one."""
    repeats = rules.repeated_rows(candidates.ids, candidates.times)
    if not repeats:
        return candidates
    rows = np.arange(batch_events) if candidates.rows is None else candidates.rows
    mask = np.ones(len(rows), np.bool_)
    mask[list(repeats)] = False
    repeated = {int(rows[row]): int(rows[original]) for row, original in repeats.items()}
    return replace(candidates, repeats=repeated).part(rows, mask)
