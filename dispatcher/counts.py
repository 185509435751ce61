"""What a dispatcher's ledger counts, as plain values."""

from pathlib import Path
from typing import Any

from dispatcher.ledger import Ledger
from dispatcher.rules.totals import NOTHING, Totals
from dispatcher.workers import worker_directories
from photon.core.fates import Fate
from photon.core.histogram import EDGES_US


def counted(totals: Totals) -> dict[str, Any]:
    fates = {fate.value: count for fate, count in totals.fates.items()}
    return {
        "foreign_events": totals.foreign_events,
        "fates": fates,
        "registered": totals.fates[Fate.JOINED] + totals.fates[Fate.DUPLICATE],
        "pending": totals.foreign_events - totals.ended,
        "wasted_joins": totals.wasted_joins,
        "latency_us": {"edges": EDGES_US.tolist(), "counts": totals.latencies},
    }


def read_totals(directory: Path, dead_letters: Path, bytes_max: int) -> dict[str, Any]:
    """What all workers of a datacenter that run no more have counted, as in a status. LockedError if one
    still runs."""
    totals = NOTHING
    for worker, place in worker_directories(directory).items():
        ledger = Ledger(place, dead_letters, bytes_max, worker)
        totals = totals.plus(ledger.totals)
        ledger.close()
    return counted(totals)
