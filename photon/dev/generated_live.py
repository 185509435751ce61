"""Queries and clicks as they happen: those of `photon generate --rate` and of the feeder."""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.clock import Clock
from photon.core.id_generator import EventIdGenerator, TimeReading
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
    servers = [
        [(head, _synchronised_times(head, clock)) for head in heads(side, mix.files)] for side in SIDES
    ]
    limits = _scaled_limits(stream.duration_s)
    within_s = min(_REPEATED_WITHIN_S, stream.duration_s / 10)
    events = LiveEvents(mix, stream, servers, partial(delays_us, limits=limits), within_s, keep_pairs=True)
    for elapsed_s, over in ticks(clock.monotonic, sleep, stream.duration_s, stopped):
        for side, server, lines in events.tick(elapsed_s, last=over):
            logs[side][server].write(lines)
    truth = events.truth()
    write_truth(out, truth)
    return truth


def _synchronised_times(head: str, clock: Clock) -> Times:
    server, _, process = head.rpartition(":")
    generator = EventIdGenerator(server, int(process), clock, lambda: TimeReading(clock.now_us()))

    def times(count: int) -> range:
        generator.synchronise_if_due()
        return generator.next_times(count)

    return times


def _scaled_limits(duration_s: float) -> DelayLimits:
    """A day's delays, for a stream that lasts only so long."""
    day = DelayLimits()
    return DelayLimits(
        body=min(day.body, duration_s / 20),
        tail=min(day.tail, duration_s / 2),
        longest=min(day.longest, duration_s),
    )
