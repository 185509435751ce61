"""Queries and clicks as they happen: a stream with its truth, or one that is fed to several datacenters.

`photon generate --rate` writes the stream to one place. The feeder of `photon dev` and of benchmarks writes
the same events to the logs of several datacenters. Each has its own copy, which reaches it up to
`copy_delay_s_max` late, as copies of logs do. Where a disk is full it waits for room and makes no events.

    python -m photon.dev.feeder ARGUMENTS     (JSON, the fields of Feed)

does so in a process of its own, for benchmarks, and prints the fields of Fed.
"""

import heapq
import io
import itertools
import json
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from photon.core.clock import Clock, SystemClock
from photon.core.disk import storage_errors
from photon.core.errors import DiskFullError, StorageError
from photon.dev.generated_logs import (
    CLICKS,
    PAYLOADS,
    QUERIES,
    SIDES,
    SPOILINGS,
    USERS,
    Counts,
    DelayLimits,
    GeneratedTruth,
    Ints,
    Mix,
    Stream,
    click_lines,
    delays_us,
    heads,
    opaque_ids,
    pair_lines,
    payloads,
    prepare_directory,
    query_lines,
    server_logs,
    spoil,
    truth_of,
    write_truth,
)

TICK_S: Final = 0.005
_EVENTS_A_TICK_MAX: Final = 20_000
_CLICKABLE_MAX: Final = 1_000_000  # so many of the last queries can still be clicked
_HELD_BACK_S: Final = (0.05, 0.5)
"""The log line of a query that was clicked early comes this much later than the click's."""
_REPEATED_WITHIN_S: Final = 5.0

Times = Callable[[int], range]
"""As many times (us) in a row as asked for, later than all before: those of one server process."""
Lines = tuple[int, int, list[bytes]]
"""Side, server process, lines."""


class LiveEvents:
    """Makes queries and clicks at a steady rate, a tick's worth of lines at a time, and counts them.

    Thousands a tick are made by C-level maps: 100,000 a second cost a fifth of a core.
    """

    def __init__(
        self,
        mix: Mix,
        rates: Stream,
        servers: Sequence[Sequence[tuple[str, Times]]],
        delays: Callable[[np.random.Generator, int], Ints],
        repeated_within_s: float = _REPEATED_WITHIN_S,
        keep_pairs: bool = False,
    ) -> None:
        """`servers`: of queries, of clicks: `ip:pid` and times of each server process. `delays`: us from a
        query to its click. `keep_pairs`: for a truth, about 150 bytes a click."""
        self._mix, self._rates, self._servers, self._delays = mix, rates, servers, delays
        self._repeated_within_s = repeated_within_s
        self._rng = np.random.default_rng(mix.seed)
        self._texts = payloads(mix.seed, mix.line_bytes)
        self._clickable: list[str] = []
        self._held: list[tuple[float, int, Lines]] = []
        self._holds = 0
        self._pairs: list[bytes] | None = [] if keep_pairs else None
        self.counts = Counts(), Counts()
        """Of queries, of clicks."""
        self._orphans = self._early = 0

    def tick(self, elapsed_s: float, last: bool = False) -> list[Lines]:
        """The lines due this long after the start, in the order of writing; `last`: all held back, too."""
        # Queries that were clicked early come on top of the rate.
        due = int(self._rates.rate * elapsed_s) - (self.counts[QUERIES].distinct - self._early)
        ids, lines = self._queries(min(due, _EVENTS_A_TICK_MAX), elapsed_s)
        due = int(self._rates.click_rate * elapsed_s) - self.counts[CLICKS].distinct
        if self._clickable and due > 0:
            lines += self._clicks(min(due, _EVENTS_A_TICK_MAX), elapsed_s)
        self._clickable += ids
        if len(self._clickable) > 2 * _CLICKABLE_MAX:
            del self._clickable[:-_CLICKABLE_MAX]
        while self._held and (last or self._held[0][0] <= elapsed_s):
            lines.append(heapq.heappop(self._held)[2])
        return lines

    def truth(self) -> GeneratedTruth:
        """Of all that was made. Needs `keep_pairs`."""
        assert self._pairs is not None
        return truth_of("stream", self._mix, self.counts, self._orphans, self._early, self._pairs)

    def _queries(self, count: int, elapsed_s: float) -> tuple[list[str], list[Lines]]:
        """Ids and lines of `count` queries."""
        made, written = [], []
        for server, some in self._spread(count):
            ids, times = self._ids(QUERIES, server, some)
            users = self._rng.integers(0, USERS, some).tolist()
            lines = query_lines(ids, times, users, self._payloads(QUERIES, some))
            made += ids
            written.append(self._mixed(QUERIES, server, lines, elapsed_s))
        return made, written

    def _clicks(self, count: int, elapsed_s: float) -> list[Lines]:
        rng, mix, clickable = self._rng, self._mix, self._clickable
        back = (self._delays(rng, count) * (self._rates.rate / 1e6)).astype(np.int64)
        back = np.minimum(back, min(len(clickable), _CLICKABLE_MAX) - 1)
        primary_ids = [clickable[-1 - at] for at in back.tolist()]
        kind = rng.random(count)
        lost = kind < mix.orphans
        for at in np.flatnonzero(lost).tolist():  # an id like any other, of a query that is never logged
            (primary_ids[at],), _ = self._ids(QUERIES, self._server(), 1)
        early = ~lost & (kind < mix.orphans + mix.early)
        for at in np.flatnonzero(early).tolist():
            primary_ids[at] = self._held_back_query(elapsed_s)
        self._orphans += int(lost.sum())
        self._early += int(early.sum())
        written, first = [], 0
        for server, some in self._spread(count):
            rows = slice(first, first + some)
            first += some
            ids, times = self._ids(CLICKS, server, some)
            lines = click_lines(ids, primary_ids[rows], times, self._payloads(CLICKS, some))
            if self._pairs is not None:
                pairs = pair_lines(primary_ids[rows], ids)
                self._pairs += itertools.compress(pairs, (~lost[rows]).tolist())
            written.append(self._mixed(CLICKS, server, lines, elapsed_s, ~lost[rows]))
        return written

    def _held_back_query(self, elapsed_s: float) -> str:
        held_s = float(self._rng.uniform(*_HELD_BACK_S))
        (text,), (lines,) = self._queries(1, elapsed_s + held_s)
        self._hold(elapsed_s + held_s, lines)
        return text

    def _mixed(
        self,
        side: int,
        server: int,
        lines: list[bytes],
        elapsed_s: float,
        repeatable: npt.NDArray[np.bool_] | bool = True,
    ) -> Lines:
        """With malformed lines among them; repeats are held back."""
        rng, mix, count = self._rng, self._mix, len(lines)
        repeated, malformed = mix.more_lines(side)
        counts = self.counts[side]
        counts.distinct += count
        if repeated:
            again = rng.random(count) < repeated
            for at in np.flatnonzero(again & repeatable).tolist():
                counts.repeated += 1
                later_s = float(rng.uniform(0.0, self._repeated_within_s))
                self._hold(elapsed_s + later_s, (side, self._server(), [lines[at]]))
        if malformed:
            for at in np.flatnonzero(rng.random(count) < malformed).tolist():
                counts.malformed += 1
                lines.append(spoil(lines[at], int(rng.integers(SPOILINGS))))
        return side, server, lines

    def _server(self) -> int:
        return int(self._rng.integers(self._mix.files))

    def _spread(self, count: int) -> list[tuple[int, int]]:
        """Server processes, and how many of the events each makes."""
        if count <= 0:
            return []
        if self._mix.files == 1:
            return [(0, count)]
        servers, counts = np.unique(self._rng.integers(0, self._mix.files, count), return_counts=True)
        return list(zip(servers.tolist(), counts.tolist(), strict=True))

    def _ids(self, side: int, server: int, count: int) -> tuple[list[str], range]:
        head, times_of = self._servers[side][server]
        times = times_of(count)
        if self._mix.ids != "photon":
            return opaque_ids(self._rng.bytes(16 * count), self._mix.ids), times
        return [f"{head}:{time_us}" for time_us in times], times

    def _payloads(self, side: int, count: int) -> Iterator[str]:
        return map(self._texts[side].__getitem__, self._rng.integers(0, PAYLOADS, count).tolist())

    def _hold(self, due_s: float, lines: Lines) -> None:
        self._holds += 1  # of two that are due together the first goes first
        heapq.heappush(self._held, (due_s, self._holds, lines))


def ticks(
    now: Callable[[], float],
    sleep: Callable[[float], object],
    duration_s: float,
    stopped: Callable[[], bool],
) -> Iterator[tuple[float, bool]]:
    """Seconds since the start, and whether it is the last; every TICK_S, a late one for all it missed."""
    began, number = now(), 0
    while True:
        elapsed_s = min(now() - began, duration_s)
        over = elapsed_s >= duration_s or stopped()
        yield elapsed_s, over
        if over:
            return
        number = max(number + 1, int(elapsed_s / TICK_S))
        sleep(max(0.0, began + number * TICK_S - now()))


def generate_stream(
    out: Path,
    mix: Mix,
    stream: Stream,
    clock: Clock,
    sleep: Callable[[float], object],
    stopped: Callable[[], bool] = lambda: False,
) -> GeneratedTruth:
    """Write for `duration_s`, or until `stopped` says so; then what was held back, and the truth.

    An event's time is when its line is written; only early clicked queries are logged after their time.
    The truth is kept in memory. Errors as generate_at_once.
    """
    prepare_directory(out)
    logs = [server_logs(out, side, mix) for side in SIDES]
    servers = [[(head, rising_times(clock.now_us)) for head in heads(side, mix.files)] for side in SIDES]
    limits = _scaled_limits(stream.duration_s)
    within_s = min(_REPEATED_WITHIN_S, stream.duration_s / 10)
    events = LiveEvents(mix, stream, servers, partial(delays_us, limits=limits), within_s, keep_pairs=True)
    for elapsed_s, over in ticks(clock.monotonic, sleep, stream.duration_s, stopped):
        for side, server, lines in events.tick(elapsed_s, last=over):
            logs[side][server].write(lines)
    truth = events.truth()
    write_truth(out, truth)
    return truth


def _scaled_limits(duration_s: float) -> DelayLimits:
    """A day's delays, for a stream that lasts only so long."""
    day = DelayLimits()
    return DelayLimits(
        body=min(day.body, duration_s / 20),
        tail=min(day.tail, duration_s / 2),
        longest=min(day.longest, duration_s),
    )


# -- the feeder

T = TypeVar("T")

END_S_MAX: Final = 10.0
ROOM_RETRY_S: Final = 0.5
COPY_DELAY_S_MAX: Final = 0.5
EARLY: Final = 0.01
"""Of the clicks: logged before their query."""
REPEATED: Final = 0.001
"""Of the clicks: logged twice, byte for byte."""
_NAME: Final = re.compile(r"fed-(\d{6})\.jsonl")


@dataclass(frozen=True, slots=True)
class Feed:
    """What to write, and to which directories (with `queries` and `clicks` in them)."""

    directories: list[str]
    queries_per_s: float
    clicks_per_s: float
    seed: int
    seconds: float = 1e9
    copy_delay_s_max: float = 0.0
    early: float = 0.0
    repeated: float = 0.0


@dataclass(frozen=True, slots=True)
class Fed:
    """What was written, and in how many seconds. `late_ms`: how far the slowest tick was behind its time."""

    queries: int
    clicks: int
    seconds: float
    late_ms: float


class Feeder:
    """Feeds in a thread of its own, which ends with this process."""

    def __init__(self, plan: Feed) -> None:
        self.failed = ""
        """Why it has ended by itself, or without its last events; "": it has not."""
        self.notices: list[str] = []
        """What it has to say for a person; the caller takes them."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[plan], name="feeder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """It writes what it holds back, and ends."""
        self._stopped.set()
        self._thread.join(END_S_MAX)
        if self._thread.is_alive():
            self.failed = (
                f"the feeder did not write its last events within {END_S_MAX:g} s; its logs may lack queries "
                "of their clicks"
            )

    def _run(self, plan: Feed) -> None:
        try:
            feed(plan, self._stopped, self.notices.append)
        except Exception as error:  # whatever it is, nothing more is fed
            self.failed = f"the feeder: {error or repr(error)}"


class DatacenterLogs:
    """One datacenter's copy: a file for the queries and one for the clicks of this life of the feeder.

    What is put in comes out in order, but late: by up to `delay_s_max`, which is drawn anew each second.
    """

    def __init__(self, directory: Path, name: str, rng: random.Random, delay_s_max: float) -> None:
        """DiskFullError, StorageError."""
        self._rng = rng
        self._delay_s_max = delay_s_max
        self._delay_s, self._redraw_at = 0.0, 0.0
        self._waiting: deque[tuple[float, Path, bytes]] = deque()
        self._files: dict[Path, io.FileIO] = {}
        for path in (directory / "queries" / name, directory / "clicks" / name):
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path] = path.open("ab", buffering=0)

    def put(self, now_s: float, queries: bytes, clicks: bytes) -> None:
        if now_s >= self._redraw_at:
            self._redraw_at = now_s + 1.0
            self._delay_s = self._rng.uniform(0.0, self._delay_s_max)
        due_s = now_s + self._delay_s
        self._waiting += [(due_s, *one) for one in zip(self._files, (queries, clicks), strict=True) if one[1]]

    def write(self, now_s: float) -> None:
        """What is due. StorageError if a log can't be written; after DiskFullError the next call goes on."""
        while self._waiting and self._waiting[0][0] <= now_s:
            due_s, path, data = self._waiting[0]
            with storage_errors(path):
                written = self._files[path].write(data)
            self._waiting.popleft()
            if written < len(data):  # the disk fills up
                self._waiting.appendleft((due_s, path, data[written:]))

    def close(self) -> None:
        """With all that waits, as `write`."""
        self.write(float("inf"))
        for file in self._files.values():
            file.close()


class Room:
    """Waits for space on the disk. `tell`: a person, once each time. `waited_s`: in all."""

    def __init__(self, stopped: threading.Event, tell: Callable[[str], None]) -> None:
        self._stopped, self._tell = stopped, tell
        self.waited_s = 0.0

    def wait_to(self, act: Callable[[], T]) -> T:
        """Its result, once there was room for it. DiskFullError if there is none when all must end."""
        began = None
        while True:
            try:
                done = act()
            except DiskFullError as error:
                if self._stopped.is_set():
                    raise
                if began is None:
                    began = time.monotonic()
                    self._tell(f"{error}; it makes no events meanwhile")
                self._stopped.wait(ROOM_RETRY_S)
            else:
                if began is not None:
                    self.waited_s += time.monotonic() - began
                    self._tell("there is space again: it goes on")
                return done


def last_life(directory: str) -> int:
    """That of the last feeder that wrote to it; -1 if none has. The clock does not tell: it may step back."""
    found = [_NAME.fullmatch(path.name) for path in Path(directory).glob("*/*.jsonl")]
    return max((int(match[1]) for match in found if match is not None), default=-1)


def fed_events(plan: Feed, now_us: Callable[[], int], life: int) -> LiveEvents:
    """Its events. `life`: from 0 on, each life's its own: its ids are of a server process of its own."""
    mix = Mix(seed=plan.seed, files=1, early=plan.early, duplicates=plan.repeated)
    servers = [[(heads(side, life + 1)[life], rising_times(now_us))] for side in SIDES]
    rates = Stream(plan.queries_per_s, plan.clicks_per_s)
    return LiveEvents(mix, rates, servers, _short_delays, repeated_within_s=2.0)


def rising_times(now_us: Callable[[], int]) -> Times:
    """Times of a clock that may step back."""
    last_us = 0

    def times(count: int) -> range:
        nonlocal last_us
        first = max(now_us(), last_us + 1)
        last_us = first + count
        return range(first, first + count)

    return times


def _short_delays(rng: np.random.Generator, count: int) -> Ints:
    """From a query to its click: 2 s on average."""
    return rng.exponential(2e6, count).astype(np.int64)


def feed(plan: Feed, stopped: threading.Event, tell: Callable[[str], None]) -> Fed:
    """Write until `stopped`, or for `seconds`, then what was held back. StorageError."""
    rng = random.Random(plan.seed)
    life = 1 + max(map(last_life, plan.directories))
    name = f"fed-{life:06d}.jsonl"
    room = Room(stopped, tell)
    copies = [
        room.wait_to(partial(DatacenterLogs, Path(path), name, rng, plan.copy_delay_s_max))
        for path in plan.directories
    ]
    events = fed_events(plan, SystemClock().now_us, life)
    before_s = late_s = 0.0
    running = ticks(lambda: time.monotonic() - room.waited_s, stopped.wait, plan.seconds, stopped.is_set)
    for now_s, over in running:
        late_s, before_s = max(late_s, now_s - before_s - TICK_S), now_s
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for side, _, lines in events.tick(now_s, last=over):
            sides[side].extend(lines)
        for copy in copies:
            copy.put(now_s, b"".join(sides[QUERIES]), b"".join(sides[CLICKS]))
        for copy in copies:
            room.wait_to(partial(copy.write, now_s))
    for copy in copies:
        room.wait_to(copy.close)
    queries, clicks = (side.distinct for side in events.counts)
    return Fed(queries, clicks, before_s, round(late_s * 1e3, 1))


def main() -> None:
    """Exit status 1 where a log can't be written."""
    try:
        print(json.dumps(asdict(feed(Feed(**json.loads(sys.argv[1])), threading.Event(), sys.exit))))
    except StorageError as error:
        sys.exit(f"photon: {error}")


if __name__ == "__main__":
    main()
