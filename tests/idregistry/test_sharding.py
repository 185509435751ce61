"""Sharding (paper 2.2.2)."""

import random

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from idregistry.routes import merge_outcomes, segments_of, split, take_part, whole
from idregistry.rules.sharding import BEGINNING, HORIZON, Configuration, Interval
from photon.core.columns import pack_times, take_ids
from photon.core.ids import IdPacker
from tests.idregistry.kit import event_ids


def test_shard_is_a_function_of_the_id() -> None:
    """2.2.2: "a deterministic hash of the event_id, modulo the total number of shards". Written down: a
    change of these numbers would send known ids to other shards."""
    ids = event_ids(*range(8))
    assert shard_of(ids, 100).tolist() == SHARDS_OF_100
    assert shard_of(ids + ids, 100).tolist() == SHARDS_OF_100 * 2


def always(shards: int) -> Configuration:
    return Configuration(1, (Interval(BEGINNING, shards),))


def shard_of(ids: bytes, shards: int) -> npt.NDArray[np.uint64]:
    return always(shards).shard_of(ids, bytes(len(ids) // 2))


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
    parts = split(whole(ids, times), always(shards))
    assert len({part.shard for part in parts}) == len(parts)
    for part in parts:
        assert set(shard_of(part.ids, shards).tolist()) == {part.shard}
        # In their old order: of an id that stands twice, the first must win.
        assert (np.diff(part.rows) > 0).all()
    # The id's own first byte stands for its outcome.
    outcomes = [part.ids[::16] for part in parts]
    assert merge_outcomes(parts, outcomes, count) == ids[::16] if parts else count == 0
    times_back = merge_outcomes(parts, [part.times[::8] for part in parts], count) if parts else b""
    assert times_back == times[::8]


def test_a_batch_of_one_shard_is_passed_on_as_it_is() -> None:
    ids, times = event_ids(1, 2, 3), bytes(24)
    (part,) = split(whole(ids, times), always(1))
    assert part.ids is ids
    assert part.times is times
    assert part.rows.tolist() == [0, 1, 2]


@given(st.integers(1, 200), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 99))
def test_rows_that_were_misrouted_are_split_anew_and_keep_their_place(
    count: int, numbers: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    intervals = [Interval(BEGINNING if n == 0 else n * 1000, shards) for n, shards in enumerate(numbers)]
    configuration = Configuration(2, tuple(intervals))
    ids = rng.randbytes(16 * count)
    times = pack_times([rng.choice([-5, 500, 1500, 2500, 9999, HORIZON]) for _ in range(count)])
    rows = np.array(sorted(rng.sample(range(count), rng.randint(1, count))))
    parts = split(take_part(whole(ids, times), rows, 0), configuration)
    found = np.concatenate([part.rows for part in parts])
    assert sorted(found.tolist()) == rows.tolist()
    expected = configuration.shard_of(ids, times)
    for part in parts:
        assert part.ids == take_ids(ids, part.rows)
        assert set(expected[part.rows].tolist()) == {part.shard}
        half = np.arange(0, len(part.ids) // 16, 2)
        taken = take_part(part, half, part.shard)
        assert taken.ids == take_ids(ids, taken.rows)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_each_id_keeps_its_token_when_a_release_is_split(counts: list[int], shards: int) -> None:
    count = sum(counts)
    ids = event_ids(*range(count))
    tokens = [b"token %d" % n for n in range(len(counts))]
    of_row = [token for token, n in zip(tokens, counts, strict=True) for _ in range(n)]
    for part in split(whole(ids, bytes(8 * count)), always(shards)):
        segments, sizes = segments_of(part, tokens, counts)
        spread = [token for token, n in zip(segments, sizes, strict=True) for _ in range(n)]
        assert spread == [of_row[row] for row in part.rows]
