"""The IdRegistry as a DataFrame (paper 3.3.3): a task a shard, each streams the scan of its shard's leader.

    id binary (16 bytes), time_us long (to the hour where the replica keeps no more), token binary, and what
    the token says: address string, incarnation long (64 bits, signed), token_us long; shard int

The driver holds none of it. An export (Parquet) can be asked later, without a registry.

Lookups tell which ids are absent (2.1): a scan can't say it of events that were joined after it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from idregistry.client import RegistryAt, RegistryClient
from idregistry.rules.surveys import Scanned
from photon.core.clock import SystemClock
from photon.core.columns import take_ids, take_times
from photon.core.errors import UnavailableError, UsageError
from photon.core.fates import Registered
from photon.core.ids import MARK_ADDRESSES, parse_token
from spark.options import SCAN_TIMEOUT_S
from spark.reading.lines import fixed_binary
from spark.reading.paths import escaped, is_uri

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA: Final = (
    "id binary, time_us long, token binary, address string, incarnation long, token_us long, shard int"
)

ASK_TIMEOUT_S: Final = 10.0
LEADER_WAIT_S_MAX: Final = 60.0
"""How long the leader of a shard is looked for, which knows all that was acknowledged."""
BATCH_IDS_MAX: Final = 8192
ROUNDS: Final = 3
"""A replica that is behind has caught up by the last of them."""
_PAUSE_S: Final = 0.5
_IDS, _FACTS = "ids", "shards"


def registered(
    session: "SparkSession", registry: RegistryAt, timeout_s: float = SCAN_TIMEOUT_S
) -> "DataFrame":
    """All that was acknowledged before a job of it began; what is registered or released meanwhile may be in.

    A row an id; two where two tokens hold it in different shards, which only joiners that ended while they
    asked leave behind. UnavailableError if no replica answers now; a job fails if it can't read a shard
    within `timeout_s`. Each job scans anew: persist it, or write an export, to use it twice.
    """
    from spark.reading.events import run

    with registry.client(ASK_TIMEOUT_S) as client:
        configuration = client.configuration()
    rows = run(session, configuration.shards, partial(scan_of, registry, timeout_s), SCHEMA)
    # Around the start of an interval other shards guard an id, too.
    return rows.dropDuplicates(["id", "token"]) if len(configuration.intervals) > 1 else rows


def scan_of(registry: RegistryAt, timeout_s: float, shard: int) -> Iterator[Any]:
    """One shard -> record batches of SCHEMA. UnavailableError."""
    with registry.client(min(timeout_s, LEADER_WAIT_S_MAX)) as client:
        for scanned in client.scan(shard, timeout_s=timeout_s, fresh=True):
            if scanned.ids:
                yield to_arrow(scanned, shard)


def boundaries(registry: RegistryAt, timeout_s: float = SCAN_TIMEOUT_S) -> dict[int, int]:
    """Shard -> the event time (us) before which its leader has forgotten ids. UnavailableError."""
    found = {}
    with registry.client(min(timeout_s, LEADER_WAIT_S_MAX)) as client:
        for shard in client.configuration().shards:
            first = next(client.scan(shard, timeout_s=timeout_s, fresh=True))  # of an empty shard too
            found[shard] = first.boundary_us
    return found


def shards_of(registry: RegistryAt) -> tuple[int, ...]:
    with registry.client(ASK_TIMEOUT_S) as client:
        return client.configuration().shards


def to_arrow(scanned: Scanned, shard: int) -> Any:
    """One piece of a scan as columns of SCHEMA, but for marks, which are of no foreign event.

    Python work for each distinct token, not for each id.
    """
    holders = list(map(parse_token, scanned.holders))
    rows = pa.array(scanned.holder_of)
    address = pa.array([holder.address for holder in holders], pa.string())
    incarnation = pa.array([signed(holder.incarnation) for holder in holders], pa.int64())
    columns = {
        "id": fixed_binary(scanned.ids),
        "time_us": pa.array(np.frombuffer(scanned.times, "<i8")),
        "token": pa.array(scanned.token_table, pa.binary()).take(pa.array(scanned.token_of)),
        "address": address.take(rows),
        "incarnation": incarnation.take(rows),
        "token_us": pa.array(scanned.token_times),
        "shard": pa.repeat(pa.scalar(shard, pa.int32()), len(scanned.holder_of)),
    }
    found = pa.RecordBatch.from_pydict(columns)
    marks = [number for number, holder in enumerate(holders) if holder.address in MARK_ADDRESSES]
    return found.filter(pa.array(~np.isin(scanned.holder_of, marks))) if marks else found


def signed(incarnation: int) -> int:
    """64 bits as Spark's long has them."""
    return incarnation - (1 << 64) if incarnation >> 63 else incarnation


def unsigned(incarnation: int) -> int:
    """The reverse of `signed`: as tokens and the registry's client have it."""
    return incarnation & ((1 << 64) - 1)


def absent(registry: RegistryAt, ids: bytes, times: bytes) -> bytes:
    """16 x N ids and 8 x N times -> the ids of which every replica that answers says, again and again, that
    they are not registered, nor forgotten. UnavailableError if none answers.
    """
    # Each replica by itself: a client of all would ask the nearest one only.
    replicas = [replace(registry, addresses=(address,)) for address in registry.addresses]
    found = b""
    with ExitStack() as held:
        clients = [held.enter_context(one.client(ASK_TIMEOUT_S)) for one in replicas]
        for low in range(0, len(times) // 8, BATCH_IDS_MAX):
            high = low + BATCH_IDS_MAX
            found += _absent(clients, ids[16 * low : 16 * high], times[8 * low : 8 * high])
    return found


def _absent(clients: Sequence[RegistryClient], ids: bytes, times: bytes) -> bytes:
    """The ids that are left when all were asked."""
    for turn in range(ROUNDS):
        if turn:
            time.sleep(_PAUSE_S)
        failures = []
        for client in clients:
            if not ids:
                return b""
            try:
                outcomes = np.frombuffer(client.lookup(ids, times), np.uint8)
            except UnavailableError as error:
                failures.append(error)
                continue
            rows = outcomes == Registered.ABSENT
            ids, times = take_ids(ids, rows), take_times(times, rows)
        if len(failures) == len(clients):
            raise failures[-1]
    return ids


@dataclass(frozen=True, slots=True)
class Export:
    """An export: its ids (SCHEMA), when its scan began (us), and each shard's boundary after it."""

    ids: "DataFrame"
    began_us: int
    boundaries: dict[int, int]


def write_export(
    session: "SparkSession", registry: RegistryAt, directory: str, timeout_s: float = SCAN_TIMEOUT_S
) -> int:
    """Keep what the registry holds now as Parquet in a new directory, or a URI for Spark; how many ids."""
    began_us = SystemClock().now_us()
    registered(session, registry, timeout_s).write.parquet(f"{directory}/{_IDS}")
    facts = [(shard, us, began_us) for shard, us in boundaries(registry, timeout_s).items()]
    # Written last: an export without it is not whole.
    session.createDataFrame(facts, "shard int, boundary_us long, began_us long").coalesce(1).write.parquet(
        f"{directory}/{_FACTS}"
    )
    count: int = read_export(session, directory).ids.count()
    return count


def check_export(directory: str) -> None:
    """UsageError for a local directory that is no whole export."""
    if not is_uri(directory) and not Path(directory, _FACTS, "_SUCCESS").exists():
        raise UsageError(f"--export {directory}: no whole export; `photon registry export` makes one")


def read_export(session: "SparkSession", directory: str) -> Export:
    """The reverse of write_export. Spark's own error for a directory that is none."""
    facts = session.read.parquet(escaped(f"{directory}/{_FACTS}")).collect()
    ids = session.read.schema(SCHEMA).parquet(escaped(f"{directory}/{_IDS}"))
    return Export(ids, facts[0].began_us, {row.shard: row.boundary_us for row in facts})
