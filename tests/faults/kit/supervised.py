"""A LocalCluster whose supervisor is a process of its own, so that a test can kill it, and all else with it.

system.dev = SupervisedSystem(system.topology, system.work)     before the FaultSystem is entered
"""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import psutil

from photon.cluster.local_cluster import LocalCluster
from photon.cluster.nursery import Nursery
from photon.cluster.supervisor import FreshLauncher, child_environment, die_with_parent
from photon.cluster.topology import Topology, read_topology
from photon.core.signals import on_termination

_POLL_S: Final = 0.05
_STOP_S_MAX: Final = 60.0


class SupervisedSystem(LocalCluster):
    """Its `kill` is of the supervisor alone; `start` comes again after it, on the same directories."""

    def __init__(self, topology: Topology, work: Path) -> None:
        super().__init__(topology, work, FreshLauncher())  # which is never asked
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def start(self) -> None:
        with (self._work / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.kit.supervised", str(self._work)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                cwd=Path(__file__).parents[3],
            )

    def poll(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, (self._work / "supervisor.log").read_text()

    def kill(self) -> None:
        if self._process is not None:
            self._family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(_STOP_S_MAX) == 0, (self._work / "supervisor.log").read_text()
        self._process = None

    def roles(self) -> int:
        """How many processes it supervises (they are the nursery's children)."""
        assert self._process is not None
        nurseries = psutil.Process(self._process.pid).children()
        return sum(len(nursery.children()) for nursery in nurseries)

    def survivors(self) -> list[psutil.Process]:
        """Of those that ran when it was killed."""
        return [one for one in self._family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def main(work: Path) -> None:
    die_with_parent()
    told = threading.Event()
    on_termination(told.set)
    nursery = Nursery()
    system = LocalCluster(read_topology(work / "topology.json"), work, nursery)
    try:
        system.start()
        while not told.is_set():
            system.poll()
            time.sleep(_POLL_S)
        system.stop()
    finally:
        system.kill()
        nursery.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(Path(sys.argv[1]))
