"""Another number of shards while commits go on (paper 2.2.2), on real replica processes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from photon.core.errors import UsageError
from tests.idregistry.cluster import Cluster
from tests.idregistry.load import Load, assert_sound
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

SKEW_S = 0.5


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(**settings: Any) -> Cluster:
        clusters.append(Cluster(tmp_path, clock_skew_s=SKEW_S, **settings))
        clusters[-1].start()
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.mark.long
def test_commits_go_on_from_2_to_6_to_3_shards_with_leaders_killed_and_no_id_is_in_two_shards(  # type: ignore[no-untyped-def]
    make_cluster,
) -> None:
    """2.2.2: "dynamic changes of the number of shards while preserving mapping of existing event_ids"."""
    cluster = make_cluster(shards=2)
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
    assert [i.shards for i in admin.configuration().intervals] == [2, 6, 3]
    assert_sound(cluster, load, 6)
    spread = [cluster.shard_status("r0", shard)["ids"] for shard in range(6)]
    assert min(spread) > 0, "every shard had its share"


def test_a_resharding_that_would_change_a_mapping_is_refused(make_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_cluster(shards=2)
    admin = cluster.client(20.0)
    now_us = time.time_ns() // 1000
    for at_us in (1, now_us - 10**6, now_us):
        with pytest.raises(UsageError, match="in the future"):
            admin.reshard(3, at_us)
    with pytest.raises(UsageError, match="already"):
        admin.reshard(2)
    assert len(admin.configuration().intervals) == 1
