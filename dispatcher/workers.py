"""The workers of a datacenter: how many there are, and what each has for itself in their directory.

<directory>/workers      their number, recorded at the first start
<directory>/inbox        files of events that are fed in again; each belongs to a worker, as logs do
<directory>/worker-<n>   its ledger, and its unpacked copies of logs
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from dispatcher.ledger import Ledger
from dispatcher.rules.verdicts import NOTHING, Totals
from photon.core.disk import make_directory, storage_errors, sync_directory, write_file
from photon.core.errors import SettingsError
from photon.core.fates import Fate
from photon.core.histogram import EDGES_US


def worker_directory(directory: Path, worker: int) -> Path:
    return directory / f"worker-{worker}"


def worker_directories(directory: Path) -> dict[int, Path]:
    """Of the workers that have begun."""
    names = (path.name.removeprefix("worker-") for path in directory.glob("worker-*"))
    return {n: worker_directory(directory, n) for n in sorted(int(name) for name in names if name.isdigit())}


def check_workers(directory: Path, workers: int) -> None:
    """SettingsError if the directory was begun with another number: each ledger would miss files, or get
    some that another one has counted."""
    with storage_errors(directory):
        recorded = _recorded(directory)
    if recorded is not None and recorded != workers:
        raise SettingsError(
            f"{directory} was begun with {recorded} dispatcher workers, not {workers}; "
            f"set 'dispatcher.workers' (or the number of 'dispatchers') to {recorded} again, or move the "
            "directory away to read all foreign logs again (what is registered is not joined twice)"
        )


def fix_workers(directory: Path, workers: int) -> None:
    """The same, and the number stands from now on, durably. StorageError."""
    with storage_errors(directory):
        make_directory(directory)
        if _recorded(directory) is None:
            # Workers that start at the same time all try; the first one's word stands.
            write_file(directory / f"workers-{os.getpid()}", f"{workers}\n".encode(), _put)
    check_workers(directory, workers)


def _put(temporary: Path, own: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.link(temporary, own.with_name("workers"))
    temporary.unlink()
    sync_directory(own.parent)


def _recorded(directory: Path) -> int | None:
    try:
        return int((directory / "workers").read_text("ascii"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SettingsError(
            f"{directory / 'workers'}: no number; write how many workers began there"
        ) from error


# --- What a dispatcher's ledger counts, as plain values.


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
