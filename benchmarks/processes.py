"""Processes of a benchmark: children that talk JSON lines, and what a tree of processes costs."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import psutil

from photon.core.errors import PhotonError

ROOT = Path(__file__).resolve().parents[1]
_END_S = 10.0


class BenchError(PhotonError):
    """A measurement could not be made, or its figures would mean nothing."""


def start_module(module: str, argument: object, **pipes: Any) -> "subprocess.Popen[str]":
    """`python -m module JSON`, which ends with this process (photon.cluster.supervisor.die_with_parent)."""
    command = [sys.executable, "-m", module, json.dumps(argument)]
    environment = {**os.environ, "PHOTON_PARENT": str(os.getpid())}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, bufsize=1, **pipes)


def end(process: "subprocess.Popen[Any]") -> None:
    """SIGKILL, and wait."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Child:
    """A module that answers each JSON line on its standard input with one on its standard output."""

    def __init__(self, module: str, argument: object) -> None:
        self._process = start_module(module, argument, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid

    def tell(self, what: object) -> None:
        """Send a line; `hear` its answer later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"a process of the benchmark ended with status {self._process.wait(_END_S)}")
        return json.loads(line)

    def ask(self, what: object) -> Any:
        self.tell(what)
        return self.hear()

    def close(self) -> None:
        end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes so far."""
    return float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids))


def percentiles(latencies_ms: list[float]) -> dict[str, float]:
    """p50 and p99, of nothing at all: not a number."""
    ordered = sorted(latencies_ms) or [float("nan")]
    return {
        f"p{share}_ms": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 2)
        for share in (50, 99)
    }


SAMPLE_S: Final = 0.5
"""Walking the pages of all processes takes some milliseconds: more often, it would slow what it measures."""

_ROLE: Final = re.compile(r"\b(registry|eventstore|joiner|dispatcher) serve\b")
_PSS: Final = re.compile(r"^Pss_(Anon|File|Shmem):\s+(\d+) kB$", re.MULTILINE)


@dataclass(slots=True)
class Usage:
    """Peaks over all samples, bytes, of all processes together. `cpu_s`: role -> user and system seconds.

    `anonymous`: what only a process itself can free; `shared`: pages of files (libraries, LMDB maps), each
    counted once, which the kernel takes back when it needs them. `by_role`: peak of the anonymous, by role.
    """

    total: int = 0
    anonymous: int = 0
    shared: int = 0
    by_role: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)


class ProcessTree:
    """Samples a process and all below it, until `stop`. CPU counts from now on, whatever they used before."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._before = {process.pid: _cpu_s(process) for process in self._processes()}
        self._stop = threading.Event()
        self._usage = Usage()
        self._cpu: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def stop(self) -> Usage:
        """What was seen. CPU seconds miss what a process did after its last sample."""
        self._stop.set()
        self._thread.join()
        cpu: dict[str, float] = {}
        for role, seconds in self._cpu.values():
            cpu[role] = cpu.get(role, 0.0) + seconds
        self._usage.cpu_s = {role: round(seconds, 2) for role, seconds in sorted(cpu.items())}
        return self._usage

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                self._sample(self._processes())

    def _processes(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def _sample(self, processes: list[psutil.Process]) -> None:
        usage = self._usage
        anonymous: Counter[str] = Counter()
        shared = 0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                role = role_of(process.cmdline())
                self._cpu[process.pid] = (role, _cpu_s(process) - self._before.get(process.pid, 0.0))
                private, mapped = memory_of(Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii"))
                anonymous[role] += private
                shared += mapped
        private = sum(anonymous.values())
        usage.total = max(usage.total, private + shared)
        usage.anonymous = max(usage.anonymous, private)
        usage.shared = max(usage.shared, shared)
        for role, size in anonymous.items():
            usage.by_role[role] = max(usage.by_role.get(role, 0), size)


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def role_of(command: list[str]) -> str:
    """The role that a command line serves, `join` for the one that starts them."""
    found = _ROLE.search(" ".join(command))
    return found[1] if found else "join"


def memory_of(smaps_rollup: str) -> tuple[int, int]:
    """(anonymous, shared) proportional bytes, from the text of /proc/PID/smaps_rollup."""
    sizes = {kind: int(kib) << 10 for kind, kib in _PSS.findall(smaps_rollup)}
    return sizes.get("Anon", 0), sizes.get("File", 0) + sizes.get("Shmem", 0)
