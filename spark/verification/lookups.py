"""Which ids the registry does not hold, asked by Lookup (paper 2.1): a scan can't say it of events that were
joined after it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from pyspark.sql import DataFrame

from photon.core.columns import take_ids, take_times
from photon.core.errors import UnavailableError
from photon.core.fates import Registered
from photon.core.ids import ID_BYTES
from spark.engine.arrow import map_in_arrow
from spark.registered import ASK_TIMEOUT_S

if TYPE_CHECKING:
    import pyarrow as pa

    from idregistry.client import RegistryAt, RegistryClient

BATCH_IDS_MAX: Final = 8192
ROUNDS: Final = 3
"""A replica that is behind has caught up by the last of them."""
_PAUSE_S: Final = 0.5


def absent(events: DataFrame, registry: "RegistryAt") -> DataFrame:
    """key, time_us -> the keys of which every replica that answers says, again and again, that they are not
    registered. One that it has forgotten is none of them. A job fails with UnavailableError if none answers.
    """
    return map_in_arrow(events.select("key", "time_us"), _asker(registry), "key binary")


def _asker(
    registry: "RegistryAt",
) -> "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    def ask(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        from spark.reading.columns import fixed_binary

        # Each replica by itself: a client of all would ask the nearest one only.
        replicas = [replace(registry, addresses=(address,)) for address in registry.addresses]
        with ExitStack() as held:
            clients: list[RegistryClient] = []
            for batch in batches:
                clients = clients or [held.enter_context(one.client(ASK_TIMEOUT_S)) for one in replicas]
                for low in range(0, batch.num_rows, BATCH_IDS_MAX):
                    part = batch.slice(low, BATCH_IDS_MAX)
                    ids = b"".join(part.column(0).to_pylist())
                    times = part.column(1).to_numpy().astype("<i8").tobytes()
                    yield pa.RecordBatch.from_pydict({"key": fixed_binary(_absent(clients, ids, times))})

    return ask


def _absent(clients: "Sequence[RegistryClient]", ids: bytes, times: bytes) -> bytes:
    """The ids that are left when all were asked."""
    for turn in range(ROUNDS):
        if turn:
            time.sleep(_PAUSE_S)
        silent: UnavailableError | None = None
        answers = 0
        for client in clients:
            if not ids:
                return b""
            try:
                outcomes = np.frombuffer(client.lookup(ids, times), np.uint8)
            except UnavailableError as error:
                silent = error
                continue
            answers += 1
            rows = outcomes == Registered.ABSENT
            ids, times = take_ids(ids, rows), take_times(times, rows)
        if not answers and silent is not None:
            raise silent
    assert len(ids) % ID_BYTES == 0
    return ids
