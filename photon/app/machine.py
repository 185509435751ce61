"""The machine a measurement was taken on, and the memory of a tree of processes."""

import contextlib
import os
import platform
import threading
from pathlib import Path
from typing import Final

import psutil

SAMPLE_S: Final = 0.2


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, kernel, Python: what a figure means nothing without."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


class MemoryPeak:
    """Samples the proportional memory (PSS: shared pages counted once) of a process and all below it."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._stop = threading.Event()
        self.peak_bytes = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The highest sum seen, bytes."""
        self._stop.set()
        self._thread.join()
        return self.peak_bytes

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                processes = [self._root, *self._root.children(recursive=True)]
                self.peak_bytes = max(self.peak_bytes, sum(map(_pss, processes)))


def _pss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
