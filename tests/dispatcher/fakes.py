"""A joiner in memory, log lines, and a dispatcher set up for a test."""

import contextlib
import json
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import dispatcher.worker
from dispatcher.rules.events import Events
from dispatcher.server import DispatcherServer
from joiner.client import ForeignColumns
from photon.core.clock import Clock, SteadyClock, SystemClock
from photon.core.columns import split_ids, split_lines
from photon.core.fates import Joined
from photon.core.settings import Settings, parse_settings
from tests.fake_registry import FakeRegistry
from tests.waiting import wait_until


def click(number: int) -> dict:
    return {"id": f"click-{number}", "primary_id": f"query-{number}", "ts_us": 1_000_000 + number}


def lines(events: Iterable[object]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def clicks(low: int, high: int) -> bytes:
    return lines(click(number) for number in range(low, high))


def click_number(line: bytes) -> int:
    return int(json.loads(line)["id"].removeprefix("click-"))


class Writer(threading.Thread):
    """Writes clicks to growing files, each write ending in the middle of a line, now and then a bad one."""

    def __init__(self, logs: Path, files: int, bad_every: int, pause_s: float) -> None:
        """20 clicks a write, a bad line beside them in each `bad_every`-th."""
        super().__init__()
        self.stopping = threading.Event()
        self.bad = self.written = 0
        self._paths = [logs / f"{number}.jsonl" for number in range(files)]
        self._bad_every, self._pause_s = bad_every, pause_s

    def run(self) -> None:
        files = [path.open("ab", buffering=0) for path in self._paths]
        tails = [b""] * len(files)
        while not self.stopping.is_set():
            turn = self.written % len(files)
            text = clicks(self.written * 20, self.written * 20 + 20)
            if self.written % self._bad_every == 0:
                text += b'{"id": "no primary", "ts_us": 1}\n'
                self.bad += 1
            text = tails[turn] + text
            files[turn].write(text[:-15])
            tails[turn] = text[-15:]
            self.written += 1
            self.stopping.wait(self._pause_s)
        for file, tail in zip(files, tails, strict=True):
            file.write(tail)
            file.close()


@dataclass
class Outcomes:
    outcomes: bytes
    reasons: dict[int, str] = field(default_factory=dict)


Answer = tuple[Joined, str | None]


def always_joined(_line: bytes, _tries: int) -> Answer:
    return Joined.JOINED, None


class FakeJoiner:
    """`answer(line, tries)` decides of an event, `before(batch)` may raise or wait."""

    def __init__(
        self,
        answer: Callable[[bytes, int], Answer] = always_joined,
        before: Callable[[list[bytes]], None] = lambda _: None,
        registry: FakeRegistry | None = None,
    ) -> None:
        self.answer = answer
        self.before = before
        self.registry = registry
        self.agree: Callable[[], None] = lambda: None
        self.handed = Counter[bytes]()
        self.joined = Counter[bytes]()
        self.batches: list[int] = []
        self.sent_at: list[tuple[float, list[bytes]]] = []
        self._mutex = threading.Lock()

    def join(self, batch: ForeignColumns) -> Outcomes:
        events = split_lines(batch.events)
        count = len(events)
        assert len(batch.ids) == len(batch.primary_ids) == 16 * count
        assert len(batch.times) == len(batch.ages) == 8 * count
        tries = memoryview(batch.tries).cast("I")
        assert len(tries) == count
        self.before(events)
        with self._mutex:
            self.sent_at.append((time.monotonic(), events))
            self.batches.append(count)
            self.handed.update(events)
            outcomes, reasons = bytearray(), {}
            for row, (key, line) in enumerate(zip(split_ids(batch.ids), events, strict=True)):
                outcome, reason = self.answer(line, tries[row])
                if outcome is Joined.JOINED and self.registry is not None:
                    if key in self.registry.present:
                        outcome = Joined.DUPLICATE
                    self.registry.tokens[key] = b""
                if outcome is Joined.JOINED:
                    self.joined[line] += 1
                outcomes.append(outcome)
                if reason is not None:
                    reasons[row] = reason
        return Outcomes(bytes(outcomes), reasons)


def fast_settings(**dispatcher: object) -> Settings:
    return parse_settings(
        {
            "logs": {"scan_interval_s": 0.05, "poll_interval_ms": 5},
            "dispatcher": {"retry_delay_ms_min": 2, "retry_delay_ms_max": 20} | dispatcher,
        }
    )


class Site:
    """A directory with foreign logs in `logs`, and dispatchers over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"
        self.logs.mkdir(exist_ok=True)
        self.dead_letters = root / "dead-letters"
        self.registry = FakeRegistry()
        self.joiner = FakeJoiner()
        self.clock: Clock = SystemClock()

    def server(
        self,
        settings: Settings | None = None,
        drain: bool = False,
        patterns: Sequence[str] | None = None,
        seed: int = 1,
        eventstore: Any = None,
        worker: int = 0,
        workers: int = 1,
        datacenter: str = "dc0",
        joiners: Mapping[str, str] | None = None,
    ) -> DispatcherServer:
        place = dispatcher.worker.Site(
            settings=settings or fast_settings(),
            datacenter=datacenter,
            directory=self.root / "state",
            number=worker,
            patterns=patterns or [str(self.logs / "*.jsonl")],
            dead_letters=self.dead_letters,
            registry=self.registry,
            joiner=self.joiner,
            make_eventstore=eventstore and (lambda: eventstore),
            joiners=joiners or {},
            clock=SteadyClock(self.clock),
            rng=random.Random(seed),
            drain=drain,
        )
        return DispatcherServer(place, "d0", "127.0.0.1:0", workers=workers)

    def drain(
        self,
        settings: Settings | None = None,
        seconds: float = 20.0,
        patterns: Sequence[str] | None = None,
    ) -> dict:
        """Run until all is drained; the last status."""
        server = self.server(settings, drain=True, patterns=patterns)
        server.start()
        try:
            wait_until(lambda: server.wait(0) or server.status()["drained"], seconds)
            return server.status()
        finally:
            server.stop()

    def letters(self) -> list[dict]:
        files = sorted(self.dead_letters.glob("foreign-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


@contextlib.contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """The disk takes no file of more bytes, in this process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def adds_up(status: dict) -> bool:
    return status["foreign_events"] == sum(status["fates"].values()) + status["pending"]


def some_events(count: int, tries: int = 0, names: int = 2, first: int = 0) -> Events:
    """Events of several files, as a reader makes them."""
    rows = [json.dumps(click(first + number)).encode() for number in range(count)]
    ids = [number.to_bytes(16, "big") for number in range(first, first + count)]
    steps = np.linspace(0, count, names, endpoint=False).astype(int).tolist()
    return Events(
        ids=b"".join(ids),
        primary_ids=b"".join(key[::-1] for key in ids),
        times=np.arange(-5, count - 5, dtype="<i8").tobytes(),
        lines=rows,
        tries=np.full(count, tries, np.uint32),
        sends=np.zeros(count, np.uint32),
        first_seen=np.full(count, 1_000, np.int64),
        files=np.arange(count, dtype=np.uint32) % 3,
        offsets=np.arange(count, dtype=np.int64) * 100,
        names=[f"logs/file-ü{name}.jsonl" for name in range(names)],
        name_from=steps,
    )
