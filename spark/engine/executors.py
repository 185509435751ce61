"""What executors on other machines must have: Photon's packages, which the session sends, and libraries.

Executors import this module, and it must load where those libraries are missing: it needs Python alone.
"""

import importlib
import platform
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from photon.core.errors import UsageError
from spark.engine.failures import SparkFailedError, spark_failures

if TYPE_CHECKING:
    from pyspark import SparkContext

    from spark.engine.options import SparkOptions

# What the modules import that tasks run, and the distribution that brings it.
LIBRARIES: Final = {
    "google.protobuf.message": "protobuf",  # google.protobuf alone is in a jar on the path of Spark's Pythons
    "grpc": "grpcio",
    "lmdb": "lmdb",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "zstandard": "zstandard",
}
_NO_PYTHON: Final = "Cannot run program"
EXECUTOR_WAIT_S_MAX: Final = 120.0
"""How long a standalone cluster may take to give the first executor."""


def found_lacking(_rows: Iterable[int]) -> Iterator[str]:
    """On an executor -> a line that says what its Python lacks; nothing where it has all."""
    missing = sorted(name for module, name in LIBRARIES.items() if not _imports(module))
    if missing:
        # Executors of a machine share its Python: no number, so that equal lines are one.
        yield (
            f"{sys.executable} (Python {platform.python_version()}) on {socket.gethostname()} "
            f"lacks {', '.join(missing)}"
        )


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _lacks(context: "SparkContext") -> list[str]:
    """What the executors that there are lack, a line a machine. Takes the start of their Pythons, no more."""
    tasks = context.defaultParallelism
    return sorted(set(context.parallelize(range(tasks), tasks).mapPartitions(found_lacking).collect()))


def prepare_executors(context: "SparkContext", options: "SparkOptions", packages: Path) -> None:
    """Send them that zip. SparkFailedError where no executor comes, UsageError where one can't run Photon."""
    try:
        with spark_failures(), _given_up_without_executors(context, options):
            _send(context, packages)
            found = _lacks(context)
    except SparkFailedError as error:
        if _NO_PYTHON in str(error.__cause__):
            raise UsageError(
                f"executors can't run {context.pythonExec}; name a Python that they have in PYSPARK_PYTHON"
            ) from error
        raise
    if found:
        raise UsageError(
            f"executors can't run Photon: {'; '.join(found)}; install it there, "
            "or name a Python that has all in PYSPARK_PYTHON"
        )


@contextmanager
def _given_up_without_executors(context: "SparkContext", options: "SparkOptions") -> Iterator[None]:
    """A standalone cluster that gives no executor leaves its jobs waiting for ever, without a word."""
    given_up = threading.Event()

    def give_up() -> None:
        jvm_context: Any = context._jsc.sc()
        if jvm_context.getExecutorMemoryStatus().size() <= 1:  # the driver itself
            given_up.set()
            context.cancelAllJobs()

    timer = threading.Timer(EXECUTOR_WAIT_S_MAX, give_up)
    timer.daemon = True
    if options.master_addresses:
        timer.start()
    try:
        yield
    except Exception as error:
        if not given_up.is_set():
            raise
        raise SparkFailedError(
            f"{options.master} gave no executor within {EXECUTOR_WAIT_S_MAX:.0f} s: are its workers up, with "
            "cores and memory left (--conf spark.executor.memory=..., spark.cores.max=...)?"
        ) from error
    finally:
        timer.cancel()


def _send(context: "SparkContext", packages: Path) -> None:
    """Executors import Photon from there. The driver goes on with the packages that it has."""
    before = list(sys.path)
    context.addPyFile(str(packages))
    sys.path[:] = before
