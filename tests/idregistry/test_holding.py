"""Tokens of packed rows: where they are, that they go when they are cleared, and their memory with them."""

import random

import numpy as np
import pytest

from idregistry import freezing, idtable
from idregistry.arrays import array_of
from idregistry.commands import Clear, Fence, Release, encode
from idregistry.holding import Holding
from idregistry.recent import STAMP_DTYPE
from idregistry.state import ShardState
from photon.core.tokens import Token
from tests.idregistry.kit import NOW_US, commit_command, contents, event_ids, new_state, same_times

IDS = 120


def stamps_of(holders: list[int]) -> np.ndarray:
    stamps = np.zeros(len(holders), STAMP_DTYPE)
    stamps["holder"] = holders
    stamps["time_us"] = np.array(holders) * 1000
    return stamps


def told(holding: Holding, rows: int) -> list[tuple[int, int]]:
    """(holder, time) of all rows, asked for as a range; any rows tell the same."""
    filled, taken = np.zeros(rows, STAMP_DTYPE), np.zeros(rows, STAMP_DTYPE)
    holding.fill(0, filled)
    order = np.random.default_rng(1).permutation(rows)
    holding.take(order, taken)
    assert (filled[order] == taken).all()
    return list(zip(filled["holder"].tolist(), filled["time_us"].tolist(), strict=True))


@pytest.mark.parametrize(
    "parts", [[[1, 2], [3, 4]], [[1, 2], [3, 0]], [[0, 0], [0, 1]], [[0], [0]], [[5, 0, 0, 7], [1]]]
)
def test_rows_have_the_tokens_they_were_given_and_others_none(parts: list[list[int]]) -> None:
    holding = Holding(8)
    rows: list[int] = []
    for part in parts:
        holding.extend(len(rows), stamps_of(part))
        rows += part
        assert told(holding, len(rows)) == [(holder, holder * 1000) for holder in rows]
    assert holding.held == np.count_nonzero(rows)
    assert holding.nbytes == holding.held * (12 if all(rows) else 16)


def test_a_range_in_the_middle_is_told_as_the_whole() -> None:
    holders = [1, 0, 2, 3, 0, 0, 4, 0]
    holding = Holding(8)
    holding.extend(0, stamps_of(holders))
    for start in range(8):
        for end in range(start, 9):
            stamps = np.zeros(end - start, STAMP_DTYPE)
            holding.fill(start, stamps)
            assert stamps["holder"].tolist() == holders[start:end]


@pytest.mark.parametrize("sparse", [False, True])
def test_cleared_rows_have_no_token_and_are_counted(sparse: bool) -> None:
    holders = [1, 2, 0, 3] if sparse else [1, 2, 4, 3]
    holding = Holding(4)
    holding.extend(0, stamps_of(holders))
    holding.clear(np.array([3, 0, 2]))
    holding.clear(np.array([0]))
    assert told(holding, 4) == [(0, 0), (2, 2000), (0, 0), (0, 0)]
    assert (holding.held, holding.cleared) == (1, 2 if sparse else 3)


def released(numbers: list[int], token: Token) -> bytes:
    ids, count = event_ids(*numbers), len(numbers)
    return encode(Release(NOW_US, [token.pack()], [count], ids, same_times(count)))


def cleared(numbers: list[int]) -> bytes:
    return encode(Clear(NOW_US, event_ids(*numbers), same_times(len(numbers))))


def frozen_state(token: Token) -> ShardState:
    state = new_state()
    state.apply(commit_command((token.pack(), range(IDS))))
    state.apply(encode(Fence(NOW_US, 0, (token.incarnation,))))
    while state.tidy():
        pass
    return state


@pytest.mark.parametrize("seed", range(10))
def test_what_is_cleared_or_released_while_the_tokens_left_are_written_anew_stays_so(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(idtable, "FREEZE_IDS", 1)
    monkeypatch.setattr(freezing, "COMPACT_TOKENS", 8)
    rng = random.Random(seed)
    token = Token("a:1", 5, 1)
    tidied, other = frozen_state(token), frozen_state(token)
    steps = 0
    command = cleared(rng.sample(range(IDS), IDS // 3))
    while tidied.apply(command) == other.apply(command) and tidied.tidy():
        steps += 1
        some = rng.sample(range(IDS), 2)
        command = rng.choice([cleared(some), released(some, token)])
        assert contents(tidied) == contents(other)
    assert steps > IDS // 8, "it was done in steps"
    assert contents(tidied) == contents(other)
    assert list(tidied.freeze()) == list(other.freeze())


def test_tokens_that_are_cleared_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idtable, "FREEZE_IDS", 1)
    state = frozen_state(Token("a:1", 5, 1))
    held = state.memory()["frozen_bytes"]
    state.apply(cleared(list(range(IDS))))
    while state.tidy():
        pass
    assert held - state.memory()["frozen_bytes"] == 12 * IDS


def test_what_is_cleared_while_it_is_new_takes_no_token_when_it_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = new_state()
    state.apply(commit_command((b"a", range(IDS))))
    state.apply(cleared(list(range(IDS - 1))))
    monkeypatch.setattr(idtable, "FREEZE_IDS", 1)
    while state.tidy():
        pass
    (segment,) = state._facts.table._layout.segments
    assert segment.columns.holding.nbytes == 16


def test_a_large_array_is_as_any_other() -> None:
    for rows in (0, 1, 1 << 20):
        array = array_of(rows, np.uint32)
        array[:] = np.arange(rows)
        assert len(array) == rows
        assert array.sum() == rows * (rows - 1) // 2
    with pytest.raises((MemoryError, ValueError, OverflowError)):
        array_of(1 << 61, np.uint64)
