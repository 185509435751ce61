"""Children of a benchmark: Python modules of this package that talk JSON lines, and what CPU they used."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from photon.core.errors import PhotonError

ROOT = Path(__file__).resolve().parents[1]
_END_S = 10.0


class BenchmarkError(PhotonError):
    """A measurement could not be made, or its figures would mean nothing."""


def start_module(module: str, argument: object, **pipes: Any) -> "subprocess.Popen[str]":
    """`python -m module JSON`, which ends with this process (photon.app.supervisor.die_with_parent)."""
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
            raise BenchmarkError(f"a process of the benchmark ended with status {self._process.wait(_END_S)}")
        return json.loads(line)

    def ask(self, what: object) -> Any:
        self.tell(what)
        return self.hear()

    def close(self) -> None:
        end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def cpu_seconds(pids: Iterable[int]) -> list[float]:
    """User and system time of each process so far."""
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


def percentiles(latencies_ms: list[float]) -> dict[str, float]:
    """p50 and p99, of nothing at all: not a number."""
    ordered = sorted(latencies_ms) or [float("nan")]
    return {
        f"p{share}_ms": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 2)
        for share in (50, 99)
    }
