"""Status to Prometheus families, and their scrape."""

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from photon.core.errors import AddressInUseError
from photon.rpc.metrics import FAMILIES, collect, serve_metrics
from tests.rpc.metrics_page import PAGE, page

DISPATCHER = {
    "foreign_events": 7,
    "fates": {"joined": 4, "unjoinable": 1},
    "pending": 2,
    "wasted_joins": 0,
    "in_flight": 1,
    "drained": False,
    "storage_error": "no space left",
    "latency_us": {"edges": [100, 200_000], "counts": [3, 1, 2], "sum": 700_000},
}


def samples(room, status):
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "process")): sample.value
        for family in collect(room, "x", status)
        for sample in family.samples
    }


def test_figures_rows_keys_and_troubles_become_samples():
    found = samples("dispatcher", DISPATCHER)
    assert found["photon_dispatcher_events_total",] == 7
    assert found["photon_dispatcher_fated_events_total", "joined"] == 4
    assert found["photon_dispatcher_fated_events_total", "unjoinable"] == 1
    assert found["photon_dispatcher_drained",] == 0
    assert found["photon_dispatcher_storage_failing",] == 1
    shards = [
        {"shard": n, "ids": n * 10, "is_leader": n == 1, "has_quorum": True, "applied_index": 5}
        for n in (0, 1)
    ]
    found = samples("registry", {"shards": shards, "queue": 3})
    assert found["photon_registry_shard_ids", "1"] == 10
    assert found["photon_registry_shard_leading", "0"] == 0
    assert found["photon_registry_queue_ids",] == 3
    assert not any("commits" in name or "committed" in name for name, *_ in found)  # rows have no such figure


def test_a_histogram_is_cumulative_in_seconds_with_and_without_a_sum():
    found = samples("dispatcher", DISPATCHER)
    name = "photon_dispatcher_latency_seconds"
    assert [found[f"{name}_bucket", edge] for edge in ("0.0001", "0.2", "+Inf")] == [3, 4, 6]
    assert (found[f"{name}_count",], found[f"{name}_sum",]) == (6, 0.7)
    bare = {**DISPATCHER, "latency_us": {"edges": [100, 200_000], "counts": [3, 1, 2]}}
    found = samples("dispatcher", bare)
    assert found[f"{name}_count",] == 6
    assert (f"{name}_sum",) not in found


def test_what_a_status_lacks_is_left_out():
    assert samples("eventstore", {"cache": {"hits": 1}}) == {("photon_eventstore_cache_hits_total",): 1}


def test_names_say_their_room_and_no_two_are_alike():
    for room, families in FAMILIES.items():
        names = [family.name for family in families]
        assert len(names) == len(set(names)), room
        assert all(family.help.endswith(".") for family in families)


def test_the_page_of_metrics_is_of_those_that_are_served():
    assert PAGE.read_text() == page(), "python -m tests.rpc.metrics_page"


def test_every_alert_asks_for_metrics_that_there_are():
    text = (Path(__file__).parents[2] / "deploy" / "alerts.yml").read_text()
    asked = {
        name.removesuffix("_total")
        for name in re.findall(r"\bphoton_(?:registry|eventstore|joiner|dispatcher)_\w+", text)
    }
    there = {f"photon_{room}_{family.name}" for room, families in FAMILIES.items() for family in families}
    assert "photon_joiner_unwritten_events" in asked
    assert asked <= there


def test_a_scrape_is_answered_in_the_text_format_and_a_taken_port_is_told():
    server = serve_metrics("127.0.0.1:0", "dispatcher", "dispatcher-east", lambda: DISPATCHER)
    port = server.server_address[1]
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        (sample,) = families["photon_dispatcher_events"].samples
        assert (sample.labels, sample.value) == ({"process": "dispatcher-east"}, 7)
        assert "process_cpu_seconds" in families
        with pytest.raises(AddressInUseError, match=str(port)):
            serve_metrics(f"127.0.0.1:{port}", "dispatcher", "again", lambda: DISPATCHER)
    finally:
        server.stop()
