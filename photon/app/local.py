"""The local cluster behind `photon join`: starts every process, watches the run, stops, sums up."""

import contextlib
import hashlib
import json
import os
import random
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from photon.app.console import RunDisplay
from photon.app.ports import free_ports
from photon.app.statuses import StatusReader
from photon.app.summary import count_lines, merge_fates, percentiles_ms
from photon.app.supervisor import Supervisor
from photon.app.topology import DATACENTER_NAMES, Pipeline, Replica, Topology, write_topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, PhotonError, SettingsError, StorageError, UsageError
from photon.core.logfiles import check_patterns
from photon.core.settings import Settings, load_settings, to_document

POLL_S: Final = 0.05
STALL_S: Final = 120.0
"""A drain in which nothing moves for so long ends with status 1; it can be resumed."""


class StalledError(PhotonError):
    """Nothing has moved for long; what was done is safe and the run can be resumed."""


@dataclass(frozen=True, slots=True)
class JoinJob:
    """What `photon join` was asked for."""

    primary: list[str]
    foreign: list[str]
    out: Path
    config: Path | None
    work: Path
    datacenters: int = 1
    follow: bool = False


def run_join(job: JoinJob, display: RunDisplay) -> dict[str, Any]:
    """Start, drain (or follow until told to stop), stop, sum up. The summary of docs/operating.md."""
    began = time.monotonic()
    settings = load_settings(job.config)
    _check(job, settings)
    with _locked(job.work), _termination() as told_to_stop:
        _check_same_registry(job.work, settings)
        topology = plan(job, settings, random.Random())
        joined_before = _joined_lines(topology)
        cluster = LocalCluster(topology, job.work)
        try:
            cluster.start()
            reader = StatusReader(topology)
            run = _watch(job, cluster, reader, display, told_to_stop, began)
            cluster.stop()
        except BaseException:
            cluster.kill()
            raise
        return _summary(topology, run, joined_before)


class LocalCluster:
    """All processes of a topology under one supervisor."""

    def __init__(self, topology: Topology, work: Path) -> None:
        self._topology = topology
        self._path = work / "topology.json"
        write_topology(topology, self._path)
        self.supervisor = Supervisor(work / "logs")

    def start(self) -> None:
        """Everything at once: each waits for whom it needs."""
        for replica in self._topology.replicas:
            self._serve("registry", f"registry-{replica.name}", replica.name)
        for role in ("eventstore", "joiner", "dispatcher"):
            for pipeline in self._topology.pipelines:
                self._serve(role, f"{role}-{pipeline.datacenter}", pipeline.datacenter)

    def stop(self) -> None:
        """Down the stream, so that nobody loses whom it still needs."""
        names = list(self.supervisor.children)
        tiers = [[n for n in names if n.startswith(role)] for role in ("dispatcher", "joiner")]
        self.supervisor.stop([*tiers, [n for n in names if n.startswith(("eventstore", "registry"))]])

    def kill(self) -> None:
        self.supervisor.kill()

    def _serve(self, role: str, child: str, name: str) -> None:
        self.supervisor.start(child, [role, "serve", "--topology", str(self._path), "--name", name])


def plan(job: JoinJob, settings: Settings, rng: random.Random) -> Topology:
    """Addresses and directories for every process, ports chosen free."""
    names = DATACENTER_NAMES[: job.datacenters]
    ports = iter(free_ports(2 * settings.registry.replicas + 3 * len(names), rng))
    return Topology(
        settings=to_document(settings),
        primary=[_absolute(pattern) for pattern in job.primary],
        foreign=[_absolute(pattern) for pattern in job.foreign],
        output=str(job.out.absolute()),
        spool=str(job.work.absolute() / "spool"),
        secret=secrets.token_hex(32),
        drain=not job.follow,
        replicas=[
            Replica(
                name=f"r{number}",
                grpc=f"127.0.0.1:{next(ports)}",
                raft_host="127.0.0.1",
                raft_port=next(ports),
                directory=str(job.work.absolute() / "registry" / f"r{number}"),
            )
            for number in range(settings.registry.replicas)
        ],
        pipelines=[
            Pipeline(
                datacenter=name,
                eventstore=f"127.0.0.1:{next(ports)}",
                joiner=f"127.0.0.1:{next(ports)}",
                dispatcher=f"127.0.0.1:{next(ports)}",
                directory=str(job.work.absolute() / name),
            )
            for name in names
        ],
    )


@dataclass(slots=True)
class _Run:
    """The last that was seen of a run."""

    eventstores: list[dict[str, Any]]
    restarts: int
    seconds: float


def _watch(
    job: JoinJob,
    cluster: LocalCluster,
    reader: StatusReader,
    display: RunDisplay,
    told_to_stop: Sequence[int],
    began: float,
) -> _Run:
    last_moved, last_seen = time.monotonic(), ""
    while True:
        cluster.supervisor.poll()
        while cluster.supervisor.notices:
            display.notice(cluster.supervisor.notices.pop())
        dispatchers, eventstores, joiners = reader.read()
        now = time.monotonic()
        for name, status in reader.named():
            _tell(display, name, status)
        counts = merge_fates(dispatchers, sum(j.get("joined", 0) for j in joiners))
        display.update(counts, counts["joined"] / (now - began))
        answered = len(dispatchers) == len(eventstores) == len(joiners) == job.datacenters
        # What a joiner still has in hand may yet be written.
        at_work = any(j["in_flight"] or j["unresolved"] for j in joiners)
        drained = answered and not at_work and all(d["drained"] for d in dispatchers)
        if told_to_stop or (drained and not job.follow):
            _tell_unended(display, [*dispatchers, *eventstores])
            return _Run(eventstores, cluster.supervisor.restarts(), now - began)
        seen = json.dumps([[d["foreign_events"], d["fates"]] for d in dispatchers]) + json.dumps(
            [[e["primary_events"], e["caught_up"]] for e in eventstores]
        )
        if seen != last_seen:
            last_moved, last_seen = now, seen
        elif now - last_moved > STALL_S and not job.follow:
            raise StalledError(_why_stalled(reader, now - last_moved))
        time.sleep(POLL_S)


def _tell_unended(display: RunDisplay, statuses: Sequence[dict[str, Any]]) -> None:
    for status in statuses:
        for file, size in status["unended"].items():
            display.notice(f"{file} ends in a partly written line ({size} bytes), left for the next run")
        for file, reason in status.get("unreadable", {}).items():
            display.notice(f"{file} was not read ({reason}), left for the next run")


def _tell(display: RunDisplay, name: str, status: dict[str, Any]) -> None:
    for notice in status.get("notices", ()):
        display.notice(f"{name}: {notice}")
    if status.get("storage_error"):
        display.notice(f"{name}: {status['storage_error']}")


def _why_stalled(reader: StatusReader, seconds: float) -> str:
    reasons = [
        f"{name}: {status['storage_error']}" for name, status in reader.named() if status.get("storage_error")
    ]
    reasons += [f"{name} does not answer" for name in reader.silent()]
    if not reader.registry_has_quorum():
        reasons.append("the registry has no quorum")
    return (
        f"nothing has moved for {seconds:.0f} s ({'; '.join(reasons) or 'no reason known'}); "
        "nothing is lost: mend the cause and run the same command again"
    )


def _summary(topology: Topology, run: _Run, joined_before: int) -> dict[str, Any]:
    joined = _joined_lines(topology)
    seconds = run.seconds
    new = joined - joined_before
    ledgers = [_ledger(topology, pipeline) for pipeline in topology.pipelines]
    per_datacenter = {
        pipeline.datacenter: count_lines(topology.joined_directory(pipeline.datacenter))
        for pipeline in topology.pipelines
    }
    return {
        **merge_fates(ledgers, joined),
        "wasted_joins": sum(ledger["wasted_joins"] for ledger in ledgers),
        "seconds": round(seconds, 3),
        "joined_per_s": round(new / seconds, 1) if seconds > 0 else 0.0,
        "latency_ms": percentiles_ms(ledger["latency_us"] for ledger in ledgers),
        "joined_this_run": new,
        "joined_by_datacenter": per_datacenter,
        "primary_events": max((e["primary_events"] for e in run.eventstores), default=0),
        "primary_malformed": max((e["malformed"] for e in run.eventstores), default=0),
        "restarts": run.restarts,
    }


def _ledger(topology: Topology, pipeline: Pipeline) -> dict[str, Any]:
    """What a dispatcher that has ended left on disk: the truth, however it ended."""
    from dispatcher.server import read_totals

    bytes_max = topology.checked_settings().dispatcher.state_bytes_max
    letters = topology.dead_letters_directory(pipeline.datacenter)
    return read_totals(Path(pipeline.directory) / "dispatcher", letters, bytes_max)


def _joined_lines(topology: Topology) -> int:
    directory = Path(topology.output) / "joined"
    return count_lines(directory) if directory.exists() else 0


def _check(job: JoinJob, settings: Settings) -> None:
    """Everything that can be known to be wrong before a process is started."""
    check_patterns([*job.primary, *job.foreign])
    if settings.adapter.use:
        from joiner.adapter import load_adapter

        load_adapter(settings.adapter.use)
    for directory in (job.out, job.work):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{directory}: cannot be made ({error.strerror}); name a directory you can write"
            ) from error
        if not os.access(directory, os.W_OK):
            raise UsageError(f"{directory}: not writable; name a directory you can write")


def _check_same_registry(work: Path, settings: Settings) -> None:
    """What ids are remembered by must not change while they are: refuse rather than join twice."""
    path = work / "registry.json"
    facts = {
        "registry.shards": settings.registry.shards,
        "registry.replicas": settings.registry.replicas,
        "ids.key (digest)": hashlib.blake2b(settings.ids.key.encode(), digest_size=8).hexdigest(),
    }
    if path.exists():
        try:
            before = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{path}: cannot be read ({error}); restore it, or start in an empty --work"
            ) from error
        changed = [name for name, value in facts.items() if before.get(name) != value]
        if changed:
            raise SettingsError(
                f"{changed[0]} was {before.get(changed[0])} when {work} was made; "
                "set it back or use an empty --work"
            )
        return
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts))
    partial.replace(path)


def _locked(work: Path) -> DirectoryLock:
    try:
        return DirectoryLock(work)
    except LockedError as error:
        raise LockedError(f"another photon runs on {work}; wait for it or name another --work") from error


@contextlib.contextmanager
def _termination() -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM; a second one raises at once."""
    told: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _absolute(pattern: str) -> str:
    return str(Path.cwd() / pattern)
