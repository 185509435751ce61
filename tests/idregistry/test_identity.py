"""One registry is told from another by its identity, which stays for its whole life (real replicas)."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from idregistry.client import RegistryClient
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError
from tests.idregistry.cluster import NODES, Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "one", shards=1, clock_skew_s=0.5)
    (tmp_path / "one").mkdir()
    made.start()
    yield made
    made.close()


def of_each(cluster: Cluster, *nodes: str) -> set[str]:
    """What replicas say of which each is asked through a client that was given no other."""
    said = set()
    for node in nodes:
        wait_until(lambda node=node: bool(cluster.client(2.0, [node]).status(cluster.grpc[node])["identity"]))
        said.add(cluster.client(10.0, [node]).identity())
        said.add(str(cluster.status(node)["identity"]))
    return said


@pytest.mark.long
def test_all_replicas_tell_the_same_after_restarts_elsewhere_a_resharding_and_a_replacement(
    cluster: Cluster, tmp_path: Path
) -> None:
    identity = cluster.client().identity()
    assert len(bytes.fromhex(identity)) == 16
    assert of_each(cluster, *NODES) == {identity}
    cluster.kill()
    cluster.move()
    cluster.start()
    assert cluster.client().identity() == identity
    assert cluster.client().reshard(2).adopted
    cluster.kill("r1")
    shutil.rmtree(tmp_path / "one" / "r1")
    cluster.join("r3")
    cluster.client().replace("r1", "r3", f"127.0.0.1:{cluster.raft['r3']}", cluster.grpc["r3"])
    names = ["r0", "r2", "r3"]
    wait_until(lambda: sorted(row.name for row in cluster.client().directory().replicas) == names)
    assert of_each(cluster, *names) == {identity}


@pytest.mark.long
def test_a_registry_founded_anew_at_the_same_addresses_is_another(cluster: Cluster, tmp_path: Path) -> None:
    identity = cluster.client().identity()
    cluster.kill()
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "one").mkdir()
    cluster.start()
    assert cluster.client().identity() != identity


def test_where_no_replica_runs_the_identity_is_not_known() -> None:
    client = RegistryClient(["127.0.0.1:1"], 0.5, SystemClock(), random.Random(1))
    with pytest.raises(UnavailableError, match=r"no identity of the registry within 0\.5 s"):
        client.identity()
    client.close()
    with pytest.raises(UnavailableError):
        client.identity()
