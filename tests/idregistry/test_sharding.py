"""Sharding (paper 2.2.2)."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from idregistry.sharding import merge_outcomes, shard_of, split_by_shard
from photon.core.ids import IdPacker
from tests.idregistry.kit import event_ids


def test_shard_is_a_function_of_the_id() -> None:
    """2.2.2: "a deterministic hash of the event_id, modulo the total number of shards". Written down: a
    change of these numbers would send known ids to other shards."""
    ids = event_ids(*range(8))
    assert shard_of(ids, 100).tolist() == SHARDS_OF_100
    assert shard_of(ids + ids, 100).tolist() == SHARDS_OF_100 * 2


SHARDS_OF_100 = [17, 27, 17, 3, 12, 42, 27, 62]


def test_ids_of_one_server_spread_over_all_shards() -> None:
    ids = IdPacker().pack([f"10.0.0.1:42:{1_700_000_000_000_000 + 7 * n}" for n in range(10_000)])
    counts = np.bincount(shard_of(ids, 10).astype(int))
    assert counts.min() > 700
    assert counts.max() < 1300


@given(st.integers(0, 300), st.integers(1, 20), st.integers(0, 99))
def test_split_by_shard_and_merged_a_batch_is_in_its_old_order(count: int, shards: int, seed: int) -> None:
    rng = random.Random(seed)
    ids, times = rng.randbytes(16 * count), rng.randbytes(8 * count)
    parts = split_by_shard(ids, times, shards)
    assert len({part.shard for part in parts}) == len(parts)
    for part in parts:
        assert set(shard_of(part.ids, shards).tolist()) == {part.shard}
        # In their old order: of an id that stands twice, the first must win.
        assert part.rows is None or (np.diff(part.rows) > 0).all()
    # The id's own first byte stands for its outcome.
    outcomes = [part.ids[::16] for part in parts]
    assert merge_outcomes(parts, outcomes, count) == ids[::16] if parts else count == 0
    times_back = merge_outcomes(parts, [part.times[::8] for part in parts], count) if parts else b""
    assert times_back == times[::8]


def test_a_batch_of_one_shard_is_passed_on_as_it_is() -> None:
    ids, times = event_ids(1, 2, 3), bytes(24)
    (part,) = split_by_shard(ids, times, 1)
    assert part.ids is ids
    assert part.times is times
    assert part.rows is None
