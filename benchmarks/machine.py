"""The machine a measurement was taken on."""

import contextlib
import os
import platform
from pathlib import Path

import psutil


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
