"""Puts the staged files of a backfill where readers find them, under the lease of the job's incarnation.

As joiner.output does, it checks the lease before a file gets its final name and after. A lease that runs
after the rename proves that the file was there before any fence, so that recovery, which reads after the
fence, saw it. Otherwise the file is taken back. Only a file that the manifest lists is published: a kill
between the rename and the listing leaves one for the next run that gets the lease, or for `--abandon`, which
takes it back.

`abandon` gives a backfill up and releases what it registered and did not publish, so that others may join
it, in recovery's order (paper 3.3.3): fence, in every shard; take back what is not listed; release, by
compare-and-delete, what the tokens of unpublished buckets hold. Killed anywhere, it can be run again.
"""

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.client import RegistryClient
from idregistry.rules.packing import SCAN_S_MAX, buckets_of
from idregistry.rules.sharding import Configuration
from idregistry.rules.surveys import Scanned
from joiner.leases import LeaseKeeper
from joiner.output import Checkpoint
from joiner.output_files import LINES, PARQUET, CompleteFile, Manifest, numbers_in
from photon.core.columns import take_ids, unpack_times
from photon.core.disk import make_directory, storage_errors, sync_directory
from photon.core.errors import CorruptStateError, FencedError, OverloadedError, UnavailableError
from photon.core.fates import Released
from photon.core.ids import Token, parse_token
from spark.backfill.job import (
    LOGS,
    STEM,
    BucketResult,
    Job,
    Place,
    Staged,
    check_registry,
    remove_letters,
    remove_replaced,
)

LEASE_WAIT_S_MAX: Final = 300.0
"""For a registry that went away."""
FIRST_LEASE_WAIT_S_MAX: Final = 30.0
"""For one that has not answered yet."""
FENCE_WAIT_S_MAX: Final = 120.0
"""More than a lease."""
_LEASE_POLL_S: Final = 0.05
_FENCE_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Publisher:
    """For a job whose results are known, in one process at a time (the place's lock)."""

    place: Place
    job: Job
    keeper: LeaseKeeper
    checkpoint: Checkpoint = lambda _: None

    def publish(self) -> None:
        """All that is not yet. FencedError: only `--abandon` helps; UnavailableError: again later."""
        make_directory(self.place.joined)
        make_directory(self.place.letters)
        with closing(Manifest(self.place.joined, STEM)) as manifest:
            name, listed = self.job.joined_name, manifest.listed
            left = [result for result in self.job.results if name(result.bucket) not in listed]
            for result in left:
                self._publish_letters(result)
            with storage_errors(self.place.letters):
                sync_directory(self.place.letters)  # the letters of a listed bucket are not looked at again
            for result in left:
                if result.joined is not None:
                    self._publish_joined(result, result.joined, manifest)
                    self.checkpoint("listed")
        remove_replaced(self.job, self.place)

    def _publish_letters(self, result: BucketResult) -> None:
        for log, letters in (("foreign", result.letters), ("primary", result.primary_letters)):
            if letters is not None:
                staged = self.place.staging / letters.name
                final = self.place.letters / self.job.letters_name(log, result.bucket)
                with storage_errors(final):
                    if staged.exists():
                        staged.rename(final)
                    elif not final.exists():
                        raise _missing(staged)

    def _publish_joined(self, result: BucketResult, joined: Staged, manifest: Manifest) -> None:
        staged = self.place.staging / joined.name
        final = self.place.joined / self.job.joined_name(result.bucket)
        deadline = time.monotonic() + LEASE_WAIT_S_MAX
        while True:
            await_lease(self.keeper, self.job, self.place, deadline)  # the first look
            with suppress(OverloadedError):  # it ran out just then
                self._put(staged, final, joined.bytes)
                break
        entry = (joined.bytes, joined.lines, joined.crc32, result.opened_us, result.closed_us)
        manifest.add(CompleteFile(final.name, *entry))

    def _put(self, staged: Path, final: Path, size: int) -> None:
        """OverloadedError: the lease ran out, and the file is where it was."""
        with storage_errors(final):
            # Renamed by a run before this one: it was there before any fence, for the lease runs still.
            there = final.exists()
            path = final if there else staged
            if not path.exists() or path.stat().st_size != size:
                raise _missing(path)
            if there:
                sync_directory(final.parent)  # the run before may have ended before it did
                return
            self.checkpoint("lease seen")
            try:
                staged.rename(final)
                sync_directory(final.parent)
                self.checkpoint("renamed")
                self.keeper.check(self.keeper.own)
            except BaseException:  # also a signal's: no end of our own choice without the second look
                if final.exists():
                    final.rename(staged)
                    sync_directory(final.parent)
                raise


def await_lease(keeper: LeaseKeeper, job: Job, place: Place, deadline_s: float) -> None:
    """Return when the lease runs. FencedError, SettingsMismatchError; UnavailableError at `deadline_s`
    (time.monotonic).
    """
    while True:
        try:
            keeper.check(keeper.own)
            return
        except OverloadedError as error:
            if keeper.own.fenced:
                raise fenced(job, place) from error
            if keeper.refused is not None:
                raise keeper.refused from error
            if time.monotonic() > deadline_s:
                why = keeper.status()["trouble"] or "no answer yet"
                raise UnavailableError(
                    f"the IdRegistry gives no lease ({why}); nothing is lost: see to it, and run the same "
                    "command again"
                ) from error
        time.sleep(_LEASE_POLL_S)


def fenced(job: Job, place: Place) -> FencedError:
    return FencedError(
        f"the backfill's incarnation {job.incarnation:016x} was fenced, what it had not published may be "
        f"others' by now; run the same command with --abandon, then once more ({place.home})"
    )


def take_back(job: Job, place: Place) -> set[int]:
    """Delete what has its final name and is not listed, dead letters too; the buckets that are published.

    For a job that is fenced, and whose driver is dead (the place's lock is ours).
    """
    make_directory(place.joined)
    with closing(Manifest(place.joined, STEM)) as manifest:
        published = set()
        for bucket in range(job.buckets):
            name = job.joined_name(bucket)
            if name in manifest.listed:
                published.add(bucket)
            else:
                with storage_errors(place.joined / name):
                    (place.joined / name).unlink(missing_ok=True)
        with storage_errors(place.joined):
            sync_directory(place.joined)
    for log in LOGS:
        remove_letters(job, place, log, set(range(job.buckets)) - published)
    return published


def next_number(place: Place) -> int:
    """Of files: above those of all that were ever listed or begun."""
    begun = [old.first_number + old.buckets for old in place.put_away_jobs()]
    if not place.joined.is_dir():
        return max(begun, default=0)
    with closing(Manifest(place.joined, STEM)) as manifest:
        there = [path.name for kind in (LINES, PARQUET) for path in place.joined.glob(f"{STEM}-*{kind}")]
        return max([manifest.next_number, *begun, *(number + 1 for number in numbers_in(there))])


def _missing(path: Path) -> CorruptStateError:
    return CorruptStateError(
        f"{path}: missing, or not as it was written, and the backfill is to publish it; put it back, or run "
        "the same command with --abandon, which lets the events be joined anew"
    )


@dataclass(frozen=True, slots=True)
class Abandoned:
    """`released` ids may be joined by others; `kept` buckets are published, and stay."""

    released: int
    kept: int


def abandon(
    job: Job, place: Place, client: RegistryClient, notice: Callable[[str], None] = lambda _: None
) -> Abandoned:
    """The place's lock is held: its driver is dead. UnavailableError: run it again; UsageError."""
    check_registry(job, place, client.identity())
    _fence(client, job.incarnation, notice)  # from then on nothing more is registered in any shard
    configuration = client.configuration()
    published = take_back(job, place)
    released = 0
    for shard in configuration.shards:
        for scanned in client.scan(shard, timeout_s=SCAN_S_MAX, fresh=True):
            released += _release(client, configuration, shard, scanned, job, published)
    return Abandoned(released, len(published))


def _fence(client: RegistryClient, incarnation: int, notice: Callable[[str], None]) -> None:
    deadline = time.monotonic() + FENCE_WAIT_S_MAX
    while not (answer := client.fence(incarnation)).fenced:
        if time.monotonic() + answer.expires_in_s > deadline + FENCE_WAIT_S_MAX:
            raise UnavailableError(
                f"the lease of {incarnation:016x} runs for {answer.expires_in_s:.0f} s; try then"
            )
        notice(f"waiting {answer.expires_in_s:.0f} s for the end of the backfill's lease")
        time.sleep(max(_FENCE_POLL_S, answer.expires_in_s))


def _release(
    client: RegistryClient,
    configuration: Configuration,
    shard: int,
    scanned: Scanned,
    job: Job,
    published: set[int],
) -> int:
    """Of a piece of a scan what is ours and in no published file; how many ids were released."""
    holders = [parse_token(held) if held else None for held in scanned.holders]
    ours = {row: one for row, one in enumerate(holders) if one and one.incarnation == job.incarnation}
    buckets = scanned.token_times - job.begun_us
    of_job = (buckets >= 0) & (buckets < job.buckets)  # a life may have had other jobs before
    rows = np.flatnonzero(np.isin(scanned.holder_of, [*ours]) & of_job & ~np.isin(buckets, [*published]))
    if not len(rows):
        return 0
    rows = rows[np.argsort(buckets[rows], kind="stable")]
    ids = take_ids(scanned.ids, rows)
    places = shard * 2 + scanned.guarded[rows]
    times = _routed(configuration, places, ids, unpack_times(scanned.times)[rows])
    numbers, counts = np.unique(buckets[rows], return_counts=True)
    address = ours[int(scanned.holder_of[rows[0]])].address
    tokens = [Token(address, job.incarnation, job.begun_us + number).pack() for number in numbers.tolist()]
    outcomes = client.release(ids, times, tokens, counts.tolist())
    released = outcomes.count(Released.RELEASED)
    left = len(outcomes) - released - outcomes.count(Released.ABSENT) - outcomes.count(Released.OTHER)
    if left:
        raise UnavailableError(
            f"shard {shard} of the registry did not release {left} of {len(outcomes)} ids, as if it had not "
            "heard of the fence; run the same command again"
        )
    return released


def _routed(
    configuration: Configuration,
    places: npt.NDArray[np.int64],
    ids: bytes,
    times_us: npt.NDArray[np.int64],
) -> bytes:
    """Times by which the ids go, among others, to the places (of Configuration.places) that they are in: a
    scan tells the hour, and an interval of the configuration may begin within."""
    times = times_us.astype("<i8")
    for interval in configuration.intervals[1:]:
        astray = ~(configuration.places(ids, times.tobytes()) == places[:, None]).any(1)
        start = np.array([interval.start_us], np.int64)
        within = buckets_of(times) == buckets_of(start)[0]
        times = np.where(astray & within, start, times)
    return times.tobytes()
