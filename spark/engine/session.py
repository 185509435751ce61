"""A Spark session for one command: quiet, its scratch files under one temporary directory, ended with it.

Locally all of it stays on loopback; on a cluster executors are sent Photon's own packages and asked what they
lack before any log is read.

Ctrl-C and SIGTERM end a command before its time, with its JVM.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from spark.engine.executors import (
    PACKAGES,
    SparkFailedError,
    package_root,
    prepare_executors,
    spark_failures,
    write_packages,
)
from spark.engine.options import DRIVER_MEMORY, MASTER, SparkOptions, check_requirements

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def map_in_arrow(
    frame: "DataFrame",
    function: "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]",
    schema: str,
    barrier: bool = False,
) -> "DataFrame":
    """Each partition's record batches -> record batches of `schema` (DDL), by Python on the executors.

    As DataFrame.mapInArrow, which asks for pandas though it never uses it (PySpark 4.3).
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    inner: Any = frame
    udf = UserDefinedFunction(function, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = udf(*[frame[f"`{name}`"] for name in frame.columns])
    return DataFrame(inner._jdf.mapInArrow(column._jc, barrier, None), frame.sparkSession)


@contextmanager
def ended_by_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Ctrl-C and SIGTERM end the block as an exit does, so that the JVM and the scratch files go.

    Until the function given is called with the JVM they wait: one that is just starting can't be stopped. It
    is called again when Spark runs.
    Then they end the JVM too: a call into it that waits for a job holds up all that follow, so that none
    could cancel the job. Spark's own handler of Ctrl-C makes such a call, and fills the screen.
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
        yield arm
    except Exception as error:
        if ended_by:  # what the end of the JVM made fail
            raise SystemExit(128 + ended_by[0]) from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


__all__ = ["SparkFailedError", "check_requirements", "open_session", "spark_failures"]

# --- the session

JVM_STOP_S_MAX: Final = 10.0
MASTER_ASK_S_MAX: Final = 5.0

_SAID: Final = "jvm.log"


_LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n%ex
"""


@contextmanager
def open_session(
    options: SparkOptions | str = MASTER,
    driver_memory: str = DRIVER_MEMORY,
    settings: Mapping[str, str] | None = None,
) -> "Iterator[SparkSession]":
    """A session in a JVM of its own, which ends with the block. One at a time in a process.

    `options`: a command's; or a master, `driver_memory` as Spark writes it (`1g`, `512m`), and `settings`,
    more of Spark's own. What the JVM says goes to a file, and the last of it into the SparkFailedError if it
    does not start, no master answers or no executor comes. UsageError for missing requirements here or on
    executors, a bad memory size or a master that is none.
    """
    if isinstance(options, str):
        options = SparkOptions(options, driver_memory, settings or {})
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
        # Its thread prints a stack when the JVM ends first, which whoever waits for the JVM is told anyway.
        context._accumulatorServer.handle_error = lambda *_: None
        return SparkSession(context)


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
        "spark.master": options.master,
        "spark.driver.memory": options.driver_memory,
        "spark.driver.extraJavaOptions": f"{java} {more}".rstrip(),
    }


def _variables(options: SparkOptions, address: str) -> dict[str, str]:
    """The environment that Spark is started with, beside what is there."""
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
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
