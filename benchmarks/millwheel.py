"""`photon bench millwheel`: computations measured from log lines to sink files, every output checked."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.measuring import (
    ROOT,
    BenchError,
    ProcessTree,
    Row,
    Tail,
    Usage,
    fresh,
    machine_now,
    percentiles,
)
from benchmarks.millwheel_topologies import CACHED
from benchmarks.peer_runs import Peer, PeerRun, chosen, interpreters, missing, run_peer
from photon.cluster.local_cluster import free_ports
from photon.cluster.wheels import DEPLOY_S, ask
from photon.core.errors import PhotonError
from photon.dev.demo import odd_windows

SEED: Final = 11
SECOND_US: Final = 1_000_000
LINES_A_SECOND: Final = 10_000
"""Of event time."""
LIVE_LINES_PER_S: Final = 1_000
LIVE_WORKERS: Final = (1, 2, 4, 8)
KILLS: Final = 5
CACHES: Final = (500, 2_000, 8_000, 32_000, 200_000)
"""Keys; the last one is what a worker has."""
START_S_MAX: Final = 30.0
END: Final = "end"
"""The key of the line that ends a peer's log."""
Found = Counter[tuple[str, int, int]]
"""Key, second, count: of each line in the sink."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`keys`: how many there are to choose from; `skew`: of Zipf's law, 0 for keys that are all alike;
    `pad`: bytes of a line beside key and time."""

    keys: int
    skew: float = 0.0
    pad: int = 0


SHAPES: Final = {
    "few keys": Shape(500),
    "skewed": Shape(5_000, skew=1.0, pad=300),
    "many keys": Shape(300_000, pad=100),
}


@dataclass(frozen=True)
class Plan:
    """`lines`: of a log; `runs`: of which the median is told."""

    directory: Path
    lines: int = 1_000_000
    runs: int = 3
    live_seconds: float = 15.0
    store: str = ""

    @classmethod
    def of(cls, directory: Path, quick: bool, lines: int, **given: Any) -> Self:
        """As asked for; `quick`: a twentieth of it, once."""
        return (
            cls(directory, lines // 20, runs=1, live_seconds=2.0, store=given["store"])
            if quick
            else cls(directory, lines, **given)
        )


@dataclass(frozen=True, slots=True)
class Written:
    """Logs and what is in them: keys by number and their times."""

    directory: Path
    codes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]

    def counts(self) -> Found:
        """By key and second."""
        pairs = np.stack([self.codes, self.times // SECOND_US], axis=1)
        distinct, counts = np.unique(pairs, axis=0, return_counts=True)
        return Counter(
            (f"key-{code}", second * SECOND_US, count)
            for (code, second), count in zip(distinct.tolist(), counts.tolist(), strict=True)
        )


def written(directory: Path, shape: Shape, lines: int) -> Written:
    """Four files whose lines are within a second of their order by time; the same ones each time."""
    random = np.random.default_rng(SEED)
    if shape.skew:
        weights = 1 / np.arange(1, shape.keys + 1) ** shape.skew
        codes = random.choice(shape.keys, lines, p=weights / weights.sum())
    else:
        codes = random.integers(shape.keys, size=lines)
    begin = 1_700_000_000 * SECOND_US
    times = begin + np.arange(lines) * SECOND_US // LINES_A_SECOND + random.integers(SECOND_US, size=lines)
    pad = f', "page": "{"x" * shape.pad}"' if shape.pad else ""
    logs = fresh(directory / "logs")
    rows = list(zip(codes.tolist(), times.tolist(), strict=True))
    for part in range(4):
        (logs / f"{part}.jsonl").write_text(
            "".join([f'{{"key": "key-{code}", "ts_us": {ts}{pad}}}\n' for code, ts in rows[part::4]])
        )
    return Written(directory, codes, times)


@contextmanager
def running(directory: Path, topology: str, workers: int, *options: str, cached: int | None = None) -> Any:
    """The command over a new work directory; killed in the end if it still runs. `cached`: keys."""
    for name in ("work", "out"):
        shutil.rmtree(directory / name, ignore_errors=True)
    with started(directory, topology, workers, *options, cached=cached) as process:
        yield process


@contextmanager
def started(
    directory: Path, topology: str, workers: int, *options: str, work: str = "work", cached: int | None = None
) -> Any:
    """As `running`, beside what is there."""
    name = f"benchmarks.millwheel_topologies:{topology}"
    command = [sys.executable, "-m", "photon.cli.main", "millwheel", "run", name, "--work", work, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if cached is not None:
        environment[CACHED] = str(cached)
    with subprocess.Popen(
        [*command, "--workers", str(workers), *options],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Its summary. BenchError for another status than 0."""
    said, _ = process.communicate()
    if process.returncode != 0:
        raise BenchError(f"photon millwheel run ended with status {process.returncode}")
    summary: dict[str, Any] = json.loads(said)
    return summary


def drained(
    logs: Written, topology: str, workers: int, kills: int = 0, cached: int | None = None
) -> tuple[float, Usage, int]:
    """Wall seconds, start included, over logs that grow no more; its cost; how many workers were killed."""
    began = time.monotonic()
    killed = 0
    with running(logs.directory, topology, workers, cached=cached) as process:
        tree = ProcessTree(process.pid)
        while killed < kills and process.poll() is None:
            time.sleep(0.4)
            for child in psutil.Process(process.pid).children()[-1:]:
                child.send_signal(signal.SIGKILL)
                killed += 1
        process.wait()
        seconds = time.monotonic() - began
        usage = tree.stop(ended=True)
        finish(process)
    return seconds, usage, killed


def check_counts(logs: Written, truth: Found) -> None:
    """BenchError unless each count is there once."""
    found = _counted((logs.directory / "out" / "counts").glob("*.jsonl"))
    if found != truth:
        raise BenchError(
            f"wrong output: {(truth - found).total():,} counts are missing, "
            f"{(found - truth).total():,} are too many"
        )


def _counted(paths: Iterable[Path]) -> Found:
    found: Found = Counter()
    for path in paths:
        with path.open("rb") as file:
            for line in map(json.loads, file):
                found[line["key"], line["start_us"], line["count"]] += line.get("diff", 1)
    return found


def odd_ones(counts: Found, learn: int = 20, sigmas: float = 3.0, row: int = 3) -> Counter[str]:
    """What Zeitgeist tells, computed anew: key by key over all of its seconds."""
    by_key: dict[str, dict[int, int]] = {}
    for key, start, number in counts:
        by_key.setdefault(key, {})[start // SECOND_US] = number
    return Counter(
        f"{key} {kind} {second * SECOND_US}"
        for key, seconds in by_key.items()
        for second, kind in odd_windows(seconds, learn, sigmas, row)
    )


def check_odd(logs: Written, truth: Counter[str]) -> None:
    """BenchError unless all that is odd was told once."""
    found: Counter[str] = Counter()
    for path in (logs.directory / "out" / "odd").glob("*.jsonl"):
        with path.open("rb") as file:
            found.update(f"{line['key']} {line['kind']} {line['start_us']}" for line in map(json.loads, file))
    if found != truth:
        raise BenchError(f"wrong output: of {truth.total()} odd seconds, {(truth & found).total()} were told")


# --- the parts


def throughput(plan: Plan, tell: Callable[[str], object]) -> list[Row]:
    """Logs that grow no more, from start to end."""
    rows = []
    for name, shape in SHAPES.items():
        logs = written(plan.directory, shape, plan.lines)
        truth = logs.counts()
        jobs = [("WINDOWS", 2, 0), ("WINDOWS", 1, 0), ("RECORDS", 1, 0), ("WINDOWS", 2, KILLS)]
        # A key that comes now and then costs Zeitgeist a timer a second: that is another benchmark.
        jobs += [("ZEITGEIST", 2, 0)] if shape.keys < 10_000 else []
        for topology, workers, kills in jobs:
            tell(f"{name}, {topology.lower()}, {workers} workers{', kills' if kills else ''}")
            runs = []
            for _ in range(plan.runs):
                runs.append(drained(logs, topology, workers, kills))
                check_counts(logs, truth)
                if topology == "ZEITGEIST":
                    check_odd(logs, odd_ones(truth))
            seconds, usage, killed = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
            row: Row = {"shape": name, "job": topology.lower(), "workers": workers, "kills": killed}
            row |= {"lines": plan.lines, "seconds": round(seconds, 2)}
            row |= {"lines_per_s": round(plan.lines / seconds), "cpu_s": usage.cpu_s}
            rows.append(row | {"peak_mib": usage.peak_mib})
    return rows


def latency(plan: Plan, tell: Callable[[str], object]) -> list[Row]:
    """Lines that come one by one, from the write of each to its line readable in the sink; beside the paper's
    figures for a single stage on 200 CPUs. Weak productions are without exactly-once. `watermark`: how far
    the last stage's is behind the source's."""
    paper: Row = {"engine": "MillWheel, paper 8.1", "stages": 1}
    rows: list[Row] = [
        paper | {"productions": "weak", "p50_ms": 3.6, "p95_ms": 30.0},
        paper | {"productions": "strong", "p50_ms": 33.7, "p95_ms": 93.8},
    ]
    shapes = itertools.product(("WEAK_", ""), (("STAGE", 1), ("STAGES", 3)), LIVE_WORKERS)
    for weak, (topology, stages), workers in shapes:
        productions = "weak" if weak else "strong"
        tell(f"latency, {stages} stages, {productions}, {workers} workers")
        directory = fresh(plan.directory / "live")
        (directory / "logs").mkdir()
        last = "echo" if stages == 1 else "third"
        with running(directory, f"{weak}{topology}", workers, "--follow") as process:
            live = Live(directory)
            live.run(plan.live_seconds, last)
            process.send_signal(signal.SIGTERM)
            finish(process)
        row: Row = {"engine": "here", "stages": stages, "productions": productions, "workers": workers}
        row |= {"lines": len(live.sent)} | percentiles(live.latencies_ms(), (50, 95, 99))
        rows.append(
            row | {f"watermark_{key}": value for key, value in percentiles(live.lags_ms, (50, 95)).items()}
        )
    return rows


def cache(plan: Plan, tell: Callable[[str], object]) -> list[Row]:
    """CPU of the worker, its store within, by the number of keys whose state it keeps in memory, windows of a
    second over 20,000 keys each (paper Fig. 16). `cpu`: of the most."""
    rows: list[Row] = []
    logs = written(plan.directory, SHAPES["many keys"], plan.lines)
    truth = logs.counts()
    for cached in CACHES:
        tell(f"cache, {cached:,} keys")
        costs = []
        for _ in range(plan.runs):
            costs.append(drained(logs, "RECORDS", 1, cached=cached)[1])
            check_counts(logs, truth)
        usage = sorted(costs, key=lambda cost: cost.cpu_s)[len(costs) // 2]
        rows.append({"cached_keys": cached, "cpu_s": usage.cpu_s, "peak_mib": usage.peak_mib})
    most = max(row["cpu_s"] for row in rows)
    return [row | {"cpu": round(row["cpu_s"] / most, 2)} for row in rows]


def recovery(plan: Plan, tell: Callable[[str], object]) -> list[Row]:
    """Lines that come one by one while a worker of two is killed, or new code is deployed, each with a share
    of so many keys, a state and a timer each: the longest that a line waited, and how many waited over 0.1 s.
    """
    rows: list[Row] = []

    def kill(process: "subprocess.Popen[bytes]", _: Path) -> None:
        psutil.Process(process.pid).children()[-1].send_signal(signal.SIGKILL)

    def deploy(_: "subprocess.Popen[bytes]", work: Path) -> None:
        ask(work, "deploy", timeout_s=DEPLOY_S)

    for fault, does in {"none": None, "a worker is killed": kill, "new code": deploy}.items():
        tell(f"recovery, {plan.lines:,} keys, {fault}")
        directory = fresh(plan.directory / "live")
        (directory / "logs").mkdir()
        now = time.time_ns() // 1_000
        with (directory / "logs" / "keys.jsonl").open("w") as log:
            log.writelines(f'{{"key": "key-{n}", "ts_us": {now}, "n": -2}}\n' for n in range(plan.lines))
        with running(directory, "WAITING", 2, "--follow") as process:
            _await(
                directory / "work",
                lambda told: told["counts"].get("echo", {}).get("records", 0) >= plan.lines,
                START_S_MAX + plan.lines / 10_000,
            )
            live = Live(directory)
            live.run(plan.live_seconds, "echo", partial(does, process, directory / "work") if does else int)
            process.send_signal(signal.SIGTERM)
            restarts = finish(process)["restarts"]
        rows.append({"fault": fault, "keys": plan.lines, "restarts": restarts, **live.waited()})
    return rows


def machines(plan: Plan, tell: Callable[[str], object]) -> list[Row]:
    """Lines that come one by one to a run of two machines, one worker each, whose state is in the database
    `store`, while one of them comes or goes. As `recovery`."""
    if not plan.store:
        raise BenchError("machines: name a PostgreSQL server by --store (docs/millwheel.md says which)")
    rows: list[Row] = []
    for fault in ("none", "a machine comes", "one leaves", "one is killed", "the one that leads is killed"):
        tell(f"machines, {fault}")
        rows.append({"fault": fault, **_moving(plan, fault)})
    return rows


def _moving(plan: Plan, fault: str) -> Row:
    directory = fresh(plan.directory / "live")
    (directory / "logs").mkdir()
    store = f"{plan.store}{'&' if '?' in plan.store else '?'}schema=bench{time.time_ns()}"
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2, random.Random()))
    options = ("--follow", "--store", store, "--machine")
    with running(directory, "STAGE", 1, *options, first) as one, ExitStack() as held:
        _await(directory / "work", lambda told: len(told["processes"]) == 1)
        two: list[subprocess.Popen[bytes]] = []

        def comes() -> None:
            two.append(held.enter_context(started(directory, "STAGE", 1, *options, second, work="two")))

        if fault != "a machine comes":
            comes()
            _await(directory / "work", lambda told: len(told["processes"]) == 2)
        does: dict[str, Callable[[], object]] = {
            "none": int,
            "a machine comes": comes,
            "one leaves": lambda: two[0].send_signal(signal.SIGTERM),
            "one is killed": lambda: _kill_all(two[0].pid),
            "the one that leads is killed": lambda: _kill_all(one.pid),
        }
        live = Live(directory)
        live.run(plan.live_seconds, "echo", does[fault])
    return live.waited()


def _kill_all(pid: int) -> None:
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        one.send_signal(signal.SIGKILL)


def _await(work: Path, holds: Callable[[dict[str, Any]], bool], within_s: float = START_S_MAX) -> None:
    """Until that holds of the run's status. BenchError if it does not."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with suppress(PhotonError):
            if holds(ask(work, "status")):
                return
        time.sleep(0.1)
    raise BenchError(f"the run was not as far as it should be within {within_s:g} s")


class Live:
    """A log that grows by a line each millisecond, and the sink's files, read as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.sent: list[int] = []
        self._got: dict[int, int] = {}
        self.lags_ms: list[float] = []
        self._over = threading.Event()

    def run(self, seconds: float, last: str, halfway: Callable[[], object] = lambda: None) -> None:
        """BenchError unless each line arrives once. The first second is no part of the figures. `halfway`: is
        done beside it, to its end; what it raises is raised."""
        watcher = threading.Thread(target=self._watch, args=(last,))
        with (
            ThreadPoolExecutor(1) as beside,
            (self._directory / "logs" / "a.jsonl").open("wb", buffering=0) as log,
        ):
            self._await_start(log)
            watcher.start()
            reader = threading.Thread(target=self._read)
            reader.start()
            try:
                began = time.monotonic()
                for n in range(round(seconds * LIVE_LINES_PER_S)):
                    time.sleep(max(0.0, began + n / LIVE_LINES_PER_S - time.monotonic()))
                    now = time.time_ns()
                    log.write(b'{"key": "key-%d", "ts_us": %d, "n": %d}\n' % (n % 500, now // 1_000, n))
                    self.sent.append(now)
                    if n == round(seconds * LIVE_LINES_PER_S) // 2:
                        done = beside.submit(halfway)
                deadline = time.monotonic() + START_S_MAX
                while len(self._got) < len(self.sent) and time.monotonic() < deadline:
                    time.sleep(0.01)
                done.result()
            finally:
                self._over.set()
                reader.join()
                watcher.join()
        if self._got.keys() != set(range(len(self.sent))):
            raise BenchError(f"{len(self.sent) - len(self._got)} lines did not arrive")

    def latencies_ms(self) -> list[float]:
        return [(self._got[n] - sent) / 1e6 for n, sent in enumerate(self.sent) if n >= LIVE_LINES_PER_S]

    def waited(self) -> Row:
        waited = self.latencies_ms()
        row: Row = percentiles(waited, (50,)) | {"longest_ms": round(max(waited))}
        return row | {"lines_over_100_ms": sum(one > 100 for one in waited), "lines": len(waited)}

    def _await_start(self, log: Any) -> None:
        """Until a line of its own came through."""
        log.write(b'{"key": "first", "ts_us": %d, "n": -1}\n' % (time.time_ns() // 1_000))
        deadline = time.monotonic() + START_S_MAX
        while not any(path.stat().st_size for path in (self._directory / "out" / "echoed").glob("*.jsonl")):
            if time.monotonic() > deadline:
                raise BenchError("photon millwheel run does not start")
            time.sleep(0.05)

    def _read(self) -> None:
        with closing(Tail(self._directory / "out" / "echoed", "*.jsonl")) as logs:
            while not self._over.is_set():
                for whole in logs.read():
                    now = time.time_ns()
                    for n in map(int, whole.split(b"\n")):
                        if n in self._got:
                            raise BenchError(f"line {n} arrived twice")
                        if n >= 0:
                            self._got[n] = now
                time.sleep(0.0002)

    def _watch(self, last: str) -> None:
        while not self._over.wait(0.1):
            try:
                marks = ask(self._directory / "work", "status")["low_watermarks"]
            except PhotonError:
                continue
            source, stage = marks["events"]["low_watermark_us"], marks[last]["low_watermark_us"]
            if source is not None and stage is not None:
                self.lags_ms.append((source - stage) / 1_000)


PEERS: Final = {
    "photon": Peer("photon", "MillWheel here, in columns, 2 workers"),
    "duckdb": Peer("duckdb", "DuckDB, one aggregation (the floor)"),
    "pathway": Peer("pathway", "Pathway, no persistence"),
    "bytewax": Peer("bytewax", "Bytewax, recovery"),
    "spark": Peer("pyspark", "Spark Structured Streaming, windows, checkpoint", java=True),
    "spark-state": Peer("pyspark", "Spark transformWithState, checkpoint", java=True),
    "flink": Peer("pyflink", "Flink SQL, windows, checkpoint", java=True),
}
"""Of benchmarks.millwheel_peers."""


def beside_us(plan: Plan, names: str, pythons: Sequence[str], tell: Callable[[str], object]) -> list[Row]:
    """A row for each shape of log and peer, ours among them, from files to files; its best run. Then the same
    with a SIGKILL of all its processes half way, after which it is started again: `killed_...`.

    `missing`, `extra`: counts that are not there once, of those that are right.
    """
    pythons_of, peers = interpreters(pythons, PEERS), chosen(names, PEERS)
    lacking = {name: missing(peer, pythons_of[name]) for name, peer in peers.items()}
    rows: list[Row] = [{"engine": PEERS[name].what, "remark": why} for name, why in lacking.items() if why]
    for shape_name, shape in SHAPES.items():
        logs = written(plan.directory / "beside", shape, plan.lines)
        end = int(logs.times.max()) + 3_600 * SECOND_US
        with (logs.directory / "logs" / "3.jsonl").open("a") as last:
            last.write(f'{{"key": "{END}", "ts_us": {end}}}\n')
        truth = logs.counts()
        for name, peer in peers.items():
            if not lacking[name]:
                tell(f"{shape_name}, {peer.what}")
                row = {"shape": shape_name, "engine": peer.what, "lines": plan.lines}
                rows.append(row | _peer_figures(plan, name, pythons_of[name], logs, truth))
    return rows


def _peer_figures(plan: Plan, name: str, python: str, logs: Written, truth: Found) -> Row:
    out = plan.directory / "beside" / "peer"

    def run(kill_after_s: float | None = None) -> PeerRun:
        return run_peer(
            "benchmarks.millwheel_peers", name, python, logs.directory / "logs", out, kill_after_s
        )

    runs = []
    for _ in range(plan.runs):
        runs.append(run())
        if runs[-1].status != 0:
            return {"remark": f"ended with status {runs[-1].status}; see {out / 'log'}"}
    best = min(runs, key=lambda one: one.seconds)
    row: Row = {"seconds": round(best.seconds, 2), "lines_per_s": round(plan.lines / best.seconds)}
    row |= {"cpu_s": best.usage.cpu_s, "peak_mib": best.usage.peak_mib, **_wrong(out, truth)}
    killed = run(best.seconds / 2)
    if killed.status != 0:
        return row | {"remark": f"killed, it ended with status {killed.status}; see {out / 'log'}"}
    after = {"seconds": round(killed.seconds, 2), **_wrong(out, truth)}
    return row | {f"killed_{key}": value for key, value in after.items()}


def _wrong(out: Path, truth: Found) -> Row:
    counted = _counted(_whole_files(out / "counts"))
    found = Counter({row: times for row, times in counted.items() if row[0] != END})
    return {"missing": (truth - found).total(), "extra": (found - truth).total()}


def _whole_files(counts: Path) -> list[Path]:
    """What a reader may read: of Spark's, those that its sink's log lists."""
    listed = [entry.read_text() for entry in (counts / "_spark_metadata").glob("[0-9]*")]
    if listed:
        names = {json.loads(line)["path"] for text in listed for line in text.splitlines()[1:]}
        return [counts / Path(name).name for name in sorted(names)]
    files = (
        path for path in counts.rglob("*") if path.is_file() and path.suffix not in (".manifest", ".crc")
    )
    return sorted(path for path in files if not path.name.startswith((".", "_")))


PARTS: Final[dict[str, Callable[[Plan, Callable[[str], object]], list[Row]]]] = {
    "throughput": throughput,
    "latency": latency,
    "cache": cache,
    "recovery": recovery,
    "machines": machines,
}


def run(
    plan: Plan, only: Sequence[str], peers: str | None, pythons: Sequence[str], tell: Callable[[str], object]
) -> dict[str, Any]:
    """The machine and the rows of each part, and of the `peers`. BenchError for a wrong output of ours."""
    report: dict[str, Any] = {"machine": machine_now()}
    for name, part in PARTS.items():
        if name in only or (not only and (part is not machines or plan.store)):
            report[name] = part(plan, tell)
    if peers:
        report["peers"] = beside_us(plan, peers, pythons, tell)
    return report
