"""`photon dev`: start a whole system, feed it, show it, play its outage, stop it, check what it wrote."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from photon.cluster.placing import PORT_TRIES_MAX, on_free_ports
from photon.cluster.preflight import check_apart, check_directories, check_leaders, check_run, check_same_run
from photon.cluster.registry_replicas import clear_unfounded
from photon.cluster.roles import ROLES
from photon.cluster.running import (
    POLL_S,
    STALL_S,
    StalledError,
    joined_lines,
    locked,
    open_nursery,
    running,
    tell_all,
    termination,
    why_stalled,
)
from photon.cluster.supervisor import Launcher
from photon.cluster.topology import Topology
from photon.core.errors import UsageError
from photon.core.settings import Foreign, Primary, Settings
from photon.dev.checks import count_lines
from photon.dev.feeder import Feeder, FeederEndedError
from photon.dev.figures import Sample, Window, figures_of
from photon.dev.finishing import Finishing, events_seen
from photon.dev.outage import Outage, OutagePlay
from photon.dev.plan import REPLICAS, fed_datacenters, logs_of, plan_dev
from photon.dev.summary import summary_of
from photon.dev.system import DevSystem
from photon.dev.view import Look, View

if TYPE_CHECKING:
    from photon.cluster.statuses import StatusReader

SAMPLE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class DevJob:
    """What `photon dev` was asked for. `seconds` None: until it is told to stop.

    `replicas`: of the registry, whatever `settings.registry` says.
    """

    out: Path
    work: Path
    settings: Settings = field(default_factory=Settings)
    replicas: int = REPLICAS
    primary: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    datacenters: int = 2
    queries_per_s: float = 1_000.0
    clicks_per_s: float = 200.0
    seconds: float | None = None
    outage: Outage | None = None
    seed: int = 1


def run_dev(job: DevJob, view: View) -> dict[str, Any]:
    """The summary of docs/dev.md. Errors as those of `photon join`."""
    _check(job)
    with (
        locked(job.work),
        locked(job.out / "joined"),
        termination() as told_to_stop,
        open_nursery() as nursery,
    ):
        joined_before = sum(joined_lines(job.out).values())
        remembered = 0 if job.settings.registry.retention_days else joined_before

        def run() -> dict[str, Any]:
            if not joined_before:
                clear_unfounded(job.work, job.replicas)
            life = _Run(job, _plan(job, joined_before), nursery, view, told_to_stop)
            return life.summary(joined_before, life.run(remembered))

        return on_free_ports(run, view.notice, 1 if job.settings.replicas else PORT_TRIES_MAX)


class _Run:
    """One life of the system."""

    def __init__(
        self, job: DevJob, topology: Topology, launcher: Launcher, view: View, told_to_stop: Sequence[int]
    ) -> None:
        self._job, self._topology, self._view, self._told_to_stop = job, topology, view, told_to_stop
        self._system = DevSystem(topology, job.work, launcher)
        self._play = None
        if job.outage is not None:
            self._system.processes_of(job.outage.datacenter)  # or there is none
            system = self._system
            self._play = OutagePlay(job.outage, system.kill_datacenter, system.restore_datacenter)
        self._feeder: Feeder | None = None
        self._window = Window()
        self._began = time.monotonic()
        self._was_told = False
        self.restarts = 0
        self.feeder_failed = ""
        """Why the generator ended as it should not have, if it did."""
        self.cut_short = False
        """Somebody did not want to wait until what was written has its fate."""
        self.seen: dict[str, int | None] = {}
        """Datacenter -> events that were recorded or in hand at the end, where it is not kept down."""

    @property
    def killed(self) -> list[str]:
        """Datacenters that are kept down."""
        outage = self._job.outage
        return [outage.datacenter] if outage is not None and self._play and self._play.killed else []

    def run(self, remembered: int) -> float:
        """Seconds from when all was up to the end of the feed. `remembered`: ids the registry must know."""
        job, system, told_to_stop = self._job, self._system, self._told_to_stop
        replace = not job.settings.replicas
        with (
            running(system.cluster, job.work, told_to_stop, remembered, self._view.notice, replace) as reader,
            ThreadPoolExecutor(1, "sampling") as pool,
        ):
            sampler = _Sampler(reader, pool)
            try:
                self._await_up(sampler)
                seconds = self._watch(sampler)
                self._finish(sampler)
            finally:
                if self._feeder is not None:
                    self._feeder.kill()
            self.restarts = system.supervisor.restarts()
        return seconds

    def summary(self, joined_before: int, seconds: float) -> dict[str, Any]:
        """Once it has run. `seconds`: what `run` returned."""
        return summary_of(
            self._topology,
            self._job.work,
            self.killed,
            self.restarts,
            seconds,
            joined_before,
            not self.cut_short,
            self.seen,
            self.feeder_failed,
        )

    def _await_up(self, sampler: "_Sampler") -> None:
        began = time.monotonic()
        while not self._told_to_stop:
            if self._turn(sampler, "starting") and not sampler.reader.silent():
                break
            if time.monotonic() - began > STALL_S:
                raise StalledError(why_stalled(sampler.reader, STALL_S))
            time.sleep(POLL_S)
        self._began = time.monotonic()

    def _watch(self, sampler: "_Sampler") -> float:
        """Feed it for as long as it is to run. A generator that fails ends it: what it wrote is finished."""
        job = self._job
        fed = fed_datacenters(self._topology, job.work)
        if fed and not self._told_to_stop:
            directories = [logs_of(job.work, name) for name in fed]
            log = job.work / "logs" / "feed.log"
            self._feeder = Feeder(directories, job.queries_per_s, job.clicks_per_s, job.seed, log)
            self._await_feed(self._feeder, sampler)
        while not self._told_to_stop:
            self._turn(sampler, "running")
            if self._feeder is not None:
                self._feeder_must(self._feeder.check)
            seconds = self._seconds
            while self._play is not None and (said := self._play.step(seconds)) is not None:
                self._view.notice(said)
            if self.feeder_failed or (job.seconds is not None and seconds >= job.seconds):
                break
            time.sleep(POLL_S)
        self._was_told = bool(self._told_to_stop)
        seconds = self._seconds
        if self._feeder is not None and not self.feeder_failed:
            self._feeder_must(self._feeder.stop)
        self._feeder = None
        return seconds

    def _feeder_must(self, act: Callable[[], None]) -> None:
        try:
            act()
        except FeederEndedError as error:
            self.feeder_failed = str(error)
            self._view.notice(self.feeder_failed)
        self._tell_of_feeder()

    def _tell_of_feeder(self) -> None:
        while self._feeder is not None and self._feeder.notices:
            self._view.notice(self._feeder.notices.pop(0))

    def _await_feed(self, feeder: Feeder, sampler: "_Sampler") -> None:
        """The generator takes a while to start on a busy machine: its time counts from the first log."""
        while not self._told_to_stop and not feeder.has_begun():
            self._turn(sampler, "starting")
            feeder.check()
            self._tell_of_feeder()
            if self._seconds > STALL_S:
                raise StalledError(f"the generator has begun no logs within {STALL_S:.0f} s; run it again")
            time.sleep(POLL_S)
        self._began = time.monotonic()

    def _finish(self, sampler: "_Sampler") -> None:
        """Let what was written get its fate, where it gets on: nothing is lost if it does not."""
        fed = fed_datacenters(self._topology, self._job.work)
        written = {name: count_lines(logs_of(self._job.work, name) / "clicks") for name in fed}
        finishing = Finishing(written, time.monotonic())
        while True:
            if self._turn(sampler, "finishing"):
                rows = figures_of(self._topology, self._window).pipelines
                alive = [row for row in rows if row.datacenter not in self.killed]
                self.seen = {row.datacenter: events_seen(row) for row in alive}
                if finishing.is_over(alive, time.monotonic()):
                    return
            if self._told_to_stop and not self._was_told:  # after the end of --for
                self.cut_short = True
                return
            time.sleep(POLL_S)

    def _turn(self, sampler: "_Sampler", phase: str) -> bool:
        """Keep the processes running; whether there is something new to see, which is shown."""
        self._system.poll()
        sample = sampler.sample()
        if sample is None:
            return False
        self._window.add(sample)
        figures = figures_of(self._topology, self._window)
        restarts = self._system.supervisor.restarts()
        self._view.show(Look(self._seconds, phase, figures, self.killed, restarts))
        tell_all(self._system.cluster, sampler.reader, self._view.notice)
        return True

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began


class _Sampler:
    """Asks all processes, in a thread: one that stands still must not keep others from being restarted."""

    def __init__(self, reader: "StatusReader", pool: ThreadPoolExecutor) -> None:
        self.reader = reader
        self._pool = pool
        self._asked_s = float("-inf")
        self._answer: Future[object] | None = None

    def sample(self) -> Sample | None:
        """What they said, if that is new. They are asked again SAMPLE_S after the last time."""
        found = None
        if self._answer is not None and self._answer.done():
            self._answer.result()
            self._answer = None
            found = Sample(
                self._asked_s, {**dict.fromkeys(self.reader.silent()), **dict(self.reader.named())}
            )
        now = time.monotonic()
        if self._answer is None and now - self._asked_s >= SAMPLE_S:
            self._asked_s = now
            self._answer = self._pool.submit(self.reader.read, tuple(ROLES))
        return found


def _check(job: DevJob) -> None:
    """What can be known to be wrong before anything is planned."""
    if bool(job.primary) != bool(job.foreign):
        raise UsageError(
            "--primary and --foreign go together: existing logs of both, or none for generated ones"
        )
    check_run([*job.primary, *job.foreign], job.out, job.work, job.settings)
    check_directories((job.out, job.work, *map(Path, job.settings.joiner.output_roots)))


def _plan(job: DevJob, joined_before: int) -> Topology:
    topology = plan_dev(
        job.settings,
        job.work,
        job.out,
        job.primary,
        job.foreign,
        job.datacenters,
        random.Random(),
        job.replicas,
    )
    _check_planned(job, topology, joined_before)
    return topology


def _check_planned(job: DevJob, topology: Topology, joined_before: int) -> None:
    settings = topology.settings
    as_generated = (settings.primary, settings.foreign) == (Primary(), Foreign())
    if not as_generated and fed_datacenters(topology, job.work):
        raise UsageError(
            "[primary] and [foreign] of the settings name fields that generated logs have not; leave both "
            "sections out, or name your own logs with --primary and --foreign"
        )
    names = [pipeline.datacenter for pipeline in topology.pipelines]
    patterns = [p for one in topology.pipelines for p in topology.primary_of(one) + topology.foreign_of(one)]
    check_apart(patterns, job.out, job.work, names, settings.joiner.output_roots)
    joiners = {pipeline.datacenter: len(pipeline.joiners) for pipeline in topology.pipelines}
    check_same_run(job.work, job.out, settings, joiners, joined_before)
    if not settings.replicas:
        check_leaders(job.work, settings)
