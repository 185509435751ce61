"""What a dispatcher's ledger counts, as plain values."""

from pathlib import Path
from typing import Any

from dispatcher.ledger import Ledger
from dispatcher.rows import Rows
from dispatcher.totals import Totals
from photon.core.fates import Fate
from photon.core.histogram import EDGES_US
from photon.logs.inventory import GONE_DEVICE


def counted(totals: Totals) -> dict[str, Any]:
    """The counts of a directory, of all its workers together."""
    fates = {fate.value: count for fate, count in totals.fates.items()}
    return {
        "foreign_events": totals.foreign_events,
        "fates": fates,
        "registered": totals.fates[Fate.JOINED] + totals.fates[Fate.DUPLICATE],
        "pending": totals.foreign_events - totals.ended,
        "wasted_joins": totals.wasted_joins,
        "latency_us": {"edges": EDGES_US.tolist(), "counts": totals.latencies},
    }


def of_workers(rows: Rows) -> list[dict[str, Any]]:
    """The workers that live, with how many files each holds."""
    held = [slot for source, slot in rows.claims().items() if source[0] != GONE_DEVICE]
    return [
        {"slot": slot, "name": worker.name, "process": worker.pid, "files": held.count(slot)}
        for slot, worker in sorted(rows.workers().items())
        if worker.incarnation
    ]


def all_read(rows: Rows) -> bool:
    """Every worker has read all there was for it since the last of them came or went; no event waits.

    A file that nobody holds would have been taken by then: whose it is follows from who is there.
    """
    state = rows.known_state()
    resting = [worker.rested == state.epoch for worker in rows.workers().values() if worker.incarnation]
    return all(resting) and state.totals.foreign_events == state.totals.ended


def read_totals(directory: Path, dead_letters: Path, bytes_max: int) -> dict[str, Any]:
    """What dispatchers that run no more have counted, as in their status. LockedError if one still runs."""
    ledger = Ledger(directory, dead_letters, bytes_max)
    try:
        return counted(ledger.totals)
    finally:
        ledger.close()
