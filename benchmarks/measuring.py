"""What all benchmarks share: the machine, the cost of a tree of processes, percentiles, a report as text."""

import contextlib
import os
import platform
import re
import resource
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

import psutil

from photon.core.errors import PhotonError

ROOT: Final = Path(__file__).resolve().parents[1]
SAMPLE_S: Final = 0.5
"""Walking the pages of all processes takes some milliseconds: more often, it would slow what it measures."""

_LOOK_FOR_FILES_S: Final = 0.02
_READ_BYTES: Final = 4 << 20
_PSS: Final = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)

Row = dict[str, Any]


class BenchError(PhotonError):
    """A measurement could not be made, or its figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Usage:
    """`peak_mib`: of all processes together, pages that several share counted once. `cpu_s`: user and system
    seconds, of one that still ran without what it did after its last sample."""

    cpu_s: float
    peak_mib: int


class ProcessTree:
    """Samples a process and all below it, until `stop`. CPU counts from now on, whatever they used before."""

    def __init__(self, pid: int) -> None:
        self._ended_s = _ended_cpu_s()
        self._root = psutil.Process(pid)
        self._before_s = {one.pid: cpu_seconds([one.pid]) for one in self._processes()}
        self._stop = threading.Event()
        self._peak = 0
        self._cpu_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def stop(self, ended: bool = False) -> Usage:
        """`ended`: the process was waited for, and no other since the start: its CPU is known to its end."""
        self._stop.set()
        self._thread.join()
        used = sum(seconds - self._before_s.get(pid, 0.0) for pid, seconds in self._cpu_s.items())
        if ended:  # of some below it nobody but the samples tells: they were killed, or left alone
            used = max(used, _ended_cpu_s() - self._ended_s)
        return Usage(round(used, 2), self._peak >> 20)

    def _processes(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                self._peak = max(self._peak, sum(self._sample(one.pid) for one in self._processes()))

    def _sample(self, pid: int) -> int:
        """Notes its CPU time; its bytes of memory, 0 of one that has ended."""
        self._cpu_s[pid] = max(self._cpu_s.get(pid, 0.0), cpu_seconds([pid]))
        with contextlib.suppress(OSError):
            return memory_of(Path(f"/proc/{pid}/smaps_rollup").read_text("ascii"))
        return 0


def _ended_cpu_s() -> float:
    """Of all children that were waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes so far; of one that has ended, none."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += sum(psutil.Process(pid).cpu_times()[:2])
    return total


def memory_of(smaps_rollup: str) -> int:
    """Proportional bytes, from the text of /proc/PID/smaps_rollup."""
    return sum(int(kib) << 10 for kib in _PSS.findall(smaps_rollup))


class Tail:
    """Files that grow: `read` gives the whole lines that came since the last one, of later files, too."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory, self._pattern = directory, pattern
        self._files: dict[Path, FileIO] = {}
        self._begun: dict[Path, bytes] = {}  # a line's
        self._look_at = 0.0

    def read(self) -> Iterator[bytes]:
        """Of a file after the other, without the last newline."""
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_FOR_FILES_S
            for path in set(self._directory.rglob(self._pattern)) - self._files.keys():
                self._files[path] = path.open("rb", buffering=0)
        for path, file in self._files.items():
            data = self._begun.get(path, b"") + file.read(_READ_BYTES)
            whole, _, self._begun[path] = data.rpartition(b"\n")
            if whole:
                yield whole

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def fresh(directory: Path) -> Path:
    """The directory, empty."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def percentiles(latencies_ms: Iterable[float], shares: Sequence[int] = (50, 99)) -> dict[str, float]:
    """p50 and so on, of nothing at all: not a number."""
    ordered = sorted(latencies_ms) or [float("nan")]
    places = ((share, min(len(ordered) - 1, len(ordered) * share // 100)) for share in shares)
    return {f"p{share}_ms": round(ordered[at], 2) for share, at in places}


# --- a report as text


def text(report: dict[str, Any]) -> str:
    """Each part under its name: rows as tables, a single row and single figures as lines."""
    return "\n\n".join("\n".join([name, *_part(figures)]) for name, figures in report.items())


def _part(figures: Any) -> list[str]:
    if isinstance(figures, list):
        return _part(figures[0]) if len(figures) == 1 else table(figures)
    lines = []
    for key, value in figures.items():
        is_rows = key.endswith("_rows")
        lines += ["", *table(value)] if is_rows else [f"  {key.replace('_', ' '):<22}  {_cell(value)}"]
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """Right-aligned columns under the keys' words, one above the other where a key has several."""
    columns = []
    for key in dict.fromkeys(key for row in rows for key in row):
        columns.append((key.split("_"), [_cell(row.get(key, "")) for row in rows]))
    height = max((len(words) for words, _ in columns), default=0)
    padded = [[""] * (height - len(words)) + words + cells for words, cells in columns]
    widths = [max(map(len, column)) for column in padded]
    lines = zip(*padded, strict=True)
    return ["  " + "  ".join(map(str.rjust, line, widths)).rstrip() for line in lines]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, kernel, Python: what a figure means nothing without."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def machine_now() -> dict[str, object]:
    """It, the day, and its load before anything is measured."""
    return {
        **describe_machine(),
        "day": time.strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
