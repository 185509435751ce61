"""A Spark session for one command: quiet, on loopback, its scratch files under one temporary directory."""

import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from photon.core.errors import PhotonError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN: Final = 17
JAVA_ASK_S_MAX: Final = 30.0
JVM_STOP_S_MAX: Final = 10.0

_MEMORY: Final = re.compile(r"[1-9]\d*[kmgt]", re.ASCII | re.IGNORECASE)
_JAVA_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')

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


def check_requirements() -> None:
    """UsageError, with the mend, where PySpark or a Java that can run it is missing."""
    if find_spec("pyspark") is None:
        raise UsageError("this command needs PySpark; install it with: pip install 'pyspark>=4,<5'")
    java = _java()
    if java is None:
        raise UsageError(
            f"this command needs Java {JAVA_MIN} or newer and found none; "
            "install one (Debian: openjdk-17-jre-headless) or set JAVA_HOME"
        )
    version = _java_version(java)
    if version < JAVA_MIN:
        raise UsageError(
            f"this command needs Java {JAVA_MIN} or newer, and {java} is {version or 'none that answers'}; "
            "install a newer one or set JAVA_HOME to it"
        )


def _java() -> str | None:
    """The java that Spark will start: the one of JAVA_HOME, else the first on the PATH."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


def _java_version(java: str) -> int:
    """Its major version (1.8 counts as 8); 0 if it can't be run or says none."""
    try:
        asked = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_ASK_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _JAVA_VERSION.search(asked.stderr)
    if found is None:
        return 0
    return int(found[2] or 0) if found[1] == "1" else int(found[1])


@contextmanager
def open_session(
    master: str = "local[*]", driver_memory: str = "1g", settings: Mapping[str, str] | None = None
) -> "Iterator[SparkSession]":
    """A session in a JVM of its own, which ends with the block. One at a time in a process.

    `driver_memory` as Spark writes it (`1g`, `512m`); `settings` are more of Spark's own. What the JVM says
    goes to a file, and the last of it into the SparkFailedError if it does not start. UsageError for missing
    requirements, a bad memory size or a master that is none.
    """
    check_requirements()
    if not _MEMORY.fullmatch(driver_memory):
        raise UsageError(
            f"--driver-memory must be a whole number with a unit, such as 512m or 2g, not '{driver_memory}'"
        )
    if not re.match(r"local(\[.+\])?$|[a-z0-9]+://|yarn$", master):
        raise UsageError(
            f"--master '{master}' is none; use local[*], local[N], spark://HOST:PORT, yarn or k8s://"
        )
    with (
        tempfile.TemporaryDirectory(prefix="photon-spark-", ignore_cleanup_errors=True) as scratch,
        _ended_by_signals() as arm,
    ):
        configuration = _configuration(master, driver_memory, Path(scratch)) | dict(settings or {})
        session = _start(configuration, Path(scratch))
        try:
            arm()
            yield session
        finally:
            _stop(session)


@contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM end the block as an exit does, so that the JVM and the scratch files go.

    Until the function given is called they wait: a JVM that is just starting can't be stopped. Spark's own
    handler of Ctrl-C calls into the JVM in the middle of another call, and fills the screen.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    waiting: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        waiting.append(number)

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def arm() -> None:
        for number in previous:
            signal.signal(number, end)
        if waiting:
            raise SystemExit(128 + waiting[0])

    previous = {number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield arm
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _configuration(master: str, driver_memory: str, scratch: Path) -> dict[str, str]:
    log4j = scratch / "log4j2.properties"
    log4j.write_text(_LOG4J, "utf-8")
    configuration = {
        "spark.master": master,
        "spark.app.name": "photon",
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": f"-Dlog4j.configurationFile={log4j} -Djava.io.tmpdir={scratch}",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # As Photon's own parser: of a key that stands twice the last one counts.
        "spark.sql.variant.allowDuplicateKeys": "true",
        # The checksummed one can't open names with a colon, and leaves .crc files beside what it writes.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    }
    if master.startswith("local"):
        configuration |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        # Else Spark looks up this machine's name, which fails where that name has no address.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return configuration


def _start(configuration: Mapping[str, str], scratch: Path) -> "SparkSession":
    from pyspark import SparkConf, SparkContext, java_gateway
    from pyspark.sql import SparkSession

    # It prints each error with its whole stack; spark_failures says the same in a line.
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    conf = SparkConf(loadDefaults=False)
    conf.setAll(list(configuration.items()))
    said = scratch / "jvm.log"
    launch: Any = java_gateway.launch_gateway
    with said.open("wb") as log, spark_failures(said):
        gateway = launch(conf, {"stdout": log, "stderr": log})
        return SparkSession(SparkContext(conf=conf, gateway=gateway))


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
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\[[A-Z_.]{6,}\]", line)]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    first = (named or [line for line in lines if not line.startswith("at ")] or ["no reason given"])[0]
    return first if not causes or causes[-1] in first else f"{first} ({causes[-1]})"


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def _stop(session: "SparkSession") -> None:
    """Stop the session and wait for its JVM, so that nothing writes into the directory that goes next."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    with suppress(Exception):  # a JVM that died can't be asked to stop
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
