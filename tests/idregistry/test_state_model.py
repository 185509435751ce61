"""The state machine of a shard against a plain model, whatever is where in memory."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry import segment_file
from idregistry.rules import table as idtable
from idregistry.rules.commands import Command, Commit, Configure, encode
from idregistry.rules.state import ShardState
from photon.core.columns import pack_times
from tests.idregistry.kit import (
    LATEST,
    NOW_US,
    OWN,
    contents,
    filed_state,
    merge,
    seal,
    write_files,
)
from tests.idregistry.state_model import COMMANDS, END, EVENT_TIMES, POOL, STORIES, Model

ALL = b"".join(POOL)
STEPS = st.sampled_from([0, 0, 1, 2, 5, 1000])
FILING = st.sampled_from(["", "", "", "seal", "merge two", "merge all"])


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all would be written at once, in one block."""
    monkeypatch.setattr(idtable, "PART_IDS", 4)
    monkeypatch.setattr(segment_file, "BLOCK_ROWS", 3)


def apply_filing(kind: str, state: ShardState) -> None:
    if kind == "seal":
        seal(state)
    elif kind == "merge all":
        merge(state)
    elif kind:
        merge(state, *(segment.number for segment in state._facts.table.segments[:2]))


def settled(state: ShardState) -> None:
    """A snapshot can be taken."""
    while state.files() is None:
        write_files(state, 1)


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        *(("anything", 60), ("few ids", 30), ("batches", 40), ("batches of two shards", 30)),
        *(pytest.param(kind, 150, marks=pytest.mark.long) for kind in STORIES),
    ],
)
def test_replicas_answer_as_a_plain_dict_would_whatever_they_have_written(kind: str, examples: int) -> None:
    """2.1, 3.3.2. One writes its files by one schedule, the other by another and is restored from a snapshot
    now and then. Ids are in dicts, in segments, merged, released, expired, fenced, repeated, another shard's.
    """
    commands, first = STORIES[kind]
    steps = st.tuples(commands, STEPS, STEPS, st.booleans(), EVENT_TIMES, FILING)

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(steps, min_size=1, max_size=25))
    def play(story: list[tuple[Command, int, int, bool, int, str]]) -> None:
        with TemporaryDirectory() as root:
            model, state = Model(0), filed_state(Path(root) / "one", first)
            model.apply(Configure(NOW_US, first))
            other = filed_state(Path(root) / "other", first)
            for command, written, other_written, restored, time_us, filing in story:
                expected = model.apply(command)
                assert state.apply(encode(command)) == expected
                assert other.apply(encode(command)) == expected
                for one in (state, other):
                    apply_filing(filing, one)
                write_files(state, written)
                if restored:
                    settled(other)
                    chunks, names = list(other.freeze()), other.files()
                    other = ShardState(0, segment_file.SegmentFiles)
                    other.open_in(Path(root) / "other")
                    other.prepare(chunks)()
                    assert other.files() == names
                write_files(other, other_written)
                times = pack_times([time_us] * len(POOL))
                assert state.lookup(ALL, times) == other.lookup(ALL, times) == model.lookup(ALL, times)
            for replica in (state, other):
                assert contents(replica) == model.contents()
                assert replica.ids == model.ids
                assert (replica.boundary_us, replica.latest_us) == (model.boundary_us, model.latest_us)
                assert (replica.configuration, replica.prepared) == (model.configuration, model.prepared)
                assert replica.fences == len(model.fences)
                assert replica.accounts()({0, 1, 2, END}, "", LATEST).days == model.days()
                write_files(replica)
            assert list(state.freeze()) == list(other.freeze()), "replicas agree to the byte"
            assert state.files() == other.files()
            for file in state.files() or ():
                one, same = ((Path(root) / of / file.name).read_bytes() for of in ("one", "other"))
                assert one == same
                assert state.verify(Path(root) / "other" / file.name, file)

    play()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(COMMANDS, STEPS, st.booleans(), st.integers(0, 3), FILING), max_size=30))
@pytest.mark.long
def test_a_cut_tells_the_moment_it_was_taken_however_late_it_is_drawn(
    story: list[tuple[Command, int, bool, int, str]],
) -> None:
    """Several at once, drawn piece by piece between commands of every kind and pieces of writing."""
    with TemporaryDirectory() as root:
        state = filed_state(Path(root) / "one")
        cuts: list[tuple[list[bytes], list[bytes], Iterator[bytes]]] = []
        for command, steps, cut, pieces, filing in story:
            if cut:
                settled(state)
                cuts.append((list(state.freeze()), [], state.freeze()))
            state.apply(encode(command))
            apply_filing(filing, state)
            write_files(state, steps)
            for _, drawn, rest in cuts[-2:]:
                drawn += [chunk for _, chunk in zip(range(pieces), rest, strict=False)]
        for expected, drawn, rest in cuts:
            assert [*drawn, *rest] == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(COMMANDS, max_size=10), st.lists(COMMANDS, max_size=10), st.integers(0, 300))
def test_a_cut_that_is_dropped_leaves_nothing_behind(
    before: list[Command], after: list[Command], drawn: int
) -> None:
    state, other = ShardState(0), ShardState(0)
    for command in before:
        state.apply(encode(command))
        other.apply(encode(command))
    for _ in zip(range(drawn), state.freeze(), strict=False):
        pass
    for command in after:
        assert state.apply(encode(command)) == other.apply(encode(command))
    assert not list(state._facts.table._live_cuts())
    assert list(state.freeze()) == list(other.freeze())


@settings(max_examples=50, deadline=None)
@given(st.lists(COMMANDS, max_size=20), STEPS, st.lists(st.sampled_from(POOL), unique=True, min_size=1))
def test_many_ids_are_found_in_segments_as_few_are(
    commands: list[Command], steps: int, some: list[bytes]
) -> None:
    """Searches differ by the size of the batch."""
    with TemporaryDirectory() as root:
        state = filed_state(Path(root) / "one")
        for command in commands:
            state.apply(encode(command))
            seal(state)
            write_files(state, steps)
        whole = state.lookup(ALL, pack_times([0] * len(POOL)))
        for key in some:
            assert state.lookup(key, pack_times([0])) == whole[POOL.index(key) : POOL.index(key) + 1]


def test_a_commit_of_no_ids_is_answered_by_none() -> None:
    state = ShardState(0)
    assert state.apply(encode(Commit(NOW_US, [b"a"], [0], b"", b"", [OWN]))) == b""
    assert state.lookup(b"", b"") == b""
