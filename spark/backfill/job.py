"""What a backfill keeps in OUT/.photon-backfill/<datacenter>: the job, its staged files, a lock.

A job is planned once: which bytes of which logs it reads, its buckets, its incarnation. Every later run of
the same command continues that plan, because only the same token wins again what it had registered.

A job that is done replaces the dead letters of earlier jobs over the same logs: it has a letter of its own
for each event that is still not joined. Letters of a log that has changed stay: they may be all that is left
of its events.
"""

import hashlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from joiner.output_files import LINES, PARQUET
from photon import __version__
from photon.core.disk import make_directory, read_json, storage_errors, sync_directory, write_json
from photon.core.errors import UsageError
from photon.core.fates import Fate
from photon.core.settings import Settings, reading_fingerprint
from photon.logs.files import named_files, telling
from photon.logs.packed import is_packed
from spark.losses import BACKFILL
from spark.reading.paths import check_name, escaped, is_uri

STEM: Final = "backfill"
"""Joined logs are `joined/<datacenter>/backfill-NNNNNN.jsonl`."""
FILES_MAX: Final = 1 << 20
OFFSET_MAX: Final = 1 << 40
BUCKET_BYTES: Final = 64 << 20
"""Of the logs; a task holds the primaries of its bucket in memory."""
BUCKETS_MAX: Final = 1 << 16
_PRIMARY_SHARE_MAX: Final = 8  # of the foreign logs' size: of the primaries only those that are named count
_UNPACKED: Final = 8  # times the size of an archive, about
_JOB: Final = "job.json"


class Phase(StrEnum):
    """How far a job is."""

    PLANNED = "planned"
    JOINED = "joined"
    """All is registered and staged; `results` say what."""
    DONE = "done"


class LogInput(msgspec.Struct, frozen=True):
    """A log: its first `size` bytes are read, whatever it gains. `telling`: digest of their ends."""

    name: str
    size: int
    telling: str


class Staged(msgspec.Struct, frozen=True):
    """A file that waits to be published: its name in the staging directory, what the manifest will say."""

    name: str
    bytes: int
    lines: int
    crc32: str


class BucketResult(msgspec.Struct, frozen=True):
    """What became of a bucket. `fates`: foreign lines by fate; files are None where they would be empty."""

    bucket: int
    fates: dict[str, int]
    primary_events: int
    primary_malformed: int
    joined: Staged | None
    letters: Staged | None
    primary_letters: Staged | None
    opened_us: int
    closed_us: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what came of it. Bucket b has the token `begun_us + b` and the file `first_number + b`.

    `registry`: the identity of the one it registers with.
    """

    incarnation: int
    begun_us: int
    reading: str
    spark: str
    output_format: str
    patterns: tuple[tuple[str, ...], tuple[str, ...]]
    primary: tuple[LogInput, ...]
    foreign: tuple[LogInput, ...]
    buckets: int
    first_number: int
    registry: str
    phase: Phase = Phase.PLANNED
    results: tuple[BucketResult, ...] = ()

    def joined_name(self, bucket: int) -> str:
        suffix = PARQUET if self.output_format == "parquet" else LINES
        return f"{STEM}-{self.first_number + bucket:06d}{suffix}"

    def letters_name(self, log: str, bucket: int) -> str:
        return f"{log}-{STEM}-{self.first_number + bucket:06d}{LINES}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a backfill writes."""

    out: Path
    datacenter: str

    @property
    def home(self) -> Path:
        return self.out / ".photon-backfill" / self.datacenter

    @property
    def staging(self) -> Path:
        """All executors see it, under the same name."""
        return self.home / "staging"

    @property
    def joined(self) -> Path:
        return self.out / "joined" / self.datacenter

    @property
    def letters(self) -> Path:
        return self.out / "dead-letters" / self.datacenter

    @property
    def token_address(self) -> str:
        return f"{BACKFILL}{self.datacenter}"

    def load(self) -> Job | None:
        """CorruptStateError, StorageError."""
        return read_json(self.home / _JOB, Job)

    def save(self, job: Job) -> None:
        write_json(self.home / _JOB, job)

    def put_away(self, job: Job, how: str) -> None:
        """The job is over; what it was stays readable, and its numbers used."""
        with storage_errors(self.home):
            (self.home / _JOB).rename(self.home / f"job-{job.first_number:06d}-{how}.json")

    def put_away_jobs(self) -> Iterator[Job]:
        for path in self.home.glob("job-*.json"):
            with storage_errors(path):
                yield msgspec.json.decode(path.read_bytes(), type=Job)


def check_registry(job: Job, place: Place, identity: str) -> None:
    """UsageError for another registry than the job's: it would let every event be joined again."""
    if job.registry != identity:
        raise UsageError(
            f"{place.home}: its backfill registers with the registry {job.registry}, and this is {identity}; "
            "name the --work or --registry that it was begun with, or begin one under another --datacenter"
        )


Look = Callable[[Sequence[str]], tuple[LogInput, ...]]  # at what URIs name


def look_at(patterns: Sequence[str], what: str, remote: Look) -> tuple[LogInput, ...]:
    """The logs that patterns and URIs name now, a file with several names once. UsageError, StorageError."""
    uris = [pattern for pattern in patterns if is_uri(pattern)]
    found = (*_look_at_local([p for p in patterns if not is_uri(p)]), *(remote(uris) if uris else ()))
    if not found:
        raise UsageError(f"no {what} log matches {', '.join(map(repr, patterns))}; check the pattern")
    if len(found) >= FILES_MAX // 2:
        raise UsageError(f"{len(found)} {what} logs; a backfill reads {FILES_MAX // 2 - 1} at a time")
    return found


def _look_at_local(patterns: Sequence[str]) -> list[LogInput]:
    found = []
    for file in named_files(patterns):
        name = os.path.abspath(file.name)
        check_name(name)
        if file.size >= OFFSET_MAX:
            raise UsageError(f"{name} has {file.size} bytes; cut it into files below {OFFSET_MAX}")
        with storage_errors(Path(name)):
            found.append(LogInput(name, file.size, telling(name, file.size)))
    return found


def check_unchanged(inputs: Iterable[LogInput], remote: Look) -> None:
    """UsageError if the bytes that a job was planned with may be others now; growth does not matter."""
    logs = list(inputs)
    elsewhere = [log for log in logs if is_uri(log.name)]
    if elsewhere and {*elsewhere} - {*remote([escaped(log.name) for log in elsewhere])}:
        raise UsageError(
            f"a log such as {elsewhere[0].name} is not what the unfinished backfill was planned with; put "
            "that back, or --abandon"
        )
    for log in (log for log in logs if not is_uri(log.name)):
        try:
            size = os.stat(log.name).st_size
            same = size == log.size if is_packed(log.name) else size >= log.size
            same = same and telling(log.name, log.size) == log.telling
        except OSError as error:
            raise UsageError(
                f"{log.name}: {error.strerror}; the unfinished backfill reads it: put it back, or --abandon"
            ) from error
        if not same:
            raise UsageError(
                f"{log.name} is not the log that the unfinished backfill was planned with; put that back, "
                "or --abandon"
            )


def buckets_for(primary: Iterable[LogInput], foreign: Iterable[LogInput], least: int) -> int:
    foreign_bytes, primary_bytes = _bytes_of(foreign), _bytes_of(primary)
    total = foreign_bytes + min(primary_bytes, _PRIMARY_SHARE_MAX * foreign_bytes)
    return min(max(least, -(-total // BUCKET_BYTES)), BUCKETS_MAX)


def _bytes_of(logs: Iterable[LogInput]) -> int:
    return sum(log.size * (_UNPACKED if is_packed(log.name) else 1) for log in logs)


def reading_of(settings: Settings) -> str:
    """Equal where a line is the same event, and joins to the same, whenever it is read."""
    adapter = settings.adapter
    facts = [__version__, reading_fingerprint(settings), adapter.use, adapter.field, _code_of(adapter.use)]
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=12).hexdigest()


def _code_of(use: str) -> str:
    """A digest of the adapter's own module; what it imports is the user's to keep."""
    source = adapter_source(use)
    return "" if source is None else hashlib.blake2b(source.read_bytes(), digest_size=8).hexdigest()


def adapter_source(use: str) -> Path | None:
    """The file of the module that the settings name; None for the default adapter, or where it has none."""
    module = use.partition(":")[0]
    found = importlib.util.find_spec(module) if module else None
    path = Path(found.origin) if found is not None and found.origin else None
    return path if path is not None and path.is_file() else None


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
