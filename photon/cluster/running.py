"""What every run on this machine needs: locks, signals, a registry that remembers, the final counts."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from joiner.output_files import count_joined
from photon.cluster.local_cluster import LocalCluster
from photon.cluster.nursery import Nursery
from photon.cluster.preflight import RegistryMemory
from photon.cluster.registry_replicas import Replacing, members_of
from photon.cluster.topology import DATACENTER_NAMES, JOINER_FILES, Pipeline, Topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, PhotonError

if TYPE_CHECKING:
    from photon.cluster.statuses import StatusReader

POLL_S: Final = 0.05
STALL_S: Final = 120.0
"""Nothing moves for so long: the run ends with status 1; it can be resumed."""


class StalledError(PhotonError):
    """Nothing has moved for long; what was done is safe and the run can be resumed."""


@contextlib.contextmanager
def running(
    cluster: LocalCluster,
    work: Path,
    told_to_stop: Sequence[int],
    remembered: int,
    notice: Callable[[str], None],
    replace: bool = True,
) -> Iterator["StatusReader"]:
    """All processes, within the block; stopped after it, killed if it raises. PortTakenError: choose again;
    SettingsError for another number of workers than before.

    `remembered`: as many ids must the registry know; `replace`: replicas that lost their disks.
    """
    from dispatcher.workers import check_workers
    from photon.cluster.statuses import StatusReader  # while the nursery imports the same

    topology = cluster.topology
    for pipeline in topology.pipelines:
        check_workers(Path(pipeline.directory) / "dispatcher", len(pipeline.dispatchers))
    replacing = Replacing(topology, members_of(work, len(topology.replicas)).lost, notice)
    try:
        cluster.start()
        if replace:
            replacing.start()
        with contextlib.closing(StatusReader(topology)) as reader:
            await_memory(work, cluster, reader, told_to_stop, remembered)
            cluster.start_dispatchers()
            yield reader
        replacing.stop()
        cluster.stop()
    except BaseException:
        replacing.stop()
        cluster.kill()
        raise


def await_memory(
    work: Path,
    cluster: LocalCluster,
    reader: "StatusReader",
    told_to_stop: Sequence[int],
    remembered: int,
) -> None:
    """Return once the registry is known to remember so many ids; CorruptStateError if it does not."""
    memory = RegistryMemory(remembered, work)
    began = time.monotonic()
    while not told_to_stop:
        cluster.poll()
        (replicas,) = reader.read(("registry",)) if remembered else ([],)
        waited = time.monotonic() - began
        if memory.is_whole(replicas, waited):
            return
        if waited > STALL_S:
            raise StalledError(why_stalled(reader, waited))
        time.sleep(POLL_S)


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
