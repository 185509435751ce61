"""Snapshots of a shard's state: whole, exact while commands go on, refused where they are damaged."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.rules import snapshots
from idregistry.rules.commands import Boundary, Commit, Fences, Release, encode
from idregistry.rules.packing import BUCKET_US
from idregistry.rules.state import ShardState
from idregistry.rules.steward import DAY_US
from photon.core import protocol
from photon.core.columns import pack_times, split_ids
from photon.core.errors import CorruptStateError
from photon.core.ids import Token
from tests.idregistry.kit import (
    NOW_US,
    OWN,
    commit_command,
    contents,
    event_id,
    event_ids,
    filed_state,
    new_state,
    same_times,
    seal,
    write_files,
)
from tests.idregistry.state_model import crafted


def restored(chunks: list[bytes]) -> ShardState:
    state = ShardState(0)
    state.prepare(chunks)()
    return state


def test_a_large_state_is_cut_into_chunks_and_restored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_IDS_MAX", 100)
    rng = random.Random(1)
    state = new_state()
    for batch in range(60):
        ids = rng.randbytes(16 * 1000)
        times = pack_times([NOW_US + rng.randrange(20) * BUCKET_US for _ in range(1000)])
        state.apply(encode(Commit(NOW_US, [b"token-%d" % batch], [1000], ids, times, [OWN])))
    chunks = list(state.freeze())
    assert max(map(len, chunks[4:])) <= 8 + 36 * 100
    assert contents(restored(chunks)) == contents(state)


def test_an_id_that_comes_back_in_another_dict_does_not_come_back_in_the_cut(tmp_path: Path) -> None:
    """The cut holds the dict with the released id; changes in the dict that took its place are not its."""
    state = filed_state(tmp_path / "files")
    token = Token("a:1", 5, 1).pack()
    state.apply(commit_command((token, [1]), (b"b", [2])))
    state.apply(encode(Fences(NOW_US, 0, (5,))))
    state.apply(encode(Release(NOW_US, [token], [1], event_id(1), same_times(1), [OWN], False)))
    cut = state.freeze()
    seal(state)
    write_files(state)
    state.apply(commit_command((b"again", [1])))
    state.apply(commit_command((b"and not again", [1])))
    assert contents(restored(list(cut))) == {event_id(2): b"b"}
    assert contents(state) == {event_id(1): b"again", event_id(2): b"b"}


def at_bytecode(wanted: int, change: Callable[[], None]) -> Iterator[bool]:
    """Calls `change` before the bytecode of that number in the drawing of the first sub-dict; if it did."""
    seen = 0

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal seen
        if frame.f_globals["__name__"] != "idregistry.rules.segments":
            return None
        if frame.f_code.co_name == "draw" and frame.f_locals["number"] > 0:
            sys.settrace(None)
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            seen += 1
            if seen == wanted:
                change()
        return trace

    sys.settrace(trace)
    try:
        yield True
    finally:
        sys.settrace(None)
    yield seen >= wanted


@pytest.mark.parametrize("sealing", [False, True])
@pytest.mark.long
def test_whatever_happens_between_any_two_bytecodes_of_drawing_does_not_show(
    tmp_path: Path, sealing: bool
) -> None:
    """There another thread may come in: an insert, changes in place, what is released, and sealing."""
    rng = random.Random(7)
    ids = split_ids(crafted(*((rng.randrange(1 << 56), rng.randrange(1 << 64)) for _ in range(20))))
    frozen, recent, new = b"".join(ids[:8]), b"".join(ids[8:16]), ids[16]
    changed = ids[1] + ids[9]
    token = Token("a:1", 5, 1).pack()

    def commit(state: ShardState, ids: bytes, token: bytes) -> None:
        count = len(ids) // 16
        state.apply(encode(Commit(NOW_US, [token], [count], ids, same_times(count), [OWN])))

    bytecode, reached = 0, True
    while reached:
        bytecode += 1
        state = filed_state(tmp_path / "files")
        commit(state, frozen, token)
        seal(state)
        write_files(state)
        commit(state, recent, token)
        state.apply(encode(Fences(NOW_US, 0, (5,))))

        def change(state: ShardState = state) -> None:
            commit(state, new, b"late")
            state.apply(encode(Release(NOW_US, [token], [2], changed, same_times(2), [OWN], False)))
            commit(state, changed, b"late")
            if sealing:
                seal(state)

        expected, cut = list(state.freeze()), state.freeze()
        tracing = at_bytecode(bytecode, change)
        next(tracing)
        drawn = list(cut)
        reached = next(tracing)
        assert drawn == expected, f"at bytecode {bytecode}"
    assert bytecode > 100


@pytest.mark.parametrize(
    "damage",
    [
        "head",
        "head long",
        "short",
        "long",
        "twice",
        "missing",
        "no end",
        "two ends",
        "other form",
        "holder",
        "nobody",
        "bucket",
        "order",
    ],
)
def test_a_snapshot_that_is_not_whole_is_refused_and_changes_nothing(damage: str) -> None:
    state = new_state()
    state.apply(commit_command((b"a", range(20)), (b"b", range(20, 30))))
    chunks = list(state.freeze())
    *_, last, end = chunks
    broken = {
        "head": [chunks[0][:-1], *chunks[1:]],
        "head long": [chunks[0] + b"\0", *chunks[1:]],
        "short": [*chunks[:-2], last[:-1], end],
        "long": [*chunks[:-2], last + b"\0", end],
        "twice": [*chunks[:-1], last, end],
        "missing": [*chunks[:-2], end],
        "no end": chunks[:-1],
        "two ends": [*chunks, end],
        "other form": [b"XXXX" + chunks[0][4:], *chunks[1:]],
        "holder": [*chunks[:-2], last[:-16] + b"\xff" + last[-15:], end],
        "nobody": [*chunks[:-2], last[:-16] + bytes(4) + last[-12:], end],
        "bucket": [*chunks[:-2], last[:-4] + pack_times([-(1 << 31)])[:4], end],
        "order": [*chunks[:3], chunks[4], chunks[3], *chunks[5:]],
    }[damage]
    other = new_state()
    other.apply(commit_command((b"kept", [99])))
    with pytest.raises(CorruptStateError, match="snapshot"):
        other.prepare(broken)()
    assert contents(other) == {event_id(99): b"kept"}


def test_ids_that_are_not_in_order_inside_a_chunk_are_refused() -> None:
    state = new_state()
    state.apply(encode(Commit(NOW_US, [b"a"], [2], crafted((5, 1), (6, 1)), same_times(2), [OWN])))
    head, names, tally, chunk, end = state.freeze()
    swapped = chunk[:4] + chunk[12:20] + chunk[4:12] + chunk[20:]
    twice = chunk[:4] + chunk[4:12] * 2 + chunk[20:]
    for broken in (swapped, twice):
        with pytest.raises(CorruptStateError, match="order"):
            ShardState(0).prepare([head, names, tally, broken, end])()


def test_a_snapshot_of_any_number_of_holders_and_fences_is_of_small_chunks() -> None:
    """The log takes none above 64 MiB: all replicas would stop at their next snapshot, for good."""
    state, count = new_state(), 3_000
    for n in range(count):
        token = Token("j" * 900, n, 1).pack()
        state.apply(encode(Commit(NOW_US, [token], [1], event_ids(n), same_times(1), [OWN])))
    state.apply(encode(Fences(NOW_US, 0, tuple(range(count)))))
    chunks = list(state.freeze())
    assert max(map(len, chunks)) < 1 << 20
    other = ShardState(0)
    other.prepare(chunks)()
    assert (list(other.freeze()), other.fences) == (chunks, count)


def test_a_holder_that_holds_nothing_any_more_is_forgotten_and_numbers_are_given_once() -> None:
    state = new_state()

    def commit(name: str, n: int, time_us: int) -> None:
        token = Token(name, 1, 0).pack()
        state.apply(encode(Commit(NOW_US, [token], [1], event_ids(n), same_times(1, time_us), [OWN])))

    def numbers() -> list[int]:
        return sorted({int(number) for piece in state.scan() for number in piece.holder_of})

    for n in range(50):
        commit(f"joiner-{n}", n, NOW_US - 2 * DAY_US)
    commit("last", 50, NOW_US)
    assert len(state._facts.holders.names) == 51
    state.apply(encode(Boundary(NOW_US, NOW_US - DAY_US)))
    assert len(state._facts.holders.names) == 1
    commit("joiner-3", 3, NOW_US)
    other = ShardState(0)
    other.prepare(list(state.freeze()))()
    for one in (state, other):
        held = {token for piece in one.scan() for token in piece.tokens}
        assert held == {Token("last", 1, 0).pack(), Token("joiner-3", 1, 0).pack()}
    assert numbers() == [0, 1]


def test_a_state_that_has_a_newer_command_is_kept_in_that_version_which_an_older_build_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = new_state()
    state.apply(commit_command((b"a", [1])))
    before = next(iter(state.freeze()))
    newer = bytearray(commit_command((b"b", [2])))
    with monkeypatch.context() as build:
        build.setattr(protocol, "NEWEST", 2)
        newer[1] = 2
        state.apply(bytes(newer))
        state.apply(commit_command((b"c", [3])))
        chunks = list(state.freeze())
        assert list(restored(chunks).freeze()) == chunks
    assert (before[4], chunks[0][4]) == (1, 2)
    with pytest.raises(CorruptStateError, match="protocol version 2, and this build reads 1 to 1"):
        restored(chunks)


def test_a_snapshot_that_names_a_file_is_refused_where_there_is_none(tmp_path: Path) -> None:
    state = filed_state(tmp_path / "files")
    state.apply(commit_command((b"a", range(20))))
    seal(state)
    assert state.files() is None, "it can't be taken before the file is there"
    write_files(state)
    chunks, (file,) = list(state.freeze()), state.files() or ()
    with pytest.raises(CorruptStateError, match="no directory"):
        restored(chunks)
    (tmp_path / "files" / file.name).write_bytes(b"something else")
    assert not state.verify(tmp_path / "files" / file.name, file)
    other = filed_state(tmp_path / "files")
    with pytest.raises(CorruptStateError, match="segment file"):
        other.prepare(chunks)()


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_instead_of_a_chunk_raises_nothing_but_corrupt_state(garbage: bytes) -> None:
    head = next(iter(new_state().freeze()))
    for chunks in ([garbage], [head[:20] + garbage], [head, garbage]):
        with suppress(CorruptStateError):
            ShardState(0).prepare(chunks)()
