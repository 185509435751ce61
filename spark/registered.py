"""The IdRegistry as a DataFrame (paper 3.3.3): a task a shard, each streams the scan of its shard's leader.

    id binary (16 bytes), time_us long (to the hour where the replica keeps no more), token binary, and what
    the token says: address string, incarnation long (64 bits, signed), token_us long; shard int

The driver holds none of it. An export (Parquet) can be asked later, without a registry.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from idregistry.client import RegistryAt
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError, UsageError
from photon.core.ids import parse_token
from spark.engine.options import SCAN_TIMEOUT_S
from spark.engine.session import map_in_arrow
from spark.reading.paths import is_uri

if TYPE_CHECKING:
    import pyarrow as pa

    from idregistry.rules.state import Scanned

SCHEMA: Final = (
    "id binary, time_us long, token binary, address string, incarnation long, token_us long, shard int"
)

ASK_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 0.5
_IDS, _FACTS = "ids", "shards"


def registered(session: SparkSession, registry: RegistryAt, timeout_s: float = SCAN_TIMEOUT_S) -> DataFrame:
    """All that the registry holds. Everything acknowledged before a job of it began is in; what is registered
    or released meanwhile may be or not.

    UnavailableError where no replica answers now; a job fails where a shard can't be read within `timeout_s`.
    Each job scans anew: persist it, or write an export, to use it twice.
    """
    shards = _shards(registry)
    numbers = session.range(0, shards, 1, shards).select(F.col("id").cast("int").alias("shard"))
    return map_in_arrow(numbers, _scanner(registry, timeout_s), SCHEMA)


def boundaries(registry: RegistryAt, timeout_s: float = SCAN_TIMEOUT_S) -> dict[int, int]:
    """Shard -> the event time (us) before which its leader has forgotten ids. UnavailableError."""
    found = {}
    for shard in range(_shards(registry)):
        with closing(_scan(registry, shard, timeout_s)) as pieces:
            found[shard] = next(pieces).boundary_us  # of an empty shard too
    return found


def _shards(registry: RegistryAt) -> int:
    with registry.client(ASK_TIMEOUT_S) as client:
        return client.configuration().shards


# --- on the executors


def _scanner(
    registry: RegistryAt, timeout_s: float
) -> "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    def scan_shards(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            for shard in batch.column(0).to_pylist():
                for scanned in _scan(registry, shard, timeout_s):
                    if scanned.ids:
                        yield to_arrow(scanned, shard)

    return scan_shards


def _scan(registry: RegistryAt, shard: int, timeout_s: float) -> "Generator[Scanned, None, None]":
    """The pieces of one shard, from its leader: only that knows all that was acknowledged.

    Who leads may change until the first piece is here. UnavailableError.
    """
    deadline = time.monotonic() + timeout_s
    begun = False
    with registry.client(ASK_TIMEOUT_S) as client:
        while True:
            try:
                left_s = max(0.001, deadline - time.monotonic())
                for scanned in client.scan(shard, timeout_s=left_s, fresh=True):
                    begun = True
                    yield scanned
                return
            except UnavailableError:
                if begun or time.monotonic() + _PAUSE_S > deadline:
                    raise
                time.sleep(_PAUSE_S)


def to_arrow(scanned: "Scanned", shard: int) -> "pa.RecordBatch":
    """One piece of a scan as columns of SCHEMA. Python work for each distinct token, not for each id."""
    import pyarrow as pa

    from spark.reading.parsing import fixed_binary

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
    return pa.RecordBatch.from_pydict(columns)


def signed(incarnation: int) -> int:
    """64 bits as Spark's long has them."""
    return incarnation - (1 << 64) if incarnation >> 63 else incarnation


def unsigned(incarnation: int) -> int:
    """The reverse of `signed`: as tokens and the registry's client have it."""
    return incarnation & ((1 << 64) - 1)


# --- exports


@dataclass(frozen=True, slots=True)
class Export:
    """An export: its ids (SCHEMA), when its scan began (us), and each shard's boundary after it."""

    ids: DataFrame
    began_us: int
    boundaries: dict[int, int]


def write_export(
    session: SparkSession, registry: RegistryAt, directory: str, timeout_s: float = SCAN_TIMEOUT_S
) -> int:
    """Keep what the registry holds now as Parquet in a new directory, or a URI for Spark; how many ids."""
    began_us = SystemClock().now_us()
    registered(session, registry, timeout_s).write.parquet(f"{directory}/{_IDS}")
    facts = [(shard, us, began_us) for shard, us in boundaries(registry, timeout_s).items()]
    # Written last: an export without it is not whole.
    session.createDataFrame(facts, "shard int, boundary_us long, began_us long").coalesce(1).write.parquet(
        f"{directory}/{_FACTS}"
    )
    count: int = session.read.schema(SCHEMA).parquet(f"{directory}/{_IDS}").count()
    return count


def check_export(directory: str) -> None:
    """UsageError for a local directory that is no whole export."""
    if not is_uri(directory) and not Path(directory, _FACTS, "_SUCCESS").exists():
        raise UsageError(f"--export {directory}: no whole export; `photon registry export` makes one")


def read_export(session: SparkSession, directory: str) -> Export:
    """The reverse of write_export. Spark's own error for a directory that is none."""
    facts = session.read.parquet(f"{directory}/{_FACTS}").collect()
    ids = session.read.schema(SCHEMA).parquet(f"{directory}/{_IDS}")
    return Export(ids, facts[0].began_us, {row.shard: row.boundary_us for row in facts})
