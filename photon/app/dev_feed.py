"""Writes the same queries and clicks to the logs of several datacenters, as a process of its own.

    python -m photon.app.dev_feed ARGUMENTS     (JSON, the fields of Feed)

Ends on SIGTERM, with what was held back. Each datacenter has its own copy, which reaches it up to
COPY_DELAY_S_MAX late, as copies of logs do. One click in a hundred is logged before its query, and one in a
thousand is logged again.

Where a disk is full it waits for room and makes no events meanwhile. It tells so on stdout, and why it ends
if nobody told it to (ERROR_MARK): its log may be on that disk.
"""

import heapq
import json
import random
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from photon.app.generate_events import USERS, click_lines, click_payloads, heads, query_lines, query_payloads
from photon.app.supervisor import die_with_parent
from photon.core.disk import storage_errors
from photon.core.errors import DiskFullError, StorageError

T = TypeVar("T")

ERROR_MARK: Final = "photon: "
TICK_S: Final = 0.01
COPY_DELAY_S_MAX: Final = 0.5
CLICK_DELAY_S: Final = 2.0
"""Mean time from a query to its click."""
CLICKABLE_MAX: Final = 500_000
"""So many of the last queries can still be clicked."""
EVENTS_A_TICK_MAX: Final = 20_000
EARLY: Final = 0.01
"""Of the clicks: so many are logged before their query, which comes HELD_BACK_S later."""
HELD_BACK_S: Final = (0.05, 0.5)
REPEATED: Final = 0.001
"""Of the clicks: so many are logged twice, byte for byte."""
REPEATED_WITHIN_S: Final = 2.0
ROOM_RETRY_S: Final = 0.5
_NAME: Final = re.compile(r"fed-(\d{6})\.jsonl")


@dataclass(frozen=True, slots=True)
class Feed:
    """What to write, and to which directories (with `queries` and `clicks` in them)."""

    directories: list[str]
    queries_per_s: float
    clicks_per_s: float
    seed: int


class DatacenterLogs:
    """One datacenter's copy: a file for the queries and one for the clicks of this life of the feeder.

    What is put in comes out in order, but late: by up to `delay_s_max`, which is drawn anew each second.
    """

    def __init__(self, directory: Path, name: str, rng: random.Random, delay_s_max: float) -> None:
        self._rng = rng
        self._delay_s_max = delay_s_max
        self._delay_s, self._redraw_at = 0.0, 0.0
        self._waiting: deque[tuple[float, bytes, bytes]] = deque()
        self._queries = _Log(directory / "queries" / name)
        self._clicks = _Log(directory / "clicks" / name)

    def put(self, now_s: float, queries: bytes, clicks: bytes) -> None:
        if now_s >= self._redraw_at:
            self._redraw_at = now_s + 1.0
            self._delay_s = self._rng.uniform(0.0, self._delay_s_max)
        if queries or clicks:
            self._waiting.append((now_s + self._delay_s, queries, clicks))

    def write(self, now_s: float) -> None:
        """What is due. StorageError if a log can't be written; after DiskFullError the next call goes on."""
        while True:
            self._queries.flush()
            self._clicks.flush()
            if not self._waiting or self._waiting[0][0] > now_s:
                return
            _, self._queries.left, self._clicks.left = self._waiting.popleft()

    def close(self) -> None:
        """With all that waits, as `write`."""
        self.write(float("inf"))
        self._queries.file.close()
        self._clicks.file.close()


class _Log:
    """One file. DiskFullError, StorageError."""

    def __init__(self, path: Path) -> None:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab", buffering=0)
        self.left = b""
        """What is to be written."""
        self._path = path

    def flush(self) -> None:
        with storage_errors(self._path):
            while self.left:  # a disk that fills up takes a part
                self.left = self.left[self.file.write(self.left) :]


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


class Events:
    """Makes queries and clicks at a steady rate. `now_us` is the time that they get; ids are Photon's.

    `life`: from 0 on, each life's its own: its ids are of a server process of its own.
    """

    def __init__(self, plan: Feed, rng: random.Random, now_us: Callable[[], int], life: int) -> None:
        self._plan, self._rng, self._now_us = plan, rng, now_us
        self._query_head, self._click_head = (heads(side, life + 1)[life] for side in (0, 1))
        self._query_texts, self._click_texts = query_payloads(plan.seed), click_payloads(plan.seed)
        self._clickable: list[str] = []
        self._held: list[tuple[float, int, bool, bytes]] = []
        self._holds = 0
        self._last_us = 0
        self._queries = self._clicks = 0

    def tick(self, elapsed_s: float, last: bool = False) -> tuple[bytes, bytes]:
        """The lines of queries and clicks due so long after the start; `last`: all held back, too."""
        asked = min(int(self._plan.queries_per_s * elapsed_s) - self._queries, EVENTS_A_TICK_MAX)
        self._queries += asked
        ids, times = self._ids(self._query_head, asked)
        queries = self._query_lines(ids, times)
        clicks = self._due_clicks(elapsed_s)
        self._clickable += ids
        if len(self._clickable) > 2 * CLICKABLE_MAX:
            del self._clickable[:-CLICKABLE_MAX]
        while self._held and (last or self._held[0][0] <= elapsed_s):
            _, _, is_query, line = heapq.heappop(self._held)
            (queries if is_query else clicks).append(line)
        return b"".join(queries), b"".join(clicks)

    def _due_clicks(self, elapsed_s: float) -> list[bytes]:
        due = min(int(self._plan.clicks_per_s * elapsed_s) - self._clicks, EVENTS_A_TICK_MAX)
        if due <= 0 or not self._clickable:
            return []
        self._clicks += due
        rng, known = self._rng, len(self._clickable)
        back = 1.0 / (self._plan.queries_per_s * CLICK_DELAY_S)
        clicked = [self._clickable[-1 - min(int(rng.expovariate(back)), known - 1)] for _ in range(due)]
        for at in range(due):
            if rng.random() < EARLY:
                clicked[at] = self._held_back_query(elapsed_s)
        ids, times = self._ids(self._click_head, due)
        lines = click_lines(ids, clicked, times, rng.choices(self._click_texts, k=due))
        for line in lines:
            if rng.random() < REPEATED:
                self._hold(elapsed_s + rng.uniform(0.0, REPEATED_WITHIN_S), False, line)
        return lines

    def _held_back_query(self, elapsed_s: float) -> str:
        ids, times = self._ids(self._query_head, 1)
        self._hold(elapsed_s + self._rng.uniform(*HELD_BACK_S), True, self._query_lines(ids, times)[0])
        return ids[0]

    def _query_lines(self, ids: list[str], times: range) -> list[bytes]:
        users = self._rng.choices(range(USERS), k=len(ids))
        return query_lines(ids, times, users, self._rng.choices(self._query_texts, k=len(ids)))

    def _ids(self, head: str, count: int) -> tuple[list[str], range]:
        first = max(self._now_us(), self._last_us + 1)
        times = range(first, first + count)
        self._last_us = first + count
        return [f"{head}:{time_us}" for time_us in times], times

    def _hold(self, due_s: float, is_query: bool, line: bytes) -> None:
        self._holds += 1  # of two that are due together the first goes first
        heapq.heappush(self._held, (due_s, self._holds, is_query, line))


def last_life(directory: str) -> int:
    """That of the last feeder that wrote to it; -1 if none has. The clock does not tell: it may step back."""
    found = [_NAME.fullmatch(path.name) for path in Path(directory).glob("*/*.jsonl")]
    return max((int(match[1]) for match in found if match is not None), default=-1)


def feed(plan: Feed, stopped: threading.Event, tell: Callable[[str], None]) -> None:
    """Write until `stopped`, then what was held back. StorageError."""
    rng = random.Random(plan.seed)
    life = 1 + max(map(last_life, plan.directories))
    name = f"fed-{life:06d}.jsonl"
    room = Room(stopped, tell)
    copies = [
        room.wait_to(partial(DatacenterLogs, Path(path), name, rng, COPY_DELAY_S_MAX))
        for path in plan.directories
    ]
    events = Events(plan, rng, lambda: time.time_ns() // 1_000, life)
    began = time.monotonic() - room.waited_s
    while True:
        over = stopped.wait(TICK_S)
        now = time.monotonic() - began - room.waited_s
        queries, clicks = events.tick(now, last=over)
        for copy in copies:
            copy.put(now, queries, clicks)
        for copy in copies:
            room.wait_to(partial(copy.write, now))
        if over:
            break
    for copy in copies:
        room.wait_to(copy.close)


def _tell(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Exit status 1 where a log can't be written."""
    die_with_parent()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        feed(Feed(**json.loads(sys.argv[1])), stopped, _tell)
    except StorageError as error:
        _tell(f"{ERROR_MARK}{error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
