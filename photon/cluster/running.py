"""What `photon join` and `photon dev` share: locks, signals, the loop of a run, its final counts."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from joiner.output_files import count_joined
from photon.cluster.local_cluster import LocalCluster
from photon.cluster.nursery import Nursery
from photon.cluster.preflight import RegistryMemory
from photon.cluster.registry_replicas import Replacing, members_of
from photon.cluster.roles import ROLES
from photon.cluster.summary import Sample
from photon.cluster.supervisor import Launcher
from photon.cluster.topology import DATACENTER_NAMES, JOINER_FILES, Pipeline, Topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, PhotonError
from photon.core.settings import Settings

if TYPE_CHECKING:
    from photon.cluster.statuses import StatusReader

POLL_S: Final = 0.05
STALL_S: Final = 120.0
"""Nothing moves for so long: the run ends with status 1; it can be resumed."""


class StalledError(PhotonError):
    """Nothing has moved for long; what was done is safe and the run can be resumed."""


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
    with locked(work), locked(out / "joined"), termination() as told_to_stop, open_nursery() as nursery:
        yield Ground(nursery, told_to_stop, sum(joined_lines(out).values()))


class RunLoop:
    """The loop of a run: restarts what died, asks all processes, hands on what they have to say."""

    def __init__(
        self,
        cluster: LocalCluster,
        reader: "StatusReader",
        pool: ThreadPoolExecutor,
        told_to_stop: Sequence[int],
        notice: Callable[[str], None],
        every_s: float,
    ) -> None:
        """`pool`: of one thread, which asks: a process that stands still must not keep others from being
        restarted. They are asked `every_s` after the last time, and when a phase begins."""
        self.cluster, self.reader, self.told_to_stop = cluster, reader, told_to_stop
        self._pool, self._notice, self._every_s = pool, notice, every_s
        self._asked_s = float("-inf")
        self._answer: Future[object] | None = None

    def until(self, over: Callable[[Sample | None], bool], roles: tuple[str, ...] = tuple(ROLES)) -> None:
        """One phase of a run: turns until `over`, which is given what the processes said, if that is new.

        ProcessFailedError, CorruptStateError: the run is over.
        """
        self._asked_s = float("-inf")
        while True:
            self.cluster.poll()
            sample = self._look(roles)
            if sample is not None:
                tell_all(self.cluster, self.reader, self._notice)
            if over(sample):
                return

    def _look(self, roles: tuple[str, ...]) -> Sample | None:
        """Takes POLL_S at most, and as long as that without news."""
        now = time.monotonic()
        if self._answer is None and now - self._asked_s >= self._every_s:
            self._asked_s, self._answer = now, self._pool.submit(self.reader.read, roles)
        if self._answer is None:
            time.sleep(POLL_S)
            return None
        wait([self._answer], POLL_S)
        if not self._answer.done():
            return None
        self._answer.result()
        self._answer = None
        return Sample(self._asked_s, {**dict.fromkeys(self.reader.silent()), **dict(self.reader.named())})


@contextlib.contextmanager
def running(
    cluster: LocalCluster,
    work: Path,
    ground: Ground,
    settings: Settings,
    notice: Callable[[str], None],
    every_s: float = POLL_S,
    replace: bool = True,
) -> Iterator[RunLoop]:
    """All processes, within the block; stopped after it, killed if it raises. PortTakenError: choose again;
    SettingsError for another number of workers than before.

    `replace`: replicas that lost their disks.
    """
    from dispatcher.workers import check_workers
    from photon.cluster.statuses import StatusReader  # while the nursery imports the same

    topology, told_to_stop = cluster.topology, ground.told_to_stop
    for pipeline in topology.pipelines:
        check_workers(Path(pipeline.directory) / "dispatcher", len(pipeline.dispatchers))
    replacing = Replacing(topology, members_of(work, len(topology.replicas)).lost, notice)
    # Ids that are forgotten on purpose are not missed.
    remembered = 0 if settings.registry.retention_days else ground.joined_before
    try:
        cluster.start_but_dispatchers()
        if replace:
            replacing.start()
        with contextlib.closing(StatusReader(topology)) as reader, ThreadPoolExecutor(1, "asking") as pool:
            loop = RunLoop(cluster, reader, pool, told_to_stop, notice, every_s)
            if remembered:
                _await_memory(loop, RegistryMemory(remembered, work))
            cluster.start_dispatchers()
            yield loop
        replacing.stop()
        cluster.stop()
    except BaseException:
        replacing.stop()
        cluster.kill()
        raise


def _await_memory(loop: RunLoop, memory: RegistryMemory) -> None:
    """Return once the registry is known to remember all; CorruptStateError if it does not."""
    began = time.monotonic()

    def over(sample: Sample | None) -> bool:
        waited = time.monotonic() - began
        if loop.told_to_stop or (sample is not None and memory.is_whole(sample.of("registry"), waited)):
            return True
        if waited > STALL_S:
            raise StalledError(why_stalled(loop.reader, waited))
        return False

    loop.until(over, ("registry",))


def tell_all(cluster: LocalCluster, reader: "StatusReader", tell: Callable[[str], None]) -> None:
    """What the supervisor and the processes have to say for a person."""
    while cluster.supervisor.notices:
        tell(cluster.supervisor.notices.pop(0))
    for name, status in reader.named():
        for notice in status.get("notices", ()):
            tell(f"{name}: {notice}")
        if status.get("storage_error"):
            tell(f"{name}: {status['storage_error']}")


def why_stalled(reader: "StatusReader", seconds: float) -> str:
    reasons = [
        f"{name}: {status['storage_error']}" for name, status in reader.named() if status.get("storage_error")
    ]
    has_quorum = reader.registry_has_quorum()  # asks the replicas, which are silent until they are asked
    reasons += [f"{name} does not answer" for name in reader.silent()]
    if not has_quorum:
        reasons.append("the registry has no quorum")
    reasons += [
        f"{name}: {status['pending']:,} events wait to be tried again"
        for name, status in reader.named()
        if status.get("pending")
    ]
    return (
        f"nothing has moved for {seconds:.0f} s ({'; '.join(reasons) or 'no reason known'}); "
        "nothing is lost: mend the cause and run the same command again"
    )


def ledger_of(topology: Topology, pipeline: Pipeline) -> dict[str, Any]:
    """What a dispatcher that has ended left on disk: the truth, however it ended."""
    from dispatcher.workers import read_totals

    bytes_max = topology.settings.dispatcher.state_bytes_max
    letters = topology.dead_letters_directory(pipeline.datacenter)
    return read_totals(Path(pipeline.directory) / "dispatcher", letters, bytes_max)


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


def locked(directory: Path) -> DirectoryLock:
    try:
        return DirectoryLock(directory)
    except LockedError as error:
        raise LockedError(
            f"another photon runs on {directory}; wait for it or name another --work and --out"
        ) from error


@contextlib.contextmanager
def open_nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    try:
        yield nursery
    finally:
        nursery.close()


@contextlib.contextmanager
def termination() -> Iterator[list[int]]:
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
