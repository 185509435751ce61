"""What holds for every command on a standalone cluster of a master and two workers, all real processes."""

import json
import signal
import socket
import sys
import venv

import psutil
import pytest

from tests.spark.cluster import alive, ended, on_cluster, python_process
from tests.spark.cluster_job import TASKS
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]  # a cluster on a busy machine is slow

_SQUARES = {str(rest): sum(n * n for n in range(TASKS) if n % 3 == rest) for rest in range(3)}


@pytest.fixture
def start(cluster, tmp_path):
    """Starts the job on the cluster; what is still running at the end is killed, with its JVM."""
    started = []

    def start(*arguments, options=None, environment=None):
        options = on_cluster(cluster) if options is None else options
        job = ["-m", "tests.spark.cluster_job", *arguments, *options]
        process = python_process(*job, directory=tmp_path, environment=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def one_line(done, status):
    assert (done.returncode, done.stdout) == (status, ""), done
    assert done.stderr.startswith("photon: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_executors_import_the_packages_that_the_command_sends(start):
    """They run in another directory, and would find an installed Photon later on their path."""
    done = ended(start("places"))
    assert (done.returncode, done.stderr) == (0, "")
    [[core, spark]] = json.loads(done.stdout)
    assert core.endswith("photon-packages.zip/photon/logs/formats.py")
    assert spark.endswith("photon-packages.zip/spark/session.py")


def test_a_worker_lost_in_the_middle_of_a_job_does_not_spoil_the_result(start, cluster, tmp_path):
    process = start("squares", "--began", tmp_path, "--seconds", "0.4")
    wait_until(lambda: len(list(tmp_path.glob("began-*"))) >= TASKS // 3, what="a third of the tasks")
    cluster.kill_worker(cluster.workers[0])
    done = ended(process)
    cluster.start_worker()
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == _SQUARES
    assert len(list(tmp_path.glob("began-*"))) > TASKS  # what the lost one had done was done again


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=[pytest.mark.long, pytest.mark.soak])],
)
def test_ended_by_a_signal_it_leaves_neither_processes_nor_files(start, cluster, tmp_path, number, status):
    process = start("squares", "--began", tmp_path, "--seconds", "60")
    wait_until(lambda: list(tmp_path.glob("began-*")), 180, what="a task")
    ours = psutil.Process(process.pid).children(recursive=True)
    assert ours
    process.send_signal(number)
    done = ended(process, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
    assert [child for child in ours if alive(child)] == []
    assert list((tmp_path / "scratch").iterdir()) == []
    wait_until(lambda: not cluster.executors(), what="the executors' end")


@pytest.mark.soak
def test_a_python_of_executors_that_lacks_libraries_is_told_with_what_it_lacks(start, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    bare = tmp_path / "bare" / "bin" / "python"
    told = one_line(ended(start("places", environment={"PYSPARK_PYTHON": str(bare)})), status=2)
    assert f"{bare} (Python {sys.version.split()[0]})" in told
    assert "lacks grpcio, lmdb, msgspec, numpy, protobuf, pyarrow, zstandard; install it there" in told


@pytest.mark.long
@pytest.mark.soak
def test_a_python_that_executors_do_not_have_is_told(start, cluster):
    options = [*on_cluster(cluster), "--conf", "spark.pyspark.python=/nowhere/python3"]
    told = one_line(ended(start("places", options=options)), status=2)
    assert "can't run /nowhere/python3" in told


@pytest.mark.long
@pytest.mark.soak
def test_a_cluster_that_gives_no_executor_is_told_and_not_waited_for_for_ever(start, cluster):
    options = ["--master", cluster.master, "--conf", "spark.executor.memory=64g"]
    told = one_line(ended(start("places", "--wait", "3", options=options)), status=1)
    assert "gave no executor within 3 s" in told


def test_a_master_that_does_not_answer_is_told_before_a_jvm_is_started(start):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        told = one_line(ended(start("places", options=["--master", f"spark://{address}"])), status=1)
    assert f"no Spark master answers ({address}: Connection refused)" in told
