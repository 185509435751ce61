"""What a task does with its bucket: join, adapt, register, write, in the joiner's order (paper 3.3.1).

One token for the bucket, the same in every attempt: what a dead attempt had registered is won again, and the
file that it left is never published, for the driver takes the files of the attempt whose result it was told.
An id is asked for once in an attempt: a second time it would be won again.

Its files are staged, for the driver to publish.
"""

import os
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from idregistry.client import RegistryAt
from joiner import parquet, rules
from joiner.adapter import BatchAdapter, load_adapter
from joiner.output_files import LINES, PARQUET
from photon.core.clock import Attempts, Backoff
from photon.core.columns import join_lines, split_ids, take_ids, take_times
from photon.core.errors import FencedError, UnavailableError
from photon.core.fates import Committed, Fate, Joined, Registered
from photon.core.ids import ID_BYTES, Token
from photon.core.settings import Settings
from photon.logs.writer import DeadLetter, dead_letter_lines
from spark.backfill.rows import Kind, file_and_offset, kinds_of

PATIENCE_S: Final = 300.0
"""So long a registry is asked that does not answer."""
_PAUSES: Final = Backoff(0.1, 5.0)


def patiently(ask: Callable[[], bytes], patience_s: float = PATIENCE_S) -> bytes:
    """The answer, asked for again while the registry is away: `ask` may be done twice. UnavailableError."""
    attempts = Attempts(_PAUSES, patience_s, time.monotonic, time.sleep)
    for _ in attempts:
        try:
            return ask()
        except UnavailableError as error:
            failure = error
    raise failure


@dataclass(slots=True)
class Foreign:
    """N foreign events. `keys`: their primary ids."""

    keys: list[bytes]
    ids: bytes
    times: bytes
    places: npt.NDArray[np.int64]
    lines: list[bytes]

    def take(self, rows: npt.NDArray[np.intp]) -> "Foreign":
        chosen = rows.tolist()
        return Foreign(
            list(map(self.keys.__getitem__, chosen)),
            take_ids(self.ids, rows),
            take_times(self.times, rows),
            self.places[rows],
            list(map(self.lines.__getitem__, chosen)),
        )


def foreign_events(part: Any) -> Foreign:
    """Rows of spark.backfill.rows of that kind."""
    return Foreign(
        part.column("key").to_pylist(),
        b"".join(part.column("id").to_pylist()),
        part.column("time_us").to_numpy(zero_copy_only=False).astype("<i8").tobytes(),
        part.column("place").to_numpy(),
        part.column("line").to_pylist(),
    )


@dataclass(slots=True)
class Primaries:
    """The primary lines of the bucket by id; of an id that stands twice the first line counts."""

    keys: list[bytes] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    known: dict[bytes, bytes] | None = None

    def by_id(self) -> dict[bytes, bytes]:
        if self.known is None:
            self.known = dict(zip(reversed(self.keys), reversed(self.lines), strict=True))
            self.keys, self.lines = [], []
        return self.known


_WRITE_BYTES: Final = 4 << 20


class Staged(msgspec.Struct, frozen=True):
    """A file that waits to be published: its name in the staging directory, what the manifest will say."""

    name: str
    bytes: int
    lines: int
    crc32: str


class StagedFile:
    """Made when something is written; `lines` in it."""

    def __init__(self, path: Path, fsync: bool, opened: ExitStack) -> None:
        self._path = path
        self._fsync = fsync
        self._opened = opened
        self._file: IO[bytes] | None = None
        self._crc = 0
        self._bytes = 0
        self.lines = 0

    def write(self, data: bytes, lines: int) -> None:
        if not data:
            return
        if self._file is None:
            self._file = self._opened.enter_context(self._path.open("xb", buffering=_WRITE_BYTES))
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._bytes += len(data)
        self.lines += lines

    def close(self, as_parquet: bool = False) -> Staged | None:
        """None if nothing was written."""
        if self._file is None:
            return None
        self._file.flush()
        if as_parquet:
            return self._converted()
        self._sync(self._file)
        return Staged(self._path.name, self._bytes, self.lines, f"{self._crc:08x}")

    def _converted(self) -> Staged:
        rows = self._path.with_suffix(PARQUET)
        count = parquet.convert(self._path, rows)
        assert count == self.lines, f"{count} rows made of {self.lines} lines"
        self._path.unlink()
        crc = size = 0
        with rows.open("rb") as file:
            while block := file.read(_WRITE_BYTES):
                crc, size = zlib.crc32(block, crc), size + len(block)
            self._sync(file)
        return Staged(rows.name, size, count, f"{crc:08x}")

    def _sync(self, file: IO[bytes]) -> None:
        if self._fsync:
            os.fsync(file.fileno())


COMMITS_IN_FLIGHT_MAX: Final = 2
"""Of a task; the registry works on one while the next is adapted."""
_FENCED: Final = bytes([Committed.FENCED])

NO_PRIMARY: Final = "no primary event in the logs"


class BucketResult(msgspec.Struct, frozen=True):
    """What became of a bucket. `fates`: foreign lines by fate; files are None where they would be empty."""

    bucket: int
    fates: dict[str, int]
    primary_events: int
    primary_malformed: int
    joined: Staged | None
    letters: Staged | None
    primary_letters: Staged | None
    opened_us: int
    closed_us: int


@dataclass(frozen=True, slots=True)
class Work:
    """What every task of a job is told. `names`: of the logs, by number; `begun_us`: bucket 0's token."""

    settings: Settings
    registry: RegistryAt
    address: str
    incarnation: int
    begun_us: int
    staging: str
    names: tuple[str, ...]
    as_parquet: bool

    def token(self, bucket: int) -> bytes:
        """Of this bucket in every attempt, and of nothing else ever."""
        return Token(self.address, self.incarnation, self.begun_us + bucket).pack()


def join_bucket(batches: Iterable[Any], work: Work) -> Iterator[BucketResult]:
    """The record batches of a partition (spark.backfill.rows) -> its result; none where it has no rows.

    FencedError: the job must be abandoned. UnavailableError, StorageError, OSError: try the task again.
    """
    with ExitStack() as opened:
        task: _Task | None = None
        for batch in batches:
            if batch.num_rows:
                numbers = np.unique(batch.column("bucket").to_numpy(zero_copy_only=False))
                if task is None:
                    task = _Task(work, int(numbers[0]), opened)
                assert numbers.tolist() == [task.bucket], f"rows of buckets {numbers} in bucket {task.bucket}"
                task.take(batch)
        if task is not None:
            yield task.end()


_Repeat = tuple[bytes, int, bytes]
"""Id, place, line."""


@dataclass(slots=True)
class _Asked:
    """Candidates on their way to the registry; `lines` are joined. `repeats`: events of these ids, or of ids
    asked for before, that stood in the logs again."""

    committed: Future[bytes]
    ids: bytes
    lines: bytes
    events: list[bytes]
    places: npt.NDArray[np.int64]
    repeats: list[_Repeat]


class _Task:
    """One attempt at one bucket."""

    def __init__(self, work: Work, bucket: int, opened: ExitStack) -> None:
        self.bucket = bucket
        self._work = work
        self._token = work.token(bucket)
        self._client = opened.enter_context(work.registry.client(work.settings.registry.request_timeout_s))
        self._pool = opened.enter_context(ThreadPoolExecutor(COMMITS_IN_FLIGHT_MAX))
        adapter = work.settings.adapter
        self._adapter = BatchAdapter(load_adapter(adapter.use, adapter.field))
        self._primaries = Primaries()
        self._asked: deque[_Asked] = deque()
        self._seen: set[bytes] = set()
        self._expired: set[bytes] = set()
        self._fates: Counter[Fate] = Counter()
        self._primary_events = 0
        self._opened_us = time.time_ns() // 1000
        fsync = work.settings.joiner.fsync
        attempt = f"{bucket:06d}-{uuid4().hex}"
        staging = Path(work.staging)
        self._joined = StagedFile(staging / f"joined-{attempt}{LINES}", fsync, opened)
        self._letters = StagedFile(staging / f"foreign-{attempt}{LINES}", fsync, opened)
        self._primary_letters = StagedFile(staging / f"primary-{attempt}{LINES}", fsync, opened)

    def take(self, batch: Any) -> None:
        """Rows come sorted by place, so all primaries of the bucket before its first foreign event."""
        places = batch.column("place").to_numpy()
        ends = np.searchsorted(kinds_of(places), range(len(Kind) + 1))
        for kind in Kind:
            start, end = int(ends[kind]), int(ends[kind + 1])
            if start < end:
                part = batch.slice(start, end - start)
                if kind is Kind.PRIMARY:
                    self._primaries.keys += part.column("key").to_pylist()
                    self._primaries.lines += part.column("line").to_pylist()
                elif kind is Kind.PRIMARY_COUNT:
                    self._primary_events += int(part.column("time_us").to_numpy().sum())
                elif kind is Kind.PRIMARY_MALFORMED:
                    self._malformed(part, self._primary_letters)
                elif kind is Kind.FOREIGN:
                    self._join(foreign_events(part))
                else:
                    self._fates[Fate.MALFORMED] += len(part)
                    self._malformed(part, self._letters)

    def end(self) -> BucketResult:
        self._settle_all()
        joined = self._joined.close(self._work.as_parquet)
        return BucketResult(
            self.bucket,
            {fate.value: count for fate, count in self._fates.items()},
            self._primary_events,
            self._primary_letters.lines,
            joined,
            self._letters.close(),
            self._primary_letters.close(),
            self._opened_us,
            time.time_ns() // 1000,
        )

    # --- joining

    def _join(self, events: Foreign) -> None:
        primaries = list(map(self._primaries.by_id().get, events.keys))
        if None in primaries:
            found = np.fromiter((primary is not None for primary in primaries), np.bool_, len(primaries))
            self._without_primary(events.take(np.flatnonzero(~found)))
            events = events.take(np.flatnonzero(found))
        pairs = [primary for primary in primaries if primary is not None]
        adapted = self._adapter.join(pairs, join_lines(events.lines))
        for row, reason in adapted.reasons.items():
            self._letter(Fate.FILTERED, reason, events.lines[row], int(events.places[row]))
        if adapted.rows is not None:
            events = events.take(np.asarray(adapted.rows, np.intp))
        self._register(events, adapted.lines)

    def _register(self, events: Foreign, lines: bytes) -> None:
        ids = split_ids(events.ids)
        repeats: list[_Repeat] = []
        if len(set(ids)) < len(ids) or not self._seen.isdisjoint(ids):
            new = np.fromiter(self._first_times(ids), np.bool_, len(ids))
            for row in np.flatnonzero(~new).tolist():
                repeats.append((ids[row], int(events.places[row]), events.lines[row]))
            events, lines = events.take(np.flatnonzero(new)), rules.take_lines(lines, new)
        else:
            self._seen.update(ids)
        if not events.lines:
            self._settle_all()
            self._repeated(repeats)
            return
        if len(self._asked) >= COMMITS_IN_FLIGHT_MAX:
            self._settle()
        committed = self._pool.submit(self._commit, events.ids, events.times)
        self._asked.append(_Asked(committed, events.ids, lines, events.lines, events.places, repeats))

    def _first_times(self, ids: Iterable[bytes]) -> Iterator[bool]:
        for key in ids:
            yield key not in self._seen
            self._seen.add(key)

    def _commit(self, ids: bytes, times: bytes) -> bytes:
        return patiently(lambda: self._client.commit(ids, times, self._token))

    def _settle_all(self) -> None:
        while self._asked:
            self._settle()

    def _settle(self) -> None:
        """Take the oldest answer, write what was won."""
        asked = self._asked.popleft()
        committed = asked.committed.result()
        if _FENCED in committed:
            raise FencedError(f"incarnation {self._work.incarnation:016x} of {self._work.address} is fenced")
        outcomes = rules.outcomes_of_commit(committed)
        self._fates[Fate.JOINED] += outcomes.count(Joined.JOINED)
        self._fates[Fate.DUPLICATE] += outcomes.count(Joined.DUPLICATE)
        for row in np.flatnonzero(np.frombuffer(outcomes, np.uint8) == Joined.EXPIRED).tolist():
            self._expired.add(asked.ids[row * ID_BYTES : (row + 1) * ID_BYTES])
            self._letter(Fate.EXPIRED, rules.EXPIRED_REASON, asked.events[row], int(asked.places[row]))
        self._joined.write(rules.winning_lines(committed, asked.lines), outcomes.count(Joined.JOINED))
        self._repeated(asked.repeats)

    def _repeated(self, repeats: list[_Repeat]) -> None:
        """Events whose ids were asked for, and answered."""
        for key, place, line in repeats:
            if key in self._expired:
                self._letter(Fate.EXPIRED, rules.EXPIRED_REASON, line, place)
            else:
                self._fates[Fate.DUPLICATE] += 1

    # --- what is not joined

    def _without_primary(self, events: Foreign) -> None:
        """An event whose primary another pipeline found is a duplicate here."""
        registered = patiently(lambda: self._client.lookup(events.ids, events.times))
        for row, (key, known) in enumerate(zip(split_ids(events.ids), registered, strict=True)):
            if known == Registered.EXPIRED:
                self._letter(Fate.EXPIRED, rules.EXPIRED_REASON, events.lines[row], int(events.places[row]))
            elif known == Registered.PRESENT or key in self._seen:
                self._fates[Fate.DUPLICATE] += 1
            else:
                self._letter(Fate.UNJOINABLE, NO_PRIMARY, events.lines[row], int(events.places[row]))

    def _malformed(self, part: Any, letters: StagedFile) -> None:
        rows = zip(*(part.column(name).to_pylist() for name in ("place", "line", "reason")), strict=True)
        bad = [self._dead(Fate.MALFORMED, reason, line, place) for place, line, reason in rows]
        letters.write(dead_letter_lines(bad), len(bad))

    def _letter(self, fate: Fate, reason: str, line: bytes, place: int) -> None:
        self._fates[fate] += 1
        self._letters.write(dead_letter_lines([self._dead(fate, reason, line, place)]), 1)

    def _dead(self, fate: Fate, reason: str, line: bytes, place: int) -> DeadLetter:
        number, offset = file_and_offset(place)
        return DeadLetter(fate, reason, line, self._work.names[number], offset)
