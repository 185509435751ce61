"""Checks that a source or a sink keeps what `ports` says, whatever it is made of.

A source is read to its end, then anew from many places, as starts after a crash do. To a sink, writers of
names of their own write lines, are killed in the middle (SIGKILL) and go on from the place that it tells;
somebody who reads it by other means says which lines are there. What is asked for is what joins rely on.
"""

import contextlib
import itertools
import json
import multiprocessing
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final, Self

from photon.connect.ports import Batch, Fields, Guarantee, Sink, Source, State
from photon.connect.uris import make_sink, make_source
from photon.core.columns import split_lines
from photon.core.errors import PhotonError, UnavailableError, told
from photon.logs.writer import LogPosition

BATCH_BYTES_MAX: Final = 64 << 20
CUTS: Final = 12
"""Places to go on from."""
STILL_S_MAX: Final = 30.0
"""So long nothing comes before it is said that nothing will."""
LINES: Final = 240
KILLS: Final = 6
TRIES: Final = 10
_PAUSE_S: Final = 1.0
_WAIT_S: Final = 0.5
_BATCH: Final = 7
_BATCHES_MAX: Final = 6
_KILL_WITHIN_S: Final = 0.02
_FILE_LINES: Final = 60


@dataclass(frozen=True, slots=True)
class Check:
    """`failed`: why, or None. `skipped`: why it could not be checked."""

    name: str
    failed: str | None = None
    skipped: str | None = None


class _BrokenError(Exception):
    """What a source or a sink did that it must not."""


Record = tuple[int, bytes]


# --- Sources.


def check_source(text: str, fields: Fields) -> Iterator[Check]:
    """What it has now is read some fifteen times. UsageError: it can't be made."""
    make_source(text, fields).close()
    known: dict[str, list[Record]] = {}
    batches: list[Batch] = []

    def read_to_the_end() -> None:
        batches.extend(_read_all(make_source(text, fields), {}))
        known.update(_records(batches))

    def goes_on_behind_each_record() -> None:
        for after in _places(batches):
            _compare(known, after, _records(_read_all(make_source(text, fields), after)))

    def opens_again() -> None:
        source = make_source(text, fields)
        with contextlib.closing(source):
            source.open({}, True)
            source.read(_WAIT_S)
            half = _places(batches)[0]
            _compare(known, half, _records(_drained(source, half)))

    def is_led_by_us() -> None:
        source = make_source(text, fields)
        with contextlib.closing(source):
            source.open({}, True)
            source.kept({partition: records[-1][0] for partition, records in known.items()})
        _compare(known, {}, _records(_read_all(make_source(text, fields), {})))

    def closes_twice() -> None:
        source = make_source(text, fields)
        source.open({}, True)
        source.close()
        source.close()

    if (whole := _checked("reads to an end, in whole lines whose numbers rise", read_to_the_end)).failed:
        yield whole
        return
    yield whole
    if not batches:
        yield Check("the rest", skipped="it has no records now")
        return
    yield _checked("goes on behind any record, with the same ones", goes_on_behind_each_record)
    yield _checked("opens again at another place", opens_again)
    yield _checked("begins where it is told, whatever was told to `kept`", is_led_by_us)
    yield _checked("closes twice", closes_twice)


def _read_all(source: Source, after: Mapping[str, int]) -> list[Batch]:
    with contextlib.closing(source):
        return _drained(source, after)


def _drained(source: Source, after: Mapping[str, int]) -> list[Batch]:
    source.open(after, True)
    found: list[Batch] = []
    moved = time.monotonic()
    while True:
        with contextlib.suppress(UnavailableError):
            if batches := source.read(_WAIT_S):
                found += batches
                moved = time.monotonic()
            if source.state() is State.FINISHED:
                break
        if time.monotonic() > moved + STILL_S_MAX:
            raise _BrokenError(f"it is {source.state().value} for {STILL_S_MAX:g} s and brings nothing")
    if source.read(0.0):
        raise _BrokenError("it was finished, and brought more")
    if not 0 <= source.known_to() <= time.time_ns() // 1_000:
        raise _BrokenError(f"it is known to {source.known_to()} us, which is to come, or before 1970")
    return found


def _records(batches: Iterable[Batch]) -> dict[str, list[Record]]:
    """Of each partition. _BrokenError for a batch that can't be."""
    found: dict[str, list[Record]] = {}
    for batch in batches:
        of_it = found.setdefault(batch.partition, [])
        lines = split_lines(batch.lines)
        numbers = [first + step for first, count in batch.runs for step in range(count)]
        if not batch.lines.endswith(b"\n"):
            raise _BrokenError(f"{batch.partition}: the last line of a batch has no end")
        if len(lines) != len(numbers):
            raise _BrokenError(f"{batch.partition}: {len(lines)} lines with the numbers of {len(numbers)}")
        if len(batch.lines) > BATCH_BYTES_MAX:
            raise _BrokenError(f"{batch.partition}: a batch has {len(batch.lines)} bytes")
        rising = [of_it[-1][0], *numbers] if of_it else numbers
        for before, number in itertools.pairwise(rising):
            if number <= before:
                raise _BrokenError(f"{batch.partition}: record {number} comes behind {before}")
        of_it += zip(numbers, lines, strict=True)
    return found


def _places(batches: Sequence[Batch]) -> list[dict[str, int]]:
    """Where a crash may leave off: behind a batch, and within one. Evenly over all, at most CUTS."""
    after: dict[str, int] = {}
    found = []
    for batch in batches:
        first, count = batch.runs[0]
        found.append(after | {batch.partition: first + (count - 1) // 2})
        first, count = batch.runs[-1]
        after = after | {batch.partition: first + count - 1}
        found.append(after)
    step = max(1, len(found) // CUTS)
    return [*found[::step][: CUTS - 1], found[-1]]


def _compare(
    known: Mapping[str, list[Record]], after: Mapping[str, int], found: Mapping[str, list[Record]]
) -> None:
    for partition, records in known.items():
        wanted = [one for one in records if one[0] > after.get(partition, -1)]
        # What was written meanwhile comes behind.
        here = found.get(partition, [])[: len(wanted)]
        if here != wanted:
            agree = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(here, wanted, strict=False))
            number = wanted[len(list(agree))][0]
            raise _BrokenError(
                f"{partition}: opened behind {after.get(partition)}, it does not bring {number} as it did"
            )


# --- Sinks.

Read = Callable[[], Iterable[bytes]]


def check_sink(text: str, read: Read | None, rng: random.Random) -> Iterator[Check]:
    """Some thousand small lines stay in it, by writers whose names begin with `photon-check`.

    `read` brings all lines that it has, by other means. UsageError: it can't be made.
    """
    checks = _SinkChecks(text, rng)
    for name, does in (
        ("tells each writer up to where it has its lines", checks.tells_its_places),
        ("lets one of two write by one name", checks.refuses_who_was_taken_over),
        ("goes on where it tells after SIGKILL in the middle of writing", checks.goes_on_after_kills),
    ):
        check = _checked(name, does)
        yield check
        if check.failed:
            return
    name = "has each line once"
    if read is None:
        yield Check(name, skipped="nobody says how to read it")
    else:
        yield _checked(name, lambda: checks.has_the_lines(read()))


class _SinkChecks:
    def __init__(self, text: str, rng: random.Random) -> None:
        self._text, self._rng = text, rng
        self._run = f"photon-check-{secrets.token_hex(4)}"
        self._written: set[str] = set()
        with self._writer("made") as one:
            self._guarantee = one.guarantee

    def _writer(self, name: str) -> "_Writer":
        return _Writer(self._text, f"{self._run}-{name}")

    def _complete(self, name: str) -> None:
        """All lines of a writer, from where it was left."""
        with self._writer(name) as one:
            one.opened()
            one.write_all()
        self._written.update(one.ids)

    def _place_of(self, name: str) -> LogPosition | None:
        with self._writer(name) as one:
            return one.told()

    def tells_its_places(self) -> None:
        with self._writer("one") as one:
            if (at := one.told()) is not None:
                raise _BrokenError(f"it tells {at} to a writer that it has never seen")
            while not one.done:
                one.write_on()
                if (at := self._place_of("one")) != one.at:
                    raise _BrokenError(f"it was given lines up to {one.at}, and tells {at}")
                one.opened()
        if (at := self._place_of("other")) is not None:
            raise _BrokenError(f"it tells {at} to another writer, which wrote nothing")
        self._written.update(one.ids)
        self._complete("other")

    def refuses_who_was_taken_over(self) -> None:
        with self._writer("taken-over") as old, self._writer("taken-over") as new:
            old.opened()
            old.write_on()
            new.opened()
            new.write_on()
            with contextlib.suppress(PhotonError):
                old.write()
                old.write()
                if self._guarantee is Guarantee.ATOMIC:
                    raise _BrokenError("two that write by one name both succeeded")
        self._complete("taken-over")

    def goes_on_after_kills(self) -> None:
        for _ in range(KILLS):
            _write_and_be_killed(self._text, f"{self._run}-killed", self._rng)
        self._complete("killed")

    def has_the_lines(self, lines: Iterable[bytes]) -> None:
        found: Counter[str] = Counter()
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and str(event.get("id", "")).startswith(self._run):
                    if event.get("primary") != {"id": f"of {event['id']}"}:
                        raise _BrokenError(f"{event['id']} came back as {event}")
                    found[event["id"]] += 1
        if missing := self._written - found.keys():
            raise _BrokenError(f"{len(missing)} of {len(self._written)} lines are not there: {min(missing)}")
        twice = [id_ for id_, count in found.items() if count > 1]
        if twice and self._guarantee is not Guarantee.NONE:
            raise _BrokenError(f"{len(twice)} lines are there more than once: {min(twice)}")


class _Writer:
    """Writes LINES lines of a joined log of several files, as a joiner does."""

    def __init__(self, text: str, name: str) -> None:
        self._sink: Sink = make_sink(text, name)
        self.name, self.guarantee = name, self._sink.guarantee
        self.at = LogPosition(0, 0)
        self._lines = [
            json.dumps({"id": f"{name}-{n}", "n": n, "primary": {"id": f"of {name}-{n}"}}).encode() + b"\n"
            for n in range(LINES)
        ]
        self.ids = [f"{name}-{n}" for n in range(LINES)]
        self._next = self._failures = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.close()

    def told(self) -> LogPosition | None:
        """Where it has the lines; asked again while it is away."""
        for _ in range(TRIES - 1):
            with contextlib.suppress(UnavailableError):
                return self._sink.open()
            time.sleep(_PAUSE_S)
        return self._sink.open()

    def opened(self) -> LogPosition | None:
        place = self.told()
        self.at, self._next = LogPosition(0, 0), 0
        if place is not None:
            while self._next < LINES and self.at < place:
                self._next, _, self.at = self._batch(1)
            if self.at != place:
                raise _BrokenError(f"it tells {place}, where no line of {self.name} ends")
        return place

    @property
    def done(self) -> bool:
        return self._next >= LINES

    def _batch(self, count: int) -> tuple[int, LogPosition, LogPosition]:
        """Up to so many lines of one file: the first behind them, and where they are."""
        file, within = divmod(self._next, _FILE_LINES)
        end = min(self._next + count, LINES, self._next - within + _FILE_LINES)
        start = self.at if self.at.file == file else LogPosition(file, 0)
        size = sum(map(len, self._lines[self._next : end]))
        return end, start, LogPosition(file, start.offset + size)

    def write(self) -> None:
        end, start, to = self._batch(_BATCH)
        self._sink.write(b"".join(self._lines[self._next : end]), start, to)
        self._next, self.at = end, to

    def write_on(self) -> None:
        """A batch, or what comes of it where the outcome is not known. _BrokenError if nothing ever does."""
        before = self.at
        try:
            self.write()
        except UnavailableError:
            self.opened()
        self._failures = self._failures + 1 if self.at == before else 0
        if self._failures >= TRIES:
            raise _BrokenError(f"it takes no more lines of {self.name} behind {self.at}")

    def write_all(self) -> None:
        while not self.done:
            self.write_on()


def _write_and_be_killed(text: str, name: str, rng: random.Random) -> None:
    """In a process of its own, which tells before each batch; it has the time of some."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_write_and_tell, args=(text, name, there), daemon=True)
    process.start()
    there.close()
    with contextlib.suppress(EOFError):
        for _ in range(rng.randint(1, _BATCHES_MAX)):
            here.recv()
        time.sleep(rng.uniform(0, _KILL_WITHIN_S))
    process.kill()
    process.join()


def _write_and_tell(text: str, name: str, before_batch: Connection) -> None:
    one = _Writer(text, name)
    one.opened()
    while not one.done:
        before_batch.send(None)
        one.write()


def _checked(name: str, does: Callable[[], None]) -> Check:
    try:
        does()
    except _BrokenError as error:
        return Check(name, str(error))
    except Exception as error:
        return Check(name, f"it failed: {told(error)}")
    return Check(name)
