"""A system of several datacenters under faults: real processes, proxies between, live logs, checked output.

    with FaultSystem(tmp_path, seed, Feed(seed), proxies=True) as system:
        system.until_fated(1_000)
        system.proxies.isolate("west")
        ...
        system.proxies.heal()
        system.finish()

All waiting is done by its `until...` and `run_for`: they restart what died, as a supervisor does, and have a
deadline. In the main thread only.
"""

import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from dispatcher.workers import read_totals
from idregistry.client import RegistryClient
from joiner.output_files import Life, read_lives
from photon.cluster.local_cluster import LocalCluster
from photon.cluster.nursery import Nursery
from photon.cluster.statuses import StatusReader, whole
from photon.cluster.supervisor import Launcher
from photon.cluster.topology import Topology
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError
from photon.core.ids import parse_token
from photon.core.settings import parse_settings
from photon.dev.plan import logs_of, make_logs, plan_dev
from tests.faults.kit.checkers import (
    AT_ANY_INSTANT,
    RULES,
    Facts,
    Fenced,
    Report,
    Rule,
    Scan,
    check,
    ledger_of,
    read_dead_letters,
    read_joined,
)
from tests.faults.kit.feeder import LONG, Feed, Feeder, cut_short
from tests.faults.kit.output import Watch
from tests.faults.kit.toxics import Proxies

_Value = TypeVar("_Value")

DEADLINE_S: Final = 90.0
POLL_S: Final = 0.05
LOG_TAIL_LINES: Final = 12
_CALL_S: Final = 10.0

QUICK: Final[Mapping[str, Mapping[str, Any]]] = {
    "registry": {"shards": 2, "lease_s": 2.5, "election_timeout_ms": 300, "request_timeout_s": 5.0},
    "logs": {"scan_interval_s": 0.2},
    "dispatcher": {
        "request_timeout_s": 10.0,
        "retry_delay_ms_max": 500,
        "absent_delay_ms_max": 500,
    },
    "joiner": {"unjoinable_age_s": 8.0},
}
"""Settings that let a fault and its mending pass within seconds."""


def seed_for(name: str) -> int:
    """PHOTON_FAULT_SEED, to see a run again; or a new one, printed."""
    given = os.environ.get("PHOTON_FAULT_SEED")
    seed = int(given) if given else secrets.randbits(32)
    sys.stdout.write(f"{name}: PHOTON_FAULT_SEED={seed}\n")
    return seed


@contextmanager
def under_faults(directory: Path, name: str, rate: float = 200.0, **how: Any) -> Iterator["FaultSystem"]:
    """A system that joins live logs, for a test of this name; at the end all that was logged must have come
    out once. `how`: as FaultSystem has it."""
    seed = seed_for(name)
    with FaultSystem(directory, seed, Feed(seed, LONG, rate), **how) as system:
        system.until_joined(50)
        yield system
        cut_short(system.feeder)
        system.finish()


class NotInTimeError(Exception):
    """What was waited for did not come."""


class FaultSystem:
    """`start`ed by `with`, killed at its end. The work directory is kept if the test fails, else removed."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        feed: Feed | None = None,
        *,
        datacenters: int = 2,
        replicas: int = 3,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        proxies: bool = False,
        launcher: Launcher | None = None,
    ) -> None:
        """`datacenters` with a pipeline, `replicas` of the registry (3: one each in east, west, central; 5:
        in east, east-2, west, west-2, central). `settings`: sections whose keys replace those of QUICK.
        `launcher`: shared by systems that run one after the other; none: its own."""
        self.seed = seed
        self.failed = False
        """Set by a fixture that several tests share, where one of them has failed."""
        self.rng = random.Random(seed)
        self.work = directory / "work"
        self.out = directory / "out"
        self._paused: set[str] = set()
        self._fences: list[Fenced] = []
        self._reader: StatusReader | None = None
        self._registry: RegistryClient | None = None
        self.last_scans: list[Scan] = []
        changed = settings or {}
        document = {name: {**QUICK.get(name, {}), **changed.get(name, {})} for name in {*QUICK, *changed}}
        topology = plan_dev(
            parse_settings(document), self.work, self.out, (), (), datacenters, random.Random(), replicas
        )
        self.work.mkdir(parents=True, exist_ok=True)  # small disks may be mounted in it
        self._proxies: Proxies | None = None
        names = [pipeline.datacenter for pipeline in topology.pipelines]
        self.feeder = Feeder(feed or Feed(seed), {name: logs_of(self.work, name) for name in names})
        self.watch = Watch(self.out)
        self.watch.expects = self._expects_lines
        with ExitStack() as opened:
            if proxies:
                self._proxies = Proxies(random.Random())  # ports: no two runs of a seed may meet
                opened.callback(self._proxies.close)
                topology = self._proxies.between(topology)
            if launcher is None:
                launcher = Nursery()
                opened.callback(launcher.close)
            self.topology = topology
            make_logs(topology, self.work)
            self.dev = LocalCluster(topology, self.work, launcher)
            self._opened = opened.pop_all()

    # -- life --------------------------------------------------------------------------------------------

    def start(self, feed: bool = True) -> None:
        """All processes; the feeder, too, unless `feed` is false (then `feeder.start()`)."""
        self.feeder.prepare()
        self.dev.start()
        self.watch.start()
        if feed:
            self.feeder.start()

    def __enter__(self) -> "FaultSystem":
        sys.stdout.write(f"seed {self.seed}, in {self.work}\n")
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self.failed or error is not None
        if failed:
            self.tell()
        self.close()
        if failed:
            sys.stdout.write(f"seed {self.seed}; all that was written is kept in {self.work.parent}\n")
        else:
            shutil.rmtree(self.work, ignore_errors=True)
            shutil.rmtree(self.out, ignore_errors=True)

    def close(self) -> None:
        """End everything at once. Again: nothing."""
        self._resume_all()
        self.feeder.stop()
        self.dev.kill()
        self.watch.stop()
        self._forget_clients()
        self._opened.close()

    def tell(self) -> None:
        """Print how it stands: for the report of a test that failed."""
        say = sys.stdout.write
        say(f"fed {self.feeder.written}, joined {self.watch.by_datacenter()}\n")
        for notice in self.dev.supervisor.notices:
            say(f"  {notice}\n")
        for log in sorted((self.work / "logs").glob("*.log")):
            lines = log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
            say(f"--- {log.name}\n" + "".join(f"  {line}\n" for line in lines))

    # -- faults ------------------------------------------------------------------------------------------

    @property
    def proxies(self) -> Proxies:
        assert self._proxies is not None, "this system was made without proxies"
        return self._proxies

    def kill(self, process: str) -> None:
        """SIGKILL `joiner-east`, say; started again by the next poll."""
        if (pid := self.dev.pid_of(process)) is not None:
            os.kill(pid, signal.SIGKILL)

    def pause(self, process: str) -> None:
        """SIGSTOP, until `resume`."""
        pid = self.dev.pid_of(process)
        assert pid is not None, f"{process} does not run"
        os.kill(pid, signal.SIGSTOP)
        self._paused.add(process)

    def resume(self, process: str) -> None:
        """SIGCONT."""
        self._paused.discard(process)
        if (pid := self.dev.pid_of(process)) is not None:
            os.kill(pid, signal.SIGCONT)

    def fence(self, incarnation: int, deadline_s: float = DEADLINE_S) -> Fenced:
        """Fence an incarnation, once its lease is over: whatever it wrote must stand there by then."""
        self.until(
            lambda: self.registry().fence(incarnation).fenced, f"the fence of {incarnation:016x}", deadline_s
        )
        ids = frozenset(line.id for line in read_joined(self.out, grows=True) if line.id is not None)
        self._fences.append(Fenced(incarnation, ids))
        return self._fences[-1]

    def lives(self, datacenter: str) -> list[Life]:
        """Of the joiners that have written, or may have, in a datacenter: the newest last."""
        return sorted(read_lives(self.out / "joined" / datacenter).values(), key=lambda life: life.since_us)

    def use(self, topology: Topology) -> None:
        """Who there is has changed: ask these from now on."""
        self.topology = topology
        self._forget_clients()

    # -- waiting -----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Let what died be restarted."""
        self.dev.poll()

    def run_for(self, seconds: float) -> None:
        """Let it run."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.poll()
            time.sleep(min(POLL_S, left))

    def until(
        self, what: Callable[[], _Value], why: str, deadline_s: float = DEADLINE_S, poll_s: float = POLL_S
    ) -> _Value:
        """What `what` gives as soon as that is true; UnavailableError counts as not yet."""
        until = time.monotonic() + deadline_s
        while True:
            self.poll()
            with suppress(UnavailableError):
                if value := what():
                    return value
            if time.monotonic() > until:
                raise NotInTimeError(f"{why}: not after {deadline_s:g} s (seed {self.seed})")
            time.sleep(poll_s)

    def until_leader(self, shard: int | None = 0, deadline_s: float = DEADLINE_S) -> str:
        """The replica that leads the shard (None: the directory), as soon as one does and has a quorum."""
        name = "the directory" if shard is None else f"shard {shard}"
        return self.until(lambda: self.leader_of(shard), f"a leader of {name}", deadline_s) or ""

    def until_joined(self, lines: int, deadline_s: float = DEADLINE_S) -> None:
        """So many events are joined, in all datacenters together."""
        self.until(lambda: self.watch.joined >= lines, f"{lines} joined events", deadline_s)

    def until_fated(
        self, events: int, datacenters: Iterable[str] | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        """So many events have their fate in each of these datacenters (none named: all)."""
        wanted = self._pipelines() if datacenters is None else set(datacenters)

        def fated() -> bool:
            ended = {name: s["foreign_events"] - s["pending"] for name, s in self._dispatchers().items()}
            return all(ended.get(name, 0) >= events for name in wanted)

        self.until(fated, f"{events} events with their fate in {', '.join(sorted(wanted))}", deadline_s)

    def until_drained(self, datacenters: Iterable[str] | None = None, deadline_s: float = DEADLINE_S) -> None:
        """The feeder is done, each event has its fate in these datacenters, no joiner has any in hand."""
        wanted = self._pipelines() if datacenters is None else set(datacenters)
        self.until(lambda: all(self.feeder.is_done_in(name) for name in wanted), "all to be fed", deadline_s)

        def drained() -> bool:
            dispatchers = self._dispatchers()
            events = self.feeder.written
            return all(
                name in dispatchers
                and dispatchers[name]["foreign_events"] >= events[name]
                and not dispatchers[name]["pending"]
                for name in wanted
            ) and self._joiners_rest(wanted)

        self.until(drained, f"all events to have their fate in {', '.join(sorted(wanted))}", deadline_s)

    # -- looking -----------------------------------------------------------------------------------------

    def status(self, process: str) -> dict[str, Any] | None:
        """What a process says of itself; None if it does not answer."""
        return self.statuses((process,)).get(process)

    def statuses(self, processes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Of those whose names begin like these and that answer."""
        if self._reader is None:
            self._reader = StatusReader(self.topology)
        answered = self._reader.read(processes).answered().items()
        return {name: dict(status) for name, status in answered if name.startswith(processes)}

    def leader_of(self, shard: int | None = 0) -> str | None:
        """The replica (`r0`) that leads the shard (None: the directory) with a quorum; None if none does."""
        leaders = []
        for process, status in self.statuses(("registry-",)).items():
            shards = {one["shard"]: one for one in status["shards"]}
            one = status["directory"] if shard is None else shards.get(shard)
            if one and one["is_leader"] and one["has_quorum"]:
                leaders.append((one["term"], process.removeprefix("registry-")))
        return max(leaders)[1] if leaders else None

    def longest_stall(self) -> float:
        """Seconds: the longest time without a joined line while some were to come."""
        return self.watch.longest_stall_s()

    def registry(self) -> RegistryClient:
        """A client of its own, past all proxies."""
        if self._registry is None:
            addresses = [replica.grpc for replica in self.topology.replicas]
            network = self.topology.network("")
            self._registry = RegistryClient(addresses, _CALL_S, SystemClock(), random.Random(0), network)
        return self._registry

    def scans(self, replicas: Sequence[str] | None = None, deadline_s: float = DEADLINE_S) -> list[Scan]:
        """What each replica (of these) holds of each shard, once they have caught up with each other.

        Those that still differ at the deadline are given out as they are: the checkers tell.
        """
        named = [r for r in self.topology.replicas if replicas is None or r.name in replicas]
        found: list[Scan] = []
        until = time.monotonic() + deadline_s
        while True:
            self.poll()
            try:
                shards = self.registry().configuration().shards
                found = [
                    self._scan(replica.name, replica.grpc, shard) for shard in shards for replica in named
                ]
            except UnavailableError:
                if time.monotonic() > until:
                    raise
            else:
                digests = {(scan.shard, scan.digest()) for scan in found}
                if len(digests) == len(shards) or time.monotonic() > until:
                    return found
            time.sleep(0.2)

    # -- the verdict -------------------------------------------------------------------------------------

    def check_now(self) -> None:
        """What must hold at any instant, over the output as it stands. BrokenError."""
        check(self._facts(grows=True), AT_ANY_INSTANT).hold()

    def finish(
        self,
        deadline_s: float = DEADLINE_S,
        *,
        ledgers: Iterable[str] | None = None,
        replicas: Sequence[str] | None = None,
        rules: Sequence[Rule] = RULES,
    ) -> Report:
        """Drain, stop in order, and check everything. BrokenError; NotInTimeError.

        `ledgers`: the datacenters whose counts must be those of the logs (none named: all), others are not
        waited for; `replicas` likewise, which must agree. All processes named must be up.
        """
        wanted = self._pipelines() if ledgers is None else set(ledgers)
        self.until_drained(wanted, deadline_s)
        # Another may yet hold the intent of an event whose fate these know.
        self.until(lambda: self._joiners_rest(self._pipelines()), "all joiners to rest", deadline_s)
        scans = self.scans(replicas, deadline_s)
        self.feeder.stop()
        self.dev.stop()
        self.watch.look()
        facts = self._facts(grows=False)
        facts.scans = self.last_scans = scans
        for pipeline in self.topology.pipelines:
            if pipeline.datacenter in wanted:
                letters = self.topology.dead_letters_directory(pipeline.datacenter)
                limit = self.topology.settings.dispatcher.state_bytes_max
                counted = read_totals(Path(pipeline.directory) / "dispatcher", letters, limit)
                facts.ledgers[pipeline.datacenter] = ledger_of(counted)
        assert facts.ledgers.keys() == wanted, f"there is no such pipeline: {sorted(wanted)}"
        report = check(facts, rules)
        sys.stdout.write(f"seed {self.seed}: {report}\n")
        return report.hold()

    # ----------------------------------------------------------------------------------------------------

    def _forget_clients(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._registry is not None:
            self._registry.close()
            self._registry = None

    def _facts(self, grows: bool) -> Facts:
        return Facts(
            truth=self.feeder.truth,
            lines=read_joined(self.out, grows),
            letters=[] if grows else read_dead_letters(self.out),
            repeated=dict(self.watch.repeated),
            fences=list(self._fences),
            longest_stall_s=self.longest_stall(),
        )

    def _pipelines(self) -> set[str]:
        return {pipeline.datacenter for pipeline in self.topology.pipelines}

    def _dispatchers(self) -> dict[str, dict[str, Any]]:
        """Datacenter -> what its dispatchers count together."""
        return {counts["datacenter"]: counts for counts in whole(self.statuses(("dispatcher-",)).values())}

    def _joiners_rest(self, datacenters: Iterable[str]) -> bool:
        """Whether those that are not kept down have nothing in hand."""
        joiners = self.topology.processes("joiner")
        processes = {joiner.title for joiner in joiners if joiner.datacenter in set(datacenters)}
        down = {name for name, child in self.dev.supervisor.children.items() if child.held}
        statuses = self.statuses(("joiner-",))
        return all(
            name in statuses and not statuses[name]["in_flight"] and not statuses[name]["unresolved"]
            for name in processes - down
        )

    def _expects_lines(self) -> bool:
        """Some pair is logged and not joined."""
        return self.watch.joined < self.feeder.joinable

    def _scan(self, replica: str, address: str, shard: int) -> Scan:
        holders: dict[bytes, int] = {}
        for piece in self.registry().scan(shard, address, timeout_s=DEADLINE_S):
            incarnations = [parse_token(t).incarnation for t in piece.token_table]
            for row, token in enumerate(piece.token_of.tolist()):
                holders[piece.ids[16 * row : 16 * row + 16]] = incarnations[token]
        return Scan(replica, shard, holders)

    def _resume_all(self) -> None:
        for process in list(self._paused):
            with suppress(ProcessLookupError):
                self.resume(process)
