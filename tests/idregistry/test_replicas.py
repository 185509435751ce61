"""The registry as it runs: three processes, real logs on disk, SIGKILL (paper 2: fault-tolerance).

Another number of shards while commits go on (2.2.2); old ids go, and with them shards that are empty (2.3).
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from idregistry.client import RegistryClient
from idregistry.rules.packing import BUCKET_US
from photon.core.columns import pack_times
from photon.core.errors import NoQuorumError, UnavailableError
from photon.core.fates import Registered
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import DUPLICATE, EXPIRED, NOW_US, WON, event_ids, same_times, token
from tests.idregistry.load import Load, assert_sound
from tests.waiting import wait_until

ABSENT, PRESENT, TOO_OLD, _ = bytes(Registered)

pytestmark = pytest.mark.cluster


MakeCluster = Callable[..., Cluster]


@pytest.mark.long
def test_commits_go_on_whatever_becomes_of_the_leader_and_what_was_acknowledged_is_remembered(
    make_cluster: MakeCluster,
) -> None:
    """2: "always available even when there is an outage ..."; 2.1: "automatically elects a new master"; 2.3,
    with the year 2023 as long ago and a retention of a day.
    """
    cluster = make_cluster(shards=2, retention_days=1.0)
    load = Load([cluster.client(5.0) for _ in range(4)])
    load.wait_for(30)
    for _ in range(2):
        leader = cluster.leader()
        cluster.kill(leader)
        load.wait_for(30)
        cluster.start(leader)
        load.wait_for(10)
    hung = cluster.leader()
    cluster.pause(hung)
    load.wait_for(20)
    cluster.resume(hung)  # it grants nothing
    load.wait_for(20)
    stopped = cluster.leader()
    assert cluster.terminate(stopped) == [0], "it drains and exits well"
    load.wait_for(5)
    cluster.start(stopped)
    cluster.kill()
    cluster.start()
    load.wait_for(5)
    load.end()
    assert_sound(cluster, load, 2)
    client = cluster.client()
    won = list(load.won)[:5000]
    times = pack_times([load.times[key] for key in won])
    again = client.commit(b"".join(won), times, token("somebody else"))
    assert again == bytes([DUPLICATE] * len(won))
    for shard in range(2):
        wait_until(lambda n=shard: all(cluster.shard_status(r, n).get("boundary_us") for r in NODES))  # type: ignore[misc]
    assert client.commit(event_ids(1), same_times(1, NOW_US), token("a")) == bytes([EXPIRED])
    assert client.lookup(event_ids(1), same_times(1, NOW_US)) == bytes([TOO_OLD])
    assert client.commit(event_ids(2), same_times(1, 4 * NOW_US), token("a")) == bytes([WON])


@pytest.mark.long
def test_without_a_majority_nothing_is_acknowledged_and_lookups_go_on(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    client = cluster.client()
    client.commit(event_ids(1), same_times(1), token("a"))
    left = cluster.leader()
    cluster.kill(*(node for node in NODES if node != left))
    with pytest.raises(NoQuorumError):
        cluster.client(timeout_s=4.0).commit(event_ids(2), same_times(1), token("b"))
    assert client.lookup(event_ids(1, 3), same_times(2)) == bytes([PRESENT, ABSENT])
    cluster.start(*(node for node in NODES if node != left))
    assert client.commit(event_ids(2), same_times(1), token("b")) == bytes([WON])


@pytest.mark.long
def test_commits_go_on_from_2_to_6_to_3_shards_with_leaders_killed_and_no_id_is_in_two_shards(
    make_cluster: MakeCluster,
) -> None:
    """2.2.2: "dynamic changes of the number of shards while preserving mapping of existing event_ids"."""
    cluster = make_cluster(shards=2, clock_skew_s=0.5)
    load = Load([cluster.client(5.0) for _ in range(4)])
    load.wait_for(20)
    admin = cluster.client(20.0)
    for shards in (6, 3):
        resharded = admin.reshard(shards)
        assert resharded.adopted, resharded.why
        killed = cluster.leader(1)
        cluster.kill(killed)
        wait_until(lambda at=resharded.start_us: time.time_ns() // 1000 > at)  # type: ignore[misc]
        load.wait_for(20)
        cluster.start(killed)
        load.wait_for(20)
    load.end()
    assert [len(i.shards) for i in admin.configuration().intervals] == [2, 6, 3]
    assert_sound(cluster, load, 6)
    spread = [cluster.shard_status("r0", shard)["ids"] for shard in range(6)]
    assert min(spread) > 0, "every shard had its share"


DAY_S = 86_400.0


def retrying(client: RegistryClient, *arguments: bytes) -> bytes:
    while True:
        try:
            return client.commit(*arguments)  # type: ignore[arg-type]
        except UnavailableError:
            continue


@pytest.mark.long
def test_old_ids_vanish_under_load_and_their_events_expire(make_cluster: MakeCluster) -> None:
    """2.3: "deletes them ... if the timestamp ... is older than the garbage collection threshold"."""
    # The boundary starts some seconds before the end of a bucket and crosses it a step later.
    now_us = time.time_ns() // 1000
    end_us = (now_us // BUCKET_US) * BUCKET_US - BUCKET_US
    retention_s = (now_us - end_us) / 1e6 + 8.0
    cluster = make_cluster(shards=2, retention_days=retention_s / DAY_S)
    client = cluster.client()
    old = event_ids(*range(5000))
    times = same_times(5000, end_us - 1)
    assert retrying(client, old, times, token("old")) == bytes([WON] * 5000)
    load = Load([cluster.client() for _ in range(2)])
    cluster.kill(cluster.leader(1))
    wait_until(lambda: set(client.lookup(old, times)) == {Registered.EXPIRED})
    before = load.batches
    assert retrying(client, old, times, token("new")) == bytes([EXPIRED] * 5000)
    load.wait_for(10)
    load.end()
    assert load.batches > before
    assert load.slowest_s < 10.0
    running = cluster.running
    live = len(load.won)
    for node in running:
        wait_until(
            lambda node=node: sum(cluster.shard_status(node, n).get("ids", -1) for n in (0, 1)) == live
        )


@pytest.mark.long
def test_a_shard_of_the_past_retires_everywhere_and_may_come_again(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(shards=3, clock_skew_s=0.3, retention_days=4.0 / DAY_S)
    admin = cluster.client()
    load = Load([cluster.client() for _ in range(2)], pause_s=0.02)
    load.wait_for(5)
    assert admin.reshard(1).adopted
    hosted = ("group-0002", "group-0003")
    sleeper = "r2"
    cluster.kill(sleeper)
    awake = [node for node in NODES if node != sleeper]
    wait_until(lambda: not any((tmp_path / n / g).exists() for n in awake for g in hosted))
    assert [len(i.shards) for i in admin.configuration().intervals] == [1]
    cluster.start(sleeper)  # it finds out when it comes back
    wait_until(lambda: not any((tmp_path / sleeper / g).exists() for g in hosted))
    load.wait_for(5)
    again = admin.reshard(3)
    assert again.adopted
    wait_until(lambda: time.time_ns() // 1000 > again.start_us)
    load.wait_for(10)
    wait_until(lambda: all(cluster.shard_status("r0", n).get("ids", 0) > 0 for n in range(3)))
    assert not (tmp_path / "r0" / "group-0002").exists(), "a group's number was used twice"
    load.end()
    assert max(load.won.values()) == 1
