"""A Spark session for one command: quiet, its scratch files in one temporary directory, ended with it.

Locally all of it stays on loopback. Executors of a cluster get Photon's own packages from the session, and
are asked which libraries they lack before any log is read. They import this module, so it must load where
those libraries are missing: it needs Python alone.

What Spark and its JVM raise becomes an error of Photon's in one line. Ctrl-C and SIGTERM end a command
early, with its JVM.
"""

import logging
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from photon.core.errors import PhotonError, UsageError
from spark.options import SparkOptions, check_requirements

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

TASK_TRIES: Final = 4
"""Spark's own number on a cluster; locally it would give up at the first."""
JVM_STOP_S_MAX: Final = 10.0
MASTER_ASK_S_MAX: Final = 5.0
EXECUTOR_WAIT_S_MAX: Final = 120.0
"""How long a standalone cluster may take to give the first executor."""
PACKAGES: Final = ("photon", "idregistry", "eventstore", "dispatcher", "joiner", "spark", "millwheel")
LIBRARIES: Final = {
    "google.protobuf.message": "protobuf",  # google.protobuf alone is in a jar on the path of Spark's Pythons
    "grpc": "grpcio",
    "lmdb": "lmdb",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "zstandard": "zstandard",
}
"""What tasks import, and the distribution that brings it."""

_SAID: Final = "jvm.log"
_NO_PYTHON: Final = "Cannot run program"
_LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n%ex
"""


class SparkFailedError(PhotonError):
    """Spark could not start, or a job of it failed: nothing is known of the logs. Mend it and ask again."""


@contextmanager
def open_session(options: SparkOptions) -> "Iterator[SparkSession]":
    """A session in a JVM of its own, which ends with the block. One at a time in a process.

    UsageError for missing requirements, here or on executors, and for bad options. What the JVM says goes to
    a file, and its last line into the SparkFailedError if it does not start, no master answers or no
    executor comes.
    """
    check_requirements()
    options.check()
    with (
        tempfile.TemporaryDirectory(prefix="photon-spark-", ignore_cleanup_errors=True) as scratch,
        ended_by_signals() as arm,
    ):
        gateway = _launched(options, Path(scratch))
        try:
            arm(gateway.proc)
            session = _session(gateway, _python(options), Path(scratch))
            arm(gateway.proc)
            if not options.is_local:
                prepare_executors(session.sparkContext, options, write_packages(Path(scratch)))
            yield session
        finally:
            _stop(gateway)


def map_in_arrow(
    frame: "DataFrame",
    function: "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]",
    schema: "str | StructType",
) -> "DataFrame":
    """Each partition's record batches -> record batches of `schema`, by Python on the executors.

    As DataFrame.mapInArrow, which asks for pandas though it never uses it (PySpark 4.3).
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    inner: Any = frame
    udf = UserDefinedFunction(function, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = udf(*[frame[f"`{name}`"] for name in frame.columns])
    return DataFrame(inner._jdf.mapInArrow(column._jc, False, None), frame.sparkSession)


@contextmanager
def spark_failures(said: Path | None = None) -> Iterator[None]:
    """What Spark and its JVM raise, as SparkFailedError in one line. `said`: what the JVM wrote."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, OSError) as error:
        reason = _gist(str(error))
        if said is not None and (lines := said.read_text("utf-8", "replace").strip().splitlines()):
            reason += f"; the JVM said: {lines[-1]}"
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


def write_packages(directory: Path) -> Path:
    """A zip, in that directory, of the sources of the very packages that this process runs."""
    path = directory / "photon-packages.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packages:
        for name in PACKAGES:
            root = package_root(name)
            for source in sorted(root.rglob("*.py")):
                packages.write(source, Path(name, source.relative_to(root)))
    return path


def package_root(package: str) -> Path:
    """The directory that the package runs from."""
    return Path(import_module(package).__path__[0])


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
        import_module(module)
    except ImportError:
        return False
    return True


def prepare_executors(context: "SparkContext", options: SparkOptions, packages: Path) -> None:
    """Send them that zip. SparkFailedError where no executor comes, UsageError where one can't run Photon."""
    tasks = context.defaultParallelism
    try:
        with spark_failures(), _given_up_without_executors(context, options):
            before = list(sys.path)
            context.addPyFile(str(packages))
            sys.path[:] = before  # the driver goes on with the packages that it has
            lacking = context.parallelize(range(tasks), tasks).mapPartitions(found_lacking).collect()
    except SparkFailedError as error:
        if _NO_PYTHON in str(error.__cause__):
            raise UsageError(
                f"executors can't run {context.pythonExec}; name a Python that they have in PYSPARK_PYTHON"
            ) from error
        raise
    if lacking:
        raise UsageError(
            f"executors can't run Photon: {'; '.join(sorted(set(lacking)))}; install it there, "
            "or name a Python that has all in PYSPARK_PYTHON"
        )


@contextmanager
def _given_up_without_executors(context: "SparkContext", options: SparkOptions) -> Iterator[None]:
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


@contextmanager
def ended_by_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Ctrl-C and SIGTERM end the block as an exit does, so that the JVM and the scratch files go.

    They wait until the yielded function gets the JVM, since one that is just starting can't be stopped; it is
    called again when Spark runs. From then on they end the JVM too: a call into it that waits for a job holds
    up all that follow, so that none could cancel the job. Spark's own handler of Ctrl-C makes such a call,
    and fills the screen; so would what calls into a JVM that ends have to tell.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: None
        return
    ended_by: list[int] = []
    machines: list[subprocess.Popen[bytes]] = []

    def end(number: int, _frame: FrameType | None) -> None:
        if not ended_by:
            ended_by.append(number)
            if machines:
                leave()

    def leave() -> None:
        logging.disable()
        warnings.simplefilter("ignore")
        machines[0].terminate()  # Spark in it tells the cluster, and removes its files
        raise SystemExit(128 + ended_by[0])

    def arm(machine: subprocess.Popen[bytes]) -> None:
        for number in previous:  # Spark sets its own where it starts
            signal.signal(number, end)
        machines.append(machine)
        if ended_by:
            leave()

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings():
            yield arm
    except Exception as error:
        if ended_by:  # what the end of the JVM made fail
            raise SystemExit(128 + ended_by[0]) from error
        raise
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _launched(options: SparkOptions, scratch: Path) -> Any:
    """A JVM, as PySpark's gateway to it; all settings are in it."""
    from pyspark import SparkConf, java_gateway

    # It prints each error with its whole stack; spark_failures says the same in a line.
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    address = _driver_address(options)
    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(_configuration(options, scratch, address).items()))
    said = scratch / _SAID
    launch: Any = java_gateway.launch_gateway
    with said.open("wb") as log, spark_failures(said), _environment(_variables(options, address)):
        return launch(conf, {"stdout": log, "stderr": log})


def _session(gateway: Any, python: str, scratch: Path) -> "SparkSession":
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    with spark_failures(scratch / _SAID), _environment({"PYSPARK_PYTHON": python}):
        context: Any = SparkContext(conf=SparkConf(_jvm=gateway.jvm), gateway=gateway)
        # Its thread prints a stack when the JVM ends first, which whoever waits for the JVM sees anyway.
        context._accumulatorServer.handle_error = lambda *_: None
        return SparkSession(context)


def _with_tries(master: str) -> str:
    """`local[2]` -> `local[2,4]`; one that says its tries, or is no local one, as it is."""
    found = re.fullmatch(r"local(?:\[([^,\]]+)\])?", master)
    return f"local[{found[1] or 1},{TASK_TRIES}]" if found else master


def _configuration(options: SparkOptions, scratch: Path, address: str) -> dict[str, str]:
    log4j = scratch / "log4j2.properties"
    log4j.write_text(_LOG4J, "utf-8")
    configuration = {
        "spark.app.name": "photon",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # As Photon's own parser: of a key that stands twice the last one counts.
        "spark.sql.variant.allowDuplicateKeys": "true",
        # The checksummed one can't open names with a colon, and leaves .crc files beside what it writes.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    }
    if address:
        configuration |= {"spark.driver.bindAddress": address, "spark.driver.host": address}
    configuration |= options.conf
    java = f"-Dlog4j.configurationFile={log4j} -Djava.io.tmpdir={scratch}"
    more = configuration.get("spark.driver.extraJavaOptions", "")
    return configuration | {
        "spark.master": _with_tries(options.master),
        "spark.driver.memory": options.driver_memory,
        "spark.driver.extraJavaOptions": f"{java} {more}".rstrip(),
    }


def _variables(options: SparkOptions, address: str) -> dict[str, str]:
    """What is added to the environment that Spark is started with."""
    variables = {}
    if options.is_local:
        # Its Python workers must find the packages that run here, whatever directory they are started in.
        roots = dict.fromkeys(str(package_root(name).parent) for name in PACKAGES)
        present = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([*roots, *([present] if present else [])])
    if address and "SPARK_LOCAL_IP" not in os.environ:
        # Else Spark looks up this machine's name, which fails where that name has no address.
        variables["SPARK_LOCAL_IP"] = address
    return variables


def _python(options: SparkOptions) -> str:
    """The interpreter of tasks: this one, or the one that was named (for a cluster)."""
    named = None if options.is_local else os.environ.get("PYSPARK_PYTHON")
    return options.conf.get("spark.pyspark.python") or named or sys.executable


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _driver_address(options: SparkOptions) -> str:
    """The address of this machine that executors are to call; empty where Spark must find it (yarn, k8s)."""
    if options.is_local:
        return "127.0.0.1"
    if not options.master_addresses or "SPARK_LOCAL_IP" in os.environ:
        return ""
    refusals = []
    for host, port in options.master_addresses:
        try:
            with socket.create_connection((host, port), MASTER_ASK_S_MAX) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            refusals.append(f"{host}:{port}: {error.strerror or error}")
    raise SparkFailedError(
        f"no Spark master answers ({'; '.join(refusals)}); is --master {options.master} up?"
    )


def _stop(gateway: Any) -> None:
    """Stop Spark and wait for its JVM, so that nothing writes into the directory that goes next."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    session = SparkSession._instantiatedSession
    with suppress(Exception):  # a JVM that died can't be asked to stop
        if session is not None:
            session.stop()
    SparkContext._gateway = SparkContext._jvm = None
    with suppress(Exception):
        gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(JVM_STOP_S_MAX)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
