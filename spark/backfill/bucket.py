"""What a task does with its bucket: join, adapt, register, write, in the joiner's order (paper 3.3.1).

All attempts use one token: what a dead attempt had registered is won again. The files it left are never
published, since the driver publishes those of the attempt whose result it got. An attempt asks for an id
once; a second time it would win it again.

The files are staged, for the driver to publish.
"""

import os
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from idregistry.client import RegistryAt
from joiner import rules
from joiner.adapter import BatchAdapter, load_adapter
from joiner.output_files import LINES, PARQUET
from photon.core.columns import join_lines, split_ids, take_ids, take_times
from photon.core.errors import FencedError
from photon.core.fates import Committed, Fate, Joined, Registered
from photon.core.ids import Token
from photon.core.settings import Settings
from photon.logs.parquet import convert
from photon.logs.writer import DeadLetter, dead_letter_lines
from spark.backfill.job import BucketResult, Job, Place, Staged
from spark.backfill.rows import KIND_BITS, Kind, file_and_offset

PATIENCE_S: Final = 300.0
"""How long a registry that does not answer is asked, again and again."""
COMMITS_IN_FLIGHT_MAX: Final = 2
"""Of a task: the registry works on one while the next is adapted."""
NO_PRIMARY: Final = "no primary event in the logs"
_WRITE_BYTES: Final = 4 << 20
_FENCED: Final = bytes([Committed.FENCED])


@dataclass(frozen=True, slots=True)
class Work:
    """What every task of a job gets. `place`: by the same absolute name on every machine."""

    job: Job
    place: Place
    settings: Settings
    registry: RegistryAt

    def token(self, bucket: int) -> bytes:
        """Of this bucket in every attempt, and of nothing else ever."""
        return Token(self.place.token_address, self.job.incarnation, self.job.begun_us + bucket).pack()


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


@dataclass(slots=True)
class _Events:
    """N foreign events. `keys`: their primary ids."""

    keys: list[bytes]
    ids: bytes
    times: bytes
    places: npt.NDArray[np.int64]
    lines: list[bytes]

    def take(self, rows: npt.NDArray[np.intp]) -> "_Events":
        chosen = rows.tolist()
        return _Events(
            list(map(self.keys.__getitem__, chosen)),
            take_ids(self.ids, rows),
            take_times(self.times, rows),
            self.places[rows],
            list(map(self.lines.__getitem__, chosen)),
        )


@dataclass(slots=True)
class _Asked:
    """Events on their way to the registry, and their joined lines. `repeats`: id, place and line of events
    whose ids were asked for already."""

    committed: Future[bytes]
    events: _Events
    lines: bytes
    repeats: list[tuple[bytes, int, bytes]]


class _Task:
    """One attempt at one bucket."""

    def __init__(self, work: Work, bucket: int, opened: ExitStack) -> None:
        self.bucket = bucket
        self._work = work
        self._logs = [log.name for log in (*work.job.primary, *work.job.foreign)]
        self._token = work.token(bucket)
        self._client = opened.enter_context(work.registry.client(PATIENCE_S))
        self._client.hold_to(work.job.registry)
        self._pool = opened.enter_context(ThreadPoolExecutor(COMMITS_IN_FLIGHT_MAX))
        adapter = work.settings.adapter
        self._adapter = BatchAdapter(load_adapter(adapter.use, adapter.field))
        self._primary_keys: list[bytes] = []
        self._primary_lines: list[bytes] = []
        self._primaries: dict[bytes, bytes] = {}
        self._asked: deque[_Asked] = deque()
        self._seen: set[bytes] = set()
        self._expired: set[bytes] = set()
        self._fates: Counter[Fate] = Counter()
        self._primary_events = 0
        self._opened_us = time.time_ns() // 1000
        attempt = f"{bucket:06d}-{uuid4().hex}{LINES}"
        self._joined, self._letters, self._primary_letters = (
            _StagedFile(work.place.staging / f"{kind}-{attempt}", work.settings.joiner.fsync, opened)
            for kind in ("joined", "foreign", "primary")
        )

    def take(self, batch: Any) -> None:
        """Rows come sorted by place, so all primaries of the bucket before its first foreign event."""
        places = batch.column("place").to_numpy()
        ends = np.searchsorted(places >> KIND_BITS, range(len(Kind) + 1))
        for kind in Kind:
            start, end = int(ends[kind]), int(ends[kind + 1])
            if start < end:
                part = batch.slice(start, end - start)
                if kind is Kind.PRIMARY:
                    self._primary_keys += part.column("key").to_pylist()
                    self._primary_lines += part.column("line").to_pylist()
                elif kind is Kind.PRIMARY_COUNT:
                    self._primary_events += int(part.column("time_us").to_numpy().sum())
                elif kind is Kind.PRIMARY_MALFORMED:
                    self._malformed(part, self._primary_letters)
                elif kind is Kind.FOREIGN:
                    self._join(part)
                else:
                    self._fates[Fate.MALFORMED] += len(part)
                    self._malformed(part, self._letters)

    def end(self) -> BucketResult:
        self._settle_all()
        return BucketResult(
            self.bucket,
            {fate.value: count for fate, count in self._fates.items()},
            self._primary_events,
            self._primary_letters.lines,
            self._joined.close(self._work.job.output_format == "parquet"),
            self._letters.close(),
            self._primary_letters.close(),
            self._opened_us,
            time.time_ns() // 1000,
        )

    def _join(self, part: Any) -> None:
        if self._primary_keys:  # of an id that stands twice the first line counts
            pairs = zip(reversed(self._primary_keys), reversed(self._primary_lines), strict=True)
            self._primaries = dict(pairs)
            self._primary_keys, self._primary_lines = [], []
        events = _Events(
            part.column("key").to_pylist(),
            b"".join(part.column("id").to_pylist()),
            part.column("time_us").to_numpy(zero_copy_only=False).astype("<i8").tobytes(),
            part.column("place").to_numpy(),
            part.column("line").to_pylist(),
        )
        primaries = list(map(self._primaries.get, events.keys))
        if None in primaries:
            found = np.fromiter((primary is not None for primary in primaries), np.bool_, len(primaries))
            self._without_primary(events.take(np.flatnonzero(~found)))
            events = events.take(np.flatnonzero(found))
        adapted = self._adapter.join(
            [primary for primary in primaries if primary is not None], join_lines(events.lines)
        )
        for fate, reasons in ((Fate.FILTERED, adapted.skipped), (Fate.ADAPTER_ERROR, adapted.failed)):
            for row, reason in reasons.items():
                self._letter(fate, reason, events.lines[row], int(events.places[row]))
        if adapted.again:
            raise MemoryError(f"the adapter ran out of memory at {len(adapted.again)} events")
        if adapted.rows is not None:
            events = events.take(np.asarray(adapted.rows, np.intp))
        self._register(events, adapted.lines)

    def _register(self, events: _Events, lines: bytes) -> None:
        ids = split_ids(events.ids)
        repeats = []
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
        answer = self._pool.submit(self._client.commit, events.ids, events.times, self._token)
        self._asked.append(_Asked(answer, events, lines, repeats))

    def _first_times(self, ids: Iterable[bytes]) -> Iterator[bool]:
        for key in ids:
            yield key not in self._seen
            self._seen.add(key)

    def _settle_all(self) -> None:
        while self._asked:
            self._settle()

    def _settle(self) -> None:
        """Take the oldest answer, write what was won."""
        asked = self._asked.popleft()
        committed, events = asked.committed.result(), asked.events
        if _FENCED in committed:
            job, address = self._work.job, self._work.place.token_address
            raise FencedError(f"incarnation {job.incarnation:016x} of {address} is fenced")
        outcomes = rules.outcomes_of_commit(committed)
        joined = outcomes.count(Joined.JOINED)
        self._fates[Fate.JOINED] += joined
        self._fates[Fate.DUPLICATE] += outcomes.count(Joined.DUPLICATE)
        if Joined.EXPIRED in outcomes:
            ids = split_ids(events.ids)
            for row in np.flatnonzero(np.frombuffer(outcomes, np.uint8) == Joined.EXPIRED).tolist():
                self._expired.add(ids[row])
                self._letter(Fate.EXPIRED, rules.EXPIRED_REASON, events.lines[row], int(events.places[row]))
        self._joined.write(rules.winning_lines(committed, asked.lines), joined)
        self._repeated(asked.repeats)

    def _repeated(self, repeats: list[tuple[bytes, int, bytes]]) -> None:
        """Events whose ids were asked for, and answered."""
        for key, place, line in repeats:
            if key in self._expired:
                self._letter(Fate.EXPIRED, rules.EXPIRED_REASON, line, place)
            else:
                self._fates[Fate.DUPLICATE] += 1

    def _without_primary(self, events: _Events) -> None:
        """An event whose primary another pipeline found is a duplicate here."""
        registered = self._client.lookup(events.ids, events.times)
        for row, (key, known) in enumerate(zip(split_ids(events.ids), registered, strict=True)):
            if known == Registered.EXPIRED:
                self._letter(Fate.EXPIRED, rules.EXPIRED_REASON, events.lines[row], int(events.places[row]))
            elif known == Registered.PRESENT or key in self._seen:
                self._fates[Fate.DUPLICATE] += 1
            else:
                self._letter(Fate.UNJOINABLE, NO_PRIMARY, events.lines[row], int(events.places[row]))

    def _malformed(self, part: Any, letters: "_StagedFile") -> None:
        rows = zip(*(part.column(name).to_pylist() for name in ("place", "line", "reason")), strict=True)
        bad = [self._dead(Fate.MALFORMED, reason, line, place) for place, line, reason in rows]
        letters.write(dead_letter_lines(bad), len(bad))

    def _letter(self, fate: Fate, reason: str, line: bytes, place: int) -> None:
        self._fates[fate] += 1
        self._letters.write(dead_letter_lines([self._dead(fate, reason, line, place)]), 1)

    def _dead(self, fate: Fate, reason: str, line: bytes, place: int) -> DeadLetter:
        number, offset = file_and_offset(place)
        return DeadLetter(fate, reason, line, self._logs[number], offset)


class _StagedFile:
    """Made when something is written; `lines` in it."""

    def __init__(self, path: Path, fsync: bool, opened: ExitStack) -> None:
        self.lines = 0
        self._path = path
        self._fsync = fsync
        self._opened = opened
        self._file: IO[bytes] | None = None
        self._crc = 0
        self._bytes = 0

    def write(self, data: bytes, lines: int) -> None:
        if not data:
            return
        if self._file is None:
            self._file = self._opened.enter_context(self._path.open("xb", buffering=_WRITE_BYTES))
        self._file.write(data)
        self._count(data)
        self.lines += lines

    def close(self, as_parquet: bool = False) -> Staged | None:
        """None if nothing was written."""
        if self._file is None:
            return None
        self._file.flush()
        if as_parquet:
            self._convert()
        if self._fsync:
            os.fsync(self._file.fileno())
        return Staged(self._path.name, self._bytes, self.lines, f"{self._crc:08x}")

    def _convert(self) -> None:
        """Go on as the same lines in Parquet."""
        lines, self._path = self._path, self._path.with_suffix(PARQUET)
        rows = convert(lines, self._path)
        assert rows == self.lines, f"{rows} rows made of {self.lines} lines"
        lines.unlink()
        self._crc = self._bytes = 0
        self._file = self._opened.enter_context(self._path.open("rb"))
        while block := self._file.read(_WRITE_BYTES):
            self._count(block)

    def _count(self, data: bytes) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._bytes += len(data)
