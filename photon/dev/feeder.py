"""The feeder of `photon dev` and of benchmarks: generated events for several datacenters at once.

It writes the same events to the logs of several datacenters. Each has its own copy, which reaches it up to
`copy_delay_s_max` late, as copies of logs do. Where a disk is full it waits for room and makes no events
meanwhile.

    python -m photon.dev.feeder ARGUMENTS     (JSON, the fields of Feed)

does so in a process of its own, for benchmarks, and prints the fields of Fed.
"""

import json
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from photon.core.clock import SystemClock
from photon.core.disk import storage_errors
from photon.core.errors import DiskFullError, StorageError
from photon.dev.generated_live import TICK_S, LiveEvents, Times, ticks
from photon.dev.generated_logs import CLICKS, QUERIES, SIDES, Ints, Mix, Stream, heads

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
