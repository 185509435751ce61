"""What stands in the log of a shard."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idregistry.commands import Boundary, Collect, Command, CommandError, Commit, decode, encode

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    counts = draw(st.lists(st.integers(0, 5), max_size=5))
    tokens = [draw(st.binary(min_size=1, max_size=40)) for _ in counts]
    total = sum(counts)
    ids = draw(st.binary(min_size=16 * total, max_size=16 * total))
    times = draw(st.binary(min_size=8 * total, max_size=8 * total))
    return Commit(draw(INT64), tokens, counts, ids, times)


COMMANDS = commits() | st.builds(Boundary, INT64, INT64) | st.builds(Collect, st.integers(0, (1 << 32) - 1))


@given(COMMANDS)
def test_a_command_comes_back_as_it_went_in(command: Command) -> None:
    assert decode(encode(command)) == command


@given(COMMANDS, st.data())
def test_a_command_cut_short_or_with_bytes_added_is_refused(command: Command, data: st.DataObject) -> None:
    whole = encode(command)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:cut], whole + b"\0"):
        with pytest.raises(CommandError):
            decode(broken)


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_a_command_error(garbage: bytes) -> None:
    for data in (garbage, b"\x01\x01" + garbage):
        with suppress(CommandError):
            decode(data)


def test_a_command_of_another_version_says_which() -> None:
    with pytest.raises(CommandError, match="version 2"):
        decode(b"\x02" + encode(Collect(1))[1:])


def test_a_segment_without_a_token_is_refused() -> None:
    with pytest.raises(CommandError):
        decode(encode(Commit(0, [b""], [1], bytes(16), bytes(8))))
