"""A commit answers column by column what it would answer id by id, and leaves the same state to the byte."""

import sys
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.rules import state as rules
from idregistry.rules import table as idtable
from idregistry.rules.commands import Boundary, Command, Commit, Configure, Fences, Release, encode
from idregistry.rules.packing import BUCKET_US, Encoded
from idregistry.rules.segments import bucket_in, token_of
from idregistry.rules.sharding import HORIZON, Route
from idregistry.rules.state import Facts, ShardState
from photon.core.columns import pack_times, split_ids, unpack_times
from photon.core.fates import Committed
from photon.core.ids import Token
from tests.idregistry.kit import NOW_US, OWN, commit_command, event_ids, new_state, one_shard

POOL = split_ids(event_ids(*range(40)))
TOKENS = [Token("a:1", incarnation, time).pack() for incarnation in (1, 2) for time in (0, 1)]
HOURS = st.sampled_from([-BUCKET_US, 0, 1, BUCKET_US, 2 * BUCKET_US, HORIZON])
STEPS = st.sampled_from([0, 1, 300])


def commit_each(
    facts: Facts, command: Commit, batch: Encoded, stamps: list[bytes], fenced: list[bool]
) -> bytes:
    """Id by id, with every question asked in its order."""
    table, live = facts.table, facts.live
    outcomes = []
    owned, expired = rules._owned(facts, command), facts.expired(command.times)
    times_us = unpack_times(command.times).tolist()
    rows = iter(range(batch.count))
    for count, barred in zip(command.counts, fenced, strict=True):
        won: set[bytes] = set()
        for row in islice(rows, count):
            key = batch.keys[row]
            stamp = table.stamp(batch.subs[row], key)
            place = table.frozen(batch, live).get(row)
            if bucket_in(stamp) < live and place is not None:
                stamp = place[0].columns.stamp(place[1])
            held = token_of(stamp) if bucket_in(stamp) >= live else None
            if not owned[row]:
                outcomes.append(Committed.MISROUTED)
            elif barred:
                outcomes.append(Committed.FENCED)
            elif key in won:
                outcomes.append(Committed.DUPLICATE)
            elif held == token_of(stamps[row]):
                won.add(key)
                outcomes.append(Committed.WON)
            elif expired[row]:
                outcomes.append(Committed.EXPIRED)
            elif held is not None:
                outcomes.append(Committed.DUPLICATE)
            else:
                won.add(key)
                outcomes.append(Committed.WON)
                table.put(batch.subs[row], key, stamps[row])
                holder, token_us, bucket = rules.STAMP.unpack(stamps[row])
                facts.counts.add(bucket, holder, token_us, (1, int(batch.hashes[row])))
                if times_us[row] < HORIZON:
                    facts.latest_us = max(facts.latest_us, times_us[row])
    return bytes(outcomes)


class EachState(ShardState):
    """Commits id by id."""

    def apply(self, command: bytes) -> object:
        decoded = rules.decode(command)
        if not isinstance(decoded, Commit) or not decoded.ids:
            return super().apply(command)
        facts = self._facts
        facts.time_us = max(facts.time_us, decoded.time_us)
        fenced = list(map(facts.is_fenced, decoded.tokens))
        holders = [
            (rules.NOBODY, 0) if barred else facts.holders.intern(token, route.guard)
            for token, route, barred in zip(decoded.tokens, decoded.routes, fenced, strict=True)
        ]
        low_us, high_us = rules.span(decoded.times)
        stamps = rules.new_stamps(holders, decoded.counts, decoded.times, low_us, high_us)
        return commit_each(facts, decoded, Encoded(decoded.ids), stamps, fenced)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    """Batches of up to 100 ids, most of them new at first: copies in one segment and over several, retries
    whole or in part, other shards' ids."""
    segments = draw(
        st.lists(
            st.tuples(st.sampled_from(TOKENS), st.lists(st.sampled_from(POOL), max_size=25)),
            min_size=1,
            max_size=4,
        )
    )
    ids = [key for _, some in segments for key in some]
    same = draw(st.none() | HOURS)
    times = [draw(HOURS) if same is None else same for _ in ids]
    guards = st.sampled_from([OWN, OWN, OWN, Route(HORIZON, True)])
    return Commit(
        NOW_US,
        [token for token, _ in segments],
        [len(some) for _, some in segments],
        b"".join(ids),
        pack_times(times),
        [draw(guards) for _ in segments],
    )


@st.composite
def releases(draw: st.DrawFn) -> Release:
    ids = draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=10))
    token = draw(st.sampled_from(TOKENS))
    return Release(NOW_US, [token], [len(ids)], b"".join(ids), pack_times([0] * len(ids)), [OWN], True)


STORY = st.lists(
    st.tuples(
        commits()
        | commits()
        | commits()
        | releases()
        | st.builds(Boundary, st.just(NOW_US), st.sampled_from([0, 1, BUCKET_US, 2 * BUCKET_US]))
        | st.just(Fences(NOW_US, 0, (1,))),
        STEPS,
        STEPS,
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(story=STORY, shards=st.sampled_from([1, 1, 2]))
def test_a_batch_is_answered_as_its_ids_one_by_one_would_be(
    story: list[tuple[Command, int, int]], shards: int
) -> None:
    """2.1, 3.3.2. Ids in dicts and in segments, released, expired, fenced, repeated, another shard's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(idtable, "FREEZE_IDS", 1)
        patched.setattr(idtable, "STEP_IDS", 1)
        state, each = ShardState(0), EachState(0)
        first: tuple[Command, int, int] = (Configure(NOW_US, one_shard(shards)), 0, 0)
        for command, steps, other_steps in [first, *story]:
            assert state.apply(encode(command)) == each.apply(encode(command))
            for one, count in ((state, steps), (each, other_steps)):
                for _ in range(count):
                    one.tidy()
        assert (state.ids, state.latest_us) == (each.ids, each.latest_us)
        assert list(state.freeze()) == list(each.freeze())


def _lines_run(state: ShardState, command: bytes) -> int:
    """How many lines of Python it takes to apply it."""
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        state.apply(command)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("raced", ["one id twice", "in one command", "later", "frozen", "expired"])
def test_a_repeated_id_costs_the_others_nothing(raced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.2.1: datacenters race for the same ids: 4,000 of them take the lines of Python that 400 take."""
    monkeypatch.setattr(idtable, "FREEZE_IDS", 1)

    def lines_run(count: int) -> int:
        state = new_state()
        numbers = list(range(count))
        segments = {
            "one id twice": [(TOKENS[0], [*numbers[:-1], 0])],
            "in one command": [(TOKENS[0], numbers[::2]), (TOKENS[2], numbers[::2])],
        }.get(raced, [(TOKENS[0], numbers)])
        if raced in ("later", "frozen"):
            state.apply(commit_command((TOKENS[2], numbers)))
        if raced == "frozen":
            while state.tidy():
                pass
        if raced == "expired":
            state.apply(encode(Boundary(NOW_US, NOW_US + 1)))
        return _lines_run(state, commit_command(*segments))

    assert lines_run(4_000) < lines_run(400) + 100, "a search of segments takes some steps more"
