"""The feeder of `photon dev` and of benchmarks: generated events for several datacenters at once.

    python -m photon.dev.feeder ARGUMENTS     (JSON, the fields of Feed)

writes the same events to the logs of several datacenters until SIGTERM, then what was held back. Each
datacenter has its own copy, which reaches it up to `copy_delay_s_max` late, as copies of logs do. Where a
disk is full it waits for room and makes no events meanwhile. It says so on stdout, and why it ends if nobody
told it to (ERROR_MARK): its log may be on that disk.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from photon.cluster.supervisor import child_environment, die_with_parent, last_message
from photon.core.clock import SystemClock
from photon.core.disk import storage_errors
from photon.core.errors import DiskFullError, PhotonError, StorageError
from photon.core.signals import on_signals
from photon.dev.generated_live import TICK_S, LiveEvents, Times, ticks
from photon.dev.generated_logs import CLICKS, QUERIES, SIDES, Ints, Mix, Stream, heads

T = TypeVar("T")

COMMAND: Final = (sys.executable, "-m", "photon.dev.feeder")
END_S_MAX: Final = 10.0
ERROR_MARK: Final = "photon: "
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


class FeederEndedError(PhotonError):
    """It has ended before it was told to, or without its last events."""


class Feeder:
    """Starts it; it dies with this process."""

    def __init__(
        self, directories: Sequence[Path], queries_per_s: float, clicks_per_s: float, seed: int, log: Path
    ) -> None:
        plan = Feed(
            [str(path) for path in directories],
            queries_per_s,
            clicks_per_s,
            seed,
            copy_delay_s_max=COPY_DELAY_S_MAX,
            early=EARLY,
            repeated=REPEATED,
        )
        self._directories, self._life_before = plan.directories, max(map(last_life, plan.directories))
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, json.dumps(asdict(plan))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                env=child_environment(),
                start_new_session=True,
            )
        assert self._process.stdout is not None, "a pipe"
        self._told = self._process.stdout
        os.set_blocking(self._told.fileno(), False)
        self._rest, self._error = b"", ""
        self.notices: list[str] = []
        """What it has to say for a person; the caller takes them after `check`."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_begun(self) -> bool:
        """Whether its files are there: its time counts from then on."""
        return all(last_life(directory) > self._life_before for directory in self._directories)

    def check(self) -> None:
        """FeederEndedError if it has ended by itself."""
        status = self._process.poll()
        self._listen(ended=status is not None)
        if status is not None:
            raise FeederEndedError(self._why(status))

    def stop(self) -> None:
        """It writes what it holds back, and ends. FeederEndedError if it had ended already, or could not."""
        self.check()
        self._process.terminate()
        try:
            status = self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise FeederEndedError(
                f"the feeder did not write its last events within {END_S_MAX:.0f} s and was killed; its logs "
                "may lack queries of their clicks"
            ) from None
        self._listen(ended=True)
        if status not in (0, -signal.SIGTERM):  # by the signal: told before it had begun
            raise FeederEndedError(self._why(status))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listen(ended=True)

    def _listen(self, ended: bool) -> None:
        if self._told.closed:
            return
        *lines, self._rest = (self._rest + (self._told.read() or b"")).split(b"\n")
        for line in (line.decode("utf-8", "replace") for line in lines):
            if line.startswith(ERROR_MARK):
                self._error = line.removeprefix(ERROR_MARK)
            else:
                self.notices.append(f"the feeder: {line}")
        if ended:
            self._told.close()

    def _why(self, status: int) -> str:
        if status < 0:
            return f"the feeder was killed by signal {-status}"
        return f"the feeder (exit status {status}): {self._error or last_message(self._log, self._log_start)}"


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
    """Exit status 1 where a log can't be written. Prints the fields of Fed if its time was over."""
    die_with_parent()
    stopped = threading.Event()
    on_signals(stopped.set, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell = partial(print, flush=True)
    try:
        fed = feed(Feed(**json.loads(sys.argv[1])), stopped, tell)
    except StorageError as error:
        tell(f"{ERROR_MARK}{error}")
        sys.exit(1)
    if not stopped.is_set():
        tell(json.dumps(asdict(fed)))


if __name__ == "__main__":
    main()
