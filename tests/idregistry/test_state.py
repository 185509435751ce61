"""The state machine of a shard: claims of the paper, then properties against a plain model."""

import random
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry import snapshot
from idregistry.buckets import BUCKET_US
from idregistry.commands import Boundary, Collect, Command, Commit, encode
from idregistry.state import NO_BOUNDARY, ShardState
from photon.core.columns import hash_ids, pack_times, split_ids
from photon.core.errors import CorruptStateError
from photon.core.fates import Registered
from photon.core.ids import IdPacker
from tests.idregistry.kit import (
    DUPLICATE,
    EXPIRED,
    NOW_US,
    WON,
    commit_command,
    contents,
    event_id,
    event_ids,
    same_times,
)

ABSENT, PRESENT, TOO_OLD = bytes(Registered)


# --- claims of the paper


def test_first_commit_wins_and_the_second_is_told_duplicate() -> None:
    """2: "once an event_id is written to it, subsequent requests to write the same identifier will fail"."""
    state = ShardState()
    assert state.apply(commit_command((b"a", [1, 2]))) == bytes([WON, WON])
    assert state.apply(commit_command((b"b", [2, 3]))) == bytes([DUPLICATE, WON])
    assert contents(state) == {event_id(1): b"a", event_id(2): b"a", event_id(3): b"b"}


def test_of_two_requests_in_one_batch_the_first_gets_the_id() -> None:
    """2.2.1: "respond with success to one client ...; other clients will receive a failure message"."""
    state = ShardState()
    outcomes = state.apply(commit_command((b"a", [1, 2]), (b"b", [2, 3]), (b"c", [3, 1])))
    assert outcomes == bytes([WON, WON, DUPLICATE, WON, DUPLICATE, DUPLICATE])


def test_retry_with_the_same_token_is_told_it_won() -> None:
    """3.3.2: a joiner that got no answer asks again with its token."""
    state = ShardState()
    command = commit_command((b"a", [1, 2]))
    state.apply(command)
    assert state.apply(command) == bytes([WON, WON])
    assert state.apply(commit_command((b"b", [1]), (b"a", [1]))) == bytes([DUPLICATE, WON])


def test_a_one_byte_token_is_as_good_as_any() -> None:
    """CPython has but one object for b"a": tokens are compared, never taken for fresh by identity."""
    state = ShardState()
    assert state.apply(commit_command((b"a", [1, 1]))) == bytes([WON, DUPLICATE])
    assert state.apply(commit_command((b"a", [1, 1]))) == bytes([WON, DUPLICATE])


def test_an_id_twice_in_one_request_wins_once_also_on_a_retry() -> None:
    state = ShardState()
    command = commit_command((b"a", [1, 2, 1, 1]))
    expected = bytes([WON, WON, DUPLICATE, DUPLICATE])
    assert state.apply(command) == expected
    assert state.apply(command) == expected
    assert state.ids == 2


def test_a_retry_that_waits_beside_its_first_try_wins_too() -> None:
    state = ShardState()
    assert state.apply(commit_command((b"a", [1, 1]), (b"a", [1, 1]))) == bytes([WON, DUPLICATE] * 2)


def test_the_id_alone_is_identity_whatever_its_time() -> None:
    state = ShardState()
    state.apply(commit_command((b"a", [1]), time_us=NOW_US))
    assert state.apply(commit_command((b"b", [1]), time_us=NOW_US + 10 * BUCKET_US)) == bytes([DUPLICATE])
    assert state.lookup(event_id(1), same_times(1, 0)) == bytes([PRESENT])


def test_expired_events_are_refused_with_an_outcome_of_their_own() -> None:
    """2.3: "older than the boundary timestamp ... failure response with a special error code"."""
    state = ShardState()
    state.apply(commit_command((b"a", [1, 2]), time_us=NOW_US))
    state.apply(encode(Boundary(NOW_US, NOW_US + 1)))
    assert state.apply(commit_command((b"b", [1, 3]), time_us=NOW_US)) == bytes([EXPIRED, EXPIRED])
    assert state.apply(commit_command((b"b", [4]), time_us=NOW_US + 1)) == bytes([WON])
    assert state.lookup(event_ids(1, 9, 4), pack_times([NOW_US, NOW_US, NOW_US + 1])) == bytes(
        [TOO_OLD, TOO_OLD, PRESENT]
    )


def test_a_retry_keeps_what_it_won_though_it_expired_meanwhile() -> None:
    """Design, invariant 2: told that it won until the id is collected."""
    state = ShardState()
    state.apply(commit_command((b"a", [1]), time_us=NOW_US))
    state.apply(encode(Boundary(NOW_US, NOW_US + 2 * BUCKET_US)))
    assert state.apply(commit_command((b"a", [1]), time_us=NOW_US)) == bytes([WON])
    state.apply(encode(Collect(10)))
    assert state.apply(commit_command((b"a", [1]), time_us=NOW_US)) == bytes([EXPIRED])


def test_boundary_never_goes_back() -> None:
    """2.3: "we make sure it never goes back"."""
    state = ShardState()
    assert state.apply(encode(Boundary(NOW_US, 500))) == 500
    assert state.apply(encode(Boundary(NOW_US, 400))) == 500
    assert state.boundary_us == 500


def test_only_ids_older_than_the_boundary_are_collected_in_small_steps() -> None:
    """2.3: "only removes event_id entries whose timestamps are smaller than the recorded boundary"."""
    state = ShardState()
    state.apply(commit_command((b"old", range(10)), time_us=NOW_US - 3 * BUCKET_US))
    state.apply(commit_command((b"new", range(10, 15)), time_us=NOW_US))
    assert not state.collectable()
    assert state.apply(encode(Collect(100))) == 0
    state.apply(encode(Boundary(NOW_US, NOW_US - BUCKET_US)))
    assert state.collectable()
    assert [state.apply(encode(Collect(4))) for _ in range(4)] == [4, 4, 2, 0]
    assert not state.collectable()
    assert set(contents(state).values()) == {b"new"}
    assert state.ids == 5
    assert state.lookup(event_ids(0, 12), same_times(2)) == bytes([ABSENT, PRESENT])


def test_events_of_the_year_1754_and_of_the_far_future_are_kept_apart() -> None:
    state = ShardState()
    times = pack_times([-6_816_000_000_000_000, -(1 << 63), (1 << 63) - 1, 0, -1])
    command = encode(Commit(NOW_US, [b"a"], [5], event_ids(*range(5)), times))
    assert state.apply(command) == bytes([WON] * 5)
    state.apply(encode(Boundary(NOW_US, 0)))
    assert state.apply(encode(Collect(100))) == 3
    assert set(contents(state)) == {event_id(2), event_id(3)}


def test_photon_ids_of_one_server_and_opaque_ids_of_one_shard_spread_over_the_sub_dicts() -> None:
    """Else one dict would hold all, and stop everything while it grows."""
    packer = IdPacker()
    photon = packer.pack([f"10.0.0.1:42:{NOW_US + 20 * n}" for n in range(20_000)])
    opaque = packer.pack([f"event-{n}" for n in range(20_000)])
    for ids in (photon, opaque):
        of_shard = np.frombuffer(ids, "V16")[hash_ids(ids) % np.uint64(4) == 1].tobytes()
        state = ShardState()
        count = len(of_shard) // 16
        state.apply(encode(Commit(NOW_US, [b"a"], [count], of_shard, same_times(count))))
        assert max(map(len, state._subs)) < 3 * count / len(state._subs)


# --- properties


@dataclass
class Model:
    """The same in plain Python: one dict, one scan."""

    held: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    boundary_us: int = NO_BOUNDARY

    def apply(self, command: Command) -> object:
        match command:
            case Commit() as commit:
                return self.commit(commit)
            case Boundary(_, boundary_us):
                self.boundary_us = max(self.boundary_us, boundary_us)
                return self.boundary_us
            case Collect(ids_max):
                old = [(t // BUCKET_US, n) for n, (_, t) in enumerate(self.held.values())]
                old = [(b, n) for b, n in old if (b + 1) * BUCKET_US <= self.boundary_us]
                keys = list(self.held)
                gone = [keys[n] for _, n in sorted(old)[:ids_max]]
                for key in gone:
                    del self.held[key]
                return len(gone)

    def commit(self, commit: Commit) -> bytes:
        ids, times = list(split_ids(commit.ids)), np.frombuffer(commit.times, "<i8").tolist()
        outcomes = []
        for token, count in zip(commit.tokens, commit.counts, strict=True):
            won_here = set()
            for _ in range(count):
                key, time_us = ids.pop(0), times.pop(0)
                held = self.held.get(key)
                if key in won_here:
                    outcomes.append(DUPLICATE)
                elif held is not None and held[0] == token:
                    won_here.add(key)
                    outcomes.append(WON)
                elif time_us < self.boundary_us:
                    outcomes.append(EXPIRED)
                elif held is not None:
                    outcomes.append(DUPLICATE)
                else:
                    self.held[key] = token, time_us
                    won_here.add(key)
                    outcomes.append(WON)
        return bytes(outcomes)

    def tokens(self) -> dict[bytes, bytes]:
        return {key: token for key, (token, _) in self.held.items()}


TIMES = st.integers(-5 * BUCKET_US, 5 * BUCKET_US)
TOKENS = st.sampled_from([b"a", b"b", b"joiner-1", b"joiner-2"])


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    segments = draw(st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 30), max_size=6)), max_size=4))
    numbers = [n for _, of_segment in segments for n in of_segment]
    times = [draw(TIMES) for _ in numbers]
    tokens, counts = [t for t, _ in segments], [len(n) for _, n in segments]
    return Commit(NOW_US, tokens, counts, event_ids(*numbers), pack_times(times))


COMMANDS = commits() | st.builds(Boundary, st.just(NOW_US), TIMES) | st.builds(Collect, st.integers(0, 8))


@settings(max_examples=300, deadline=None)
@given(st.lists(COMMANDS, max_size=25), st.data())
def test_the_state_is_what_a_plain_dict_would_be(commands: list[Command], data: st.DataObject) -> None:
    """Also: a cut taken at any point tells that point, however late it is drawn; a replica restored from it
    goes on alike."""
    state, model = ShardState(), Model()
    cut_at = data.draw(st.integers(0, len(commands)))
    drawn: list[bytes] = []
    cut, tokens_then, restored = iter(()), {}, ShardState()
    for at, command in enumerate([*commands, Collect(0)]):
        if at == cut_at:
            cut, tokens_then = state.freeze(), model.tokens()
        outcome = model.apply(command)
        assert state.apply(encode(command)) == outcome
        if data.draw(st.booleans()):
            drawn += [chunk for chunk in [next(cut, None)] if chunk is not None]
    drawn += cut
    restored.restore(drawn)
    assert contents(restored) == tokens_then
    assert restored.ids == len(tokens_then)
    for command in [*commands, Collect(0)][cut_at:]:
        restored.apply(encode(command))
    assert contents(restored) == contents(state) == model.tokens()
    assert (restored.boundary_us, restored.ids) == (state.boundary_us, state.ids)
    ids, times = event_ids(*range(31)), same_times(31, 5 * BUCKET_US)
    assert state.lookup(ids, times) == bytes(key in model.held for key in split_ids(ids))
    assert list(restored.freeze())[1:] == list(state.freeze())[1:], "replicas agree to the byte"


def test_a_large_state_is_cut_into_chunks_and_restored_whole() -> None:
    rng = random.Random(1)
    state = ShardState()
    for batch in range(60):
        ids = rng.randbytes(16 * 1000)
        times = pack_times([NOW_US + rng.randrange(20) * BUCKET_US for _ in range(1000)])
        state.apply(encode(Commit(NOW_US, [b"token-%d" % batch], [1000], ids, times)))
    chunks = list(state.freeze())
    assert max(map(len, chunks)) < 2 << 20
    restored = ShardState()
    restored.restore(chunks)
    assert contents(restored) == contents(state)


def test_a_snapshot_is_drawn_in_another_thread_while_commits_go_on() -> None:
    rng = random.Random(2)
    state = ShardState()
    batches = [rng.randbytes(16 * 500) for _ in range(120)]

    def register(batch: bytes) -> None:
        state.apply(encode(Commit(NOW_US, [b"token"], [500], batch, same_times(500))))

    for batch in batches[:60]:
        register(batch)
    cut, drawn = state.freeze(), []
    drawer = threading.Thread(target=lambda: drawn.extend(cut))
    drawer.start()
    for batch in batches[60:]:
        register(batch)
    drawer.join()
    restored = ShardState()
    restored.restore(drawn)
    assert contents(restored).keys() == set(split_ids(b"".join(batches[:60])))


def test_lookups_in_other_threads_never_miss_what_was_committed_before_them() -> None:
    state = ShardState()
    rng = random.Random(3)
    committed: list[bytes] = []
    missed: list[bytes] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for ids in committed[-5:]:
                if state.lookup(ids, same_times(200)) != bytes([PRESENT] * 200):
                    missed.append(ids)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(300):
        ids = rng.randbytes(16 * 200)
        state.apply(encode(Commit(NOW_US, [b"t"], [200], ids, same_times(200))))
        committed.append(ids)
    done.set()
    for reader in readers:
        reader.join()
    assert not missed


@pytest.mark.parametrize("damage", ["head", "short", "long", "count", "missing", "other form"])
def test_a_snapshot_that_is_not_whole_is_refused_and_changes_nothing(damage: str) -> None:
    state = ShardState()
    state.apply(commit_command((b"a", range(20)), (b"b", range(20, 30))))
    chunks = list(state.freeze())
    broken = {
        "head": [chunks[0][:-1], *chunks[1:]],
        "short": [chunks[0], chunks[1][:-1]],
        "long": [chunks[0], chunks[1] + b"\0"],
        "count": [*chunks, chunks[1]],
        "missing": chunks[:1],
        "other form": [b"XXXX" + chunks[0][4:], *chunks[1:]],
    }[damage]
    other = ShardState()
    other.apply(commit_command((b"kept", [99])))
    with pytest.raises(CorruptStateError):
        other.restore(broken)
    assert contents(other) == {event_id(99): b"kept"}


@given(st.binary(max_size=300))
def test_garbage_instead_of_a_chunk_raises_nothing_but_corrupt_state(garbage: bytes) -> None:
    head = next(iter(ShardState().freeze()))
    _, parts = snapshot.unpack([head, garbage])
    with suppress(CorruptStateError):
        list(parts)
