"""A joiner without its network: the parts, wired, and what a crashed one left, taken over."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from joiner.adapter import BatchAdapter, load_adapter
from joiner.commit import Resolver, Settler, StorageGate, Unended, WrittenLines
from joiner.completion import Completer
from joiner.intents import IntentJournal
from joiner.leases import LeaseKeeper
from joiner.output import JoinedLog, Left
from joiner.output_files import Life, check_new, note_life, open_roots, output_directories, write_known
from joiner.parquet import check_installed
from joiner.pipeline import CommitSlots, Parts, Pipeline, TokenSource
from joiner.ports import Checkpoint, EventStore, Registry
from joiner.rules.batch import ForeignColumns, JoinOutcomes, Patience
from joiner.rules.intent import Intent
from joiner.rules.lease import Lease
from photon.core.clock import Clock
from photon.core.columns import split_lines
from photon.core.disk import DirectoryLock
from photon.core.errors import CorruptStateError, StorageError
from photon.core.ids import Token, parse_token
from photon.core.settings import Settings, identity_digest, reading_fingerprint
from photon.core.status import Notices

# --- What a restarted joiner takes over from the one before (design: "No loss when a joiner crashes").
#
# Of each intent without an end: its lines that stand in the joined log already (in all roots: what a crash
# left in some only is taken back first), found by their exact bytes, as a multiset, after the place the
# intent remembers. The resolver then registers it again, with the same token, and writes those winners that
# are missing.
#
# An intent whose incarnation is fenced is dropped: recovery read the joined log after the fence, so what
# stands there is there for good, and what does not is recovery's to join again.


@dataclass(frozen=True, slots=True)
class TakenOver:
    """`batches` without an end, oldest first, each with its incarnation's lease; bytes taken back."""

    batches: list[Unended]
    taken_back_bytes: int


def take_over(journal: IntentJournal, output: JoinedLog, inherit: Callable[[Token], Lease]) -> TakenOver:
    """Begins the output. CorruptStateError if a file of it is missing, SettingsError for a root that can't be
    a new one."""
    intents, done = journal.take_over()
    if not intents:
        return TakenOver([], output.begin())
    left = Left(min(intent.position for intent in intents), max(intent.position for intent in intents), done)
    for root in output.roots:
        if root.since is None:
            check_new(root, left.earliest)
    taken_back = output.begin(left)
    wanted = {line for intent in intents for line in split_lines(intent.lines)}
    written = WrittenLines(output.count(wanted, left.earliest, done))
    return TakenOver([Unended(intent, inherit(_token_of(intent)), written) for intent in intents], taken_back)


def _token_of(intent: Intent) -> Token:
    try:
        return parse_token(intent.token)
    except ValueError as error:
        raise CorruptStateError(
            f"intent {intent.sequence}: {error}; start the version of Photon that wrote it once more"
        ) from error


class Worker:
    """Joins batches; writes `joined/<datacenter>/<name>-NNNNNN.jsonl` in each output root.

    `directory` is this joiner's own and keeps its intents; one restarted after a crash must find the same
    directory, output and name. `address` goes into the tokens. `drain`: the primary logs grow no more, so an
    absent primary event is final. `on_fatal` is told, from any thread, of what only a restart can mend.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        datacenter: str,
        address: str,
        directory: Path,
        output_root: Path,
        registry: Registry,
        eventstore: EventStore,
        clock: Clock,
        rng: Random,
        drain: bool = False,
        on_fatal: Callable[[BaseException], None] = lambda _: None,
        checkpoint: Checkpoint = lambda _: None,
    ) -> None:
        """Opens and repairs the logs. AdapterError, CorruptStateError, LockedError, SettingsError,
        StorageError."""
        wanted = settings.joiner
        self._notices = Notices("joiner")
        self._reading = reading_fingerprint(settings)
        adapter = BatchAdapter(load_adapter(settings.adapter.use, settings.adapter.field))
        if wanted.output_format == "parquet":
            check_installed()
        with contextlib.ExitStack() as opened:
            opened.enter_context(DirectoryLock(directory))
            directories = output_directories(output_root, wanted.output_roots, datacenter)
            roots = open_roots(directory, directories, name)
            output = JoinedLog(roots, wanted.output_file_bytes_max, wanted.fsync, clock, checkpoint)
            opened.callback(output.close)
            journal = IntentJournal(directory / "intents", wanted.fsync)
            opened.callback(journal.close)
            self._journal = journal
            self._output = output
            self._disks = [directory, *(root.directory for root in roots)]

            def end(error: BaseException) -> None:
                output.finish_append()
                on_fatal(error)

            self._gate = StorageGate(clock, end)
            tokens = TokenSource(address, clock, rng)
            own = Lease(address, tokens.incarnation, settings.registry.lease_s)
            self.leases = LeaseKeeper(
                registry, own, clock, self._notices.tell, end, identity_digest(settings)
            )
            self._settler = Settler(registry, journal, output, self._gate, self.leases, checkpoint)
            self._slots = CommitSlots(wanted.commits_in_flight_max)
            self._resolver = Resolver(self._settle, rng, self._notices.tell)
            self._take_over(journal, output)
            write_known(directory, roots, output.position.file)
            # Recovery releases what a life registered only when it reads an output that tells of that life.
            life = Life(own.incarnation, own.address, clock.now_us())
            for root in roots:
                note_life(root.directory, name, life)
            self._completer = Completer(
                output,
                journal,
                wanted.output_format,
                wanted.output_file_s,
                clock,
                self._notices.tell,
                checkpoint,
            )
            opened.callback(self._completer.close)
            parts = Parts(
                eventstore,
                adapter,
                journal,
                output,
                self._settler,
                self._resolver,
                self._slots,
                self._gate,
                self.leases,
                tokens,
                clock,
                checkpoint,
            )
            patience = Patience(wanted.unjoinable_tries_min, wanted.unjoinable_age_s, drain)
            self._pipeline = Pipeline(parts, patience, wanted.requests_in_flight_max)
            self._opened = opened.pop_all()

    def start(self) -> None:
        """Ask for the lease, without which nothing is done, and begin to end what a crashed process left.

        Requests need not wait for that end: a new one for the same event wins or loses against it in the
        registry as against any other joiner.
        """
        self.leases.start()
        self._resolver.start()
        self._completer.start()

    def can_work(self) -> bool:
        """Whether a batch would be taken: the lease runs and the disks take writes. Those that did not are
        tried again."""
        self._gate.probe(self._disks)
        return self.leases.runs and self._gate.error is None

    def join(self, batch: ForeignColumns, timeout_s: float | None = None) -> JoinOutcomes:
        """Each event's outcome. OverloadedError, StorageError: the request was refused, nothing was done.

        `timeout_s`: how long the caller waits, None for ever. Past it nothing more is registered.
        """
        return self._pipeline.join(batch, timeout_s)

    def stop(self, grace_s: float) -> bool:
        """Give unresolved batches `grace_s` to end, complete the joined log, close; whether all did. The next
        start ends the rest."""
        ended = self._resolver.stop(grace_s) and not self._pipeline.in_flight
        if ended and not self._output.broken:
            self._end_output()
        self.close()
        return ended

    def close(self) -> None:
        """Let go of all files at once."""
        self.leases.stop()
        self._opened.close()

    def status(self) -> dict[str, Any]:
        """While something is `in_flight` or `unresolved` (intents without an end), lines may still come.

        `dropped`: events that were fenced, registered perhaps and not written: recovery's. `reading`: a fast
        path that reads events otherwise must send nothing.
        """
        return {
            "reading": self._reading,
            "joined": self._settler.joined,
            "in_flight": self._pipeline.in_flight,
            "commits_in_flight": self._slots.in_flight,
            "unresolved": self._journal.open_count,
            "dropped": self._settler.dropped,
            "lease": self.leases.status(),
            "output": self._completer.status(),
            "storage_error": self._gate.error,
            "notices": self._notices.lines(),
        }

    def _settle(self, batch: Unended) -> None:
        """The resolver's."""
        if batch.committed is None:
            with self._slots.taken(None):
                self._settler.register(batch)
        self._settler.finish(batch)

    def _end_output(self) -> None:
        try:
            self._output.end()
        except StorageError as error:
            self._notices.tell(f"the joined log's last file is left for the next start to complete: {error}")
        else:
            self._completer.finish()

    def _take_over(self, journal: IntentJournal, output: JoinedLog) -> None:
        left = take_over(journal, output, self.leases.inherit)
        for batch in left.batches:
            self._resolver.add(batch)
        torn_bytes = sum(root.torn_bytes for root in output.roots)
        if torn_bytes:
            self._notices.tell(f"cut {torn_bytes} bytes of an unfinished line off the joined log")
        if left.taken_back_bytes:
            self._notices.tell(
                f"took {left.taken_back_bytes} bytes back that a crash had left in some output roots only"
            )
        if left.batches:
            self._notices.tell(
                f"{len(left.batches)} batches were under way when the joiner ended; ending them"
            )
