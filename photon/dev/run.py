"""`photon dev`: start a whole system, feed it, show it, play its outage, stop it, check what it wrote.

Finishing (when all that was written has its fate) is pure.
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from photon.cluster.begun import READY
from photon.cluster.local_cluster import PORT_TRIES_MAX, LocalCluster, on_free_ports
from photon.cluster.preflight import check_apart, check_directories, check_leaders, check_run, check_same_run
from photon.cluster.registry_replicas import clear_unfounded
from photon.cluster.run import STALL_S, Ground, RunLoop, Watch, holding, running
from photon.cluster.statuses import Sample, Status
from photon.cluster.topology import Topology
from photon.connect.importer import SIDES
from photon.core.errors import UsageError
from photon.core.settings import Foreign, Primary, Settings
from photon.dev.checks import Course, count_lines, summary_of
from photon.dev.doings import Doings
from photon.dev.feeder import COPY_DELAY_S_MAX, EARLY, REPEATED, Feed, Feeder
from photon.dev.links import Links
from photon.dev.plan import REPLICAS, fed_datacenters, logs_of, make_logs, plan_dev
from photon.dev.view import Look, View, Window, look_at

SAMPLE_S: Final = 0.5
SETTLED_S: Final = 3.0
"""Nothing has changed for so long: the rest waits for what may never come."""
FED_SETTLED_S: Final = 15.0
"""The same of generated events, which all come to an end."""
FINISH_S_MAX: Final = 60.0
"""However it goes on, it is over then. Nothing is lost by that."""
_WHEEL: Final = "millwheel"


class Finishing:
    """When a run that was told to stop has come to the end of what was written.

    `written`: datacenter -> foreign events in its logs, where that is known. Times are monotonic.
    """

    def __init__(self, written: Mapping[str, int], now_s: float) -> None:
        self._written = written
        self._patience_s = FED_SETTLED_S if written else SETTLED_S
        self._began_s = self._moved_s = now_s
        self._seen: dict[str, tuple[int | None, int | None]] = {}

    def is_over(self, alive: Mapping[str, Status], now_s: float) -> bool:
        """`alive`: the datacenters that are not kept down, as they were just seen (dev.view.look_at)."""
        done = all(self._is_done(name, row) for name, row in alive.items())
        now = {name: (row["foreign_events"], row["pending"]) for name, row in alive.items()}
        if now != self._seen or any(row["silent"] for row in alive.values()):  # who is starting will read
            self._seen, self._moved_s = now, now_s
        settled = now_s - self._moved_s >= self._patience_s
        return done or settled or now_s - self._began_s >= FINISH_S_MAX

    def _is_done(self, name: str, row: Status) -> bool:
        """Nothing waits or is in hand and all that was written is read; where that is unknown, nothing was
        read lately."""
        if row["pending"] != 0 or row["in_flight"] != 0:
            return False
        if name in self._written:
            return bool(row["foreign_events"] == self._written[name])
        return self._seen.get(name) == (row["foreign_events"], row["pending"])


def events_seen(row: Status) -> int | None:
    """Recorded or in hand, as a datacenter was just seen; at least: a retry is pending and in hand."""
    if row["foreign_events"] is None:
        return None
    events: int = row["foreign_events"] + max(0, row["in_flight"] - row["pending"])
    return events


@dataclass(frozen=True, slots=True)
class DevJob:
    """What `photon dev` was asked for. `seconds` None: until it is told to stop.

    `replicas`: of the registry, whatever `settings.registry` says.
    """

    out: Path
    work: Path
    settings: Settings = field(default_factory=Settings)
    replicas: int = REPLICAS
    primary: Sequence[str] = ()
    foreign: Sequence[str] = ()
    datacenters: int = 2
    queries_per_s: float = 1_000.0
    clicks_per_s: float = 200.0
    seconds: float | None = None
    seed: int = 1
    doings: Doings = field(default_factory=Doings)
    watch: Watch | None = None
    wheel: Path | None = None
    """Work directory of a MillWheel over the joined events; None: there is none."""


def run_dev(job: DevJob, view: View) -> dict[str, Any]:
    """The summary of docs/dev.md. Errors as those of `photon join`."""
    _check(job)
    with holding(job.work, job.out) as ground:

        def attempt() -> dict[str, Any]:
            if not ground.joined_before:
                clear_unfounded(job.work, job.replicas)
            asked = (job.settings, job.work, job.out, job.primary, job.foreign, job.datacenters)
            topology = plan_dev(*asked, random.Random(), job.replicas)
            _check_planned(job, topology, ground.joined_before)
            with Links(topology, proxied=job.watch is not None and not job.settings.replicas) as links:
                run = _Run(job, links, ground, view)
                run.run()
            return summary_of(topology, job.work, ground.joined_before, run.course)

        return on_free_ports(attempt, view.notice, 1 if job.settings.replicas else PORT_TRIES_MAX)


class _Run:
    """One life of the system."""

    def __init__(self, job: DevJob, links: Links, ground: Ground, view: View) -> None:
        self._job, self._links, self._ground, self._view = job, links, ground, view
        self._topology = topology = links.topology
        self._told_to_stop = ground.told_to_stop
        make_logs(topology, job.work)
        self._cluster = LocalCluster(topology, job.work, ground.launcher)
        if job.doings.outage is not None:
            self._cluster.processes_of(job.doings.outage.datacenter)  # or there is none
        self._feeder: Feeder | None = None
        self._window = Window()
        self._began = time.monotonic()
        self._was_told = False
        self.course = Course()

    def run(self) -> None:
        """Start, feed, finish, stop."""
        job, notice = self._job, self._view.notice
        renew = not job.settings.replicas
        with running(self._cluster, job.work, self._ground, job.settings, notice, SAMPLE_S, renew) as loop:
            try:
                with loop.watched(job.watch, job.work):
                    self._await_up(loop)
                    self._start_wheel()
                    self._feed(loop)
                    self._finish(loop)
            finally:
                self._end_feed()
                self._cluster.supervisor.stop([_WHEEL])
            self.course.restarts = self._cluster.supervisor.restarts()

    def _await_up(self, loop: RunLoop) -> None:
        def is_up(look: Look | None) -> bool:
            return bool(self._told_to_stop) or (look is not None and not look["silent"])

        self._until(loop, "starting", is_up, STALL_S)
        self._began = time.monotonic()

    def _start_wheel(self) -> None:
        """Counts of joined clicks by country and second, and what is odd about them."""
        if self._job.wheel is None or self._told_to_stop:
            return
        joined = str(Path(self._topology.output).absolute() / "joined/*/*.jsonl")
        given = {
            "logs": {"paths": joined, "time": "ts_us", "lateness_s": 5.0},
            "key": "primary.payload.country",
            "sink": {"directory": str(self._job.wheel / "anomalies")},
            "late": "drop",
            "length_s": 1.0,
            "learn": 20,
            "sigmas": 4.0,
            "row": 3,
        }
        name = f"{READY}zeitgeist {json.dumps(given)}"
        arguments = ["millwheel", "run", name, "--follow", "--workers", "2"]
        self._cluster.supervisor.start(_WHEEL, [*arguments, "--work", str(self._job.wheel)])

    def _feed(self, loop: RunLoop) -> None:
        """Feed it for as long as it is to run. A generator that fails ends it: what it wrote is finished."""
        job = self._job
        fed = fed_datacenters(self._topology, job.work)
        if fed and not self._told_to_stop:
            logs = [str(logs_of(job.work, name)) for name in fed]
            shares = {"copy_delay_s_max": COPY_DELAY_S_MAX, "early": EARLY, "repeated": REPEATED}
            self._feeder = Feeder(Feed(logs, job.queries_per_s, job.clicks_per_s, job.seed, **shares))
        if not self._told_to_stop:
            self._until(loop, "running", lambda _: self._is_fed())
        self._was_told = bool(self._told_to_stop)
        self.course.seconds = self._seconds
        self._end_feed()

    def _is_fed(self) -> bool:
        self._tell_of_feeder()
        if self._told_to_stop or self.course.feeder_failed:
            return True
        seconds, limit = self._seconds, self._job.seconds
        for said in self._job.doings.step(self._cluster, self._links, seconds):
            self._view.notice(f"{said} after {seconds:.1f} s")
        self.course.killed = self._job.doings.silent
        return limit is not None and seconds >= limit

    def _end_feed(self) -> None:
        self._job.doings.end(self._cluster, self._links)
        self.course.killed = self._job.doings.silent
        if self._feeder is not None:
            self._feeder.stop()
            self._tell_of_feeder()
            self._feeder = None

    def _tell_of_feeder(self) -> None:
        if self._feeder is None:
            return
        while self._feeder.notices:
            self._view.notice(f"the feeder: {self._feeder.notices.pop(0)}")
        if self._feeder.failed:
            self.course.feeder_failed = self._feeder.failed
            self._view.notice(self._feeder.failed)

    def _finish(self, loop: RunLoop) -> None:
        """Let what was written get its fate, where it gets on: nothing is lost if it does not."""
        fed = fed_datacenters(self._topology, self._job.work)
        written = {name: count_lines(logs_of(self._job.work, name) / "clicks") for name in fed}
        finishing = Finishing(written, time.monotonic())

        def is_over(look: Look | None) -> bool:
            if look is not None:
                alive = {n: row for n, row in look["datacenters"].items() if n not in self.course.killed}
                self.course.seen = {name: events_seen(row) for name, row in alive.items()}
                if finishing.is_over(alive, time.monotonic()):
                    return True
            # After the end of --for; a run that was told to stop before is let finish.
            self.course.cut_short = bool(self._told_to_stop) and not self._was_told
            return self.course.cut_short

        self._until(loop, "finishing", is_over)

    def _until(
        self, loop: RunLoop, phase: str, over: Callable[[Look | None], bool], patience_s: float = float("inf")
    ) -> None:
        """One phase, each new look at which is shown, and given to `over`."""

        def turn(sample: Sample | None) -> bool:
            if sample is None:
                return over(None)
            self._window.add(sample)
            self.course.has_quorum = sample.has_quorum()
            restarts = self._cluster.supervisor.restarts()
            look = look_at(self._topology, self._window, self._seconds, phase, self.course.killed, restarts)
            self._view.show(look)
            return over(look)

        loop.until(turn, patience_s=patience_s)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _check(job: DevJob) -> None:
    """What can be known to be wrong before anything is planned."""
    if bool(job.primary) != bool(job.foreign):
        raise UsageError(
            "--primary and --foreign go together: existing logs of both, or none for generated ones"
        )
    check_run(job.primary, job.foreign, job.out, job.work, job.settings)
    check_directories((job.out, job.work, *map(Path, job.settings.joiner.output_roots)))


def _check_planned(job: DevJob, topology: Topology, joined_before: int) -> None:
    settings = topology.settings
    as_generated = (settings.primary, settings.foreign) == (Primary(), Foreign())
    if not as_generated and fed_datacenters(topology, job.work):
        raise UsageError(
            "[primary] and [foreign] of the settings name fields that generated logs have not; leave both "
            "sections out, or name your own logs with --primary and --foreign"
        )
    names = [pipeline.datacenter for pipeline in topology.pipelines]
    patterns = [text for p in topology.pipelines for side in SIDES for text in topology.patterns_of(p, side)]
    check_apart(patterns, job.out, job.work, names, settings.joiner.output_roots)
    joiners = {pipeline.datacenter: len(pipeline.joiners) for pipeline in topology.pipelines}
    check_same_run(job.work, job.out, settings, joiners, joined_before)
    if not settings.replicas:
        check_leaders(job.work, settings)
