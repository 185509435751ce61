"""A run of a system on this machine: `photon join`, and what `photon dev` has in common with it.

A run holds its directories, starts every process, asks all of them again and again how they do, stops them,
and sums up what is on disk. A join drains the logs or follows them.
"""

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from joiner.output_files import count_joined
from photon.cluster.ledgers import ledger_of
from photon.cluster.local_cluster import LocalCluster, on_free_ports, placed, unlisted_files
from photon.cluster.nursery import Nursery
from photon.cluster.preflight import (
    RegistryMemory,
    check_apart,
    check_directories,
    check_leaders,
    check_matches,
    check_reached,
    check_run,
    check_same_run,
)
from photon.cluster.registry_replicas import clear_unfounded, members_of, replacing
from photon.cluster.roles import ROLES
from photon.cluster.statuses import RunDisplay, Sample, Status, StatusReader, merge_fates, run_summary, whole
from photon.cluster.supervisor import Launcher
from photon.cluster.topology import DATACENTER_NAMES, JOINER_FILES, REGISTRY, Topology, unplaced
from photon.connect.importer import STDIN, copy_stdin, follow_stdin, side_of_stdin, stdin_pattern
from photon.connect.rows import place_of
from photon.connect.uris import is_source
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, PhotonError, UsageError
from photon.core.fates import Fate
from photon.core.settings import PIPELINE_ROLES, Settings, load_settings
from photon.logs.formats import NOT_UTF8

POLL_S: Final = 0.05
FOLLOWING_S: Final = 1.0
"""A run that goes on tailing asks its processes this often: an answer costs each of them something."""
QUIET_S: Final = 3.0
"""And this often while they read no events, and nobody watches."""
TURN_S: Final = 0.25
"""And looks this often whether all of them are there."""
STALL_S: Final = 120.0
"""Nothing moves for this long: the run ends with status 1; it can be resumed."""
STILL_S_MAX: Final = 60.0
"""After this long without progress, files that are not complete are left to the joiners' end."""
_STDIN: Final = "stdin"
_DRAINED_BY: Final = ("dispatcher", "eventstore", "joiner", "importer")


class StalledError(PhotonError):
    """Nothing has moved for long; what was done is safe and the run can be resumed. `summary`: of a join."""

    summary: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Ground:
    """What a run stands on; nobody else can run there meanwhile."""

    launcher: Launcher
    told_to_stop: list[int]
    """The signal, once there was one."""
    joined_before: int
    """Lines in the output."""


@contextlib.contextmanager
def holding(work: Path, out: Path) -> Iterator[Ground]:
    """LockedError where another run has one of the directories."""
    with (
        _locked(work),
        _locked(out / "joined"),
        _termination() as told_to_stop,
        contextlib.closing(Nursery()) as nursery,
    ):
        yield Ground(nursery, told_to_stop, sum(joined_lines(out).values()))


def _locked(directory: Path) -> DirectoryLock:
    try:
        return DirectoryLock(directory)
    except LockedError as error:
        raise LockedError(
            f"another photon runs on {directory}; wait for it or name another --work and --out"
        ) from error


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


Watch = Callable[
    [Topology, Path], contextlib.AbstractContextManager[Callable[[Sample, Mapping[str, str]], None]]
]
"""Opened for a run, with its work directory; is told what all processes said, and why some are silent."""


class RunLoop:
    """The loop of a run: restarts what died, asks all processes, hands on what they have to say."""

    def __init__(
        self,
        cluster: LocalCluster,
        reader: StatusReader,
        pool: ThreadPoolExecutor,
        told_to_stop: Sequence[int],
        notice: Callable[[str], None],
        every_s: float,
    ) -> None:
        """`pool`: of one thread, which asks: a process that stands still must not keep others from being
        restarted. They are asked `every_s` after the last time (`asks_every_s`), when a phase begins, and
        once it is told to stop."""
        self.cluster, self.reader, self.told_to_stop = cluster, reader, told_to_stop
        self._pool, self._notice, self._every_s = pool, notice, every_s
        self._turn_s = POLL_S if every_s <= POLL_S else TURN_S
        self._asked_s = float("-inf")
        self._answer: Future[Sample] | None = None
        self._hurried = self._is_quiet = False
        self._events: list[int] = []
        self._watched: Callable[[Sample, Mapping[str, str]], None] | None = None

    @property
    def asks_every_s(self) -> float:
        """After the last time, while nothing happens that is worth more."""
        return QUIET_S if self._is_quiet else self._every_s

    @contextlib.contextmanager
    def watched(self, watch: Watch | None, work: Path) -> Iterator[None]:
        """Within the block each look at the processes is told."""
        if watch is None:
            yield
            return
        with watch(self.cluster.topology, work) as self._watched:
            yield

    def until(
        self,
        over: Callable[[Sample | None], bool],
        roles: tuple[str, ...] = tuple(ROLES),
        patience_s: float = float("inf"),
    ) -> None:
        """One phase of a run: turns until `over`, which is given what the processes said, if that is new.

        ProcessFailedError, CorruptStateError: the run is over; StalledError: it was not after `patience_s`.
        """
        self._asked_s, began = float("-inf"), time.monotonic()
        while True:
            self.cluster.poll()
            sample = self._look(roles)
            if sample is not None:
                self._tell(sample)
            if over(sample):
                return
            if time.monotonic() - began > patience_s:
                raise StalledError(why_stalled(self.reader, patience_s))

    def _tell(self, sample: Sample) -> None:
        notices = self.cluster.supervisor.notices
        while notices:
            self._notice(notices.pop(0))
        events = [status["foreign_events"] for status in sample.of("dispatcher")]
        reads_none = bool(events) and events == self._events
        self._is_quiet = reads_none and self._every_s == FOLLOWING_S and self._watched is None
        self._events = events
        if self._watched is not None:
            self._watched(sample, self.reader.why_silent)
        for name, status in sample.answered().items():
            for notice in (*status.get("notices", ()), status.get("storage_error")):
                if notice:
                    self._notice(f"{name}: {notice}")

    def _look(self, roles: tuple[str, ...]) -> Sample | None:
        """Takes a turn at most, and as long as that without news."""
        now = time.monotonic()
        hurries = bool(self.told_to_stop) and not self._hurried
        if self._answer is None and (hurries or now - self._asked_s >= self.asks_every_s):
            self._hurried |= hurries
            self._asked_s, self._answer = now, self._pool.submit(self.reader.read, roles)
        if self._answer is None:
            time.sleep(self._turn_s)
            return None
        wait([self._answer], self._turn_s)
        if not self._answer.done():
            return None
        answer, self._answer = self._answer, None
        return answer.result()


@contextlib.contextmanager
def running(
    cluster: LocalCluster,
    work: Path,
    ground: Ground,
    settings: Settings,
    notice: Callable[[str], None],
    every_s: float = POLL_S,
    renew: bool = True,
) -> Iterator[RunLoop]:
    """All processes, within the block; stopped after it, killed if it raises. PortTakenError: choose again.

    `renew`: replicas that lost their disks are replaced.
    """
    topology = cluster.topology
    lost = members_of(work, len(topology.replicas)).lost if renew else []
    try:
        with (
            contextlib.closing(StatusReader(topology)) as reader,  # its imports go on beside the nursery's
            ThreadPoolExecutor(1, "asking") as pool,
            replacing(topology, lost, notice),
        ):
            loop = RunLoop(cluster, reader, pool, ground.told_to_stop, notice, every_s)
            if topology.drain and topology.titles("importer"):
                cluster.start("importer")
                _await_copies(loop)
            cluster.start(*(role for role in ROLES if role != "dispatcher"))
            # Ids that are forgotten on purpose are not missed.
            if ground.joined_before and not settings.registry.retention_days:
                _await_memory(loop, RegistryMemory(ground.joined_before, work))
            cluster.start("dispatcher")  # new events come in once all else is known to be well
            yield loop
        cluster.stop()
    except BaseException:
        cluster.kill()
        raise


def _await_copies(loop: RunLoop) -> None:
    """Return once all that is to be joined stands in log files. StalledError if they do not grow for STALL_S,
    and it is known why: what is large may take as long."""
    seen, moved_s = "", time.monotonic()

    def over(sample: Sample | None) -> bool:
        nonlocal seen, moved_s
        if loop.told_to_stop or sample is None:
            return bool(loop.told_to_stop)
        importers, silent = sample.of("importer"), sample.silent(("importer",))
        sources = [source for one in importers for source in one["sources"]]
        reasons = [f"{name} does not answer" for name in silent]
        reasons += dict.fromkeys(source["trouble"] for source in sources if source["trouble"])
        now = json.dumps([[source["records"], source["behind"]] for source in sources])
        if now != seen or not reasons:
            seen, moved_s = now, time.monotonic()
        if (stood_s := time.monotonic() - moved_s) > STALL_S:
            raise StalledError(_stalled(reasons, stood_s))
        return not silent and all(one["finished"] for one in importers)

    loop.until(over, ("importer",))


def _await_memory(loop: RunLoop, memory: RegistryMemory) -> None:
    """Return once the registry is known to remember all; CorruptStateError if it does not."""

    def over(sample: Sample | None) -> bool:
        said = None if sample is None else sample.of(REGISTRY)
        return bool(loop.told_to_stop) or (said is not None and memory.is_whole(said, time.monotonic()))

    loop.until(over, (REGISTRY,), STALL_S)


def why_stalled(reader: StatusReader, seconds: float) -> str:
    sample = reader.read((REGISTRY,))  # who was never asked is silent
    answered = sample.answered().items()
    reasons = [f"{name}: {one['storage_error']}" for name, one in answered if one.get("storage_error")]
    reasons += [f"{name} does not answer" for name in sample.silent()]
    reasons += [] if sample.has_quorum() else ["the registry has no quorum"]
    reasons += [why for _, one in answered for why in one.get("unreadable", {}).values()]
    reasons += _unpublished(sample)
    reasons += [
        f"{name}: {one['pending']:,} events wait to be tried again"
        for name, one in answered
        if one.get("pending")
    ]
    return _stalled(reasons, seconds)


def _stalled(reasons: Sequence[str], seconds: float) -> str:
    return (
        f"nothing has moved for {seconds:.0f} s ({'; '.join(reasons) or 'no reason known'}); "
        "nothing is lost: mend the cause and run the same command again"
    )


def _unpublished(sample: Sample) -> list[str]:
    return [
        f"{name}: nothing is published to {sink['sink']} ({sink['trouble']})"
        for name, one in sample.answered().items()
        for sink in one.get("sinks", ())
        if sink.get("trouble")
    ]


def joined_lines(out: Path) -> dict[str, int]:
    """Datacenter -> lines of its joiners; also of those that an earlier run had and this one has not.

    What a backfill wrote there is not this run's: its ledgers call those events duplicates.
    """
    counts = {
        path.name: count_joined(path, JOINER_FILES)
        for path in sorted((out / "joined").iterdir())
        if path.is_dir()
    }
    return {name: count for name, count in counts.items() if count or name in DATACENTER_NAMES}


def join(
    primary: str | Path | Sequence[str | Path],
    foreign: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    config: str | Path | None = None,
    work: str | Path | None = None,
    datacenters: int = 1,
    follow: bool = False,
    sinks: Sequence[str] = (),
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Join the logs that `foreign` matches with those that `primary` matches, as `photon join` does.

    `primary`, `foreign`: globs, or other sources (docs/connectors.md). Every foreign event is written once to
    OUT/joined/<datacenter>, or to OUT/dead-letters; a run that was cut off is resumed by the same call.
    `work` (OUT/.photon): the state to resume from; `config`: a photon.toml; `datacenters`: pipelines;
    `follow`: go on until SIGINT or SIGTERM; `sinks`: URIs that joined lines are published to as well;
    `watch`: is told how it goes on (photon.console).
    Call it from the main thread, which alone is told of signals.

    Returns the summary of docs/operating.md. Raises PhotonError; nothing is lost by that.
    """
    if not 1 <= datacenters <= len(DATACENTER_NAMES):
        raise UsageError(f"datacenters must be from 1 to {len(DATACENTER_NAMES)}, not {datacenters}")
    began = time.monotonic()
    primary, foreign = (
        [*map(str, [one] if isinstance(one, str | Path) else one)] for one in (primary, foreign)
    )
    out = Path(out)
    work = out / ".photon" if work is None else Path(work)
    settings = load_settings(None if config is None else Path(config))
    joiner = replace(settings.joiner, sinks=(*settings.joiner.sinks, *sinks))
    settings = replace(settings, joiner=joiner)
    names, roots = DATACENTER_NAMES[:datacenters], settings.joiner.output_roots
    primary, foreign, piped = _with_stdin(primary, foreign, work)
    logs = check_run(primary, foreign, out, work, settings)
    if not follow:
        for side, patterns in (("primary", primary), ("foreign", foreign)):
            if side != piped and not any(map(is_source, patterns)):
                check_matches(f"{side} log", patterns)
        check_reached(settings.joiner.sinks)
    check_apart(logs, out, work, names, roots)
    check_directories((out, work, *map(Path, roots)))
    topology = unplaced(settings, primary, foreign, out, drain=not follow)
    with contextlib.closing(RunDisplay()) as display, holding(work, out) as ground:
        check_same_run(
            work, out, settings, dict.fromkeys(names, settings.joiner.processes), ground.joined_before
        )
        check_leaders(work, settings)
        if piped is not None and follow:
            follow_stdin(work / _STDIN, piped, settings.imports.file_bytes_max, display.notice)
        elif piped is not None:
            told_to_stop = partial(bool, ground.told_to_stop)
            copy_stdin(work / _STDIN, piped, settings.imports.file_bytes_max, is_over=told_to_stop)
        attempt = partial(_join, topology, work, names, ground, display, began, watch)
        return on_free_ports(attempt, display.notice)


def _with_stdin(
    primary: Sequence[str], foreign: Sequence[str], work: Path
) -> tuple[list[str], list[str], str | None]:
    """The two with the log files that standard input is copied into in its place; the side that it is."""
    sides = {"primary": list(primary), "foreign": list(foreign)}
    piped = side_of_stdin(sides)
    if piped is not None:
        check_directories((work / _STDIN,))
        pattern = stdin_pattern(work / _STDIN, piped)
        sides[piped] = [pattern if one == STDIN else one for one in sides[piped]]
    return sides["primary"], sides["foreign"], piped


def _join(
    planned: Topology,
    work: Path,
    names: Sequence[str],
    ground: Ground,
    display: RunDisplay,
    began: float,
    watch: Watch | None,
) -> dict[str, Any]:
    replicas = planned.settings.registry.replicas
    if not ground.joined_before:  # whose registry was founded
        clear_unfounded(work, replicas)
    topology = placed(planned, members_of(work, replicas), {}, names, work, random.Random())
    joined_before = merge_fates(_ledgers(topology), ground.joined_before)[Fate.JOINED.value]
    cluster = LocalCluster(topology, work, ground.launcher)
    draining = _Draining(topology.drain, work, display, began)
    every_s = POLL_S if topology.drain else FOLLOWING_S
    try:
        with running(cluster, work, ground, topology.settings, display.notice, every_s) as loop:
            with loop.watched(watch, work):
                over = partial(draining.is_over, loop)
                loop.until(over, _DRAINED_BY if watch is None else tuple(ROLES))
            loop.until(Completing(loop.told_to_stop, display).is_over, ("joiner",))
    except StalledError as error:
        error.summary = _summary(topology, draining, joined_before, display)
        raise
    return _summary(topology, draining, joined_before, display)


class _Draining:
    """From the start until all is joined, or somebody says stop; and the last that was seen of it."""

    def __init__(self, drain: bool, work: Path, display: RunDisplay, began: float) -> None:
        self._drain, self._work, self._display, self._began = drain, work, display, began
        self._moved_s, self._seen = time.monotonic(), ""
        self.dispatchers: list[Status] = []
        self.eventstores: list[Status] = []
        self.stopped = drain
        """Over before all was read and decided."""
        self.lost_records = 0
        """Of sources, before they were copied, as far as those who copy them now know."""
        self.restarts = 0
        self.seconds = 0.0

    def is_over(self, loop: RunLoop, sample: Sample | None) -> bool:
        """StalledError if nothing has moved for STALL_S."""
        if sample is None:
            return False
        now = time.monotonic()
        dispatchers, eventstores, joiners, importers = map(sample.of, _DRAINED_BY)
        counts = merge_fates(whole(dispatchers), sum(j.get("joined", 0) for j in joiners))
        self._display.update(counts, counts["joined"] / (now - self._began))
        answered = not sample.silent(PIPELINE_ROLES)
        # What a joiner still has in hand may yet be written.
        at_work = any(j["in_flight"] or j["unresolved"] for j in joiners)
        at_work |= any(sink["behind"] for j in joiners for sink in j.get("sinks", ()))
        drained = answered and not at_work and all(d["drained"] for d in dispatchers)
        seen = json.dumps(
            [
                [[d["foreign_events"], d["fates"]] for d in dispatchers],
                [[e.get("primary_events"), e.get("caught_up")] for e in eventstores],
                [[sink["published"] for sink in j.get("sinks", ())] for j in joiners],
                _unpacking(self._work),
            ]
        )
        if seen != self._seen:
            self._moved_s, self._seen = now, seen
        ended = bool(loop.told_to_stop) or (drained and self._drain)
        stalled = not ended and self._drain and now - self._moved_s > STALL_S
        if ended or stalled:
            _tell_unended(self._display, (*dispatchers, *eventstores))
            for why in () if stalled else _unpublished(sample):
                self._display.notice(f"{why}; the next run goes on")
            self.dispatchers, self.eventstores = dispatchers, eventstores
            self.lost_records = sum(source["lost"] for one in importers for source in one["sources"])
            self.stopped, self.seconds = self._drain and not drained, now - self._began
            self.restarts = loop.cluster.supervisor.restarts()
        if stalled:
            raise StalledError(why_stalled(loop.reader, now - self._moved_s))
        return ended


class Completing:
    """After a drain, the joiners complete what they closed, as long as they get on with it.

    Those that are told to stop do so, too, but nobody may want to wait for that. A joiner that is in trouble
    (a full disk) is not waited for; one that does not answer, perhaps restarting, is for a while.
    """

    def __init__(self, told_to_stop: Sequence[int], display: RunDisplay) -> None:
        self._told_to_stop, self._display = told_to_stop, display
        self._seen: list[tuple[int, int]] | None = None
        self._moved_s = 0.0

    def is_over(self, sample: Sample | None) -> bool:
        if sample is None:
            return False
        outputs = [joiner["output"] for joiner in sample.of("joiner")]
        at_work = [output for output in outputs if output["waiting"] and output["trouble"] is None]
        seen = [(output["waiting"], output["progress"]) for output in at_work]
        if seen != self._seen:
            self._seen, self._moved_s = seen, sample.at_s
        files = sum(output["waiting"] for output in at_work)
        if not (files or sample.silent(("joiner",))) or sample.at_s - self._moved_s > STILL_S_MAX:
            return True
        if not self._told_to_stop:
            self._display.completing(files)
        elif files:
            self._display.notice(
                f"{files} files of the joined logs are being completed; "
                "a second Ctrl-C leaves them to the next run"
            )
        return bool(self._told_to_stop)


def _unpacking(work: Path) -> int:
    """Bytes of compressed logs that are unpacked, or being unpacked: slow, but not a stall."""
    written = 0
    for path in work.glob("*/**/spool/*"):
        with contextlib.suppress(FileNotFoundError):
            written += path.stat().st_size
    return written


def _tell_unended(display: RunDisplay, statuses: Sequence[Status]) -> None:
    for status in statuses:
        unreadable = status.get("unreadable", {})
        for file, size in status.get("unended", {}).items():
            if file not in unreadable:
                display.notice(f"{file} ends in a partly written line ({size} bytes), left for the next run")
        for file, reason in unreadable.items():
            display.notice(f"{file} was not read ({reason}), left for the next run")


def _ledgers(topology: Topology) -> list[Status]:
    return [ledger_of(topology, pipeline) for pipeline in topology.pipelines]


def _summary(topology: Topology, run: _Draining, joined_before: int, display: RunDisplay) -> dict[str, Any]:
    per_datacenter = joined_lines(Path(topology.output))
    joined = sum(per_datacenter.values())
    ledgers = _ledgers(topology)
    written = sum(ledger["fates"][Fate.JOINED.value] for ledger in ledgers)
    if written > joined:
        display.notice(
            f"{written - joined:,} joined lines are not in {topology.output}/joined any more, and count as "
            "joined. Restore them, unless they were moved away on purpose or `photon recover` has had "
            "them joined again"
        )
    unlisted = unlisted_files(topology)
    if unlisted:
        display.notice(
            f"{len(unlisted)} files with joined events are not complete yet (in no manifest, {unlisted[0]} "
            "first); the same command completes them"
        )
    statuses = (*run.dispatchers, *run.eventstores)
    summary = {
        **run_summary(ledgers, run.eventstores, joined, joined_before, run.seconds),
        "lost_records": run.lost_records,
        "joined_by_datacenter": per_datacenter,
        "primary_events": max((e.get("primary_events", 0) for e in run.eventstores), default=0),
        "primary_malformed": max((e.get("malformed", 0) for e in run.eventstores), default=0),
        "stopped": run.stopped,
        "unread_files": sorted({file for one in statuses for file in one.get("unreadable", ())}),
        "unended_files": sorted({file for one in run.dispatchers for file in one.get("unended", ())}),
        "unlisted_files": [str(path) for path in unlisted],
        "restarts": run.restarts,
    }
    _tell_misnamed(display, Path(topology.output) / "dead-letters", summary)
    return summary


def _tell_misnamed(display: RunDisplay, letters: Path, summary: Mapping[str, Any]) -> None:
    """Where no event at all could be read, its fields have other names than the settings say."""
    primary = summary["primary_events"], summary["primary_malformed"]
    foreign = summary["foreign_events"] - summary["malformed"], summary["malformed"]
    for side, (good, bad) in {"primary": primary, "foreign": foreign}.items():
        files = sorted(letters.glob(f"*/{side}-*.jsonl")) if bad and not good else []
        if files:
            with files[0].open("rb") as file:
                first = json.loads(file.readline())
            mend = (
                f". Name the fields in a photon.toml, [{side}] (`photon init` guesses them), and give it as "
                "--config, with another --out"
            )
            where = place_of(first["file"], first["offset"])
            display.notice(
                f"no {side} event could be read: {where}: {first['reason']}"
                + ("" if NOT_UTF8 in first["reason"] else mend)
            )
