"""Directories in memory, where a sync costs nothing; `-p tests.in_memory`: all tests have theirs there.

A killed process loses nothing that it wrote, there as on a disk; tests of power cuts play what those take.
The files of tests that fail stay until the next run.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOM_BYTES = 4 << 30
_MEMORY = Path("/dev/shm")
_NAME = f"photon-tests-{os.getuid()}-"
"""Of the directories of a run, followed by its process."""


@contextmanager
def memory_directory() -> Iterator[Path]:
    """One in memory, where the machine has that."""
    path = Path(tempfile.mkdtemp(prefix="photon-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.basetemp is None and _MEMORY.is_dir():
        place = _MEMORY / f"{_NAME}{os.getpid()}"
        for left in _MEMORY.glob(f"{_NAME}*"):
            if not Path("/proc", left.name.removeprefix(_NAME)).exists():
                shutil.rmtree(left, ignore_errors=True)
        if shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES:
            config.option.basetemp = place
            config.add_cleanup(lambda: _let_go(config, place))


def _let_go(config: pytest.Config, place: Path) -> None:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or not reporter.stats.keys() & {"failed", "error"}:
        shutil.rmtree(place, ignore_errors=True)
