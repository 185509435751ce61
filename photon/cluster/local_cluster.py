"""The processes of a topology on this machine: placed on free ports, started, watched over, killed, stopped.

Before joiners end they complete the joined logs that they have closed (docs/output.md); what is left of that
work decides how long they are given.
"""

import contextlib
import random
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from joiner.output_files import LINES, PARQUET, complete_files
from photon.cluster.registry_replicas import DiskWatch, Members
from photon.cluster.supervisor import Launcher, PortTakenError, Supervisor
from photon.cluster.topology import JOINER_FILES, REGISTRY, Pipeline, Replica, Topology, write_topology
from photon.core.errors import UnavailableError, UsageError

PORT_TRIES_MAX: Final = 5
GRACE_S: Final = 10.0
GRACE_S_MAX: Final = 600.0
BYTES_PER_S_MIN: Final = 4 << 20
"""The least that is completed in a second: about a tenth of what a core makes Parquet."""

# Below the range the kernel gives to outgoing connections, so that none of those takes a port
# between the choice and the bind, nor while a process restarts on it.
_LOW: Final = 20_000
_HIGH: Final = 32_000
_TRIES: Final = 2_000
_STOPS: Final = (("importer", "dispatcher"), ("joiner",), (REGISTRY, "eventstore"))
"""Down the stream, so that nobody loses whom it still needs."""
_Started = TypeVar("_Started")


def free_ports(count: int, rng: random.Random) -> list[int]:
    """Distinct ports of 127.0.0.1 that nothing listens on now."""
    ports: set[int] = set()
    for _ in range(_TRIES):
        if len(ports) == count:
            break
        port = rng.randrange(_LOW, _HIGH)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    if len(ports) < count:
        raise UnavailableError(f"no {count} free ports between {_LOW} and {_HIGH} on 127.0.0.1; free some")
    return sorted(ports)


def on_free_ports(
    attempt: Callable[[], _Started], notice: Callable[[str], None], tries_max: int = PORT_TRIES_MAX
) -> _Started:
    """What `attempt` returns, which chooses ports; again, as long as another program is quicker.

    What was done is safe, as after any other end of a run. The last PortTakenError is raised.
    """
    for _ in range(tries_max - 1):
        try:
            return attempt()
        except PortTakenError as error:
            notice(f"{error}; starting again on other ports")
    return attempt()


def placed(
    topology: Topology,
    members: Members,
    sites: Mapping[str, str],
    datacenters: Sequence[str],
    work: Path,
    rng: random.Random,
) -> Topology:
    """It, with its processes under `work` and on free ports. UnavailableError if there are too few.

    `sites`: replica -> its datacenter, of those that are anywhere in particular; `datacenters`: of pipelines.
    """
    settings = topology.settings
    counts = {
        "importer": int(topology.imports),
        "eventstore": settings.eventstore.processes,
        "joiner": settings.joiner.processes,
        "dispatcher": settings.dispatcher.workers,
    }
    processes = len(members.names) + len(datacenters) * sum(counts.values())
    needed = len(members.names) + processes * (2 if settings.metrics.serve else 1)
    addresses = (f"127.0.0.1:{port}" for port in free_ports(needed, rng))
    here = replace(
        topology,
        replicas=[
            Replica(
                name=name,
                grpc=next(addresses),
                raft=next(addresses),
                directory=str(work.absolute() / REGISTRY / name),
                joining=name in members.joining,
                datacenter=sites.get(name, ""),
            )
            for name in members.names
        ],
        pipelines=[
            Pipeline(
                datacenter=name,
                directory=str(work.absolute() / name),
                **{f"{role}s": tuple(islice(addresses, n)) for role, n in counts.items()},  # type: ignore[arg-type]
            )
            for name in datacenters
        ],
        run=f"{rng.getrandbits(64):016x}",
    )
    return replace(here, metrics=dict(zip(here.titles(), addresses, strict=False)))


class LocalCluster:
    """All processes of a topology under one supervisor; each datacenter can be killed and brought back.

    Call from one thread, the main one; `poll` often: it restarts the dead.
    """

    def __init__(
        self, topology: Topology, work: Path, launcher: Launcher, file: str = "topology.json"
    ) -> None:
        self.topology = topology
        self._path = work / file
        write_topology(topology, self._path)
        self.supervisor = Supervisor(work / "logs", launcher)
        self._disks = DiskWatch(work / REGISTRY, [replica.name for replica in topology.replicas])

    def start(self, *roles: str) -> None:
        """The processes of these roles, or of every one, that are not started yet: each waits for those it
        needs."""
        for process in self.topology.processes(*roles):
            if process.title in self.supervisor.children:
                continue
            # The name first: `ps` may cut a long path off.
            arguments = [process.role, "serve", "--name", process.name, "--topology", str(self._path)]
            lost_disk = partial(self._disks.has_lost, process.name) if process.role == REGISTRY else None
            self.supervisor.start(process.title, arguments, lost_disk)

    def poll(self) -> None:
        """Restart what died, tell who lost its disk. ProcessFailedError, CorruptStateError: it is over."""
        self.supervisor.notices += self._disks.look()
        self.supervisor.poll()

    def stop(self) -> None:
        """Joiners complete what they have closed first, and have the time for it."""
        for roles in _STOPS:
            left = unlisted_files(self.topology) if "joiner" in roles else []
            self.supervisor.stop(self.topology.titles(*roles), grace_s(left))

    def kill(self) -> None:
        """SIGKILL everything, for good."""
        self.supervisor.kill()

    def processes_of(self, datacenter: str) -> list[str]:
        """`registry-r0`, `joiner-east`, ... UsageError if there is no such datacenter."""
        found = [each.title for each in self.topology.processes() if each.datacenter == datacenter]
        if not found:
            there = ", ".join(self.topology.datacenters)
            raise UsageError(f"no process runs in a datacenter '{datacenter}'; there are: {there}")
        return found

    def kill_datacenter(self, name: str) -> None:
        """SIGKILL all its processes at once, and keep them down."""
        self.supervisor.hold_down(self._started(name))

    def freeze_datacenter(self, name: str) -> None:
        """SIGSTOP to all its processes: alive, and no answer from them."""
        self.supervisor.signal(self._started(name), signal.SIGSTOP)

    def restore_datacenter(self, name: str) -> None:
        """Its processes start again with what is on their disks, at the next `poll`; or go on."""
        self.supervisor.signal(self._started(name), signal.SIGCONT)
        self.supervisor.let_up(self._started(name))

    def pid_of(self, process: str) -> int | None:
        """None while it is down."""
        child = self.supervisor.children[process].process
        return None if child is None else child.pid

    def _started(self, datacenter: str) -> list[str]:
        return [name for name in self.processes_of(datacenter) if name in self.supervisor.children]


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
    """How long processes may take to end: joiners complete these files first."""
    return min(GRACE_S_MAX, GRACE_S + sum(map(_size, unlisted)) / BYTES_PER_S_MIN)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # it was made Parquet meanwhile
        return path.stat().st_size
    return 0
