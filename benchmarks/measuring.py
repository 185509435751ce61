"""What all benchmarks share: the cost of a tree of processes, percentiles, a report as text."""

import contextlib
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from photon.core.errors import PhotonError

ROOT: Final = Path(__file__).resolve().parents[1]
MIB: Final = 1 << 20
SAMPLE_S: Final = 0.5
"""Walking the pages of all processes takes some milliseconds: more often, it would slow what it measures."""

_ROLE: Final = re.compile(r"\b(registry|eventstore|joiner|dispatcher) serve\b")
_PSS: Final = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)

Row = dict[str, Any]
"""A row of a table: column -> value."""


class BenchError(PhotonError):
    """A measurement could not be made, or its figures would mean nothing."""


@dataclass(slots=True)
class Usage:
    """`peak_bytes`: of all processes together, pages that several share counted once. `cpu_s`: role -> user
    and system seconds, without what a process did after its last sample."""

    peak_bytes: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)

    def row(self) -> Row:
        return {"cpu_s": round(sum(self.cpu_s.values()), 1), "peak_mib": self.peak_bytes // MIB}


class ProcessTree:
    """Samples a process and all below it, until `stop`. CPU counts from now on, whatever they used before."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._before = {process.pid: cpu_seconds([process.pid]) for process in self._processes()}
        self._stop = threading.Event()
        self._peak = 0
        self._cpu: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def stop(self) -> Usage:
        self._stop.set()
        self._thread.join()
        cpu_s: dict[str, float] = {}
        for role, seconds in self._cpu.values():
            cpu_s[role] = cpu_s.get(role, 0.0) + seconds
        return Usage(self._peak, {role: round(seconds, 2) for role, seconds in sorted(cpu_s.items())})

    def _processes(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                self._peak = max(self._peak, sum(map(self._sample, self._processes())))

    def _sample(self, process: psutil.Process) -> int:
        """Notes its CPU time; its bytes of memory, 0 of one that has ended."""
        with contextlib.suppress(psutil.Error, OSError):
            seconds = cpu_seconds([process.pid]) - self._before.get(process.pid, 0.0)
            self._cpu[process.pid] = (role_of(process.cmdline()), seconds)
            return memory_of(Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii"))
        return 0


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes so far; of one that has ended, none."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += sum(psutil.Process(pid).cpu_times()[:2])
    return total


def role_of(command: list[str]) -> str:
    """The role that a command line serves, `join` for the one that starts them."""
    found = _ROLE.search(" ".join(command))
    return found[1] if found else "join"


def memory_of(smaps_rollup: str) -> int:
    """Proportional bytes, from the text of /proc/PID/smaps_rollup."""
    return sum(int(kib) << 10 for kib in _PSS.findall(smaps_rollup))


def percentiles(latencies_ms: Iterable[float], shares: Sequence[int] = (50, 99)) -> dict[str, float]:
    """p50 and so on, of nothing at all: not a number."""
    ordered = sorted(latencies_ms) or [float("nan")]
    return {
        f"p{share}_ms": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 2)
        for share in shares
    }


# --- a report as text


def text(report: dict[str, Any]) -> str:
    """Each part under its name: rows as tables, a single row and single figures as lines."""
    return "\n\n".join("\n".join([name, *_part(figures)]) for name, figures in report.items())


def _part(figures: Any) -> list[str]:
    if isinstance(figures, list):
        return _part(figures[0]) if len(figures) == 1 else table(figures)
    lines = []
    for key, value in figures.items():
        if key.endswith("_rows"):
            lines += ["", *table(value)]
        else:
            lines.append(f"  {key.replace('_', ' '):<22}{_cell(value):>16}".rstrip())
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """Right-aligned columns under the keys' words, one above the other where a key has several."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads = [column.split("_") for column in columns]
    height = max(map(len, heads), default=0)
    heads = [[""] * (height - len(head)) + head for head in heads]
    lines = [[head[n] for head in heads] for n in range(height)]
    lines += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
