"""A system of several datacenters on this machine, of which each can be killed and brought back."""

from pathlib import Path

from photon.cluster.local_cluster import LocalCluster
from photon.cluster.supervisor import Launcher, Supervisor
from photon.cluster.topology import Topology
from photon.core.disk import make_directory
from photon.core.errors import UsageError
from photon.dev.plan import fed_datacenters, logs_of


class DevSystem:
    """All processes of a topology. Call from one thread, the main one; `poll` often: it restarts the dead."""

    def __init__(self, topology: Topology, work: Path, launcher: Launcher) -> None:
        for name in fed_datacenters(topology, work):
            for kind in ("queries", "clicks"):
                make_directory(logs_of(work, name) / kind)
        self.cluster = LocalCluster(topology, work, launcher)

    @property
    def topology(self) -> Topology:
        return self.cluster.topology

    @property
    def supervisor(self) -> Supervisor:
        return self.cluster.supervisor

    def start(self) -> None:
        """Everything at once: each process waits for whom it needs."""
        self.cluster.start()
        self.cluster.start_dispatchers()

    def poll(self) -> None:
        """Restart what died. ProcessFailedError, CorruptStateError: it is over."""
        self.cluster.poll()

    def stop(self) -> None:
        """Down the stream; what is in hand is finished."""
        self.cluster.stop()

    def kill(self) -> None:
        """SIGKILL everything, for good."""
        self.cluster.kill()

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
