"""What executors on other machines must have: Photon's packages, which the session sends, and libraries.

Executors import this module, and it must load where those libraries are missing: it needs Python alone.

What Spark and its JVM raise becomes errors of Photon's here, in one line.
"""

import importlib
import platform
import re
import socket
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from photon.core.errors import PhotonError, UsageError

if TYPE_CHECKING:
    from pyspark import SparkContext

    from spark.engine.options import SparkOptions


# --- failures


class SparkFailedError(PhotonError):
    """Spark could not start, or a job of it failed: nothing is known of the logs. Mend it and ask again."""


@contextmanager
def spark_failures(said: Path | None = None) -> Iterator[None]:
    """What Spark and its JVM raise, as SparkFailedError in one line. `said`: what the JVM wrote."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, OSError) as error:
        reason = _gist(str(error))
        if said is not None and (last := _last_line(said)):
            reason += f"; the JVM said: {last}"
        raise SparkFailedError(f"Spark failed: {reason}") from error


def _gist(text: str) -> str:
    """The line that names the condition, and the innermost cause, of a message with its stack."""
    if raised := _raised_by_python(text):
        return raised
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\[[A-Z_.]{6,}\]", line)]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    first = (named or [line for line in lines if not line.startswith("at ")] or ["no reason given"])[0]
    return first if not causes or causes[-1] in first else f"{first} ({causes[-1]})"


def _raised_by_python(text: str) -> str:
    """What an executor's Python raised: the line after its stack; "" if it was not Python."""
    _, begun, stack = text.rpartition("Traceback (most recent call last):\n")
    raised = next((line for line in stack.splitlines() if begun and line[:1].strip()), "")
    return raised.partition("Error: ")[2] if raised.startswith("photon.core.errors.") else raised


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


# --- Photon's packages

PACKAGES: Final = ("photon", "idregistry", "eventstore", "dispatcher", "joiner", "spark")
ZIP_NAME: Final = "photon-packages.zip"

# The wiring of commands and servers: no task ever runs it.
_LEFT_OUT: Final = Path("photon", "app")
_LEVEL: Final = 1


class NotShippableError(PhotonError):
    """A package of Photon's has no files that could be sent to executors."""


def write_packages(directory: Path) -> Path:
    """A zip, in that directory, of the sources of the very packages that this process runs."""
    path = directory / ZIP_NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as packages:
        for name in PACKAGES:
            root = package_root(name)
            for source in sorted(root.rglob("*.py")):
                inside = Path(name, source.relative_to(root))
                if not inside.is_relative_to(_LEFT_OUT):
                    packages.write(source, inside)
    return path


def package_root(package: str) -> Path:
    """The directory that the package runs from."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise NotShippableError(f"package {package} is not installed here; install Photon anew")
    root = Path(found.submodule_search_locations[0])
    if not root.is_dir():
        raise NotShippableError(f"{root}: package {package} is no directory; install Photon unpacked")
    return root


# What the modules import that tasks run, and the distribution that brings it.
# --- what executors lack

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
