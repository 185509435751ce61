"""A standalone Spark cluster of this machine: a master and workers, real processes on loopback."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from spark.session import _LOG4J

START_S_MAX = 60.0
STOP_S_MAX = 10.0
CORES = 1
MEMORY = "700m"
EXECUTOR_MEMORY = "512m"

# For seconds of work the optimising compiler costs more than it saves.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# And half of the rest goes into classes; tests.spark.classes keeps them, beside the PySpark that they are of.
CLASSES = Path(sys.prefix) / "spark-classes.jsa"
_KEPT = CLASSES.exists() and not re.search(r"\s", str(CLASSES))
QUICK_JAVA = f"{QUICK} -XX:SharedArchiveFile={CLASSES} -Xlog:disable" if _KEPT else QUICK
NO_CODEGEN = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}

_TREE = Path(__file__).parents[2]
_MASTER_URL = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = "Successfully registered with master"


class Cluster:
    """`master` is what --master takes. Its processes run in another directory, without PYTHONPATH."""

    def __init__(self, directory):
        self.directory = directory
        (directory / "log4j2.properties").write_text(_LOG4J.replace("error", "info", 1))
        self._processes = {}
        self._workers = 0
        self.master = ""

    def start(self, workers):
        # Port 0: Spark takes a free one and says which in its log.
        self._launch("master", "master.Master", "--port", "0", "--webui-port", "0")
        self.master = self._told("master", _MASTER_URL)[1]
        for name in [self._launch_worker() for _ in range(workers)]:
            self._told(name, _REGISTERED)

    def start_worker(self):
        name = self._launch_worker()
        self._told(name, _REGISTERED)
        return name

    @property
    def workers(self):
        return [name for name in self._processes if name.startswith("worker")]

    def kill_worker(self, name):
        """As a lost machine: the worker and its executors are gone at once."""
        process = self._processes.pop(name)
        for lost in (process, *process.children(recursive=True)):
            _kill(lost)
        process.wait(STOP_S_MAX)

    def log(self, name):
        return (self.directory / f"{name}.log").read_text("utf-8", "replace")

    def executors(self):
        """The processes that run tasks of some application now."""
        found = []
        for name in self.workers:
            found += filter(alive, self._processes[name].children(recursive=True))
        return found

    def stop(self):
        everyone = list(self._processes.values())
        for process in list(everyone):
            if process.is_running():
                everyone += process.children(recursive=True)
        for process in everyone:
            _kill(process)
        psutil.wait_procs(everyone, STOP_S_MAX)
        self._processes.clear()

    def _launch_worker(self):
        name = f"worker-{self._workers}"
        self._workers += 1
        resources = ("--cores", CORES, "--memory", MEMORY, "--work-dir", self.directory / name)
        self._launch(name, "worker.Worker", "--port", "0", "--webui-port", "0", *resources, self.master)
        return name

    def _launch(self, name, what, *arguments):
        import pyspark

        home = Path(pyspark.__file__).parent
        log4j = self.directory / "log4j2.properties"
        java = f"-Dlog4j.configurationFile={log4j} -Djava.io.tmpdir={self.directory}"
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}
        environment = inherited | {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": java,
            "JDK_JAVA_OPTIONS": QUICK_JAVA,
        }
        command = [home / "bin" / "spark-class", f"org.apache.spark.deploy.{what}", "--host", "127.0.0.1"]
        with (self.directory / f"{name}.log").open("wb") as log:
            self._processes[name] = psutil.Popen(
                [*map(str, command), *map(str, arguments)],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C at the terminal is for the tests, which stop the cluster themselves.
                start_new_session=True,
            )

    def _told(self, name, pattern):
        deadline = time.monotonic() + START_S_MAX
        while (found := re.search(pattern, self.log(name))) is None:
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{name} did not start:\n{self.log(name)}")
            time.sleep(0.05)
        return found


@contextmanager
def running_cluster(directory, workers):
    cluster = Cluster(directory)
    try:
        cluster.start(workers)
        yield cluster
    finally:
        cluster.stop()


def alive(process):
    """A zombie is not: all that is left of it is its parent's to take note of."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process):
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def on_cluster(cluster, codegen=False):
    """The options of a command that run it there, with generated code or without."""
    small = {
        "spark.executor.memory": EXECUTOR_MEMORY,
        "spark.sql.shuffle.partitions": "4",
        "spark.executor.extraJavaOptions": QUICK_JAVA,
        **({} if codegen else NO_CODEGEN),
    }
    conf = [part for key, value in small.items() for part in ("--conf", f"{key}={value}")]
    return ["--master", cluster.master, "--driver-memory", "512m", *conf]


def python_process(*arguments, directory, environment=None):
    """`python ARGUMENTS` with this tree's Photon, in another directory, its temporary files below that."""
    scratch = Path(directory, "scratch")
    scratch.mkdir(exist_ok=True)
    variables = {"PYTHONPATH": str(_TREE), "TMPDIR": str(scratch), "JDK_JAVA_OPTIONS": QUICK_JAVA}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=directory,
        env={**os.environ, **variables, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process, timeout=200):
    """What the process said, once it has ended."""
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def photon(*arguments, directory, environment=None, timeout=200):
    process = python_process(
        "-m", "photon.cli.main", *arguments, directory=directory, environment=environment
    )
    return ended(process, timeout)
