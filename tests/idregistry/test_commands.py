"""What stands in the log of a shard."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.rules.commands import (
    Boundary,
    Command,
    CommandError,
    Commit,
    Configure,
    Fences,
    Gone,
    Prepare,
    Release,
    decode,
    encode,
)
from idregistry.rules.sharding import BEGINNING, Configuration, Interval
from tests.idregistry.kit import one_shard

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
UINT64 = st.integers(0, (1 << 64) - 1)


@st.composite
def with_tokens(draw: st.DrawFn, kind: type[Commit | Release]) -> Commit | Release:
    counts = draw(st.lists(st.integers(0, 5), max_size=5))
    tokens = [draw(st.binary(min_size=1, max_size=40)) for _ in counts]
    total = sum(counts)
    ids = draw(st.binary(min_size=16 * total, max_size=16 * total))
    times = draw(st.binary(min_size=8 * total, max_size=8 * total))
    return kind(draw(INT64), tokens, counts, ids, times)


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    starts = draw(st.lists(st.integers(BEGINNING + 1, (1 << 63) - 1), unique=True, max_size=3))
    shards = st.integers(1, 4096)
    return Configuration(
        draw(UINT64), tuple(Interval(start, draw(shards)) for start in [BEGINNING, *sorted(starts)])
    )


COMMANDS = (
    with_tokens(Commit)
    | with_tokens(Release)
    | st.builds(Boundary, INT64, INT64)
    | st.builds(Fences, INT64, UINT64, st.lists(UINT64, max_size=4).map(tuple))
    | st.builds(Prepare, INT64, UINT64, INT64)
    | st.builds(Configure, INT64, configurations())
)


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
    whole = encode(kind(0, [b"t"], [1], bytes(16), bytes(8)))
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
    assert whole.endswith(b"\x05")
    with pytest.raises(CommandError, match="shards"):
        decode(whole[:-1] + b"\0")


def test_a_command_of_the_directory_is_none_of_a_shard() -> None:
    with pytest.raises(CommandError):
        decode(encode(Gone(1, "r1")))
