"""`photon bench kafka`: from topics to a topic, exactly once, beside what users would take instead.

A broker of Maven Central's jars runs on the same machine. Each engine gets the same records, keyed by the
query's id (which Photon does not need), and each output is read as a consumer of committed records reads it.
"""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from benchmarks.join import Plan, generated
from benchmarks.kafka_broker import VERSION, Broker, jars, lacking
from benchmarks.measuring import ROOT, BenchError, ProcessTree, Row, fresh, machine_now, percentiles
from benchmarks.peer_runs import Peer, chosen, interpreters, missing
from photon.cluster.local_cluster import free_ports
from photon.dev.pairs import pairs_sha256

PARTITIONS: Final = 4
STREAMS: Final = f"org.apache.kafka:kafka-streams:{VERSION}"
SPARK: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:{}"
PEERS: Final = {
    "streams": Peer("sys", "Kafka Streams, exactly_once_v2", java=True),
    "quix": Peer("quixstreams", "Quix Streams, exactly-once"),
    "spark": Peer("pyspark", "Spark Structured Streaming (its sink: at least once)", java=True),
}
STILL_S: Final = 180.0
"""Without a new pair, a run is over."""
AFTER_S: Final = 5.0
"""What comes twice may come late."""
WARM_UP_S: Final = 10.0
LIVE_QUERIES_PER_S: Final = 2_000
LIVE_CLICKS_PER_S: Final = 400
_TICK_S: Final = 0.005
_CLICK_AFTER: Final = 2_000
"""A click names a query that was asked so many queries before, at most."""


@dataclass(frozen=True, slots=True)
class Job:
    """Topics, and where an engine may keep what it needs."""

    brokers: str
    queries: str
    clicks: str
    pairs: str
    directory: Path


class _Id(msgspec.Struct, gc=False):
    id: str
    primary_id: str = ""


class _Pair(msgspec.Struct, gc=False):
    """A joined line of ours, or of a peer."""

    id: str = ""
    primary_id: str = ""
    primary: _Id | None = None
    click: _Id | None = None
    query: _Id | None = None


_ID: Final = msgspec.json.Decoder(_Id)
_PAIR: Final = msgspec.json.Decoder(_Pair)
_NOBODY: Final = _Id("")


@dataclass
class Output:
    """What a consumer of committed records has seen of a topic. `at_s`: when the last new pair was seen."""

    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    mismatched: int = 0
    began_s: float = field(default_factory=time.monotonic)
    at_s: float = 0.0
    seen_us: dict[str, int] = field(default_factory=dict)
    """Click id -> when it was first seen."""

    def take(self, values: Sequence[bytes]) -> None:
        now_us = time.time_ns() // 1_000
        for value in values:
            pair = _PAIR.decode(value)
            click, query = pair.click or pair, pair.query or pair.primary or _NOBODY
            self.mismatched += click.primary_id != query.id
            if click.id not in self.seen_us:
                self.seen_us[click.id] = now_us
                self.at_s = time.monotonic()
            self.pairs[click.primary_id, click.id] += 1

    def figures(self, due: int, sha256: str = "") -> Row:
        """Lost, repeated, wrong."""
        wrong = [f"{self.mismatched:,} with another query"] if self.mismatched else []
        found = {f"{query}\t{click}\n".encode() for query, click in self.pairs}
        if sha256 and len(found) == due and pairs_sha256(found) != sha256:
            wrong.append("not the true pairs")
        twice = self.pairs.total() - len(self.pairs)
        return {"lost": due - len(self.pairs), "repeated": twice, "remark": "; ".join(wrong)}


class Topics:
    """Makes, fills and reads them."""

    def __init__(self, brokers: str) -> None:
        from confluent_kafka.admin import AdminClient

        self.brokers = brokers
        self._admin = AdminClient({"bootstrap.servers": brokers})
        self._count = 0

    def made(self, name: str) -> str:
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        self._count += 1
        full = f"{name}-{self._count}"
        self._admin.create_topics([NewTopic(full, PARTITIONS, 1)])[full].result(60)
        return full

    def producer(self) -> Any:
        from confluent_kafka import Producer

        settings: dict[str, Any] = {
            "bootstrap.servers": self.brokers,
            "partitioner": "murmur2_random",  # Java's, for peers that join by it
            "linger.ms": 1,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000,
        }
        return Producer(settings)

    def fill(self, topic: str, directory: Path, key: str) -> None:
        producer = self.producer()
        for path in sorted(directory.glob("*.jsonl")):
            for line in path.read_bytes().splitlines():
                name = getattr(_ID.decode(line), key)
                while True:
                    try:
                        producer.produce(topic, line, name)
                        break
                    except BufferError:
                        producer.poll(0.1)
        if producer.flush(300):
            raise BenchError(f"{topic}: not all records were taken")

    @contextmanager
    def reading(self, topic: str) -> Iterator[Output]:
        """In a thread: what is committed there by and by."""
        from confluent_kafka import Consumer, TopicPartition

        settings = {"group.id": "bench", "isolation.level": "read_committed", "fetch.wait.max.ms": 5}
        consumer = Consumer({"bootstrap.servers": self.brokers, "fetch.queue.backoff.ms": 5, **settings})
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        output, ended = Output(), threading.Event()

        def read() -> None:
            while not ended.is_set():
                if (first := consumer.poll(0.1)) is not None:
                    records = [first, *consumer.consume(10_000, 0)]
                    output.take([one.value() or b"" for one in records if one.error() is None])

        thread = threading.Thread(target=read, name=f"read {topic}")
        thread.start()
        try:
            yield output
        finally:
            ended.set()
            thread.join()
            consumer.close()


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    what: str
    start: Callable[[Job], "subprocess.Popen[bytes]"]


def _started(command: Sequence[str], job: Job, **environment: str) -> "subprocess.Popen[bytes]":
    log = (job.directory / "log").open("ab")
    env = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def photon(job: Job) -> "subprocess.Popen[bytes]":
    names = (job.queries, job.clicks, job.pairs)
    primary, foreign, pairs = (f"kafka://{job.brokers}/{name}" for name in names)
    inputs = ("--primary", primary, "--foreign", foreign, "--sink", pairs, "--follow")
    command = [sys.executable, "-m", "photon.cli.main", "join", *inputs, "--out", str(job.directory / "out")]
    return _started(command, job)


def streams(job: Job) -> "subprocess.Popen[bytes]":
    path, source = jars(STREAMS, "org.slf4j:slf4j-nop:1.7.36"), ROOT / "benchmarks/KafkaStreamsJoin.java"
    classes = job.directory.parent / "classes"
    if not classes.is_dir():
        subprocess.run(["javac", "-d", classes, "-cp", f"{path}/*", source], check=True)
    topics = (job.brokers, job.queries, job.clicks, job.pairs)
    arguments = (*topics, str(job.directory / "state"), str(os.cpu_count() or 1))
    return _started(["java", "-Xmx2g", "-cp", f"{classes}:{path}/*", "KafkaStreamsJoin", *arguments], job)


def _by(name: str, python: str) -> Callable[[Job], "subprocess.Popen[bytes]"]:
    def start(job: Job) -> "subprocess.Popen[bytes]":
        topics = (job.brokers, job.queries, job.clicks, job.pairs)
        command = [python, "-m", "benchmarks.kafka_peers", name, *topics, str(job.directory.absolute())]
        return _started(command, job, **(_spark_jars(python) if name == "spark" else {}))

    return start


def _spark_jars(python: str) -> dict[str, str]:
    """BenchError where Maven Central has none of this PySpark's version."""
    asked = [python, "-c", "import pyspark; print(pyspark.__version__)"]
    version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    try:
        return {"SPARK_KAFKA_JARS": str(jars(SPARK.format(version)))}
    except subprocess.CalledProcessError as error:
        why = f"no {SPARK.format(version)}; name another PySpark by --peer-python spark=PATH"
        raise BenchError(why) from error


def _kill(process: "subprocess.Popen[bytes]", with_signal: int = signal.SIGKILL) -> None:
    """It and all below it."""
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)] if with_signal == signal.SIGKILL else [root]
        for one in family:
            with suppress(psutil.Error):
                one.send_signal(with_signal)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        _kill(process)


class Bench:
    def __init__(self, plan: Plan, topics: Topics, tell: Callable[[str], object]) -> None:
        self._plan, self._topics, self._tell = plan, topics, tell
        self._filled: tuple[str, str] | None = None

    def _job(self, engine: Engine, queries: str, clicks: str) -> Job:
        pairs = self._topics.made(engine.name)
        return Job(self._topics.brokers, queries, clicks, pairs, fresh(self._plan.directory / pairs))

    def catch_up(self, engine: Engine, killed: bool = False) -> Row:
        """Over topics that are there: seconds from its start to the last pair, as a consumer sees it.

        `killed`: SIGKILL to all its processes when half of the pairs are there, and started again.
        """
        logs = generated(self._plan.directory, self._plan.queries, self._plan.clicks)
        truth = json.loads((logs / "truth.json").read_bytes())
        due = truth["distinct_joined_pairs"]
        if self._filled is None:
            self._tell("topics to be filled")
            self._filled = self._topics.made("queries"), self._topics.made("clicks")
            self._topics.fill(self._filled[0], logs / "queries", "id")
            self._topics.fill(self._filled[1], logs / "clicks", "primary_id")
        job = self._job(engine, *self._filled)
        with self._topics.reading(job.pairs) as output:
            began, process = time.monotonic(), engine.start(job)
            tree = ProcessTree(process.pid)
            try:
                if killed:
                    _wait(output, began, lambda: len(output.pairs) >= due / 2, process)
                    _kill(process)
                    process = engine.start(job)
                _wait(output, time.monotonic(), lambda: len(output.pairs) >= due, process)
                usage = tree.stop()
                time.sleep(AFTER_S)
            finally:
                _kill(process, signal.SIGTERM)
            time.sleep(1.0)
        seconds = output.at_s - began
        row: Row = {"engine": engine.what, "seconds": round(seconds, 1)}
        row["clicks_per_s"] = round(len(output.pairs) / seconds)
        if not killed:
            row |= {"cpu_s": usage.cpu_s, "peak_mib": usage.peak_mib}
        shutil.rmtree(job.directory, ignore_errors=True)
        return row | output.figures(due, truth["joined_pairs_sha256"])

    def live(self, engine: Engine) -> Row:
        """While records come: ms from a click's record produced to its pair seen."""
        job = self._job(engine, self._topics.made("queries"), self._topics.made("clicks"))
        with self._topics.reading(job.pairs) as output:
            process = engine.start(job)
            try:
                fed_us = self._feed(job, output, process)
                tree = ProcessTree(process.pid)
                began, warm_us = time.monotonic(), time.time_ns() // 1_000
                fed_us |= self._feed(job, output, process, self._plan.live_seconds, len(fed_us))
                seconds, usage = time.monotonic() - began, tree.stop()
                _wait(output, time.monotonic(), lambda: len(output.pairs) >= len(fed_us), process)
            finally:
                _kill(process, signal.SIGTERM)
        warm = [one for one, at in fed_us.items() if at >= warm_us and one in output.seen_us]
        times = [(output.seen_us[one] - fed_us[one]) / 1_000 for one in warm]
        shutil.rmtree(job.directory, ignore_errors=True)
        row: Row = {"engine": engine.what, **percentiles(times, (50, 90, 99))}
        row["cpu_cores"] = round(usage.cpu_s / seconds, 2)
        return row | output.figures(len(fed_us))

    def _feed(
        self,
        job: Job,
        output: Output,
        process: "subprocess.Popen[bytes]",
        seconds: float | None = None,
        clicks: int = 0,
    ) -> dict[str, int]:
        """Click id -> when it was produced. Without `seconds`: until pairs have come for WARM_UP_S."""
        producer, fed = self._topics.producer(), {}
        began, asked = time.monotonic(), clicks * LIVE_QUERIES_PER_S // LIVE_CLICKS_PER_S
        first, flowing_s = clicks, None
        text = "word " * 40
        while True:
            now = time.monotonic()
            if seconds is None:
                flowing_s = flowing_s or (now if output.pairs else None)
                if flowing_s is not None and now > flowing_s + WARM_UP_S:
                    break
                if process.poll() is not None or now > began + STILL_S + WARM_UP_S:
                    raise BenchError(f"nothing was joined; see {job.directory / 'log'}")
            elif now >= began + seconds:
                break
            due = first + int((now - began) * LIVE_CLICKS_PER_S)
            while asked < due * LIVE_QUERIES_PER_S // LIVE_CLICKS_PER_S:
                name = f"q{asked}"
                event = {"id": name, "ts_us": time.time_ns() // 1_000, "text": text}
                producer.produce(job.queries, msgspec.json.encode(event), name)
                asked += 1
            while clicks < due:
                name = f"q{max(0, asked - 1 - (clicks * 7919) % _CLICK_AFTER)}"
                at_us = time.time_ns() // 1_000
                event = {"id": f"c{clicks}", "primary_id": name, "ts_us": at_us, "position": 3}
                producer.produce(job.clicks, msgspec.json.encode(event), name)
                fed[f"c{clicks}"] = at_us
                clicks += 1
            producer.poll(0)
            time.sleep(_TICK_S)
        producer.flush(60)
        return fed


def _wait(
    output: Output, since_s: float, done: Callable[[], bool], process: "subprocess.Popen[bytes]"
) -> None:
    """Until it is done, or nothing new has come for STILL_S; BenchError if it ends by itself."""
    while not done():
        if process.poll() is not None:
            raise BenchError(f"it ended with status {process.returncode}")
        if time.monotonic() > max(since_s, output.at_s) + STILL_S:
            return
        time.sleep(0.02)


def _engines(peers: str | None, pythons: Sequence[str]) -> tuple[list[Engine], list[Row]]:
    """Those that can run, ours first; rows that say why others can't."""
    found, lack = [Engine("photon", "Photon, fsync, 3 Raft replicas", photon)], []
    if peers is not None:
        of = interpreters(pythons, PEERS)
        for name, peer in chosen(peers, PEERS).items():
            if why := lacking("javac", "mvn") if name == "streams" else missing(peer, of[name]):
                lack.append({"engine": peer.what, "remark": why})
            else:
                start = streams if name == "streams" else _by(name, of[name])
                found.append(Engine(name, peer.what, start))
    return found, lack


def run(
    plan: Plan,
    only: Sequence[str],
    peers: str | None,
    pythons: Sequence[str],
    brokers: str | None,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """The machine and the rows of each part; of several runs the fastest, by turns."""
    report: dict[str, Any] = {"machine": {**machine_now(), "partitions": PARTITIONS}}
    engines, lack = _engines(peers, pythons)
    with ExitStack() as opened:
        if brokers is None:
            if why := lacking("java", "mvn"):
                raise BenchError(f"{why} on PATH to run a broker with; install it, or name one by --broker")
            one, other = free_ports(2, random.Random())
            broker = Broker(plan.directory / f"broker-{os.getpid()}", (one, other))
            opened.callback(broker.close)
            brokers = broker.address
        bench = Bench(plan, Topics(brokers), tell)
        parts: dict[str, tuple[int, Callable[[Engine], Row]]] = {
            "catch-up": (plan.runs, bench.catch_up),
            "live": (1, bench.live),
            "killed": (1, lambda engine: bench.catch_up(engine, killed=True)),
        }
        for part, (runs, measure) in parts.items():
            if part in only or not only:
                rows: dict[str, list[Row]] = {}
                for _ in range(runs):
                    for engine in engines:
                        tell(f"{part}: {engine.what}")
                        rows.setdefault(engine.name, []).append(_tried(engine, measure))
                report[part] = [min(of, key=lambda row: row.get("seconds", 1e9)) for of in rows.values()]
                report[part] += lack
    return report


def _tried(engine: Engine, measure: Callable[[Engine], Row]) -> Row:
    try:
        return measure(engine)
    except BenchError as error:
        return {"engine": engine.what, "remark": str(error)}
