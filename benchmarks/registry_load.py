"""Load from outside client processes on a cluster, measured: what came through, how fast, at what cost.

A client is a process of its own, which keeps `threads` calls under way for a time and answers what it saw.
With `rate` the calls begin at fixed moments, and a latency counts from that moment: a queue that grows shows.
"""

import multiprocessing
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, Self

from benchmarks.measuring import percentiles
from benchmarks.registry_cluster import connect
from photon.cluster.supervisor import die_with_parent
from photon.core.columns import pack_times
from photon.core.errors import PhotonError
from photon.core.fates import Committed
from photon.core.ids import Token

WARM_S: Final = 0.7
_KNOWN_BATCHES: Final = 64
_TIMEOUT_S: Final = 15.0


class Caller(Protocol):
    """Lives in a client process."""

    def call(self, load: "Load") -> int:
        """One call; the ids in it. PhotonError, which is counted."""
        ...


class Measurable(Protocol):
    """A cluster under load."""

    def leader(self) -> str: ...

    def cpu(self, leader: str) -> dict[str, float]: ...

    def commit_index(self, node: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement. Times by the monotonic clock, which all processes of a machine share."""

    call: str
    ids_min: int
    ids_max: int
    threads: int
    begin: float
    end: float
    rate: float | None = None
    """Calls a second of this process, all threads together; None: each thread calls again at once."""


@dataclass(slots=True)
class Seen:
    """By clients. `ends`: the moment of each success; `failures`: by what they said."""

    latencies_ms: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    ids: int = 0
    cpu_s: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Seen") -> None:
        self.latencies_ms += other.latencies_ms
        self.ends += other.ends
        self.ids += other.ids
        self.cpu_s += other.cpu_s
        self.failures = dict(Counter(self.failures) + Counter(other.failures))


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one load, for `seconds`. `cores`: how many each kind of process kept busy."""

    seconds: float
    seen: Seen
    commits: int
    cores: dict[str, float]

    @property
    def ids_per_s(self) -> int:
        return round(self.seen.ids / self.seconds)

    @property
    def calls(self) -> int:
        return len(self.seen.latencies_ms)

    def rates(self) -> dict[str, int]:
        return {
            "requests_per_s": round(self.calls / self.seconds),
            "raft_commits_per_s": round(self.commits / self.seconds),
        }

    def row(self) -> dict[str, Any]:
        """The columns that all tables share."""
        return {
            "ids_per_s": self.ids_per_s,
            **percentiles(self.seen.latencies_ms),
            "failures": sum(self.seen.failures.values()),
            **{f"{who}_cores": round(value, 2) for who, value in self.cores.items()},
        }


class Clients:
    """Client processes, which end with this one."""

    def __init__(self, callers: Sequence[Callable[[], Caller]]) -> None:
        """`callers`: what makes the caller of each process, to be sent there."""
        self._callers = callers
        self._pools: list[ProcessPoolExecutor] = []
        self._under_way: list[Future[Seen]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")
        for caller in self._callers:
            pool = ProcessPoolExecutor(1, spawn, _become, (caller, os.getpid()))
            self._pools.append(self._stack.enter_context(pool))
        for ready in [pool.submit(os.getpid) for pool in self._pools]:
            ready.result()  # it runs: a load's time would pass before it
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(
        self,
        seconds: float,
        call: str = "commit",
        ids: int | tuple[int, int] = 1,
        in_flight: int = 1,
        calls_per_s: float | None = None,
    ) -> tuple[float, float]:
        """Start a load of `in_flight` calls under way in all; (begin, end) of the measured time."""
        low, high = (ids, ids) if isinstance(ids, int) else ids
        count = len(self._pools)
        threads = [in_flight // count + (n < in_flight % count) for n in range(count)]
        rate = None if calls_per_s is None else calls_per_s / sum(1 for n in threads if n)
        begin = time.monotonic() + WARM_S
        self._under_way = [
            pool.submit(_run, Load(call, low, high, some, begin, begin + seconds, rate))
            for pool, some in zip(self._pools, threads, strict=True)
        ]
        return begin, begin + seconds

    def finish(self) -> Seen:
        """What all processes saw."""
        seen = Seen()
        for one in self._under_way:
            seen.add(one.result())
        return seen


def registry_clients(addresses: Sequence[str], processes: int) -> Clients:
    """Each prefers another replica for its lookups."""
    turned = [[*addresses[n:], *addresses[:n]] for n in range(processes)]
    return Clients([partial(RegistryCaller, one) for one in turned])


_own: list[Caller] = []
"""The caller of this client process."""


def _become(caller: Callable[[], Caller], parent: int) -> None:
    die_with_parent({"PHOTON_PARENT": str(parent)})
    _own.append(caller())


def _run(load: "Load") -> Seen:
    return keep_calling(load, _own[0])


def measure(cluster: Measurable, clients: Clients, seconds: float, **load: Any) -> Measured:
    """One load, from its warm-up to the end of its last call."""
    leader = cluster.leader()
    begin, end = clients.begin(seconds, **load)
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu, commits = cluster.cpu(leader), cluster.commit_index(leader)
    time.sleep(max(0.0, end - time.monotonic()))
    cpu_then, commits = cluster.cpu(leader), cluster.commit_index(leader) - commits
    seen = clients.finish()
    cores = {who: (value - cpu[who]) / seconds for who, value in cpu_then.items()}
    return Measured(seconds, seen, commits, {**cores, "clients": seen.cpu_s / seconds})


def keep_calling(load: Load, caller: Caller) -> Seen:
    """Call from several threads until the end."""
    lock = threading.Lock()
    slot = 0
    each = [Seen() for _ in range(load.threads)]

    def next_start() -> float:
        nonlocal slot
        if load.rate is None:
            return time.monotonic()
        with lock:
            start = load.begin + slot / load.rate
            slot += 1
        if start < load.end:
            time.sleep(max(0.0, start - time.monotonic()))
        return start

    def work(seen: Seen) -> None:
        while (start := next_start()) < load.end:
            try:
                ids = caller.call(load)
            except PhotonError as error:
                seen.failures[str(error)] = seen.failures.get(str(error), 0) + 1
                continue
            done = time.monotonic()
            if load.begin <= done < load.end:
                seen.latencies_ms.append(round((done - start) * 1e3, 3))
                seen.ends.append(done)
                seen.ids += ids

    workers = [threading.Thread(target=work, args=(seen,)) for seen in each]
    for worker in workers:
        worker.start()
    time.sleep(max(0.0, load.begin - time.monotonic()))
    cpu_s = time.process_time()
    time.sleep(max(0.0, load.end - time.monotonic()))
    total = Seen(cpu_s=time.process_time() - cpu_s)
    for worker, seen in zip(workers, each, strict=True):
        worker.join()
        total.add(seen)
    return total


class RegistryCaller:
    """Commits fresh ids, and looks ids up."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._client = connect(addresses, _TIMEOUT_S)
        self._incarnation = random.getrandbits(63)
        self._lock = threading.Lock()
        self._made = 0
        self._committed: deque[tuple[bytes, bytes]] = deque(maxlen=_KNOWN_BATCHES)

    def call(self, load: Load) -> int:
        act = self._look_up if load.call == "lookup" else self._commit
        return act(random.randint(load.ids_min, load.ids_max))

    def _commit(self, count: int) -> int:
        ids, times = _fresh(count)
        with self._lock:
            self._made += 1
            token = Token("127.0.0.1:7000", self._incarnation, self._made).pack()
        outcomes = self._client.commit(ids, times, token)
        assert outcomes == bytes([Committed.WON]) * count, "every id is new"
        self._committed.append((ids, times))
        return count

    def _look_up(self, count: int) -> int:
        """Every second batch of ids that are registered, where some of this size are known."""
        known = random.random() < 0.5 and len(self._committed) > 0
        ids, times = random.choice(self._committed) if known else _fresh(count)
        self._client.lookup(ids[: 16 * count], times[: 8 * count])
        return count


def _fresh(count: int) -> tuple[bytes, bytes]:
    return os.urandom(16 * count), pack_times([time.time_ns() // 1000] * count)
