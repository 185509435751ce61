"""Three registry replicas of this machine, each a `photon registry serve`, and the load on them, measured.

A client is a process of its own, which keeps `threads` calls under way for a time and answers what it saw.
"""

import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import BenchError, Row, cpu_seconds, percentiles
from idregistry.client import RegistryClient
from photon.cluster.local_cluster import free_ports
from photon.cluster.supervisor import child_environment, die_with_parent, last_message
from photon.cluster.topology import Replica, Topology, write_topology
from photon.core.clock import SystemClock
from photon.core.columns import pack_times
from photon.core.errors import PhotonError
from photon.core.fates import Committed
from photon.core.ids import Token
from photon.core.settings import MAIN_SET, parse_settings
from photon.rpc.servers import StatusClient

NODES: Final = ("r0", "r1", "r2")
_READY_S: Final = 60.0
_POLL_S: Final = 0.02
_STATUS_S: Final = 2.0


class Cluster:
    """What `running` gives."""

    def __init__(self, directory: Path, command: Sequence[str], sets: int = 1) -> None:
        names = [MAIN_SET, *(f"set{n}" for n in range(1, sets))]
        self.sets = {f"r{n}": names[n // len(NODES)] for n in range(sets * len(NODES))}
        """Replica -> its set."""
        ports = free_ports(2 * len(self.sets), random.Random())
        self.grpc = {node: f"127.0.0.1:{ports.pop()}" for node in self.sets}
        self.raft = {node: ports.pop() for node in self.sets}
        self.addresses = list(self.grpc.values())
        self._directory = directory
        self._command = command
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._statuses = {n: StatusClient("registry", at, _STATUS_S) for n, at in self.grpc.items()}

    def close(self) -> None:
        for node in tuple(self._processes):
            self.kill(node)
        for asking in self._statuses.values():
            asking.close()

    def found(self, settings: Mapping[str, object], dialed: Mapping[str, int]) -> None:
        """Start all replicas; they reach each other at the ports `dialed`."""
        replicas = []
        for node, grpc in self.grpc.items():
            raft, bound = (f"127.0.0.1:{ports[node]}" for ports in (dialed, self.raft))
            home = str(self._directory / node)
            replicas.append(
                Replica(
                    datacenter="",
                    name=node,
                    grpc=grpc,
                    raft=raft,
                    set=self.sets[node],
                    listen_raft=bound,
                    directory=home,
                )
            )
        registry = parse_settings({"registry": dict(settings)})
        topology = Topology(registry, [], [], "", os.urandom(16).hex(), False, replicas, [])
        write_topology(topology, self._directory / "topology.json")
        for node in self.sets:
            self.start(node)
        self.leader()
        self.wait_until_even()

    def start(self, node: str) -> None:
        """Start a replica that is down."""
        serve = ["registry", "serve", "--topology", str(self._directory / "topology.json"), "--name", node]
        # What replicas say of each other while they start and die is not the measurement's matter.
        with self.log(node).open("ab") as log:
            self._processes[node] = subprocess.Popen(
                [sys.executable, "-m", *self._command, *serve], env=child_environment(), stderr=log
            )

    def kill(self, node: str) -> float:
        """SIGKILL; the moment of it, by the monotonic clock."""
        process = self._processes.pop(node)
        at = time.monotonic()
        process.kill()
        process.wait()
        return at

    def log(self, node: str) -> Path:
        """What a replica says on standard error."""
        return self._directory / f"{node}.log"

    def shards(self, node: str) -> list[dict[str, Any]]:
        """What a replica says of each of its shards; empty while it does not answer."""
        with suppress(PhotonError):
            return list(self._statuses[node].status()["shards"])
        return []

    def status(self, node: str) -> dict[str, Any]:
        """The same of shard 0."""
        return next((one for one in self.shards(node) if one["shard"] == 0), {})

    def leader(self) -> str:
        """The node that leads shard 0, once there is one."""

        def leading() -> str | None:
            found = [node for node in self._processes if self.status(node).get("is_leader")]
            return found[0] if len(found) == 1 else None

        return str(self._until(leading, "no leader"))

    def wait_until_settled(self, seconds: float) -> None:
        """Until nobody else led for this long: a replica that comes back may be handed the lead it had."""
        seen = [("", 0.0)]

        def settled() -> bool:
            if (leader := self.leader()) != seen[-1][0]:
                seen.append((leader, time.monotonic()))
            return time.monotonic() - seen[-1][1] >= seconds

        self._until(settled, "the lead changed hands")

    def wait_until_even(self) -> None:
        """Until all replicas run and none lags."""

        def even() -> bool:
            applied = [self.status(node).get("applied_index", -1) for node in NODES]
            return bool(min(applied) >= 0 and max(applied) - min(applied) < 100)

        self._until(even, "a replica did not catch up")

    @property
    def pids(self) -> dict[str, int]:
        """Of the replicas that run."""
        return {node: process.pid for node, process in self._processes.items()}

    def meter(self) -> Callable[[], tuple[dict[str, float], int]]:
        """Of the one that leads now and the followers: CPU seconds, and Raft entries committed so far."""
        leader = self.leader()
        pids = self.pids
        groups = {"leader": [pids.pop(leader)], "followers": list(pids.values())}

        def read() -> tuple[dict[str, float], int]:
            used = {who: cpu_seconds(group) for who, group in groups.items()}
            return used, int(self.status(leader).get("commit_index", 0))

        return read

    def _until(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            if value := found():
                return value
            time.sleep(_POLL_S)
        said = "; ".join(last_message(log) for log in sorted(self._directory.glob("*.log")))
        raise BenchError(f"{what} within {_READY_S:g} s: {said}")


def connect(addresses: Sequence[str], timeout_s: float) -> RegistryClient:
    """A client, `addresses` with the nearest first."""
    return RegistryClient(list(addresses), timeout_s, SystemClock(), random.Random())


def has_toxiproxy() -> bool:
    """Whether there can be long links: the server and the test suite's requirements are here."""
    try:
        from tests.faults.kit.toxiproxy import toxiproxy_binary
    except ImportError:
        return False
    return toxiproxy_binary() is not None


def _delayed(stack: ExitStack, ports: Mapping[str, int], delay_ms: float) -> dict[str, int]:
    """Node -> a port that leads to its own, later. ToxiproxyError if there is no server."""
    from tests.faults.kit.toxiproxy import ToxiproxyServer, need_toxiproxy

    proxies = stack.enter_context(closing(ToxiproxyServer(need_toxiproxy())))
    listens = proxies.create({node: f"127.0.0.1:{port}" for node, port in ports.items()}, ports.values())
    for node in ports:
        for stream in ("upstream", "downstream"):
            proxies.add(node, "latency", stream, {"latency": round(delay_ms)}, 1.0)
    return {node: int(address.rpartition(":")[2]) for node, address in listens.items()}


# --- load

WARM_S: Final = 0.7
_KNOWN_BATCHES: Final = 64
_TIMEOUT_S: Final = 15.0
_RACED_US: Final = 1_700_000_000_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """What one process does. Times by the monotonic clock, which all processes of a machine share.

    `ids`: from, to, a call. `rate`: calls a second, begun at fixed moments from which a latency counts, so
    that a queue that grows shows; None: each thread calls again at once.
    """

    threads: int
    begin: float
    end: float
    rate: float | None
    call: str = "commit"
    ids: tuple[int, int] = (1, 1)


Caller = Callable[[Load], int]
"""Lives in a client process; makes one call, and returns the number of ids in it. PhotonError is counted."""
Meter = Callable[[], tuple[dict[str, float], int]]
"""CPU seconds so far by kind of process, Raft commits so far."""


@dataclass(slots=True)
class Seen:
    """By clients. `ends`: the moment of each success; `failures`: by what they said."""

    latencies_ms: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    ids: int = 0
    cpu_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Seen") -> None:
        self.latencies_ms += other.latencies_ms
        self.ends += other.ends
        self.ids += other.ids
        self.cpu_s += other.cpu_s
        self.failures += other.failures


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one load, for `seconds`. `cores`: how many each kind of process kept busy."""

    seconds: float
    seen: Seen
    commits: int
    cores: dict[str, float]

    def row(self) -> Row:
        seen = self.seen
        return {
            "requests_per_s": round(len(seen.latencies_ms) / self.seconds, 1),
            "raft_commits_per_s": round(self.commits / self.seconds, 1),
            "ids_a_commit": round(seen.ids / max(1, self.commits), 1),
            "ids_per_s": round(seen.ids / self.seconds),
            **percentiles(seen.latencies_ms),
            "failures": seen.failures.total(),
            **{f"{who}_cores": round(value, 2) for who, value in self.cores.items()},
        }


class Clients:
    """Client processes."""

    def __init__(self, pools: Sequence[ProcessPoolExecutor]) -> None:
        self._pools = pools
        self._under_way: list[Future[Seen]] = []

    def begin(
        self, seconds: float, in_flight: int = 1, calls_per_s: float | None = None, **load: Any
    ) -> tuple[float, float]:
        """Start `in_flight` calls under way in all; (begin, end) of the measured time. `load`: as in Load."""
        count = len(self._pools)
        threads = [in_flight // count + (n < in_flight % count) for n in range(count)]
        rate = None if calls_per_s is None else calls_per_s / sum(1 for n in threads if n)
        begin = time.monotonic() + WARM_S
        loads = [Load(some, begin, begin + seconds, rate, **load) for some in threads]
        self._under_way = [pool.submit(_run, one) for pool, one in zip(self._pools, loads, strict=True)]
        return begin, begin + seconds

    def ask(self, what: Callable[[Caller], Any]) -> list[Any]:
        """What `what` finds in the caller of each process."""
        return [pool.submit(_ask, what).result() for pool in self._pools]

    def finish(self) -> Seen:
        """What all processes saw."""
        seen = Seen()
        for one in self._under_way:
            seen.add(one.result())
        return seen


@contextmanager
def client_processes(callers: Sequence[Callable[[], Caller]]) -> Iterator[Clients]:
    """They end with this one. `callers`: what makes the caller of each process, to be sent there."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [ProcessPoolExecutor(1, spawn, _become, (caller, os.getpid())) for caller in callers]
        for ready in [stack.enter_context(pool).submit(os.getpid) for pool in pools]:
            ready.result()  # it runs: a load's time would pass before it
        yield Clients(pools)


@contextmanager
def running(
    parent: Path,
    clients: int = 2,
    settings: Mapping[str, object] | None = None,
    delay_ms: float = 0.0,
    command: Sequence[str] = ("photon.cli.main",),
    sets: int = 1,
) -> Iterator[tuple[Cluster, Clients]]:
    """A cluster, killed and its files deleted in the end, and clients, each nearest to another replica.

    With `delay_ms` a replica's Raft port is reached only through a toxiproxy. `command`: a module that takes
    photon's arguments. `sets`: of three replicas each; the clients know those of the first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(prefix="registry-", dir=parent, ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(scratch)).absolute()
        cluster = stack.enter_context(closing(Cluster(directory, command, sets)))
        cluster.found(settings or {}, _delayed(stack, cluster.raft, delay_ms) if delay_ms else cluster.raft)
        main = cluster.addresses[: len(NODES)]
        turned = [main[n:] + main[:n] for n in range(clients)]
        calling = client_processes([partial(RegistryCaller, one) for one in turned])
        yield cluster, stack.enter_context(calling)


_own: list[Caller] = []
"""The caller of this client process."""


def _become(caller: Callable[[], Caller], parent: int) -> None:
    die_with_parent({"PHOTON_PARENT": str(parent)})
    _own.append(caller())


def _run(load: Load) -> Seen:
    return keep_calling(load, _own[0])


def _ask(what: Callable[[Caller], Any]) -> Any:
    return what(_own[0])


def measure(meter: Meter, clients: Clients, seconds: float, **load: Any) -> Measured:
    """One load, from its warm-up to the end of its last call."""
    begin, end = clients.begin(seconds, **load)
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu_s, commits = meter()
    time.sleep(max(0.0, end - time.monotonic()))
    cpu_s_then, commits_then = meter()
    seen = clients.finish()
    cores = {who: (value - cpu_s[who]) / seconds for who, value in cpu_s_then.items()}
    return Measured(seconds, seen, commits_then - commits, {**cores, "clients": seen.cpu_s / seconds})


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
                ids = caller(load)
            except PhotonError as error:
                seen.failures[str(error)] += 1
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
    """Commits fresh ids, or the same as every other caller, and looks ids up.

    `raced`: the outcomes of what the others commit, too, by load and number of the batch.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._client = connect(addresses, _TIMEOUT_S)
        self._incarnation = random.getrandbits(63)
        self._lock = threading.Lock()
        self._made = 0
        self._numbers: defaultdict[float, Iterator[int]] = defaultdict(itertools.count)
        self.raced: dict[tuple[float, int], bytes] = {}
        self._committed: deque[tuple[bytes, bytes]] = deque(maxlen=_KNOWN_BATCHES)

    def __call__(self, load: Load) -> int:
        count = random.randint(*load.ids)
        match load.call:
            case "lookup":
                return self._look_up(count)
            case "race":
                return self._race(load.begin, count)
            case _:
                return self._commit(count)

    def _race(self, load: float, count: int) -> int:
        with self._lock:
            batch = load, next(self._numbers[load])
        ids = random.Random(repr(batch)).randbytes(16 * count)
        times = pack_times([_RACED_US] * count)
        self.raced[batch] = self._client.commit(ids, times, self._token())
        return count

    def _token(self) -> bytes:
        with self._lock:
            self._made += 1
            return Token("127.0.0.1:7000", self._incarnation, self._made).pack()

    def _commit(self, count: int) -> int:
        ids, times = _fresh(count)
        outcomes = self._client.commit(ids, times, self._token())
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
