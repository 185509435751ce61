"""Removes dead letters that another backfill writes, or has written, again.

A job over all logs of one before it has a letter of its own for each event that is still not joined. So the
earlier job's go, once the later one's are all there. The letters of a log that is not what it was stay: they
may be all that is left of its events.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from photon.core.disk import make_directory, storage_errors, sync_directory
from photon.core.errors import UsageError
from spark.backfill.job import Job, LogInput, Place, check_unchanged

LOGS: Final = ("foreign", "primary")


def remove_letters(job: Job, place: Place, log: str, buckets: Iterable[int]) -> None:
    """Those of the job's `buckets`, of malformed primaries or of foreign events (`log`). StorageError."""
    make_directory(place.letters)
    with storage_errors(place.letters):
        for bucket in buckets:
            (place.letters / job.letters_name(log, bucket)).unlink(missing_ok=True)
        sync_directory(place.letters)


def remove_replaced(job: Job, place: Place) -> None:
    """Those of earlier jobs; the job's own are published. Killed here, it is simply done again."""
    for old in place.put_away_jobs():
        for log, was, now in zip(LOGS, (old.foreign, old.primary), (job.foreign, job.primary), strict=True):
            if _reads_again(now, was):
                remove_letters(old, place, log, range(old.buckets))


def _reads_again(now: Sequence[LogInput], was: Sequence[LogInput]) -> bool:
    """Whether all that was read of the logs before is read now."""
    if not {log.name for log in was} <= {log.name for log in now}:
        return False
    try:
        check_unchanged(was, lambda _: tuple(now))
    except UsageError:
        return False
    return True
