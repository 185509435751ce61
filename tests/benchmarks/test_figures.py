"""What the page of the paper's figures says is what was measured (benchmarks.figures)."""

import json
import math
import re

from benchmarks.figures import p90_ms, page, series, wasted_percent
from benchmarks.matrix import fit
from benchmarks.measuring import ROOT
from photon.cluster.statuses import Sample

MACHINE = {"cores": 2, "processor": "a processor", "memory_gib": 8, "kernel": "6", "python": "3.11"}
EDGES = [1_000, 2_000, 4_000]


def row(at_s, **datacenters):
    return {"at_s": at_s, "datacenters": datacenters}


def of(joined, wasted=0.0, counts=(0, 0, 0, 0)):
    return {
        "joined_per_s": joined,
        "wasted_per_s": wasted,
        "read_per_s": joined,
        "skipped_per_s": 0.0,
        "cache_hits_per_s": 9.0,
        "logs_hits_per_s": 1.0,
        "latency": {"edges": EDGES, "counts": list(counts)},
    }


def test_a_row_is_the_difference_of_two_samples():
    from benchmarks.figures_measured import rows_of

    def said(joined, duplicate, wasted, hits):
        return {
            "dispatcher-east": {
                "foreign_events": joined + duplicate,
                "pending": 3,
                "fates": {"joined": joined, "duplicate": duplicate},
                "wasted_joins": wasted,
                "latency_us": {"edges": EDGES, "counts": [joined]},
            },
            "eventstore-east": {"cache": {"hits": hits}, "logs": {"hits": 0, "misses": 0}},
        }

    samples = [Sample(10.0, said(100, 10, 5, 50)), Sample(12.0, said(300, 60, 15, 70))]
    (found,) = rows_of(samples, 8.0)
    east = found["datacenters"]["east"]
    assert found["at_s"] == 4.0
    assert (east["read_per_s"], east["joined_per_s"], east["wasted_per_s"]) == (125.0, 100.0, 5.0)
    assert east["skipped_per_s"] == 20.0, "of 50 duplicates 10 were joined in vain"
    assert east["cache_hits_per_s"] == 10.0
    assert east["latency"]["counts"] == [200, 0, 0, 0]


def test_a_datacenter_that_was_away_leaves_a_gap():
    at, values = series([row(1.0, east=of(5.0)), row(2.0), row(3.0, east=of(6.0))], "east", "joined_per_s")
    assert at == [1.0, 2.0, 3.0]
    assert values[0] == 5.0
    assert math.isnan(values[1])
    assert values[2] == 6.0


def test_percentiles_and_shares_are_of_all_events_in_the_window():
    rows = [
        row(float(n), east=of(80.0, 4.0, (8, 0, 2, 0)), west=of(20.0, 1.0, (0, 0, 0, 0))) for n in range(5)
    ]
    assert p90_ms(rows) == ([4.0], [4.0]), "a tenth and more took up to 4 ms"
    assert wasted_percent(rows) == ([4.0], [5.0])


def test_the_page_says_what_was_measured_and_leaves_out_what_was_not():
    slow = of(80.0, 0.0, (0, 0, 5, 0))
    rows = [
        row(float(n), east=of(120.0, 0.0, (10, 0, 0, 0)), west=slow if n == 8 else of(80.0))
        for n in range(15)
    ]
    report = {"duplicates": 0, "lost": 7, "events_in": 1234, "longest_stall_s": 2.5}
    outage = {
        "seconds": 15.0,
        "down": "east",
        "down_at_s": 5.0,
        "up_at_s": 14.0,
        "rows": rows,
        "report": report,
    }
    batching = {
        "round_trip_ms": 100.0,
        "requests_per_s": 400.0,
        "ids_a_request": [1, 20],
        "series": {
            name: [{"requests_per_s": 300.0, "commits_per_s": 9.0, "ids_a_commit": 330.0, "p50_ms": 480.0}]
            for name in ("one at a time", "pipelined")
        },
    }
    written = page({"machine": MACHINE, "outage": outage, "batching": batching})
    assert "120 and 80; `west` alone 80" in written
    assert "1 ms before (p50 1 ms), 4 ms at worst in the other datacenter, at 10 s" in written
    assert "90.0 %, where the cache" in written
    assert "0; 7 (of 1,234 read)" in written
    assert "300; 9.0, each of 330 ids; p50 480 ms" in written
    assert "Wasted joins" not in written


def test_the_page_has_a_line_for_each_shape_with_the_peers_beside_it():
    def shape(name, kib, us):
        row = {"shape": name, "events": 199_998, "kib_an_event": kib, "seconds": 5.5, "cpu_s": 4.0}
        return row | {"cpu_us_an_event": us, "cpu_us_a_kib": us / kib}

    rows = [shape("plain", 0.2, 20.0), shape("wide", 2.0, 30.0), shape("odd", 0.4, 40.0)]
    peers = [
        {"shape": "plain", "engine": "DuckDB, a join", "seconds": 1.5, "cpu_us_an_event": 2.5},
        {"shape": "wide", "engine": "DuckDB, a join", "remark": "ended with status 1"},
        {"shape": "plain", "engine": "Spark", "remark": "no Java on PATH"},
    ]
    measured = {**MACHINE, "day": "2026-11-25", "load_before": 0.1}
    found = {"machine": measured, "start": [{"cpu_s": 2.0}], "matrix": rows, "fit": fit(rows), "peers": peers}
    written = page({"machine": MACHINE, "matrix": found})
    assert "| shape | KiB an event | seconds |" in written and "Spark" not in written
    beside = rows[0]["beside_the_fit_us"]
    assert beside < 0
    assert f"| plain | 0.2 | 5.5 | 4.0 | 20.0 | 100.0 | {beside} | 1.5, 2.5 |" in written
    assert "| failed |" in next(line for line in written.splitlines() if line.startswith("| wide"))
    text = " ".join(written.split())
    assert "200,000 events a shape" in text and "which is 10.0 us an event" in text


def test_the_page_in_docs_is_that_of_its_data():
    results = ROOT / "docs" / "results"
    data = json.loads((results / "data.json").read_text("utf-8"))
    written = page(data)
    assert written == (ROOT / "docs" / "results.md").read_text("utf-8")
    assert all((ROOT / "docs" / name).is_file() for name in re.findall(r"!\[.*\]\((.*)\)", written))
