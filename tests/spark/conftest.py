"""One Spark session for the whole folder, and one standalone cluster: starting them takes seconds.

And a registry a module; and `photon` in this process.
"""

import os
from contextlib import nullcontext

import pytest

from photon.cli.main import main
from photon.cluster import local_cluster
from photon.core.errors import UsageError
from spark.options import SparkOptions, check_requirements
from spark.session import open_session
from tests.ports import free_ports
from tests.spark.cluster import NO_CODEGEN, QUICK_JAVA, running_cluster
from tests.spark.kit import RealRegistry


@pytest.fixture(scope="session")
def requirements():
    """A missing PySpark or Java skips the tests that need it; where CI is set it fails them."""
    try:
        check_requirements()
    except UsageError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the Spark tests: {error}")
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("JDK_JAVA_OPTIONS", QUICK_JAVA)  # the commands' own JVMs inherit it
        yield


@pytest.fixture(scope="session")
def session(requirements):
    quick = {"spark.sql.shuffle.partitions": "2", "spark.default.parallelism": "2"}
    # So does generated code; the commands in processes of their own on this machine run it.
    quick |= NO_CODEGEN
    with open_session(SparkOptions("local[2]", "768m", quick)) as session:
        yield session


@pytest.fixture(scope="session", params=["here", pytest.param("spark", marks=pytest.mark.spark)])
def place(request):
    """Where verification runs (tests.spark.kit.engine)."""
    return request.getfixturevalue("session") if request.param == "spark" else None


@pytest.fixture
def on_session(session, monkeypatch):
    """Commands in this process run on the session that is there."""
    monkeypatch.setattr("spark.session.open_session", lambda *_: nullcontext(session))


@pytest.fixture
def photon(capfd, monkeypatch):
    """Runs a command in this process -> its exit status, what it printed, what it complained of."""
    # Never those of a system that starts in another worker: the command would say that it starts again.
    monkeypatch.setattr(local_cluster, "free_ports", lambda count, rng: free_ports(count))

    def photon(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(map(str, arguments)))
        said = capfd.readouterr()
        return end.value.code, said.out, said.err

    return photon


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    made = RealRegistry(tmp_path_factory.mktemp("registry"), shards=3)
    yield made
    made.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, requirements):
    """A master and two workers of one core, which have neither this directory nor its PYTHONPATH.

    Only for processes of their own (tests.spark.cluster.photon): this one has its session already.
    tests/conftest.py keeps those who ask for it in one worker.
    """
    with running_cluster(tmp_path_factory.mktemp("cluster"), workers=2) as cluster:
        yield cluster
