"""Columns split and merged by shard, as a sharding configuration says (paper 2.2.2). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from idregistry.configuration import Configuration
from photon.core.columns import take_ids, take_times

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The rows of a batch that belong to one shard, in their order. `rows` is None where all do."""

    shard: int
    ids: bytes
    times: bytes
    rows: Rows | None


def split_by_shard(
    ids: bytes, times: bytes, configuration: Configuration, rows: Rows | None = None
) -> list[ShardPart]:
    """The parts of a batch, one a shard that has any; of its `rows` only, where they are given."""
    if rows is not None:
        parts = split_by_shard(take_ids(ids, rows), take_times(times, rows), configuration)
        return [ShardPart(p.shard, p.ids, p.times, rows if p.rows is None else rows[p.rows]) for p in parts]
    if not ids:
        return []
    if configuration.shards == 1:
        return [ShardPart(0, ids, times, None)]
    of = configuration.shard_of(ids, times)
    order = np.argsort(of, kind="stable")
    ordered = of[order]
    parts = []
    for of_shard in np.split(order, np.flatnonzero(np.diff(ordered)) + 1):
        shard = int(of[of_shard[0]])
        if len(of_shard) == len(of):
            return [ShardPart(shard, ids, times, None)]
        parts.append(ShardPart(shard, take_ids(ids, of_shard), take_times(times, of_shard), of_shard))
    return parts


def merge_outcomes(parts: Sequence[ShardPart], outcomes: Sequence[bytes], count: int) -> bytes:
    """The parts' outcome columns -> one of `count` bytes, in the order of the batch before the split."""
    if len(parts) == 1 and parts[0].rows is None:
        return outcomes[0]
    merged = np.zeros(count, np.uint8)
    for part, column in zip(parts, outcomes, strict=True):
        merged[part.rows] = np.frombuffer(column, np.uint8)
    return merged.tobytes()


def take_part(part: ShardPart, chosen: Rows) -> ShardPart:
    """Some rows of a part."""
    rows = chosen if part.rows is None else part.rows[chosen]
    return ShardPart(part.shard, take_ids(part.ids, chosen), take_times(part.times, chosen), rows)


def segments_of(
    part: ShardPart, tokens: Sequence[bytes], counts: Sequence[int]
) -> tuple[list[bytes], list[int]]:
    """The part's own share of a batch's segments: `tokens[i]` is for the batch's next `counts[i]` rows."""
    if part.rows is None:
        return list(tokens), list(counts)
    ends = np.cumsum(np.asarray(counts, np.int64))
    of = np.searchsorted(ends, part.rows, "right")
    chosen, sizes = np.unique(of, return_counts=True)  # a part's rows are in order, so its segments are too
    return [tokens[i] for i in chosen.tolist()], sizes.tolist()
