"""What the registry's figures show: server-side batching (Fig. 10) and time-based upsharding (Fig. 11)."""

import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from benchmarks.registry_cluster import Cluster, connect
from benchmarks.registry_load import measure, registry_clients
from photon.core.ids import Token

ROUND_TRIP_MS: Final = 100.0
"""As between the paper's regions (section 4)."""
REQUESTS_PER_S: Final = 400.0
"""The paper's shard gets "hundreds of client write requests per second"."""
_IDS: Final = (1, 20)
_IN_FLIGHT: Final = 64
_STEPS: Final = 12
_STEP_S: Final = 2.5

HOURS_A_SECOND: Final = 1.0
RETENTION_DAYS: Final = 3.0
"""As in the paper: 72 hours of event time, 72 s here."""
SHARDS: Final = (1, 3)
_BEFORE_S: Final = 96.0
_AFTER_S: Final = 120.0
_BATCHES_PER_S: Final = 5
_IDS_A_BATCH: Final = 2_000
_TIMEOUT_S: Final = 20.0


def batching(directory: Path, quick: bool) -> dict[str, Any]:
    """Requests and Raft commits a second, step by step: one commit at a time as the paper's shard has it, and
    ours, which begins the next ones before a majority has answered."""
    return {
        "round_trip_ms": ROUND_TRIP_MS,
        "requests_per_s": REQUESTS_PER_S,
        "ids_a_request": _IDS,
        "series": {
            name: _batching(directory, in_flight, 3 if quick else _STEPS)
            for name, in_flight in (("one at a time", 1), ("pipelined", 16))
        },
    }


def _batching(directory: Path, batches_in_flight: int, steps: int) -> list[dict[str, float]]:
    settings = {"election_timeout_ms": 1_000, "batches_in_flight_max": batches_in_flight}
    rows = []
    with (
        Cluster(directory, settings=settings, delay_ms=ROUND_TRIP_MS / 2) as cluster,
        registry_clients(cluster.addresses, 2) as clients,
    ):
        for number in range(steps):
            measured = measure(
                cluster, clients, _STEP_S, ids=_IDS, in_flight=_IN_FLIGHT, calls_per_s=REQUESTS_PER_S
            )
            row = measured.row()
            rows.append(
                {
                    "at_s": round(number * _STEP_S, 1),
                    "requests_per_s": round(measured.calls / measured.seconds, 1),
                    "commits_per_s": round(measured.commits / measured.seconds, 1),
                    "ids_a_commit": round(measured.seen.ids / max(1, measured.commits), 1),
                    "p50_ms": row["p50_ms"],
                    "failures": row["failures"],
                }
            )
    return rows


def upsharding(directory: Path, quick: bool) -> dict[str, Any]:
    """Ids that each shard holds while one becomes three, in hours of event time: an hour a second."""
    before_s, after_s = (12.0, 12.0) if quick else (_BEFORE_S, _AFTER_S)
    retention_days = RETENTION_DAYS / 8 if quick else RETENTION_DAYS
    settings = {"shards": SHARDS[0], "retention_days": retention_days, "clock_skew_s": 60.0}
    speed, since_s = HOURS_A_SECOND * 3600.0, time.time()
    fast = ("tests.faults.kit.skewed", "0", str(speed), str(since_s), "--")
    rows, adopted, asked_h = [], False, 0.0
    with (
        Cluster(directory, settings=settings, command=fast) as cluster,
        closing(connect(cluster.addresses, _TIMEOUT_S)) as client,
    ):
        node, began = cluster.leader(), time.monotonic()
        for number in range(round((before_s + after_s) * _BATCHES_PER_S)):
            time.sleep(max(0.0, began + number / _BATCHES_PER_S - time.monotonic()))
            now_us = round((since_s + (time.time() - since_s) * speed) * 1e6)
            token = Token("127.0.0.1:7000", 1, now_us).pack()
            client.commit(os.urandom(16 * _IDS_A_BATCH), now_us.to_bytes(8, "little") * _IDS_A_BATCH, token)
            at_h = round((time.monotonic() - began) * HOURS_A_SECOND, 2)
            held = {shard["shard"]: shard["ids"] for shard in cluster.shards(node)}
            if held and number % _BATCHES_PER_S == 0:
                rows.append({"at_h": at_h, "ids": [held.get(shard, 0) for shard in range(max(SHARDS))]})
            if number == round(before_s * _BATCHES_PER_S):
                asked_h, adopted = at_h, client.reshard(SHARDS[1]).adopted
    return {
        "retention_h": round(retention_days * 24),
        "ids_per_h": _BATCHES_PER_S * _IDS_A_BATCH,
        "resharded_at_h": round(asked_h, 1),
        "adopted": adopted,
        "rows": rows,
    }
