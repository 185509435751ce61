"""Gives a backfill up: what it registered and did not publish is released, so that others may join it.

In recovery's order (paper 3.3.3): fence, in every shard; take back what is not listed; release, by
compare-and-delete, what the tokens of unpublished buckets hold. Killed anywhere, it is simply done again.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.buckets import buckets_of
from idregistry.client import RegistryClient
from idregistry.configuration import Configuration
from idregistry.messages import SCAN_S_MAX
from idregistry.scanning import Scanned
from photon.core.columns import pack_times, take_ids, unpack_times
from photon.core.errors import UnavailableError
from photon.core.fates import Released
from photon.core.ids import ID_BYTES
from photon.core.tokens import Token, parse_token
from spark.backfill.job import Job, Place, check_registry
from spark.backfill.publishing import take_back

WAIT_S_MAX: Final = 120.0
"""More than a lease, for the fence and for its way to the shards."""
_PAUSE_S: Final = 0.2
_FIRST_PROBE_US: Final = 1

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """`released` ids may be joined by others; `kept` buckets are published, and stay."""

    released: int
    kept: int


def abandon(job: Job, place: Place, client: RegistryClient, notice: Notice = lambda _: None) -> Abandoned:
    """The place's lock is held: its driver is dead. UnavailableError: run it again; UsageError."""
    check_registry(job, place, client.identity())
    _fence(client, job.incarnation, notice)
    configuration = client.configuration()
    _await_shards(client, configuration, Token(place.token_address, job.incarnation, 0).pack())
    published = take_back(job, place)
    released = 0
    for shard in range(configuration.shards):
        for scanned in client.scan(shard, timeout_s=SCAN_S_MAX, fresh=True):
            released += _release(client, configuration, shard, scanned, job, published)
    return Abandoned(released, len(published))


def _fence(client: RegistryClient, incarnation: int, notice: Notice) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not (answer := client.fence(incarnation)).fenced:
        if time.monotonic() + answer.expires_in_s > deadline + WAIT_S_MAX:
            raise UnavailableError(
                f"the lease of {incarnation:016x} runs for {answer.expires_in_s:.0f} s; try then"
            )
        notice(f"waiting {answer.expires_in_s:.0f} s for the end of the backfill's lease")
        time.sleep(max(_PAUSE_S, answer.expires_in_s))


def _await_shards(client: RegistryClient, configuration: Configuration, token: bytes) -> None:
    """Return when each shard knows of the fence: from then on nothing more is registered by that token.

    A shard that does not know refuses a release, of whatever id.
    """
    deadline = time.monotonic() + WAIT_S_MAX
    ids, times = _probes(configuration)
    while Released.NOT_FENCED in client.release(ids, times, [token], [len(ids) // ID_BYTES]):
        if time.monotonic() > deadline:
            raise UnavailableError("a shard of the registry has not heard of the fence; see `photon status`")
        time.sleep(_PAUSE_S)


def _probes(configuration: Configuration) -> tuple[bytes, bytes]:
    """Ids that nobody has, and times, by which every shard is asked."""
    rng = random.Random()
    ids: list[bytes] = []
    starts: list[int] = []
    for number, interval in enumerate(configuration.intervals):
        start_us = interval.start_us if number else _FIRST_PROBE_US
        found: dict[int, bytes] = {}
        while len(found) < interval.shards:
            one = rng.randbytes(ID_BYTES)
            found.setdefault(int(configuration.shard_of(one, pack_times([start_us]))[0]), one)
        ids += found.values()
        starts += [start_us] * len(found)
    return b"".join(ids), pack_times(starts)


def _release(
    client: RegistryClient,
    configuration: Configuration,
    shard: int,
    scanned: Scanned,
    job: Job,
    published: set[int],
) -> int:
    """Of a piece of a scan what is ours and in no published file; how many were released."""
    ours = [bool(held) and parse_token(held).incarnation == job.incarnation for held in scanned.holders]
    if not any(ours):
        return 0
    mask = np.array(ours, np.bool_)[scanned.holder_of]
    buckets = scanned.token_times - job.begun_us
    mask &= ~np.isin(buckets, np.fromiter(published, np.int64, len(published)))
    rows = np.flatnonzero(mask)
    rows = rows[np.argsort(buckets[rows], kind="stable")]
    if not len(rows):
        return 0
    ids = take_ids(scanned.ids, rows)
    times = _routed(configuration, shard, ids, unpack_times(scanned.times)[rows])
    numbers, counts = np.unique(buckets[rows], return_counts=True)
    held = next(held for held, own in zip(scanned.holders, ours, strict=True) if own)
    holder = parse_token(held)
    tokens = [
        Token(holder.address, holder.incarnation, job.begun_us + int(number)).pack() for number in numbers
    ]
    outcomes = client.release(ids, times, tokens, counts.tolist())
    released = outcomes.count(Released.RELEASED)
    left = len(outcomes) - released - outcomes.count(Released.ABSENT) - outcomes.count(Released.OTHER)
    if left:
        raise UnavailableError(
            f"shard {shard} of the registry did not release {left} of {len(outcomes)} ids, as if it had not "
            "heard of the fence; run the same command again"
        )
    return released


def _routed(configuration: Configuration, shard: int, ids: bytes, times_us: npt.NDArray[np.int64]) -> bytes:
    """Times by which the ids go to the shard that they are in: a scan tells the hour, and an interval of the
    configuration may begin within."""
    times = times_us.astype("<i8")
    for interval in configuration.intervals[1:]:
        astray = configuration.shard_of(ids, times.tobytes()) != np.uint64(shard)
        start = np.array([interval.start_us], np.int64)
        within = buckets_of(times) == buckets_of(start)[0]
        times = np.where(astray & within, start, times)
    return times.tobytes()
