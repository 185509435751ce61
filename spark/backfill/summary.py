"""What a backfill tells of itself when it is done."""

from collections import Counter
from typing import Any

from photon.core.fates import Fate
from spark.backfill.job import Job, Place


def summary_of(job: Job, place: Place, seconds: float, again: bool = False) -> dict[str, Any]:
    """Names as in the summary of `photon join`; `seconds` are this run's. `again`: it joined nothing."""
    fates: Counter[str] = Counter()
    for result in job.results:
        fates.update(result.fates)
    counts = {fate.value: fates[fate.value] for fate in Fate}
    files = [job.joined_name(result.bucket) for result in job.results if result.joined is not None]
    return {
        "foreign_events": sum(counts.values()),
        **counts,
        "seconds": round(seconds, 3),
        "joined_per_s": round(counts[Fate.JOINED.value] / seconds, 1) if seconds > 0 and not again else 0.0,
        "joined_by_datacenter": {place.datacenter: counts[Fate.JOINED.value]},
        "primary_events": sum(result.primary_events for result in job.results),
        "primary_malformed": sum(result.primary_malformed for result in job.results),
        "buckets": job.buckets,
        "files": files,
        "incarnation": f"{job.incarnation:016x}",
    }
