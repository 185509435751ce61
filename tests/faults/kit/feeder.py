"""Live logs of each datacenter from a seed, and what must become of them.

The seed fixes which events there are, in which order and at what distance; their times (and so their ids)
begin when the feeder does. Each datacenter gets a copy of all of them of its own, in another order of
arrival, as if its log collector were slower or quicker than the other's.
"""

import random
import threading
import time
from bisect import bisect
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

TICK_S: Final = 0.01
FILE_LINES_MAX: Final = 2_000
_SERVERS: Final = 3
_TEXTS: Final = 500
_ARRIVAL_S: Final = 0.3
"""A datacenter gets a line up to so much later than another does."""
_BEFORE_QUERY_S: Final = (0.05, 1.5)
_LATE_S: Final = (1.0, 5.0)
_REPEATED_S: Final = (0.0, 2.0)
_MALFORMED: Final = (
    b'{"id": "10.9.9.9:9:1", "primary_id": ',
    b"\x00\xff\x80 no json",
    b'{"id": "a", "primary_id": "b"}',
    b'["id", "primary_id", 1]',
    b'{"id": 1.5, "primary_id": {}, "ts_us": "soon"}',
)

Log = Literal["queries", "clicks"]
LOGS: Final[tuple[Log, ...]] = ("queries", "clicks")


@dataclass(frozen=True, slots=True)
class Feed:
    """What is fed. Shares are of the clicks; what is left over has its query some time before it."""

    seed: int
    clicks: int = 3_000
    """Distinct ids."""
    clicks_per_s: float = 300.0
    """0: all at once."""
    queries_a_click: float = 1.5
    before_query: float = 0.05
    """Logged before the query that they name."""
    late: float = 0.05
    """Logged seconds after their query."""
    duplicates: float = 0.03
    """Logged a second time, or more."""
    orphans: float = 0.01
    """Name a query that is never logged. All in the first half: in the end nobody waits for them."""
    malformed: float = 0.005
    """Lines that are no event, beside the clicks; as many among the queries."""
    opaque: float = 0.1
    """Have an id that is not ours."""
    late_s: tuple[float, float] = _LATE_S
    arrival_s: float = _ARRIVAL_S
    all_late: bool = False
    """The first datacenter's copy, too, is late by up to `arrival_s`."""


@dataclass(slots=True)
class Truth:
    """What was logged, in all datacenters alike once all is written. Foreign id -> ..."""

    queries: dict[str, bytes] = field(default_factory=dict)
    """Primary id -> its line, without the newline."""
    clicks: dict[str, bytes] = field(default_factory=dict)
    """Foreign id -> its line; orphans too."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Foreign id -> primary id: what must be joined, once."""
    orphans: Counter[str] = field(default_factory=Counter)
    """Foreign id -> its lines."""
    malformed: int = 0
    malformed_queries: int = 0
    repeated: int = 0
    """Lines of clicks that stand again."""

    @property
    def foreign_lines(self) -> int:
        """In each datacenter."""
        return len(self.clicks) + self.repeated + self.malformed


class Due(NamedTuple):
    """Sorts by its time; `turn` is unlike any other's."""

    at_s: float
    turn: int
    log: Log
    line: bytes
    server: int


class Feeder:
    """Writes in a thread of its own. `start`, `join` (or `stop`: what is due later is never written).

    `truth` is whole once `start` has returned; `written` tells how far the copies are.
    """

    def __init__(self, feed: Feed, logs: Mapping[str, Path]) -> None:
        """`logs`: datacenter -> the directory of its copy, with queries/ and clicks/ in it."""
        self.feed = feed
        self.logs = dict(logs)
        self.truth = Truth()
        self._copies: dict[str, Copy] = {}
        self._complete_s: list[float] = []
        self._began: float | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def prepare(self) -> None:
        """Make the directories, empty."""
        for directory in self.logs.values():
            for log in LOGS:
                (directory / log).mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self.prepare()
        dues = _script(self.feed, time.time_ns() // 1_000)
        self.truth, self._complete_s = truth_of(dues)
        for number, (datacenter, directory) in enumerate(self.logs.items()):
            rng = random.Random(f"{self.feed.seed} {number}")
            is_late = bool(number) or self.feed.all_late
            arrivals = _arrivals(dues, rng if is_late else None, self.feed.arrival_s)
            self._copies[datacenter] = Copy(directory, arrivals, rng)
        self._began = time.monotonic()
        self._thread.start()

    def join(self, deadline_s: float = 600.0) -> None:
        """Return when all is written."""
        self._thread.join(deadline_s)
        if self._failure is not None:
            raise self._failure
        assert not self._thread.is_alive(), f"the feeder is not done after {deadline_s:g} s"

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_done(self) -> bool:
        return bool(self._copies) and all(copy.is_done for copy in self._copies.values())

    def is_done_in(self, datacenter: str) -> bool:
        return datacenter in self._copies and self._copies[datacenter].is_done

    @property
    def joinable(self) -> int:
        """Pairs of which both events are due by now, in the quickest copy."""
        return 0 if self._began is None else bisect(self._complete_s, time.monotonic() - self._began)

    @property
    def written(self) -> dict[str, int]:
        """Datacenter -> lines of its foreign logs."""
        return {datacenter: copy.foreign_lines for datacenter, copy in self._copies.items()}

    @contextmanager
    def held(self) -> Iterator[list["Copy"]]:
        """All copies, of which none is written to meanwhile."""
        with ExitStack() as locks:
            copies = list(self._copies.values())
            for copy in copies:
                locks.enter_context(copy.lock)
            yield copies

    def replan(self, truth: Truth) -> None:
        """From now on this is what is logged; all of it is due."""
        self.truth = truth
        self._complete_s = [0.0] * len(truth.pairs)

    def _run(self) -> None:
        assert self._began is not None
        try:
            while not self.is_done and not self._stopping.wait(TICK_S):
                for copy in self._copies.values():
                    copy.write(time.monotonic() - self._began)
        except BaseException as error:
            self._failure = error


class Copy:
    """One datacenter's logs. Who looks at it while it grows holds `lock` (`Feeder.held`)."""

    def __init__(self, directory: Path, dues: list[Due], rng: random.Random) -> None:
        self._dues = dues
        self._rng = rng
        self._next = 0
        self.lock = threading.Lock()
        self.foreign_lines = 0
        self._files: dict[tuple[Log, int], _Files] = {
            (log, server): _Files(directory / log, server) for log in LOGS for server in range(_SERVERS)
        }

    @property
    def is_done(self) -> bool:
        return self._next == len(self._dues)

    @property
    def planned(self) -> Sequence[Due]:
        """All lines, those that are written first."""
        return self._dues

    @property
    def written(self) -> Sequence[Due]:
        return self._dues[: self._next]

    def keep(self, turns: Container[int]) -> None:
        """Of what is not written yet, nothing but these ever is."""
        self._dues[self._next :] = [due for due in self._dues[self._next :] if due.turn in turns]

    def write(self, elapsed_s: float) -> None:
        with self.lock:
            end = self._next
            while end < len(self._dues) and self._dues[end].at_s <= elapsed_s:
                end += 1
            due = self._dues[self._next : end]
            lines: dict[tuple[Log, int], list[bytes]] = {}
            for one in due:
                lines.setdefault((one.log, one.server), []).append(one.line)
            for where, some in lines.items():
                self._files[where].write(some, self._rng)
            self.foreign_lines += sum(one.log == "clicks" for one in due)
            self._next = end


class _Files:
    """One server's log in a copy: a file after the other."""

    def __init__(self, directory: Path, server: int) -> None:
        self._directory = directory
        self._server = server
        self._number = 0
        self._lines = 0

    def write(self, lines: Sequence[bytes], rng: random.Random) -> None:
        """In two writes now and then, the first of which ends in the middle of a line."""
        if self._lines >= FILE_LINES_MAX:
            self._number, self._lines = self._number + 1, 0
        self._lines += len(lines)
        data = b"".join(line + b"\n" for line in lines)
        cut = rng.randrange(len(data)) if rng.random() < 0.1 else 0
        path = self._directory / f"{self._directory.name}-{self._server}-{self._number:05}.jsonl"
        with path.open("ab", buffering=0) as file:
            for part in (data[:cut], data[cut:]):
                if part:
                    file.write(part)


def _arrivals(dues: Sequence[Due], rng: random.Random | None, arrival_s: float) -> list[Due]:
    """In the order of a copy whose collector is late by a time that changes; without dice, as scripted."""
    if rng is None:
        return list(dues)
    late, step = 0.0, max(_ARRIVAL_S / 15, arrival_s / 100)
    found = []
    for due in dues:
        late = min(arrival_s, max(0.0, late + rng.uniform(-step, step)))
        found.append(Due(due.at_s + late, due.turn, due.log, due.line, due.server))
    return sorted(found)


class _Ids:
    """Ids of events of one kind: distinct, and of the time that they are given."""

    def __init__(self, rng: random.Random, subnet: int, began_us: int, opaque: float) -> None:
        self._rng = rng
        self._subnet = subnet
        self._began_us = began_us
        self._opaque = opaque
        self._taken: set[tuple[int, int]] = set()

    def draw(self, at_s: float) -> tuple[str, int, int]:
        """-> id, time (us), server."""
        server = self._rng.randrange(_SERVERS)
        time_us = self._began_us + round(at_s * 1e6)
        while (server, time_us) in self._taken:
            time_us += 1
        self._taken.add((server, time_us))
        if self._rng.random() < self._opaque:
            return f"{self._rng.getrandbits(128):032x}", time_us, server
        return f"10.{self._subnet}.0.{server + 1}:{4000 + server}:{time_us}", time_us, server


def _script(feed: Feed, began_us: int) -> list[Due]:
    """All lines, by when they are due (seconds from the start)."""
    rng = random.Random(feed.seed)
    queries, clicks = (_Ids(rng, subnet, began_us, feed.opaque) for subnet in (1, 2))
    dues: list[Due] = []
    words = [_words(rng) for _ in range(_TEXTS)]
    made = 0

    def put(at_s: float, log: Log, line: bytes, server: int) -> None:
        dues.append(Due(at_s, len(dues), log, line, server))

    def query(at_s: float, logged_s: float) -> str:
        nonlocal made
        made += 1
        text, time_us, server = queries.draw(at_s)
        event = {"id": text, "ts_us": time_us, "words": rng.choice(words), "user": rng.randrange(1_000)}
        put(logged_s, "queries", msgspec.json.encode(event), server)
        return text

    recent: list[str] = []
    gap = 1.0 / feed.clicks_per_s if feed.clicks_per_s else 0.0
    for number in range(feed.clicks):
        at = number * gap
        while made < (number + 1) * feed.queries_a_click or not recent:
            recent.append(query(at, at))
        kind = rng.random()
        logged = at
        if number < feed.clicks / 2 and rng.random() < 2 * feed.orphans:
            primary, _, _ = queries.draw(at)
        elif kind < feed.before_query:
            primary = query(at, at + rng.uniform(*_BEFORE_QUERY_S) * (1 if gap else 0))
        else:
            primary = recent[-1 - min(int(rng.expovariate(1 / 30)), len(recent) - 1)]
            if kind < feed.before_query + feed.late:
                logged = at + rng.uniform(*feed.late_s) * (1 if gap else 0)
        text, time_us, server = clicks.draw(logged)
        event = {"id": text, "primary_id": primary, "ts_us": time_us, "at": rng.choice(words)}
        line = msgspec.json.encode(event)
        put(logged, "clicks", line, server)
        while rng.random() < feed.duplicates:
            again = logged + rng.uniform(*_REPEATED_S) * (1 if gap else 0)
            put(again, "clicks", line, rng.randrange(_SERVERS))
        if rng.random() < feed.malformed:
            put(logged, "clicks", rng.choice(_MALFORMED) + b" %d" % number, server)
        if rng.random() < feed.malformed:
            put(at, "queries", rng.choice(_MALFORMED) + b" %d" % number, server)
        del recent[:-5_000]
    return sorted(dues)


class _Event(msgspec.Struct):
    id: str
    ts_us: int
    primary_id: str = ""


def _event_of(due: Due) -> _Event | None:
    """None of a malformed line."""
    try:
        return msgspec.json.decode(due.line, type=_Event)
    except msgspec.DecodeError:
        return None


def truth_of(dues: Iterable[Due]) -> tuple[Truth, list[float]]:
    """What must become of these lines, and when each pair is whole."""
    truth, copies, primaries = Truth(), Counter[str](), dict[str, str]()
    logged_s: dict[str, float] = {}
    for due in dues:
        event = _event_of(due)
        if event is None:
            truth.malformed += due.log == "clicks"
            truth.malformed_queries += due.log == "queries"
            continue
        logged_s.setdefault(event.id, due.at_s)
        if due.log == "queries":
            truth.queries[event.id] = due.line
        else:
            truth.clicks[event.id], primaries[event.id] = due.line, event.primary_id
            copies[event.id] += 1
    truth.pairs = {text: primary for text, primary in primaries.items() if primary in truth.queries}
    truth.orphans = Counter({text: count for text, count in copies.items() if text not in truth.pairs})
    truth.repeated = copies.total() - len(copies)
    return truth, sorted(max(logged_s[one], logged_s[other]) for one, other in truth.pairs.items())


def _words(rng: random.Random) -> str:
    return " ".join(f"w{rng.randrange(10_000)}" for _ in range(rng.randrange(2, 8)))


LONG: Final = 40_000
"""Clicks of a feed that is to be cut: for as long as a test may take on a machine that is busy."""


def cut_short(feeder: Feeder) -> None:
    """What stands in no copy yet is never logged, but for the queries of clicks that do. `truth` says so."""
    with feeder.held() as copies:
        kept = {due.turn: due for copy in copies for due in copy.written}
        clicks = [_event_of(due) for due in kept.values() if due.log == "clicks"]
        named = {click.primary_id for click in clicks if click is not None}
        for due in copies[0].planned:
            if due.log == "queries" and (query := _event_of(due)) and query.id in named:
                kept[due.turn] = due
        for copy in copies:
            copy.keep(kept)
        feeder.replan(truth_of(kept.values())[0])
