"""What this joiner has written, against what the registry says that it has won: losses are told unasked.

The journal keeps an account of the lines whose intents have ended, by output file, incarnation and day, in
the records that end them (joiner.intents). The registry keeps one of the ids that each incarnation ever won,
less what was released or is forgotten (idregistry). Where nothing is under way both are the same, so a
difference is an event that is registered and stands in no output. What was won by tokens that are younger
than YOUNG_US, or than the oldest batch under way, both leave out. A file that is gone, or shorter than what
was written to it, counts as not written.
"""

import contextlib
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AnySet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from joiner.output_files import PARQUET, Root, read_lives, read_recovered
from photon.core.accounts import NOTHING, WINDOWS, Sum, Tally, minus, plus, window_of
from photon.core.clock import Background, Clock
from photon.core.errors import PhotonError

if TYPE_CHECKING:
    from idregistry.client import RegistryClient
    from idregistry.rules.surveys import Account
    from joiner.intents import IntentJournal

CHECK_S: Final = 20.0
YOUNG_US: Final = 30_000_000
_STOP_WAIT_S: Final = 1.0
_ROW: Final = struct.Struct("<IQQqqQQ")


class Place(NamedTuple):
    """Where lines stand and whose they are. `day`: of event time, since 1970."""

    file: int
    incarnation: int
    day: int


class Row(NamedTuple):
    """Lines of one file, up to its byte `end`, with tokens of one `window`."""

    file: int
    end: int
    incarnation: int
    window: int
    day: int
    events: int
    sum: int


class Written:
    """The account of the lines whose intents have ended. For one thread at a time."""

    def __init__(self) -> None:
        self.tally: Tally[Place] = Tally()
        self.lengths: dict[int, int] = {}
        """File -> bytes that were written to it, at least."""

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.tally.add(Place(row.file, row.incarnation, row.day), row.window, (row.events, row.sum))
            self.lengths[row.file] = max(self.lengths.get(row.file, 0), row.end)

    def rows(self) -> list[Row]:
        """All of it; windows are forgotten."""
        sums = self.tally.sums.items()
        return [Row(at.file, self.lengths[at.file], at.incarnation, 0, at.day, *sum_) for at, sum_ in sums]

    def forget_before(self, day: int) -> None:
        """Let earlier days go, and the files that hold no other."""
        if any(place.day < day for place in self.tally.sums):
            self.tally.forget(lambda place: place.day < day)
            files = {place.file for place in self.tally.sums}
            self.lengths = {file: end for file, end in self.lengths.items() if file in files}


def pack_rows(rows: Iterable[Row]) -> bytes:
    return b"".join(_ROW.pack(*row) for row in rows)


def unpack_rows(data: bytes | memoryview) -> list[Row]:
    """The reverse of `pack_rows`. struct.error for what it did not make."""
    return [Row(*values) for values in _ROW.iter_unpack(data)]


@dataclass(frozen=True, slots=True)
class Difference:
    """Events that are registered in the name of this joiner and stand in no output.

    `gone`: they stood in files that are not there any more, or are shorter. `unknown`: of lives that the
    journal does not tell of, as its directory is not the one that they had.
    """

    unwritten: int = 0
    gone: int = 0
    unknown: Mapping[int, int] = field(default_factory=dict)

    @property
    def all_written(self) -> bool:
        """Whether all that was won was written, as far as the journal tells."""
        return not self.unwritten and not any(self.unknown.values())

    def at_most(self, other: "Difference") -> "Difference":
        """What both say."""
        mine, others = self.unknown, other.unknown
        unknown = {life: min(mine[life], others[life]) for life in mine.keys() & others.keys()}
        return Difference(min(self.unwritten, other.unwritten), min(self.gone, other.gone), unknown)


def compare(
    account: "Account", written: Mapping[Place, Sum], gone: AnySet[int], known: AnySet[int]
) -> Difference:
    """`gone`: the files whose lines count no more; `known`: the lives that `written` tells of."""
    there: dict[tuple[int, int], Sum] = {}
    lost: dict[tuple[int, int], Sum] = {}
    for place, sum_ in written.items():
        sums = lost if place.file in gone else there
        whose = place.incarnation, place.day
        sums[whose] = plus(sums.get(whose, NOTHING), sum_)
    unwritten = events_gone = 0
    unknown: dict[int, int] = {}
    for whose in account.days.keys() | there.keys():
        incarnation, day = whose
        if day < account.first_day:
            continue
        held = account.days.get(whose, NOTHING)
        if incarnation not in known:
            unknown[incarnation] = unknown.get(incarnation, 0) + held[0]
            continue
        # As many as one that stands twice hides, none can tell: one at least.
        missing = minus(held, there.get(whose, NOTHING))
        events = 0 if missing == NOTHING else max(1, missing[0])
        of_files = min(events, lost.get(whose, NOTHING)[0])
        events_gone += of_files
        unwritten += events - of_files
    return Difference(unwritten, events_gone, unknown)


class Accountant:
    """A thread that compares; `step` is what it does. A difference counts when two looks in a row show it."""

    def __init__(
        self,
        registry: "RegistryClient",
        roots: Sequence[Root],
        stem: str,
        incarnation: int,
        address: str,
        journal: "IntentJournal",
        clock: Clock,
    ) -> None:
        """`stem`: how this joiner's files are named. `address`: of its lives, "" where others may have had
        it.
        """
        self._registry = registry
        self._roots = roots
        self._stem = stem
        self._incarnation = incarnation
        self._address = address
        self._journal = journal
        self._clock = clock
        self._last = Difference()
        self._told = Difference()
        self._missing: list[str] = []
        self._began = window_of(clock.now_us())
        self._dismissed: set[int] = set()
        self._work = Background("accounts", self.step)

    def start(self) -> None:
        self._work.start()

    def stop(self) -> None:
        self._work.stop(_STOP_WAIT_S)

    def step(self) -> float:
        """Compare once. Seconds until the next time. UnavailableError, StorageError."""
        latest = window_of(self._clock.now_us() - YOUNG_US)
        window, written = self._journal.account(latest)
        if window <= latest - WINDOWS // 2:  # a batch waits for its end, which is told of it
            return CHECK_S
        lives = {life for root in self._roots for life in read_lives(root.directory, self._stem)}
        known = {place.incarnation for place in written.tally.sums} | {self._incarnation}
        account = self._registry.account(lives | known, self._address, window)
        if account.since > window:  # clocks differ by minutes
            return CHECK_S
        gone = {file for file, size in written.lengths.items() if not self._stands(file, size)}
        self._missing = [str(self._roots[0].log.path(file)) for file in sorted(gone)]
        found = compare(account, written.tally.before(window), gone, known)
        found = Difference(found.unwritten, found.gone, self._unrecovered(found.unknown))
        self._told, self._last = found.at_most(self._last), found
        self._journal.forget_before(account.first_day)
        former = (lives | known) - self._dismissed - {self._incarnation}
        if former and found.all_written and window > self._began:  # what they had under way has its end
            self._registry.dismiss(sorted(former))
            self._dismissed |= former
        return CHECK_S

    def dismiss(self) -> None:
        """This life has ended with nothing under way. Nobody need miss it, unless something is lost."""
        if self._last.all_written:
            with contextlib.suppress(PhotonError):  # then its next life says so
                self._registry.dismiss([self._incarnation], _STOP_WAIT_S)

    def status(self) -> dict[str, Any]:
        """Events that are registered and stand in no output, or of which that is not known; the first of the
        files that are gone; why the accounts could not be compared last time."""
        return {
            "unwritten": self._told.unwritten,
            "gone": self._told.gone,
            "missing_file": self._missing[0] if self._told.gone and self._missing else None,
            "unknown": sum(self._told.unknown.values()),
            "trouble": self._work.trouble,
        }

    def _unrecovered(self, unknown: Mapping[int, int]) -> Mapping[int, int]:
        """Without those that recovery has seen to: it has fenced them, or found nothing lost."""
        seen = {life for root in self._roots for life in read_recovered(root.directory)}
        lives = [life for life, events in unknown.items() if events and life not in seen]
        standings = self._registry.incarnations(lives) if lives else []
        return {
            life: unknown[life]
            for life, standing in zip(lives, standings, strict=True)
            if not standing.fenced
        }

    def _stands(self, file: int, size: int) -> bool:
        """Whether some root has all that was written to the file, as lines or as Parquet."""
        for root in self._roots:
            lines = root.log.path(file)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(lines).st_size >= size:
                    return True
            rows = lines.with_suffix(PARQUET)
            entry = root.manifest.listed.get(rows.name)
            with contextlib.suppress(FileNotFoundError):
                if entry is not None and os.stat(rows).st_size == entry.bytes:
                    return True
        return False
