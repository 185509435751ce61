"""What stands in the log of a shard, and which shard an id belongs to (paper 2.2.2)."""

import random
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.routes import merge_outcomes, segments_of, split, whole
from idregistry.rules.commands import (
    Boundary,
    Command,
    CommandError,
    Commit,
    Configure,
    Gone,
    Release,
    decode,
    encode,
)
from idregistry.rules.sharding import Route
from photon.core.ids import IdPacker
from tests.idregistry.kit import event_ids, one_shard
from tests.idregistry.state_model import COMMANDS


@settings(deadline=None)
@given(COMMANDS)
def test_a_command_comes_back_as_it_went_in(command: Command) -> None:
    assert decode(encode(command)) == command


@settings(deadline=None)
@given(COMMANDS, st.data())
def test_a_command_cut_short_or_with_bytes_added_is_refused(command: Command, data: st.DataObject) -> None:
    whole = encode(command)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:cut], whole + b"\0"):
        with pytest.raises(CommandError):
            decode(broken)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_a_command_error(garbage: bytes) -> None:
    for data in (garbage, b"\x92\x03" + garbage):
        with suppress(CommandError):
            decode(data)


def test_a_command_of_another_version_says_which() -> None:
    with pytest.raises(CommandError, match="version 2"):
        decode(b"\x92\x02" + encode(Boundary(1, 1))[2:])


@pytest.mark.parametrize("kind", [Commit, Release])
def test_segments_that_do_not_fit_their_ids_are_refused(kind: type[Commit | Release]) -> None:
    given_back = [False] if kind is Release else []
    whole = encode(kind(0, [b"t"], [1], bytes(16), bytes(8), [Route(7, False)], *given_back))
    for good, bad in [
        (b"\xc4\x01t", b"\xc4\x00"),
        (b"\x91\x01", b"\x91\x02"),
        (b"\x91\x01", b"\x92\x01\x00"),
    ]:
        assert good in whole
        with pytest.raises(CommandError):
            decode(whole.replace(good, bad))


def test_a_table_of_configuration_that_can_not_be_is_refused() -> None:
    whole = encode(Configure(0, one_shard(5)))
    assert whole.endswith(b"\x95\x00\x01\x02\x03\x04\x00")
    for shards in (b"\x90", b"\x92\x07\x07", b"\x91\xcd\x10\x00"):
        with pytest.raises(CommandError, match="an interval has 1 to 4096 shards, each once"):
            decode(whole[:-7] + shards + b"\0")
    with pytest.raises(CommandError, match="spread"):
        decode(whole[:-1] + b"\xff")


def test_a_command_of_the_directory_is_none_of_a_shard() -> None:
    with pytest.raises(CommandError):
        decode(encode(Gone(1, "r1")))


def test_shard_is_a_function_of_the_id() -> None:
    """2.2.2: "a deterministic hash of the event_id, modulo the total number of shards". Written down: a
    change of these numbers would send known ids to other shards."""
    ids = event_ids(*range(8))
    assert shard_of(ids, 100).tolist() == SHARDS_OF_100
    assert shard_of(ids + ids, 100).tolist() == SHARDS_OF_100 * 2


def shard_of(ids: bytes, shards: int) -> npt.NDArray[np.uint64]:
    return one_shard(shards).shard_of(ids, bytes(len(ids) // 2))


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
    parts = split(whole(ids, times), one_shard(shards), False)
    assert len({part.shard for part in parts}) == len(parts)
    for part in parts:
        assert set(shard_of(part.ids, shards).tolist()) == {part.shard}
        # In their old order: of an id that stands twice, the first must win.
        assert (np.diff(part.rows) > 0).all()
    # The id's own first byte stands for its outcome.
    for told, column in (
        (lambda part: part.ids[::16], ids[::16]),
        (lambda part: part.times[::8], times[::8]),
    ):
        for part in parts:
            part.outcomes = told(part)
        assert merge_outcomes(parts, count) == column if parts else count == 0


def test_a_batch_of_one_shard_is_passed_on_as_it_is() -> None:
    ids, times = event_ids(1, 2, 3), bytes(24)
    (part,) = split(whole(ids, times), one_shard(1), False)
    assert part.ids is ids
    assert part.times is times
    assert part.rows.tolist() == [0, 1, 2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_each_id_keeps_its_token_when_a_release_is_split(counts: list[int], shards: int) -> None:
    count = sum(counts)
    ids = event_ids(*range(count))
    tokens = [b"token %d" % n for n in range(len(counts))]
    of_row = [token for token, n in zip(tokens, counts, strict=True) for _ in range(n)]
    for part in split(whole(ids, bytes(8 * count)), one_shard(shards), False):
        segments, sizes = segments_of(part, tokens, counts)
        spread = [token for token, n in zip(segments, sizes, strict=True) for _ in range(n)]
        assert spread == [of_row[row] for row in part.rows]
