"""What the tests of this room start, and stop again: replicas, hosts, links, a clock of the test's own."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from photon.rpc.network import Tls
from tests.certificates import Authority
from tests.raft.cluster import Cluster, MakeCluster
from tests.raft.kit import Lone, Make, VirtualClock
from tests.raft.link_kit import MakeNet, Net


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """All deadlines are on it."""
    clock = VirtualClock()
    monkeypatch.setattr("pysyncobj.syncobj.monotonicTime", clock)
    return clock


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(tmp_path: Path, clock: VirtualClock) -> Iterator[Make]:
    """Makes replicas, each in a directory of its own (`0`, `1`, ...), with the arguments of `Lone`.

    A turn takes in all that it can: its time is up by `clock` alone.
    """
    made: list[Lone] = []

    def factory(*arguments: object, **named: object) -> Lone:
        made.append(Lone(tmp_path / str(len(made)), *arguments, **named))  # type: ignore[arg-type]
        return made[-1]

    yield factory
    for lone in made:
        lone.crash()


@pytest.fixture
def lone(make: Make) -> Lone:
    """One of three, whose peers are b and c."""
    return make()


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Makes clusters of hosts, with the arguments of `Cluster`."""
    made: list[Cluster] = []

    def factory(**settings: object) -> Cluster:
        made.append(Cluster(tmp_path, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield factory
    for cluster in made:
        cluster.stop()


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """a, b and c, not started."""
    return make_cluster()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="session")
def files(authority: Authority) -> list[Tls]:
    """Of a, b and c."""
    return [authority.issue("a"), authority.issue("b"), authority.issue("c")]


@pytest.fixture(params=["plain", "tls"])
def linked(request: pytest.FixtureRequest, stack: ExitStack) -> MakeNet:
    """Makes transports that listen, with the arguments of `Net`: their links plain, and inside TLS."""

    def factory(nodes: str = "ab", **named: object) -> Net:
        tls = request.getfixturevalue("files")[: len(nodes)] if request.param == "tls" else ()
        return Net(nodes, tls=tls, **named).listen(stack)  # type: ignore[arg-type]

    return factory
