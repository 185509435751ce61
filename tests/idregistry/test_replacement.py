"""A dead machine's replica is replaced by an empty one at another address, on real replica processes.

One registry is told from another by its identity, which stays for its whole life.
"""

import random
from collections.abc import Callable

import pytest

from idregistry.client import RegistryClient
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError, UsageError
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.load import Load, assert_sound
from tests.system import photon
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(shards=2, clock_skew_s=0.5)


def names(cluster: Cluster) -> list[str]:
    return sorted(replica.name for replica in cluster.client(5.0).directory().replicas)


@pytest.mark.long
def test_a_dead_replica_is_replaced_by_an_empty_one_and_then_another_may_die(cluster: Cluster) -> None:
    load = Load([cluster.client(5.0) for _ in range(2)], pause_s=0.01)
    load.wait_for(20)
    cluster.lose("r1")
    cluster.client(10.0).replace("r1", "r3", *cluster.join("r3"))
    wait_until(lambda: names(cluster) == ["r0", "r2", "r3"])
    load.wait_for(10)
    for shard in range(2):
        assert cluster.shard_status("r3", shard)["voters"] == ["r0", "r2", "r3"]
    cluster.kill("r0")
    load.wait_for(20)
    # Who starts again knows r3 only from what it noted down, for its settings do not name it.
    cluster.kill("r2")
    cluster.start("r2")
    load.wait_for(20)
    load.end()
    assert_sound(cluster, load, 2)


@pytest.mark.long
def test_a_replacement_with_a_wrong_address_is_cancelled_and_another_is_made(cluster: Cluster) -> None:
    load = Load([cluster.client(5.0)], pause_s=0.01)
    load.wait_for(10)
    admin = cluster.client(10.0)
    admin.replace("r1", "r3", "nowhere.invalid:1", "nowhere.invalid:2")
    wait_until(lambda: "r3" in cluster.status("r0")["directory"]["learners"])
    cancelled = photon(
        "registry", "replace", "--cancel", "r3", "--registry", cluster.grpc["r0"], "--wait", 20
    )
    assert cancelled.returncode == 0, cancelled.stderr
    assert "done: the replicas are r0, r1, r2" in cancelled.stdout
    cluster.kill("r1")
    admin.replace("r1", "r4", *cluster.join("r4"))
    wait_until(lambda: names(cluster) == ["r0", "r2", "r4"])
    with pytest.raises(UsageError, match="no replacement by a replica 'r5' is under way"):
        admin.cancel_replacement("r5")
    load.wait_for(10)
    load.end()
    assert_sound(cluster, load, 2)


@pytest.mark.long
def test_a_living_replica_is_moved_to_another_machine_one_at_a_time(cluster: Cluster) -> None:
    load = Load([cluster.client(5.0)], pause_s=0.01)
    load.wait_for(10)
    old = cluster.leader(0)
    where = cluster.join("r3")
    admin = cluster.client(10.0)
    with pytest.raises(UsageError, match="no replica 'r9'"):
        admin.replace("r9", "r3", *where)
    with pytest.raises(UsageError, match="never used before"):
        admin.replace(old, next(n for n in ("r0", "r1") if n != old), *where)
    admin.replace(old, "r3", *where)
    admin.replace(old, "r3", *where)  # asked for once more
    wait_until(lambda: old not in names(cluster))
    load.wait_for(10)
    load.end()
    with pytest.raises(UsageError, match="never used before"):
        admin.replace("r3", old, *where)
    cluster.kill(old)
    assert_sound(cluster, load, 2)


@pytest.mark.long
def test_a_replica_that_lost_its_disk_is_refused_and_told_what_to_do(cluster: Cluster) -> None:
    load = Load([cluster.client(5.0)], pause_s=0.01)
    load.wait_for(10)
    cluster.lose("r1")
    cluster.start("r1")
    wait_until(lambda: "replace" in cluster.said("r0") and "lost its disk" in cluster.said("r0"))
    load.wait_for(10)
    load.end()
    assert cluster.shard_status("r1").get("ids", 0) == 0, "it was let in"
    for node in ("r0", "r2"):
        assert cluster.status(node)["directory"]["has_quorum"]


def of_each(cluster: Cluster, *nodes: str) -> set[str]:
    """What replicas say of which each is asked through a client that was given no other."""
    said = set()
    for node in nodes:
        wait_until(lambda node=node: bool(cluster.status(node)["identity"]))
        said.add(cluster.client(10.0, [node]).identity())
        said.add(str(cluster.status(node)["identity"]))
    return said


@pytest.mark.long
def test_all_replicas_tell_the_same_after_restarts_elsewhere_a_resharding_and_a_replacement(
    cluster: Cluster,
) -> None:
    identity = cluster.client().identity()
    assert len(bytes.fromhex(identity)) == 16
    assert of_each(cluster, *NODES) == {identity}
    cluster.kill()
    cluster.move()
    cluster.start()
    assert cluster.client().identity() == identity
    assert cluster.client().reshard(3).adopted
    cluster.lose("r1")
    cluster.client().replace("r1", "r3", *cluster.join("r3"))
    wait_until(lambda: names(cluster) == ["r0", "r2", "r3"])
    assert of_each(cluster, "r0", "r2", "r3") == {identity}


@pytest.mark.long
def test_a_registry_founded_anew_at_the_same_addresses_is_another(cluster: Cluster) -> None:
    identity = cluster.client().identity()
    for node in NODES:
        cluster.lose(node)
    cluster.start()
    assert cluster.client().identity() != identity


def test_where_no_replica_runs_the_identity_is_not_known() -> None:
    client = RegistryClient(["127.0.0.1:1"], 0.5, SystemClock(), random.Random(1))
    with pytest.raises(UnavailableError, match=r"no identity of the registry within 0\.5 s"):
        client.identity()
    client.close()
    with pytest.raises(UnavailableError):
        client.identity()
