"""How a supervisor starts the processes of a system, and what it knows of one that it has started."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

# Large messages are freed and asked for again at each batch: keep their pages (design measurement 7).
_ENVIRONMENT: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_TOP_PAD_": str(8 << 20),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GRPC_VERBOSITY": "ERROR",
}


class Process(Protocol):
    """As a subprocess.Popen: `poll` and `wait` give the exit status, negative for a signal."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts `photon <arguments>` with its output appended to `log`."""

    def launch(self, arguments: Sequence[str], log: Path) -> Process: ...

    def close(self) -> None:
        """Let go of what it holds; processes that still run are killed with it, or when this one ends."""


class FreshLauncher:
    """Each process starts an interpreter of its own."""

    def launch(self, arguments: Sequence[str], log: Path) -> Process:
        with log.open("ab") as output:
            # A session of its own: Ctrl-C reaches the parent alone, which stops the children in order.
            return subprocess.Popen(
                [sys.executable, "-m", "photon", *arguments],
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
