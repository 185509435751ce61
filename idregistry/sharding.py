"""Which shard an id belongs to, and columns split and merged by shard (paper 2.2.2). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from photon.core.columns import hash_ids, take_ids, take_times


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The rows of a batch that belong to one shard, in their order. `rows` is None where all do."""

    shard: int
    ids: bytes
    times: bytes
    rows: npt.NDArray[np.intp] | None


def shard_of(ids: bytes, shards: int) -> npt.NDArray[np.uint64]:
    """16 x N bytes -> N shard numbers: a deterministic hash of the id alone, modulo the number of shards."""
    return hash_ids(ids) % np.uint64(shards)


def split_by_shard(ids: bytes, times: bytes, shards: int) -> list[ShardPart]:
    """The parts of a batch, one a shard that has any."""
    if not ids:
        return []
    if shards == 1:
        return [ShardPart(0, ids, times, None)]
    of = shard_of(ids, shards)
    order = np.argsort(of, kind="stable")
    ordered = of[order]
    parts = []
    for rows in np.split(order, np.flatnonzero(np.diff(ordered)) + 1):
        shard = int(of[rows[0]])
        if len(rows) == len(of):
            return [ShardPart(shard, ids, times, None)]
        parts.append(ShardPart(shard, take_ids(ids, rows), take_times(times, rows), rows))
    return parts


def merge_outcomes(parts: Sequence[ShardPart], outcomes: Sequence[bytes], count: int) -> bytes:
    """The parts' outcome columns -> one of `count` bytes, in the order of the batch before the split."""
    if len(parts) == 1 and parts[0].rows is None:
        return outcomes[0]
    merged = np.zeros(count, np.uint8)
    for part, column in zip(parts, outcomes, strict=True):
        merged[part.rows] = np.frombuffer(column, np.uint8)
    return merged.tobytes()
