"""`photon backfill --follow` on a cluster that loses a machine."""

from collections import Counter

import pytest

from tests.spark.cluster import on_cluster
from tests.spark.following import Followed
from tests.spark.kit import RealRegistry

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.soak
def test_a_worker_that_is_lost_with_its_executor_costs_no_event(tmp_path, cluster):
    registry = RealRegistry(tmp_path / "registry")
    followed = Followed(tmp_path, registry.address)
    followed.more(60)
    process = followed.start(spark=on_cluster(cluster))
    try:
        followed.await_all(process)
        followed.more(60)
        cluster.kill_worker(cluster.workers[0])
        followed.more(60)
        followed.await_all(process)
        followed.stop(process)
    finally:
        process.kill()
        process.wait()
        cluster.start_worker()
        registry.close()
    assert followed.joined(growing=False) == Counter(followed.pairs)
    assert followed.letters() == {"malformed": followed.bad}
