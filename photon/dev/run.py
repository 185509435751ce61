"""`photon dev`: start a whole system, feed it, show it, play its outage, stop it, check what it wrote."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from photon.cluster.local_cluster import PORT_TRIES_MAX, LocalCluster, on_free_ports
from photon.cluster.preflight import check_apart, check_directories, check_leaders, check_run, check_same_run
from photon.cluster.registry_replicas import clear_unfounded
from photon.cluster.run import STALL_S, Ground, RunLoop, StalledError, holding, running, why_stalled
from photon.cluster.statuses import Sample
from photon.cluster.topology import Topology
from photon.core.errors import UsageError
from photon.core.settings import Foreign, Primary, Settings
from photon.dev.checks import Course, count_lines, summary_of
from photon.dev.feeder import Feeder, FeederEndedError
from photon.dev.outage import Finishing, Outage, OutagePlay, events_seen
from photon.dev.plan import REPLICAS, fed_datacenters, logs_of, make_logs, plan_dev
from photon.dev.view import Look, View, Window, figures_of

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
    primary: Sequence[str] = ()
    foreign: Sequence[str] = ()
    datacenters: int = 2
    queries_per_s: float = 1_000.0
    clicks_per_s: float = 200.0
    seconds: float | None = None
    outage: Outage | None = None
    seed: int = 1


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
            run = _Run(job, topology, ground, view)
            run.run()
            return summary_of(topology, job.work, ground.joined_before, run.course)

        return on_free_ports(attempt, view.notice, 1 if job.settings.replicas else PORT_TRIES_MAX)


class _Run:
    """One life of the system."""

    def __init__(self, job: DevJob, topology: Topology, ground: Ground, view: View) -> None:
        self._job, self._topology, self._ground, self._view = job, topology, ground, view
        self._told_to_stop = ground.told_to_stop
        make_logs(topology, job.work)
        self._cluster = cluster = LocalCluster(topology, job.work, ground.launcher)
        self._play = None
        if job.outage is not None:
            cluster.processes_of(job.outage.datacenter)  # or there is none
            self._play = OutagePlay(job.outage, cluster.kill_datacenter, cluster.restore_datacenter)
        self._feeder: Feeder | None = None
        self._window = Window()
        self._began = time.monotonic()
        self._was_told = False
        self.course = Course()

    def run(self) -> None:
        """Start, feed, finish, stop."""
        job, notice = self._job, self._view.notice
        replace = not job.settings.replicas
        with running(self._cluster, job.work, self._ground, job.settings, notice, SAMPLE_S, replace) as loop:
            try:
                self._await_up(loop)
                self._feed(loop)
                self._finish(loop)
            finally:
                if self._feeder is not None:
                    self._feeder.kill()
            self.course.restarts = self._cluster.supervisor.restarts()

    def _await_up(self, loop: RunLoop) -> None:
        began = time.monotonic()

        def is_up(sample: Sample | None) -> bool:
            if self._told_to_stop or (sample is not None and not sample.silent()):
                return True
            if time.monotonic() - began > STALL_S:
                raise StalledError(why_stalled(loop.reader, STALL_S))
            return False

        self._until(loop, "starting", is_up)
        self._began = time.monotonic()

    def _feed(self, loop: RunLoop) -> None:
        """Feed it for as long as it is to run. A generator that fails ends it: what it wrote is finished."""
        job = self._job
        fed = fed_datacenters(self._topology, job.work)
        if fed and not self._told_to_stop:
            directories = [logs_of(job.work, name) for name in fed]
            log = job.work / "logs" / "feed.log"
            self._feeder = feeder = Feeder(directories, job.queries_per_s, job.clicks_per_s, job.seed, log)
            self._until(loop, "starting", lambda _: self._has_begun(feeder))
            self._began = time.monotonic()
        if not self._told_to_stop:
            self._until(loop, "running", lambda _: self._is_fed())
        self._was_told = bool(self._told_to_stop)
        self.course.seconds = self._seconds
        if self._feeder is not None and not self.course.feeder_failed:
            self._feeder_must(self._feeder.stop)
        self._feeder = None

    def _has_begun(self, feeder: Feeder) -> bool:
        """The generator takes a while to start on a busy machine: its time counts from the first log."""
        if self._told_to_stop or feeder.has_begun():
            return True
        feeder.check()
        self._tell_of_feeder()
        if self._seconds > STALL_S:
            raise StalledError(f"the generator has begun no logs within {STALL_S:.0f} s; run it again")
        return False

    def _is_fed(self) -> bool:
        if self._told_to_stop:
            return True
        if self._feeder is not None:
            self._feeder_must(self._feeder.check)
        seconds, limit = self._seconds, self._job.seconds
        while self._play is not None and (said := self._play.step(seconds)) is not None:
            self._view.notice(said)
            self.course.killed = self._play.killed
        return bool(self.course.feeder_failed) or (limit is not None and seconds >= limit)

    def _feeder_must(self, act: Callable[[], None]) -> None:
        try:
            act()
        except FeederEndedError as error:
            self.course.feeder_failed = str(error)
            self._view.notice(self.course.feeder_failed)
        self._tell_of_feeder()

    def _tell_of_feeder(self) -> None:
        while self._feeder is not None and self._feeder.notices:
            self._view.notice(self._feeder.notices.pop(0))

    def _finish(self, loop: RunLoop) -> None:
        """Let what was written get its fate, where it gets on: nothing is lost if it does not."""
        fed = fed_datacenters(self._topology, self._job.work)
        written = {name: count_lines(logs_of(self._job.work, name) / "clicks") for name in fed}
        finishing = Finishing(written, time.monotonic())

        def is_over(sample: Sample | None) -> bool:
            if sample is not None:
                rows = figures_of(self._topology, self._window).pipelines
                alive = [row for row in rows if row.datacenter not in self.course.killed]
                self.course.seen = {row.datacenter: events_seen(row) for row in alive}
                if finishing.is_over(alive, time.monotonic()):
                    return True
            # After the end of --for; a run that was told to stop before is let finish.
            self.course.cut_short = bool(self._told_to_stop) and not self._was_told
            return self.course.cut_short

        self._until(loop, "finishing", is_over)

    def _until(self, loop: RunLoop, phase: str, over: Callable[[Sample | None], bool]) -> None:
        """One phase, each new look at which is shown."""

        def turn(sample: Sample | None) -> bool:
            if sample is not None:
                self._window.add(sample)
                figures = figures_of(self._topology, self._window)
                restarts = self._cluster.supervisor.restarts()
                self._view.show(Look(self._seconds, phase, figures, self.course.killed, restarts))
            return over(sample)

        loop.until(turn)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _check(job: DevJob) -> None:
    """What can be known to be wrong before anything is planned."""
    if bool(job.primary) != bool(job.foreign):
        raise UsageError(
            "--primary and --foreign go together: existing logs of both, or none for generated ones"
        )
    check_run([*job.primary, *job.foreign], job.out, job.work, job.settings)
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
    patterns = [p for one in topology.pipelines for p in topology.primary_of(one) + topology.foreign_of(one)]
    check_apart(patterns, job.out, job.work, names, settings.joiner.output_roots)
    joiners = {pipeline.datacenter: len(pipeline.joiners) for pipeline in topology.pipelines}
    check_same_run(job.work, job.out, settings, joiners, joined_before)
    if not settings.replicas:
        check_leaders(job.work, settings)
