"""The workers of a datacenter: which files each reads, and what they have in their directory (paper 3.2).

<directory>/workers      their number, recorded at the first start
<directory>/inbox        files of events that are fed in again (dead letters, recovery)
<directory>/worker-<n>   the ledger of one, and its unpacked copies of logs

Whose a file is follows from a hash of its name, so each knows by itself; this goes for the inbox as for logs.
Files are put there whole, by rename, and deleted when everything of them is recorded. Events that recovery
released are in files of their own, RECOVERED: a replica of the registry that lags behind the release still
calls them present, so they go to a joiner, whatever a lookup says.
"""

import contextlib
import glob
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from dispatcher.ledger import Ledger
from dispatcher.rules.verdicts import NOTHING, Totals
from photon.core.disk import make_directory, storage_errors, sync_directory, write_file
from photon.core.errors import SettingsError, StorageError
from photon.core.fates import Differing, Fate
from photon.core.status import AGE_EDGES_US, EDGES_US
from photon.logs.files import FileState
from photon.logs.shares import slot_of


def worker_of(path: str, workers: int) -> int:
    """The worker, of so many, that reads the file."""
    return slot_of(path) % workers


def mine_of(worker: int, workers: int) -> Callable[[str], bool] | None:
    """By its path, whether a file is this worker's; None where all are."""
    return None if workers == 1 else lambda path: worker_of(path, workers) == worker


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


def counted(totals: Totals) -> dict[str, Any]:
    fates = {fate.value: count for fate, count in totals.fates.items()}
    since_read, since_event = totals.latencies
    return {
        "foreign_events": totals.foreign_events,
        "fates": fates,
        "registered": totals.fates[Fate.JOINED] + totals.fates[Fate.DUPLICATE],
        "pending": totals.waiting,
        "wasted_joins": totals.wasted_joins,
        "lost_bytes": totals.lost_bytes,
        "differing": {how.value: totals.differing.get(how, 0) for how in Differing},
        "latency_us": {"edges": EDGES_US.tolist(), "counts": since_read},
        "event_latency_us": {"edges": AGE_EDGES_US.tolist(), "counts": since_event},
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


RECOVERED: Final = "recovered-"
"""What the names of recovery's files begin with."""


def put(lines: Path, inbox: Path, name: str, partly: Callable[[], None] = lambda: None) -> None:
    """Copy a file of events into an inbox, durably, as `name`: whole or not at all. StorageError.

    Where it is there already it is left alone; one that was read meanwhile is read again, and its events are
    duplicates. `partly` is called before the rename.
    """
    final, temporary = inbox / name, inbox / f".{name}.partial"
    with storage_errors(temporary):
        make_directory(inbox)
        if final.exists():
            sync_directory(inbox)  # whoever renamed it may have been killed before this
            return
        with lines.open("rb") as source, temporary.open("wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
        partly()
        temporary.rename(final)
        sync_directory(inbox)


class Inbox:
    """`<directory>/inbox/*.jsonl`."""

    def __init__(self, directory: Path, sync: Callable[[], None]) -> None:
        """`sync` makes durable what is recorded: after it a power cut takes none of it. StorageError."""
        self._path = (directory / "inbox").absolute()
        self._sync = sync
        with storage_errors(self._path):
            make_directory(self._path)

    @property
    def pattern(self) -> str:
        return f"{glob.escape(str(self._path))}/*.jsonl"

    def sweep(self, states: Iterable[FileState]) -> None:
        """Delete those of these files that are recorded to their end, as their states in the ledger say."""
        # Whatever hinders it now is met again at the next start; nothing is read twice.
        with contextlib.suppress(StorageError):
            done = [state for state in states if self._is_done(state)]
            if done:
                self._sync()
            for state in done:
                with contextlib.suppress(OSError):
                    os.unlink(state.path)

    def is_recovered(self, name: str) -> bool:
        directory, base = os.path.split(name)
        return base.startswith(RECOVERED) and directory == str(self._path)

    def holds(self, path: str) -> bool:
        """A file in here is known by its name: the same events again mean that they are to be tried again."""
        return os.path.dirname(path) == str(self._path)

    def _is_done(self, state: FileState) -> bool:
        if state.gone or not self.holds(state.path):
            return False
        try:
            status = os.stat(state.path)
        except OSError:
            return False
        return status.st_ino == state.inode and state.offset >= status.st_size
