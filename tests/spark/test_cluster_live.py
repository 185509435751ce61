"""`photon millwheel spark` on a cluster that loses a machine."""

import contextlib
import random

import pytest

from millwheel.topology import load_topology
from tests.spark.cluster import on_cluster

pytest.importorskip("pyspark")
from tests.spark.test_live import Running

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

VISITS = """
from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.ready import Sessions, WindowCounts

TOPOLOGY = Topology(
    {"clicks": Logs("logs/*.jsonl", "ts", lateness_s=2)},
    {
        "visits": node(Sessions("visits", 1), Input("clicks", "user", None), Stream("visits")),
        "counts": node(WindowCounts("counts", 1), Input("clicks", "user", None), Stream("counts")),
    },
    {"visits": LogSink("out/visits"), "counts": LogSink("out/counts")},
)
"""


def test_a_worker_that_is_lost_with_its_executor_changes_no_line(tmp_path, cluster, monkeypatch):
    """State, timers and low watermarks that its Python held in memory are taken up from Spark's by another;
    the topology is the user's own module, which the executors don't have."""
    (tmp_path / "cluster_visits.py").write_text(VISITS)
    monkeypatch.syspath_prepend(tmp_path)
    topology, dice = load_topology("cluster_visits:TOPOLOGY"), random.Random(4)
    with contextlib.ExitStack() as started:
        running = Running(tmp_path, "cluster_visits:TOPOLOGY", started, on_cluster(cluster))
        process = running.start()
        running.write(200, dice)
        running.await_all(process, topology)
        running.write(200, dice)
        cluster.kill_worker(cluster.workers[0])
        try:
            running.write(200, dice)
            running.await_all(process, topology)
        finally:
            cluster.start_worker()
        running.write(100, dice)
        running.await_all(process, topology)
        running.stop(process)
