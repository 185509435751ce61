"""The local cluster behind `photon join`: starts every process, watches the run, stops, sums up."""

import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from photon.cluster.completion import Backlog, unlisted_files
from photon.cluster.console import RunDisplay
from photon.cluster.local_cluster import JoinJob, LocalCluster, plan
from photon.cluster.placing import on_free_ports
from photon.cluster.preflight import (
    check_apart,
    check_directories,
    check_leaders,
    check_matches,
    check_run,
    check_same_run,
)
from photon.cluster.registry_replicas import clear_unfounded
from photon.cluster.roles import PIPELINE_ROLES
from photon.cluster.running import (
    POLL_S,
    STALL_S,
    StalledError,
    joined_lines,
    ledger_of,
    locked,
    open_nursery,
    running,
    tell_all,
    termination,
    why_stalled,
)
from photon.cluster.summary import merge_fates, run_summary, whole
from photon.cluster.topology import DATACENTER_NAMES, Topology
from photon.core.fates import Fate
from photon.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from photon.cluster.statuses import StatusReader

__all__ = ["JoinJob", "StalledError", "join", "run_join"]


def join(
    primary: Sequence[str],
    foreign: Sequence[str],
    out: str | Path,
    *,
    config: str | Path | None = None,
    work: str | Path | None = None,
    datacenters: int = 1,
    follow: bool = False,
) -> dict[str, Any]:
    """Does what `photon join` does and returns the summary that its `--json` prints (docs/api.md)."""
    job = JoinJob(
        primary=list(primary),
        foreign=list(foreign),
        out=Path(out),
        config=None if config is None else Path(config),
        work=Path(out) / ".photon" if work is None else Path(work),
        datacenters=datacenters,
        follow=follow,
    )
    with RunDisplay() as display:
        return run_join(job, display)


def run_join(job: JoinJob, display: RunDisplay) -> dict[str, Any]:
    """Start, drain (or follow until told to stop), stop, sum up. The summary of docs/operating.md."""
    began = time.monotonic()
    settings = load_settings(job.config)
    _check(job, settings)
    with (
        locked(job.work),
        locked(job.out / "joined"),
        termination() as told_to_stop,
        open_nursery() as nursery,
    ):
        joined_before = sum(joined_lines(job.out).values())
        joiners = dict.fromkeys(DATACENTER_NAMES[: job.datacenters], settings.joiner.processes)
        check_same_run(job.work, job.out, settings, joiners, joined_before)
        check_leaders(job.work, settings)
        # Ids that are forgotten on purpose are not missed.
        remembered = 0 if settings.registry.retention_days else joined_before

        def join() -> dict[str, Any]:
            if not joined_before:  # whose registry was founded
                clear_unfounded(job.work, settings.registry.replicas)
            topology = plan(job, settings, random.Random())
            cluster = LocalCluster(topology, job.work, nursery)
            with running(cluster, job.work, told_to_stop, remembered, display.notice) as reader:
                run = _watch(job, cluster, reader, display, told_to_stop, began)
                _await_complete(cluster, reader, display, told_to_stop)
            return _summary(topology, run, joined_before, display)

        return on_free_ports(join, display.notice)


@dataclass(slots=True)
class _Run:
    """The last that was seen of a run."""

    eventstores: list[dict[str, Any]]
    unread: set[str]
    """Log files that are there and could not be read."""
    restarts: int
    seconds: float


def _watch(
    job: JoinJob,
    cluster: LocalCluster,
    reader: "StatusReader",
    display: RunDisplay,
    told_to_stop: Sequence[int],
    began: float,
) -> _Run:
    last_moved, last_seen = time.monotonic(), ""
    while True:
        cluster.poll()
        dispatchers, eventstores, joiners = reader.read()
        now = time.monotonic()
        tell_all(cluster, reader, display.notice)
        counts = merge_fates(whole(dispatchers), sum(j.get("joined", 0) for j in joiners))
        display.update(counts, counts["joined"] / (now - began))
        answered = not reader.silent(PIPELINE_ROLES)
        # What a joiner still has in hand may yet be written.
        at_work = any(j["in_flight"] or j["unresolved"] for j in joiners)
        drained = answered and not at_work and all(d["drained"] for d in dispatchers)
        if told_to_stop or (drained and not job.follow):
            _tell_unended(display, [*dispatchers, *eventstores])
            unread = {f for status in (*dispatchers, *eventstores) for f in status.get("unreadable", ())}
            return _Run(eventstores, unread, cluster.supervisor.restarts(), now - began)
        seen = json.dumps([[d["foreign_events"], d["fates"]] for d in dispatchers]) + json.dumps(
            [[e.get("primary_events"), e.get("caught_up")] for e in eventstores]
        )
        seen += str(_unpacking(job.work))
        if seen != last_seen:
            last_moved, last_seen = now, seen
        elif now - last_moved > STALL_S and not job.follow:
            raise StalledError(why_stalled(reader, now - last_moved))
        time.sleep(POLL_S)


def _await_complete(
    cluster: LocalCluster, reader: "StatusReader", display: RunDisplay, told_to_stop: Sequence[int]
) -> None:
    """After a drain, let the joiners complete what they closed, as long as they get on with it.

    Those that are told to stop do so, too, but nobody may want to wait for that.
    """
    backlog = Backlog()
    while True:
        cluster.poll()
        (joiners,) = reader.read(("joiner",))
        tell_all(cluster, reader, display.notice)
        silent = len(reader.silent(("joiner",)))
        if not backlog.goes_on([joiner["output"] for joiner in joiners], silent, time.monotonic()):
            return
        if told_to_stop:
            if backlog.files:
                display.notice(
                    f"{backlog.files} files of the joined logs are being completed; "
                    "a second Ctrl-C leaves them to the next run"
                )
            return
        display.completing(backlog.files)
        time.sleep(POLL_S)


def _unpacking(work: Path) -> int:
    """Bytes of compressed logs that are unpacked, or being unpacked: slow, but not a stall."""
    written = 0
    for path in work.glob("*/**/spool/*"):
        with contextlib.suppress(FileNotFoundError):
            written += path.stat().st_size
    return written


def _tell_unended(display: RunDisplay, statuses: Sequence[dict[str, Any]]) -> None:
    for status in statuses:
        for file, size in status.get("unended", {}).items():
            display.notice(f"{file} ends in a partly written line ({size} bytes), left for the next run")
        for file, reason in status.get("unreadable", {}).items():
            display.notice(f"{file} was not read ({reason}), left for the next run")


def _summary(topology: Topology, run: _Run, joined_before: int, display: RunDisplay) -> dict[str, Any]:
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


def _check(job: JoinJob, settings: Settings) -> None:
    """Everything that can be known to be wrong before a process is started."""
    patterns = [*job.primary, *job.foreign]
    check_run(patterns, job.out, job.work, settings)
    if not job.follow:
        check_matches(job.primary)
    roots = settings.joiner.output_roots
    check_apart(patterns, job.out, job.work, DATACENTER_NAMES[: job.datacenters], roots)
    check_directories((job.out, job.work, *map(Path, roots)))
