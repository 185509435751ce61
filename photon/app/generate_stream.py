"""Generated logs as a stream: whole lines, written when they happen, some milliseconds' worth at a time."""

import heapq
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from photon.app.generate_events import (
    PAYLOADS,
    SPOILINGS,
    USERS,
    DelayLimits,
    click_lines,
    click_payloads,
    heads,
    pair_lines,
    query_lines,
    query_payloads,
    spoil,
)
from photon.app.generate_files import GeneratedTruth, ServerLog, prepare_directory, server_logs, write_truth
from photon.app.generate_options import Mix, Stream
from photon.app.verify_pairs import pairs_sha256
from photon.core.clock import Clock
from photon.core.id_generator import EventIdGenerator

TICK_S: Final = 0.005

_EVENTS_A_TICK_MAX: Final = 20_000
_CLICKABLE_MAX: Final = 1_000_000  # so many of the last queries can still be clicked
_HELD_BACK_S: Final = (0.05, 0.5)
"""The log line of a query that was clicked early comes so much later than the click's."""
_REPEATED_WITHIN_S: Final = 5.0


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
    The truth is kept in memory, about 150 bytes a click. Errors as generate_at_once.
    """
    prepare_directory(out)
    writer = _Streamer(out, mix, stream, clock)
    began = clock.monotonic()
    ticks = 0
    while True:
        elapsed = clock.monotonic() - began
        over = elapsed >= stream.duration_s or stopped()
        writer.tick(min(elapsed, stream.duration_s), release_all=over)
        if over:
            break
        ticks = max(ticks + 1, int(elapsed / TICK_S))
        sleep(max(0.0, began + ticks * TICK_S - clock.monotonic()))
    truth = writer.truth()
    write_truth(out, truth)
    return truth


class _Streamer:
    def __init__(self, out: Path, mix: Mix, stream: Stream, clock: Clock) -> None:
        self._mix = mix
        self._stream = stream
        self._clock = clock
        self._rng = random.Random(mix.seed)
        self._query_payloads = query_payloads(mix.seed)
        self._click_payloads = click_payloads(mix.seed)
        self._limits = _scaled_limits(stream.duration_s)
        self._query_ids = [self._generator(head) for head in heads(0, mix.files)]
        self._click_ids = [self._generator(head) for head in heads(1, mix.files)]
        self._query_logs = server_logs(out / "queries", heads(0, mix.files), mix.file_bytes_max)
        self._click_logs = server_logs(out / "clicks", heads(1, mix.files), mix.file_bytes_max)
        self._due: dict[ServerLog, list[bytes]] = {}
        self._held: list[tuple[float, int, ServerLog, bytes]] = []
        self._holds = 0
        self._clickable: list[str] = []
        self._pairs: list[bytes] = []
        self._queries = self._duplicate_queries = self._malformed_queries = 0
        self._clicks = self._orphans = self._early = self._duplicates = self._malformed = 0

    def tick(self, elapsed: float, release_all: bool) -> None:
        """Write all that is due `elapsed` seconds after the start, queries first."""
        # Queries that were clicked early come on top of the rate.
        due = int(self._stream.rate * elapsed) - (self._queries - self._early)
        for _ in range(min(due, _EVENTS_A_TICK_MAX)):
            self._clickable.append(self._query(elapsed))
        if len(self._clickable) > 2 * _CLICKABLE_MAX:
            del self._clickable[:_CLICKABLE_MAX]
        due = int(self._stream.click_rate * elapsed) - self._clicks
        for _ in range(min(due, _EVENTS_A_TICK_MAX) if self._clickable else 0):
            self._click(elapsed)
        self._flush()  # early clicks stand before their queries even if both are due by now
        while self._held and (release_all or self._held[0][0] <= elapsed):
            _, _, log, line = heapq.heappop(self._held)
            self._put(log, line)
        self._flush()

    def truth(self) -> GeneratedTruth:
        return GeneratedTruth(
            mode="stream",
            seed=self._mix.seed,
            ids="opaque" if self._mix.opaque_ids else "photon",
            primary_rows=self._queries + self._duplicate_queries + self._malformed_queries,
            primary_distinct_ids=self._queries,
            primary_duplicates=self._duplicate_queries,
            primary_malformed=self._malformed_queries,
            foreign_rows=self._clicks + self._duplicates + self._malformed,
            foreign_distinct_ids=self._clicks,
            distinct_joined_pairs=len(self._pairs),
            orphans=self._orphans,
            duplicates=self._duplicates,
            early=self._early,
            malformed=self._malformed,
            joined_pairs_sha256=pairs_sha256(self._pairs),
        )

    def _query(self, elapsed: float, held_back_s: float = 0.0) -> str:
        """Make a query and put its line where it is due; its id."""
        at = self._rng.randrange(self._mix.files)
        text, now = self._next_id(self._query_ids[at])
        payload = self._query_payloads[self._rng.randrange(PAYLOADS)]
        (line,) = query_lines([text], [now], [self._rng.randrange(USERS)], [payload])
        log = self._query_logs[at]
        self._queries += 1
        if held_back_s:
            self._hold(elapsed + held_back_s, log, line)
        else:
            self._put(log, line)
        if self._rng.random() < self._mix.duplicate_queries:
            self._duplicate_queries += 1
            self._hold(elapsed + held_back_s + self._repeat_delay(), self._rng.choice(self._query_logs), line)
        if self._rng.random() < self._mix.malformed_queries:
            self._malformed_queries += 1
            self._put(log, spoil(line, self._rng.randrange(SPOILINGS)))
        return text

    def _click(self, elapsed: float) -> None:
        kind = self._rng.random()
        orphan = kind < self._mix.orphans
        early = not orphan and kind < self._mix.orphans + self._mix.early
        if orphan:  # an id like any other, of a query that is never logged
            primary_id, _ = self._next_id(self._rng.choice(self._query_ids))
        elif early:
            primary_id = self._query(elapsed, held_back_s=self._rng.uniform(*_HELD_BACK_S))
        else:
            back = min(int(self._delay_s() * self._stream.rate), _CLICKABLE_MAX, len(self._clickable) - 1)
            primary_id = self._clickable[-1 - back]
        at = self._rng.randrange(self._mix.files)
        text, now = self._next_id(self._click_ids[at])
        payload = self._click_payloads[self._rng.randrange(PAYLOADS)]
        (line,) = click_lines([text], [primary_id], [now], [payload])
        self._put(self._click_logs[at], line)
        self._clicks += 1
        self._early += early
        if orphan:
            self._orphans += 1
        else:
            self._pairs += pair_lines([primary_id], [text])
            if self._rng.random() < self._mix.duplicates:
                self._duplicates += 1
                self._hold(elapsed + self._repeat_delay(), self._rng.choice(self._click_logs), line)
        if self._rng.random() < self._mix.malformed:
            self._malformed += 1
            self._put(self._click_logs[at], spoil(line, self._rng.randrange(SPOILINGS)))

    def _generator(self, head: str) -> EventIdGenerator:
        server, _, process = head.rpartition(":")
        return EventIdGenerator(server, int(process), self._clock, self._clock.now_us)

    def _next_id(self, generator: EventIdGenerator) -> tuple[str, int]:
        if self._mix.opaque_ids:
            return f"{self._rng.getrandbits(128):032x}", self._clock.now_us()
        generator.synchronise_if_due()
        text = generator.next_id()
        return text, int(text.rpartition(":")[2])

    def _delay_s(self) -> float:
        """The same long tail as photon.app.generate_events.delays_us draws, one at a time."""
        share, place = self._rng.random(), self._rng.random()
        body, tail, longest = self._limits.body, self._limits.tail, self._limits.longest
        if share < 0.9:
            return min(self._rng.expovariate(6 / body), body)
        if share < 0.999:
            return float(body * (tail / body) ** place)
        return float(tail * (longest / tail) ** place)

    def _repeat_delay(self) -> float:
        return self._rng.uniform(0.0, min(_REPEATED_WITHIN_S, self._stream.duration_s / 10))

    def _flush(self) -> None:
        for log, lines in self._due.items():
            log.write(lines)
        self._due.clear()

    def _put(self, log: ServerLog, line: bytes) -> None:
        self._due.setdefault(log, []).append(line)

    def _hold(self, due: float, log: ServerLog, line: bytes) -> None:
        self._holds += 1  # keeps the order of making where two are due together; logs have no order
        heapq.heappush(self._held, (due, self._holds, log, line))


def _scaled_limits(duration_s: float) -> DelayLimits:
    """A day's delays, for a stream that lasts only so long."""
    day = DelayLimits()
    return DelayLimits(
        body=min(day.body, duration_s / 20),
        tail=min(day.tail, duration_s / 2),
        longest=min(day.longest, duration_s),
    )
