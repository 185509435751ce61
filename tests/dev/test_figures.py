"""What is shown of a running system is the difference of two looks at it."""

import pytest

from photon.cluster.statuses import Sample
from photon.cluster.topology import Pipeline, Replica, Topology
from photon.core.settings import Settings
from photon.dev.view import WINDOW_S, Window, lines_of, look_at

EDGES = [1_000, 10_000, 100_000]


@pytest.fixture
def topology():
    replicas = [
        Replica(site, f"h{n}:1", f"h{n}:2", name=f"r{n}", directory="/r")
        for n, site in enumerate(("east", "west", "central"))
    ]
    pipelines = [
        Pipeline(
            datacenter=name, eventstores=("e:1",), joiners=("j:1",), dispatchers=("d:1",), directory="/p"
        )
        for name in ("east", "west")
    ]
    regions = {"east": "us-east", "west": "us-west", "central": "central"}
    return Topology(Settings(), [], [], "/out", "", False, replicas, pipelines, regions=regions)


def dispatcher(name, joined, pending=0, wasted=0, latencies=()):
    return {
        "datacenter": name,
        "foreign_events": joined + pending,
        "fates": {"joined": joined},
        "pending": pending,
        "in_flight": 0,
        "wasted_joins": wasted,
        "latency_us": {"edges": EDGES, "counts": list(latencies)},
    }


def registry(leads, term=1, ids=0, commits=0, committed_ids=0, has_quorum=True):
    row = {"shard": 0, "is_leader": leads, "has_quorum": has_quorum, "term": term, "ids": ids}
    return {"shards": [{**row, "commits": commits, "committed_ids": committed_ids}]}


def eventstore(hits, misses):
    return {"cache": {"hits": hits, "misses": misses}}


def window_of(*samples):
    window = Window()
    for at_s, statuses in samples:
        window.add(Sample(at_s, statuses))
    return window


def look_of(topology, window, killed=()):
    return look_at(topology, window, 12.3, "running", killed, restarts=2)


def row_of(topology, window, name="east"):
    return look_of(topology, window)["datacenters"][name]


def test_rates_are_of_what_was_added_within_the_window(topology):
    window = window_of(
        (
            0.0,
            {"dispatcher-east": dispatcher("east", 1_000, wasted=500), "eventstore-east": eventstore(10, 90)},
        ),
        (2.0, {"dispatcher-east": dispatcher("east", 1_300, 7, 600), "eventstore-east": eventstore(40, 100)}),
    )
    east, west = (row_of(topology, window, name) for name in ("east", "west"))
    assert (east["joined"], east["joined_per_s"], east["pending"]) == (1_300, 150.0, 7)
    assert (east["wasted_joins"], east["wasted_ratio"], east["cache_hit_ratio"]) == (600, 0.25, 0.75)
    assert (west["joined"], west["joined_per_s"], west["silent"]) == (
        None, 0.0, ["eventstore-west", "joiner-west", "dispatcher-west"],
    )  # fmt: skip


def test_the_latency_is_of_the_last_seconds_and_not_of_all_time(topology):
    slow, then_fast = (0, 0, 1_000, 0), (100, 0, 1_000, 0)
    window = window_of(
        (0.0, {"dispatcher-east": dispatcher("east", 1_000, latencies=slow)}),
        (1.0, {"dispatcher-east": dispatcher("east", 1_100, latencies=then_fast)}),
    )
    assert row_of(topology, window)["latency_ms"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}


def test_a_first_latency_is_counted_though_there_was_no_histogram_before(topology):
    window = window_of(
        (0.0, {"dispatcher-east": dispatcher("east", 0)}),
        (1.0, {"dispatcher-east": dispatcher("east", 1, latencies=(0, 1, 0, 0))}),
    )
    assert row_of(topology, window)["latency_ms"]["p50"] == 10.0


def test_samples_older_than_the_window_are_forgotten_but_for_one(topology):
    samples = [(float(at), {"dispatcher-east": dispatcher("east", 10 * at)}) for at in range(60)]
    window = window_of(*samples)
    assert window.seconds == WINDOW_S
    assert row_of(topology, window)["joined_per_s"] == 10.0


def test_counts_of_a_process_that_began_anew_never_make_a_rate_negative(topology):
    window = window_of(
        (0.0, {"eventstore-east": eventstore(1_000, 0), "dispatcher-east": dispatcher("east", 1)}),
        (1.0, {"eventstore-east": None, "dispatcher-east": dispatcher("east", 1)}),
        (2.0, {"eventstore-east": eventstore(3, 1), "dispatcher-east": dispatcher("east", 1)}),
    )
    assert row_of(topology, window)["cache_hit_ratio"] == 0.75


def test_batches_are_counted_over_a_change_of_the_leader(topology):
    window = window_of(
        (0.0, {"registry-r0": registry(True, 1, 90, 10, 100), "registry-r1": registry(False, 1, 90, 5, 5)}),
        (1.0, {"registry-r0": None, "registry-r1": registry(True, 2, 120, 7, 35)}),
        (2.0, {"registry-r0": None, "registry-r1": registry(True, 2, 140, 9, 65)}),
    )
    look = look_of(topology, window)
    assert look["shards"] == [
        {
            "shard": 0, "leader": "r1", "datacenter": "west", "ids": 140, "batches_per_s": 2.0,
            "events_per_batch": 15.0,
        }
    ]  # fmt: skip
    assert (look["replicas"], look["replicas_up"], look["silent"]) == (3, 1, ["registry-r0"])


def test_a_leader_that_was_cut_off_is_not_taken_for_the_leader(topology):
    old = registry(True, term=1)
    window = window_of((0.0, {"registry-r0": old, "registry-r1": registry(True, term=2)}))
    assert look_of(topology, window)["shards"][0]["leader"] == "r1"
    lone = registry(True, term=3, has_quorum=False)
    assert look_of(topology, window_of((0.0, {"registry-r0": lone})))["shards"][0]["leader"] is None


def look(topology, killed=()):
    east = dispatcher("east", 1_200, pending=3, wasted=40, latencies=(0, 9, 1, 0))
    statuses = {
        "dispatcher-east": east, "joiner-east": {"joined": 1}, "eventstore-east": eventstore(9, 1),
        "dispatcher-west": None, "registry-r0": registry(True, 1, 1_234, 50, 500),
    }  # fmt: skip
    zero = {**statuses, "dispatcher-east": dispatcher("east", 0), "registry-r0": registry(True)}
    window = window_of((0.0, zero | {"eventstore-east": eventstore(0, 0)}), (2.0, statuses))
    return look_of(topology, window, killed)


def test_a_look_is_a_json_document_of_plain_values(topology):
    shown = look(topology, killed=["west"])
    assert shown["datacenters"]["east"]["joined_per_s"] == 600.0
    assert shown["datacenters"]["east"]["latency_ms"] == {"p50": 10.0, "p90": 10.0, "p99": 100.0}
    assert shown["datacenters"]["east"]["state"] == "up"
    assert shown["datacenters"]["west"]["state"] == "killed"
    assert shown["shards"][0] == {
        "shard": 0, "leader": "r0", "datacenter": "east", "ids": 1_234, "batches_per_s": 25.0,
        "events_per_batch": 10.0,
    }  # fmt: skip
    assert (shown["restarts"], shown["silent"]) == (2, ["dispatcher-west"])


def test_lines_tell_what_a_person_wants_to_know(topology):
    page = "\n".join(lines_of(look(topology, killed=["west"])))
    for shown in ("1,200", "600", "90.0%", "40 (3.2%)", "r0 (east)", "1,234", "killed", "restarts 2"):
        assert shown in page


def test_fates_that_do_not_add_up_are_shouted(topology):
    wrong = dispatcher("east", 5) | {"foreign_events": 9}
    (line, *_) = lines_of(look_of(topology, window_of((0.0, {"dispatcher-east": wrong}))))
    assert line.endswith("FATES DO NOT ADD UP")
