"""A container engine: the one that answers, or one that is started by hand and leaves nothing behind.

Ours is told to keep its hands off the firewall and off forwarding. Networks between containers need neither;
only the way out of them does, and nothing here goes out.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

_START_S = 60.0
_STOP_S = 60.0
_OPTIONS = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
_PR_SET_PDEATHSIG = 1


class NoEngineError(Exception):
    """Why there is none to be had."""


class Engine:
    """`environment`: what docker and docker-compose are to be called with. `directory`: all that ours has."""

    def __init__(self) -> None:
        self.own = False
        self.environment: dict[str, str] = {**os.environ, "DOCKER_BUILDKIT": "0"}
        self.environment.pop("PYTHONPATH", None)  # docker-compose has a Python of its own
        self._process: subprocess.Popen[bytes] | None = None
        self.directory: Path | None = None

    def start(self) -> None:
        """NoEngineError, which says what is missing."""
        if shutil.which("docker") is None:
            raise NoEngineError("there is no docker command")
        if self._answers():
            return
        for command in ("dockerd", "runc"):
            if shutil.which(command) is None:
                raise NoEngineError(f"no engine answers, and there is no {command} to start one")
        if os.geteuid() != 0:
            raise NoEngineError("no engine answers, and only root can start one")
        # A short name: a socket's path has 108 bytes at most.
        self.directory = Path(tempfile.mkdtemp(prefix="photon-engine-", dir="/tmp"))
        self._start_own(self.directory)

    def _start_own(self, home: Path) -> None:
        socket, log = f"unix://{home}/docker.sock", home / "log"
        places = ["--data-root", home / "data", "--exec-root", home / "exec", "-p", home / "pid"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["dockerd", "-H", socket, *map(str, places), *_OPTIONS],
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
        self.own = True
        self.environment["DOCKER_HOST"] = socket
        for name in ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
            self.environment.pop(name, None)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = "".join(log.read_text("utf-8", "replace").splitlines(keepends=True)[-5:])
                self.stop()
                raise NoEngineError(f"the engine does not start here:\n{said}")
            time.sleep(0.2)

    def stop(self) -> None:
        """One that we have started, and all that it has on disk."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None
        if self.directory is not None:
            _unmount_below(self.directory)
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    def docker(self, *arguments: object, timeout_s: float = 600.0) -> str:
        """What the docker command says. AssertionError with all its words if it fails."""
        return run(["docker", *map(str, arguments)], self.environment, timeout_s)

    def _answers(self) -> bool:
        command = ["docker", "version", "--format", "{{.Server.Version}}"]
        try:
            asked = subprocess.run(
                command, env=self.environment, capture_output=True, check=False, timeout=20
            )
        except subprocess.TimeoutExpired:
            return False
        return asked.returncode == 0


def run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """Its standard output. AssertionError with all its words if it fails."""
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def _stop_with_parent() -> None:
    """The engine ends its containers and goes when the tests are killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _unmount_below(directory: Path) -> None:
    """What an engine that was killed has left mounted; the deepest first."""
    mounts = [line.split(" ")[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{directory}/")), key=len, reverse=True):
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
