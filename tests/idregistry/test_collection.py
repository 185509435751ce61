"""Old ids go, and with them the shards that are empty (paper 2.2.2, 2.3), on real replica processes."""

import time
from pathlib import Path

import pytest

from idregistry.client import RegistryClient
from idregistry.rules.packing import BUCKET_US
from photon.core.errors import UnavailableError
from photon.core.fates import Registered
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import EXPIRED, WON, event_ids, same_times, token
from tests.idregistry.load import Load
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

DAY_S = 86_400.0
SECOND_US = 1_000_000


def retrying(client: RegistryClient, *arguments: bytes) -> bytes:
    while True:
        try:
            return client.commit(*arguments)  # type: ignore[arg-type]
        except UnavailableError:
            continue


@pytest.mark.long
def test_old_ids_vanish_under_load_and_their_events_expire(tmp_path: Path) -> None:
    """2.3: "deletes them ... if the timestamp ... is older than the garbage collection threshold"."""
    # The boundary starts some seconds before the end of a bucket and crosses it a step later.
    now_us = time.time_ns() // 1000
    end_us = (now_us // BUCKET_US) * BUCKET_US - BUCKET_US
    retention_s = (now_us - end_us) / 1e6 + 8.0
    cluster = Cluster(tmp_path, shards=2, retention_days=retention_s / DAY_S)
    try:
        cluster.start()
        client = cluster.client()
        wait_until(lambda: all(cluster.shard_status("r0", n).get("boundary_us") for n in (0, 1)))
        old = event_ids(*range(5000))
        times = same_times(5000, end_us - 1)
        assert retrying(client, old, times, token("old")) == bytes([WON] * 5000)
        load = Load([cluster.client() for _ in range(2)])
        cluster.kill(cluster.leader(1))
        wait_until(lambda: set(client.lookup(old, times)) == {Registered.EXPIRED}, 40.0)
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
    finally:
        cluster.close()


@pytest.mark.long
def test_a_shard_of_the_past_retires_everywhere_and_may_come_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, shards=3, clock_skew_s=0.3, retention_days=4.0 / DAY_S)
    try:
        cluster.start()
        admin = cluster.client()
        load = Load([cluster.client() for _ in range(2)], pause_s=0.02)
        load.wait_for(5)
        assert admin.reshard(1).adopted
        hosted = ("group-0002", "group-0003")
        sleeper = "r2"
        cluster.kill(sleeper)
        awake = [node for node in NODES if node != sleeper]
        wait_until(lambda: not any((tmp_path / n / g).exists() for n in awake for g in hosted), 30.0)
        assert [i.shards for i in admin.configuration().intervals] == [1]
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
    finally:
        cluster.close()
