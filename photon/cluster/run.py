"""The run behind `photon join`: start every process, drain the logs or follow them, stop, sum up."""

import contextlib
import json
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from photon.cluster.console import RunDisplay
from photon.cluster.local_cluster import Backlog, LocalCluster, unlisted_files
from photon.cluster.placing import Placing, on_free_ports
from photon.cluster.preflight import (
    check_apart,
    check_directories,
    check_leaders,
    check_matches,
    check_run,
    check_same_run,
)
from photon.cluster.registry_replicas import clear_unfounded, members_of
from photon.cluster.roles import PIPELINE_ROLES
from photon.cluster.running import (
    STALL_S,
    RunLoop,
    StalledError,
    holding,
    joined_lines,
    ledger_of,
    running,
    why_stalled,
)
from photon.cluster.summary import Sample, Status, merge_fates, run_summary, whole
from photon.cluster.topology import DATACENTER_NAMES, Topology, absolute, with_absolute_paths
from photon.core.errors import UsageError
from photon.core.fates import Fate
from photon.core.settings import Settings, load_settings

__all__ = ["JoinJob", "StalledError", "join", "run_join"]

_DRAINED_BY: Final = ("dispatcher", "eventstore", "joiner")


def join(
    primary: str | Sequence[str],
    foreign: str | Sequence[str],
    out: str | Path,
    *,
    config: str | Path | None = None,
    work: str | Path | None = None,
    datacenters: int = 1,
    follow: bool = False,
) -> dict[str, Any]:
    """Join the logs that `foreign` matches with those that `primary` matches, as `photon join` does.

    `primary`, `foreign`: globs. Every foreign event is written once to OUT/joined/<datacenter>, or to
    OUT/dead-letters; a run that was cut off is resumed by the same call. `work` (OUT/.photon): the state to
    resume from; `config`: a photon.toml; `datacenters`: pipelines; `follow`: go on until SIGINT or SIGTERM.
    Call it from the main thread, which alone is told of signals.

    Returns the summary of docs/operating.md. Raises PhotonError; nothing is lost by that.
    """
    if not 1 <= datacenters <= len(DATACENTER_NAMES):
        raise UsageError(f"datacenters must be from 1 to {len(DATACENTER_NAMES)}, not {datacenters}")
    job = JoinJob(
        primary=[primary] if isinstance(primary, str) else list(primary),
        foreign=[foreign] if isinstance(foreign, str) else list(foreign),
        out=Path(out),
        config=None if config is None else Path(config),
        work=Path(out) / ".photon" if work is None else Path(work),
        datacenters=datacenters,
        follow=follow,
    )
    with RunDisplay() as display:
        return run_join(job, display)


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
    with holding(job.work, job.out) as ground:
        joiners = dict.fromkeys(DATACENTER_NAMES[: job.datacenters], settings.joiner.processes)
        check_same_run(job.work, job.out, settings, joiners, ground.joined_before)
        check_leaders(job.work, settings)

        def attempt() -> dict[str, Any]:
            if not ground.joined_before:  # whose registry was founded
                clear_unfounded(job.work, settings.registry.replicas)
            topology = _plan(job, settings, random.Random())
            cluster = LocalCluster(topology, job.work, ground.launcher)
            with running(cluster, job.work, ground, settings, display.notice) as loop:
                draining = _Draining(job, loop, display, began)
                loop.until(draining.is_over, _DRAINED_BY)
                loop.until(_Completing(loop, display).is_over, ("joiner",))
            return _summary(topology, draining, ground.joined_before, display)

        return on_free_ports(attempt, display.notice)


def _check(job: JoinJob, settings: Settings) -> None:
    """Everything that can be known to be wrong before a process is started."""
    patterns = [*job.primary, *job.foreign]
    check_run(patterns, job.out, job.work, settings)
    if not job.follow:
        check_matches(job.primary)
    roots = settings.joiner.output_roots
    check_apart(patterns, job.out, job.work, DATACENTER_NAMES[: job.datacenters], roots)
    check_directories((job.out, job.work, *map(Path, roots)))


def _plan(job: JoinJob, settings: Settings, rng: random.Random) -> Topology:
    """Addresses and directories for every process, ports chosen free. UnavailableError if there are none."""
    names = DATACENTER_NAMES[: job.datacenters]
    members = members_of(job.work, settings.registry.replicas)
    places = Placing(settings, len(members.names), len(names), job.work, rng)
    topology = Topology(
        settings=with_absolute_paths(settings),
        primary=[absolute(pattern) for pattern in job.primary],
        foreign=[absolute(pattern) for pattern in job.foreign],
        output=str(job.out.absolute()),
        secret=secrets.token_hex(32),
        drain=not job.follow,
        replicas=places.replicas(members, {}),
        pipelines=places.pipelines(names),
    )
    places.metrics(topology)
    return topology


class _Draining:
    """From the start until all is joined, or somebody says stop; and the last that was seen of it."""

    def __init__(self, job: JoinJob, loop: RunLoop, display: RunDisplay, began: float) -> None:
        self._job, self._loop, self._display, self._began = job, loop, display, began
        self._moved_s, self._seen = time.monotonic(), ""
        self.eventstores: list[Status] = []
        self.unread: set[str] = set()
        """Log files that are there and could not be read."""
        self.restarts = 0
        self.seconds = 0.0

    def is_over(self, sample: Sample | None) -> bool:
        """StalledError if nothing has moved for STALL_S."""
        if sample is None:
            return False
        now = time.monotonic()
        dispatchers, eventstores, joiners = map(sample.of, _DRAINED_BY)
        counts = merge_fates(whole(dispatchers), sum(j.get("joined", 0) for j in joiners))
        self._display.update(counts, counts["joined"] / (now - self._began))
        answered = not sample.silent(PIPELINE_ROLES)
        # What a joiner still has in hand may yet be written.
        at_work = any(j["in_flight"] or j["unresolved"] for j in joiners)
        drained = answered and not at_work and all(d["drained"] for d in dispatchers)
        if self._loop.told_to_stop or (drained and not self._job.follow):
            _tell_unended(self._display, [*dispatchers, *eventstores])
            self.unread = {f for one in (*dispatchers, *eventstores) for f in one.get("unreadable", ())}
            self.eventstores, self.seconds = eventstores, now - self._began
            self.restarts = self._loop.cluster.supervisor.restarts()
            return True
        seen = json.dumps(
            [
                [[d["foreign_events"], d["fates"]] for d in dispatchers],
                [[e.get("primary_events"), e.get("caught_up")] for e in eventstores],
                _unpacking(self._job.work),
            ]
        )
        if seen != self._seen:
            self._moved_s, self._seen = now, seen
        elif now - self._moved_s > STALL_S and not self._job.follow:
            raise StalledError(why_stalled(self._loop.reader, now - self._moved_s))
        return False


class _Completing:
    """After a drain, the joiners complete what they closed, as long as they get on with it.

    Those that are told to stop do so, too, but nobody may want to wait for that.
    """

    def __init__(self, loop: RunLoop, display: RunDisplay) -> None:
        self._loop, self._display = loop, display
        self._backlog = Backlog()

    def is_over(self, sample: Sample | None) -> bool:
        if sample is None:
            return False
        outputs, silent = [joiner["output"] for joiner in sample.of("joiner")], sample.silent(("joiner",))
        if not self._backlog.goes_on(outputs, len(silent), time.monotonic()):
            return True
        if self._loop.told_to_stop:
            if self._backlog.files:
                self._display.notice(
                    f"{self._backlog.files} files of the joined logs are being completed; "
                    "a second Ctrl-C leaves them to the next run"
                )
            return True
        self._display.completing(self._backlog.files)
        return False


def _unpacking(work: Path) -> int:
    """Bytes of compressed logs that are unpacked, or being unpacked: slow, but not a stall."""
    written = 0
    for path in work.glob("*/**/spool/*"):
        with contextlib.suppress(FileNotFoundError):
            written += path.stat().st_size
    return written


def _tell_unended(display: RunDisplay, statuses: Sequence[Status]) -> None:
    for status in statuses:
        for file, size in status.get("unended", {}).items():
            display.notice(f"{file} ends in a partly written line ({size} bytes), left for the next run")
        for file, reason in status.get("unreadable", {}).items():
            display.notice(f"{file} was not read ({reason}), left for the next run")


def _summary(topology: Topology, run: _Draining, joined_before: int, display: RunDisplay) -> dict[str, Any]:
    per_datacenter = joined_lines(Path(topology.output))
    joined = sum(per_datacenter.values())
    ledgers = [ledger_of(topology, pipeline) for pipeline in topology.pipelines]
    written = sum(ledger["fates"][Fate.JOINED.value] for ledger in ledgers)
    if written > joined:
        display.notice(
            f"{written - joined:,} joined lines are not in {topology.output}/joined any more; they count as "
            "duplicate. If they were not moved away on purpose, restore them"
        )
    unlisted = unlisted_files(topology)
    if unlisted:
        display.notice(
            f"{len(unlisted)} files with joined events are not complete yet (in no manifest, {unlisted[0]} "
            "first); the same command completes them"
        )
    return {
        **run_summary(ledgers, joined, joined_before, run.seconds),
        "joined_by_datacenter": per_datacenter,
        "primary_events": max((e.get("primary_events", 0) for e in run.eventstores), default=0),
        "primary_malformed": max((e.get("malformed", 0) for e in run.eventstores), default=0),
        "unread_files": sorted(run.unread),
        "unlisted_files": [str(path) for path in unlisted],
        "restarts": run.restarts,
    }
