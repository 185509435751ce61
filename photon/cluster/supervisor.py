"""Starts the processes of a system, restarts those that die, stops them all, and leaves none behind."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from photon.core.clock import Backoff
from photon.core.disk import storage_errors
from photon.core.errors import DiskFullError, PhotonError

# Large messages are freed and asked for again at each batch: keep their pages (design measurement 7).
_ENVIRONMENT: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_TOP_PAD_": str(8 << 20),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GRPC_VERBOSITY": "ERROR",
}


_WORD_BYTES: Final = 4096
"""Room that a last word needs."""


class Process(Protocol):
    """As a subprocess.Popen: `poll` and `wait` give the exit status, negative for a signal."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def send_signal(self, signal: int, /) -> None: ...


class Launcher(Protocol):
    """Starts `photon <arguments>` with its output appended to `log`."""

    def launch(self, arguments: Sequence[str], log: Path) -> Process: ...

    def close(self) -> None:
        """Let go of what it holds; processes that still run are killed when this one ends."""


class FreshLauncher:
    """Each process starts an interpreter of its own. `command`: what goes before the arguments."""

    def __init__(self, *command: str) -> None:
        self._command = command or ("photon",)

    def launch(self, arguments: Sequence[str], log: Path) -> Process:
        with log.open("ab") as output:
            # A session of its own: Ctrl-C reaches the parent alone, which stops the children in order.
            return subprocess.Popen(
                [sys.executable, "-m", *self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
                start_new_session=True,
            )

    def close(self) -> None:
        pass


def child_environment() -> Mapping[str, str]:
    """Of every process that this one starts: it dies with this one, and finds the modules this one finds.

    With -m alone it would also find a `random.py` in the directory that the user stands in.
    """
    return {
        **_ENVIRONMENT,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONSAFEPATH": "1",
        "PHOTON_PARENT": str(os.getpid()),
    }


RESTARTS: Final = Backoff(0.05, 5.0)
STABLE_S: Final = 10.0
LOG_BYTES_MAX: Final = 16 << 20
LOG_LOOK_S: Final = 10.0
USAGE_STATUS: Final = 2
CORRUPT_STATUS: Final = 3
"""Exit statuses of a role that a restart does not mend: unusable settings, untrustworthy state."""
ADDRESS_STATUS: Final = 4
"""And of one whose port was taken by somebody else."""


class ProcessFailedError(PhotonError):
    """A process ended in a way that a restart can't mend. Its settings are the user's: bad usage stays so."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_status = USAGE_STATUS if status == USAGE_STATUS else 1


class PortTakenError(ProcessFailedError):
    """A process found its port taken when it was first started: the run needs other ones."""


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    arguments: Sequence[str]
    log: Path
    process: Process | None = None
    started: float = 0.0
    log_start: int = 0
    """Where in its log the running process began."""
    failures: int = 0
    restart_at: float = 0.0
    restarts: int = 0
    stays_down: Callable[[], bool] | None = None
    """Asked before each restart: whether it would do harm."""
    held: bool = False
    """Down because somebody wants it so."""


class Supervisor:
    """Owns the children from start to stop. Call from one thread, the main one: children die with it."""

    def __init__(self, log_directory: Path, launcher: Launcher | None = None) -> None:
        self._log_directory = log_directory
        self._launcher = FreshLauncher() if launcher is None else launcher
        log_directory.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, Child] = {}
        self._restarts = 0
        """Of those that were stopped since."""
        self._look_at_logs = float("-inf")
        self.notices: list[str] = []
        """What died and why, in a line each; the caller takes them."""

    def start(
        self, name: str, arguments: Sequence[str], stays_down: Callable[[], bool] | None = None
    ) -> None:
        """`arguments` are those of the photon command. While `stays_down` says so it is not restarted.
        StorageError for a log that can't be written; room for it is waited for, later on its rights, too."""
        child = Child(name, arguments, self._log_directory / f"{name}.log", stays_down=stays_down)
        with contextlib.suppress(DiskFullError), storage_errors(child.log):
            child.log.open("ab").close()
        self.children[name] = child
        self._spawn(child)

    def poll(self) -> None:
        """Restart what died, after a growing delay. ProcessFailedError for what no restart can mend."""
        now = time.monotonic()
        if now >= self._look_at_logs:
            self._look_at_logs = now + LOG_LOOK_S
            for child in self.children.values():
                _bound_log(child.log)
        for child in self.children.values():
            if child.process is None:
                if child.held or now < child.restart_at:
                    continue
                if _stays_down(child):
                    child.restart_at = now + RESTARTS.delay_s_max
                    continue
                self._spawn(child)
            elif (status := child.process.poll()) is not None:
                self._on_exit(child, status, now)

    def hold_down(self, names: Sequence[str]) -> None:
        """SIGKILL all of these at once; they are not started again before `let_up`."""
        children = [self.children[name] for name in names]
        for child in children:
            child.held = True
        _kill(children)

    def signal(self, names: Sequence[str], number: int) -> None:
        """To those of these that run."""
        for name in names:
            process = self.children[name].process
            if process is not None:
                process.send_signal(number)

    def let_up(self, names: Sequence[str]) -> None:
        """`poll` starts these again, at once."""
        for name in names:
            child = self.children[name]
            child.held, child.failures, child.restart_at = False, 0, 0.0

    def restarts(self) -> int:
        return self._restarts + sum(child.restarts for child in self.children.values())

    def stop(self, names: Sequence[str], grace_s: float = 10.0) -> None:
        """SIGTERM, SIGKILL for what is left after `grace_s`; returns when all of these are gone."""
        running = [c.process for name in names if (c := self.children.get(name)) and c.process]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + grace_s
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in names:  # not earlier: who interrupts this wants them killed
            child = self.children.pop(name, None)
            self._restarts += child.restarts if child else 0

    def kill(self) -> None:
        """SIGKILL everything at once. Every process can take it."""
        _kill(self.children.values())
        self.children.clear()

    def _spawn(self, child: Child) -> None:
        child.log_start = child.log.stat().st_size if child.log.exists() else 0
        try:
            child.process = self._launcher.launch(child.arguments, child.log)
        except OSError as error:  # no memory, too many processes, no room for the log: as it is just now
            self.notices.append(f"{child.name} could not be started ({error}); it is tried again")
            child.failures += 1
            child.restart_at = time.monotonic() + RESTARTS.delay_s(child.failures)
            return
        child.restarts += child.started > 0.0
        child.started = time.monotonic()

    def _on_exit(self, child: Child, status: int, now: float) -> None:
        down = _stays_down(child)
        # After a first start that went well, bad usage is the end of a registry replica that was replaced:
        # the run goes on without it. A port that somebody took meanwhile is waited for.
        started_well = child.restarts > 0 or now - child.started > STABLE_S
        if status == ADDRESS_STATUS and child.restarts == 0:
            raise PortTakenError(f"{child.name}: {last_message(child.log, child.log_start)}", status)
        if not down and (status == CORRUPT_STATUS or (status == USAGE_STATUS and not started_well)):
            raise ProcessFailedError(f"{child.name}: {last_message(child.log, child.log_start)}", status)
        why = f"killed by signal {-status}" if status < 0 else last_message(child.log, child.log_start)
        self.notices.append(f"{child.name} ended ({why}); {'not ' if down else ''}started again")
        child.process = None
        child.failures = 0 if now - child.started > STABLE_S else child.failures + 1
        child.restart_at = now + RESTARTS.delay_s(child.failures)


def _kill(children: Collection[Child]) -> None:
    """All at once, and then wait for them."""
    for child in children:
        if child.process is not None:
            child.process.kill()
    for child in children:
        if child.process is not None:
            child.process.wait()
            child.process = None


def _stays_down(child: Child) -> bool:
    return child.stays_down is not None and child.stays_down()


def die_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """In a child: SIGKILL from the kernel when the supervisor is gone, however it went."""
    parent = environment.get("PHOTON_PARENT")
    if parent is None:
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the call
        os._exit(1)


def last_message(log: Path, start: int = 0) -> str:
    """The last line that a process whose log began at `start` said of itself, for a report of its end."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = log.stat().st_size
        file.seek(max(start if start <= size else 0, size - 8192))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        for line in reversed(lines):
            if line.startswith("photon: "):
                return line.removeprefix("photon: ")
        if lines:
            return f"{lines[-1]} (see {log})"
    with contextlib.suppress(OSError):
        if shutil.disk_usage(log.parent).free < _WORD_BYTES:
            return f"ended without a word, for the disk of {log} is full: make room"
    return f"ended without a word (see {log})"


def _bound_log(log: Path) -> None:
    """Keep a log and, where there is room, one before it. Its process goes on appending to the same, emptied
    file."""
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        before = log.with_suffix(".log.1")
        try:
            shutil.copyfile(log, before)
        except OSError:  # the disk is full: a log may not end the run, which waits for room
            before.unlink(missing_ok=True)
        os.truncate(log, 0)
