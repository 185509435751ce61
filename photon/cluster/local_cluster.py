"""The processes of a topology on this machine: started, watched over, killed, stopped; what is left to do."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from joiner.output_files import LINES, PARQUET, complete_files
from photon.cluster.registry_replicas import DiskWatch
from photon.cluster.roles import ROLES
from photon.cluster.supervisor import Launcher, Supervisor
from photon.cluster.topology import JOINER_FILES, Topology, write_topology
from photon.core.errors import UsageError

STILL_S_MAX: Final = 60.0
"""Without progress for so long, the rest is left to the joiners' end."""
GRACE_S: Final = 10.0
GRACE_S_MAX: Final = 600.0
BYTES_PER_S_MIN: Final = 4 << 20
"""So much is completed in a second at the very least: about a tenth of what a core makes Parquet."""


class LocalCluster:
    """All processes of a topology under one supervisor; each datacenter can be killed and brought back.

    Call from one thread, the main one; `poll` often: it restarts the dead.
    """

    def __init__(self, topology: Topology, work: Path, launcher: Launcher) -> None:
        self.topology = topology
        self._path = work / "topology.json"
        write_topology(topology, self._path)
        self.supervisor = Supervisor(work / "logs", launcher)
        self._disks = DiskWatch(work / "registry", [replica.name for replica in topology.replicas])

    def start(self) -> None:
        """Everything at once: each process waits for those it needs."""
        self.start_but_dispatchers()
        self.start_dispatchers()

    def start_but_dispatchers(self) -> None:
        self._start(reads_on=False)

    def poll(self) -> None:
        """Restart what died, tell who lost its disk. ProcessFailedError, CorruptStateError: it is over."""
        self.supervisor.notices += self._disks.look()
        self.supervisor.poll()

    def start_dispatchers(self) -> None:
        self._start(reads_on=True)

    def stop(self) -> None:
        """Down the stream, so that nobody loses whom it still needs."""
        for tier in sorted({role.stops for role in ROLES.values()}):
            roles = [role for role in ROLES.values() if role.stops == tier]
            names = self.topology.titles(*(role.name for role in roles))
            if any(role.completes_files for role in roles):
                self.supervisor.stop([names], grace_s(unlisted_files(self.topology)))
            else:
                self.supervisor.stop([names])

    def kill(self) -> None:
        """SIGKILL everything, for good."""
        self.supervisor.kill()

    def datacenters(self) -> list[str]:
        """Those with a pipeline first."""
        names = [pipeline.datacenter for pipeline in self.topology.pipelines]
        return list(dict.fromkeys([*names, *(replica.datacenter for replica in self.topology.replicas)]))

    def processes_of(self, datacenter: str) -> list[str]:
        """`registry-r0`, `joiner-east`, ... UsageError if there is no such datacenter."""
        found = [each.title for each in self.topology.processes() if each.datacenter == datacenter]
        if not found:
            raise UsageError(
                f"no process runs in a datacenter '{datacenter}'; there are: {', '.join(self.datacenters())}"
            )
        return found

    def kill_datacenter(self, name: str) -> None:
        """SIGKILL all its processes at once, and keep them down."""
        self.supervisor.hold_down(self._started(name))

    def restore_datacenter(self, name: str) -> None:
        """Its processes start again with what is on their disks, at the next `poll`."""
        self.supervisor.let_up(self._started(name))

    def kill_process(self, process: str) -> None:
        """SIGKILL one; `poll` starts it again."""
        self.supervisor.kill_one(process)

    def pid_of(self, process: str) -> int | None:
        """None while it is down."""
        child = self.supervisor.children[process].process
        return None if child is None else child.pid

    def is_down(self, process: str) -> bool:
        """Whether it is kept down."""
        child = self.supervisor.children.get(process)
        return child is not None and child.held

    def _started(self, datacenter: str) -> list[str]:
        return [name for name in self.processes_of(datacenter) if name in self.supervisor.children]

    def _start(self, *, reads_on: bool) -> None:
        for role in ROLES.values():
            if role.reads_on != reads_on:
                continue
            for process in self.topology.processes(role.name):
                # The name first: `ps` may cut a long path off.
                arguments = [role.name, "serve", "--name", process.name, "--topology", str(self._path)]
                lost_disk = None if role.places else partial(self._disks.has_lost, process.name)
                self.supervisor.start(process.title, arguments, lost_disk)


# --- files of the joined logs that the joiners have still to complete (docs/output.md)


class Backlog:
    """Whether the joiners get on with the files that are closed and not listed."""

    def __init__(self) -> None:
        self.files = 0
        """That are worked on."""
        self._seen: list[tuple[int, int]] = []
        self._moved_s = float("-inf")

    def goes_on(self, outputs: Sequence[Mapping[str, Any]], silent: int, now_s: float) -> bool:
        """`outputs`: what the joiners say of theirs; `silent`: so many say nothing, being restarted perhaps.

        A joiner that is in trouble (a full disk) is not waited for.
        """
        at_work = [output for output in outputs if output["waiting"] and output["trouble"] is None]
        seen = [(output["waiting"], output["progress"]) for output in at_work]
        if self._moved_s == float("-inf") or seen != self._seen:
            self._seen, self._moved_s = seen, now_s
        self.files = sum(output["waiting"] for output in at_work)
        return (self.files > 0 or silent > 0) and now_s - self._moved_s <= STILL_S_MAX


def unlisted_files(topology: Topology) -> list[Path]:
    """Files of joiners with joined events that no manifest lists, in all output roots, growing ones included.

    CorruptStateError, StorageError.
    """
    roots = [topology.output, *topology.settings.joiner.output_roots]
    places = [Path(root) / "joined" / p.datacenter for root in roots for p in topology.pipelines]
    return sorted(path for place in places for path in _unlisted_in(place))


def _unlisted_in(directory: Path) -> Iterator[Path]:
    listed = complete_files(directory)
    for path in directory.glob(f"{JOINER_FILES}*"):
        if path.suffix not in (LINES, PARQUET):
            continue
        if path.with_suffix(LINES).name in listed or path.with_suffix(PARQUET).name in listed:
            continue
        half_made = path.suffix == PARQUET and path.with_suffix(LINES).exists()
        if not half_made and _size(path):
            yield path


def grace_s(unlisted: Sequence[Path]) -> float:
    """How long joiners may take to end: they complete these files first."""
    return min(GRACE_S_MAX, GRACE_S + sum(map(_size, unlisted)) / BYTES_PER_S_MIN)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # it was made Parquet meanwhile
        return path.stat().st_size
    return 0
