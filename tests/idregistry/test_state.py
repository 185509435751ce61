"""The state machine of a shard: claims of the paper, and what spec and memory ask of it.

Against a model, with every order of things: test_state_model. Snapshots: test_state_snapshot.
"""

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from idregistry.rules import table as idtable
from idregistry.rules.commands import (
    Boundary,
    Commit,
    Configure,
    Fences,
    Merge,
    Prepare,
    Release,
    Seal,
    encode,
)
from idregistry.rules.packing import BUCKET_US, NO_BOUNDARY
from idregistry.rules.sharding import BEGINNING, HORIZON, Configuration, Interval, Prepared
from idregistry.rules.state import ShardState
from idregistry.segment_file import SegmentFiles
from photon.core.columns import hash_ids, pack_times
from photon.core.errors import CorruptStateError
from photon.core.fates import Registered, Released
from photon.core.ids import IdPacker, Token
from tests.idregistry.kit import (
    DUPLICATE,
    EXPIRED,
    FENCED,
    MISROUTED,
    NOW_US,
    OWN,
    WON,
    commit_command,
    contents,
    event_id,
    event_ids,
    file_all,
    filed_state,
    keep_files,
    merge,
    new_state,
    one_shard,
    same_times,
    seal,
    sealed,
    write_files,
)

ABSENT, PRESENT, TOO_OLD, _ = bytes(Registered)
RELEASED, NOT_THERE, OTHER, NOT_FENCED, _ = bytes(Released)
TOKEN = Token("10.0.0.1:4242", 7, 1000)


@pytest.fixture(params=["recent", "sealed", "in files"])
def settle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """What holds of ids in dicts holds of ids in segments, wherever these are."""

    def into_files(state: ShardState) -> None:
        keep_files(state, tmp_path_factory.mktemp("files"))
        seal(state)
        write_files(state)

    return {"recent": lambda state: None, "sealed": seal, "in files": into_files}[request.param]


def release(token: Token, numbers: list[int], time_us: int = NOW_US) -> bytes:
    ids = event_ids(*numbers)
    times = same_times(len(numbers), time_us)
    return encode(Release(NOW_US, [token.pack()], [len(numbers)], ids, times, [OWN], False))


def look(state: ShardState, *numbers: int, time_us: int = NOW_US) -> bytes:
    return state.lookup(event_ids(*numbers), same_times(len(numbers), time_us))


# --- commit


def test_first_commit_wins_and_the_second_is_told_duplicate(settle) -> None:
    """2: "once an event_id is written to it, subsequent requests to write the same identifier will fail"."""
    state = new_state()
    assert state.apply(commit_command((b"a", [1, 2]))) == bytes([WON, WON])
    settle(state)
    assert state.apply(commit_command((b"b", [2, 3]))) == bytes([DUPLICATE, WON])
    assert contents(state) == {event_id(1): b"a", event_id(2): b"a", event_id(3): b"b"}


def test_of_two_requests_in_one_batch_the_first_gets_the_id() -> None:
    """2.2.1: "respond with success to one client ...; other clients will receive a failure message"."""
    state = new_state()
    outcomes = state.apply(commit_command((b"a", [1, 2]), (b"b", [2, 3]), (b"c", [3, 1])))
    assert outcomes == bytes([WON, WON, DUPLICATE, WON, DUPLICATE, DUPLICATE])


def test_retry_with_the_same_token_is_told_it_won(settle) -> None:
    """3.3.2: a joiner that got no answer asks again with its token."""
    state = new_state()
    command = commit_command((TOKEN.pack(), [1, 2]))
    state.apply(command)
    settle(state)
    assert state.apply(command) == bytes([WON, WON])
    again = commit_command((b"b", [1]), (TOKEN.pack(), [1]))
    assert state.apply(again) == bytes([DUPLICATE, WON])


def test_an_id_twice_in_one_request_wins_once_also_on_a_retry(settle) -> None:
    state = new_state()
    command = commit_command((b"a", [1, 2, 1, 1]))
    expected = bytes([WON, WON, DUPLICATE, DUPLICATE])
    assert state.apply(command) == expected
    settle(state)
    assert state.apply(command) == expected
    assert state.ids == 2


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


@pytest.mark.parametrize("raced", ["one id twice", "in one command", "later", "sealed", "expired"])
def test_a_repeated_id_costs_the_others_nothing(raced: str) -> None:
    """2.2.1: datacenters race for the same ids: 4,000 of them take the lines of Python that 400 take."""

    def lines_run(count: int) -> int:
        state = new_state()
        numbers = list(range(count))
        segments = {
            "one id twice": [(b"a", [*numbers[:-1], 0])],
            "in one command": [(b"a", numbers[::2]), (b"b", numbers[::2])],
        }.get(raced, [(b"a", numbers)])
        if raced in ("later", "sealed"):
            state.apply(commit_command((b"b", numbers)))
        if raced == "sealed":
            seal(state)
        if raced == "expired":
            state.apply(encode(Boundary(NOW_US, NOW_US + 1)))
        return _lines_run(state, commit_command(*segments))

    assert lines_run(4_000) < lines_run(400) + 100, "a search of segments takes some steps more"


# --- boundary


def test_expired_events_are_refused_with_an_outcome_of_their_own(settle) -> None:
    """2.3: "older than the boundary timestamp ... failure response with a special error code"."""
    state = new_state()
    state.apply(commit_command((b"a", [1, 2]), time_us=NOW_US))
    settle(state)
    state.apply(encode(Boundary(NOW_US, NOW_US + 1)))
    assert state.apply(commit_command((b"b", [1, 3]), time_us=NOW_US)) == bytes([EXPIRED, EXPIRED])
    assert state.apply(commit_command((b"b", [4]), time_us=NOW_US + 1)) == bytes([WON])
    times = pack_times([NOW_US, NOW_US, NOW_US + 1])
    assert state.lookup(event_ids(1, 9, 4), times) == bytes([TOO_OLD, TOO_OLD, PRESENT])


def test_a_retry_keeps_what_it_won_until_its_whole_bucket_is_before_the_boundary(settle) -> None:
    """Design, invariant 2: told that it won until the id is collected."""
    state = new_state()
    bucket_us = NOW_US // BUCKET_US * BUCKET_US
    state.apply(commit_command((b"a", [1]), time_us=NOW_US))
    settle(state)
    state.apply(encode(Boundary(NOW_US, bucket_us + BUCKET_US - 1)))
    assert state.apply(commit_command((b"a", [1]), time_us=NOW_US)) == bytes([WON])
    assert state.ids == 1
    state.apply(encode(Boundary(NOW_US, bucket_us + BUCKET_US)))
    assert state.apply(commit_command((b"a", [1]), time_us=NOW_US)) == bytes([EXPIRED])
    assert (state.ids, contents(state)) == (0, {})


def test_an_expired_id_that_comes_with_a_later_time_is_new(settle) -> None:
    state = new_state()
    state.apply(commit_command((b"a", [1, 2]), time_us=NOW_US))
    settle(state)
    later_us = NOW_US + 2 * BUCKET_US
    state.apply(encode(Boundary(NOW_US, later_us)))
    assert look(state, 1, time_us=later_us) == bytes([ABSENT])
    assert state.apply(commit_command((b"b", [1, 3]), time_us=later_us)) == bytes([WON, WON])
    settle(state)
    assert contents(state) == {event_id(1): b"b", event_id(3): b"b"}
    assert state.ids == 2


def test_boundary_never_goes_back() -> None:
    """2.3: "we make sure it never goes back"."""
    state = new_state()
    assert state.boundary_us == NO_BOUNDARY
    assert state.apply(encode(Boundary(NOW_US, 500))) == 500
    assert state.apply(encode(Boundary(NOW_US, 400))) == 500
    assert state.boundary_us == 500


# --- sharding


def test_without_a_configuration_nothing_is_decided() -> None:
    state = ShardState(0)
    assert state.configuration is None
    assert state.apply(commit_command((b"a", [1, 2]))) == bytes([MISROUTED] * 2)
    assert state.apply(release(TOKEN, [1])) == bytes([Released.MISROUTED])
    assert look(state, 1) == bytes([ABSENT])


def test_ids_of_other_shards_are_misrouted_and_not_registered() -> None:
    """2.2.2; each id belongs to one shard of its interval."""
    configuration = Configuration(1, (Interval(BEGINNING, (0, 1)), Interval(NOW_US, (0, 1, 2))))
    numbers = list(range(60))
    for time_us, shards in ((NOW_US - 1, 2), (NOW_US, 3), (HORIZON, 2)):
        states = [ShardState(shard) for shard in range(4)]
        outcomes = []
        for state in states:
            state.apply(encode(Configure(NOW_US, configuration)))
            outcomes.append(state.apply(commit_command((b"a", numbers), time_us=time_us)))
        assert {column.count(MISROUTED) for column in outcomes[shards:]} == {len(numbers)}
        assert all(sorted(column) == [WON, *[MISROUTED] * 3] for column in zip(*outcomes, strict=True))
        assert sum(state.ids for state in states) == len(numbers)


def test_a_batch_that_spans_two_intervals_is_routed_row_by_row() -> None:
    configuration = Configuration(1, (Interval(BEGINNING, (0,)), Interval(NOW_US, (0, 1))))
    state = ShardState(1)
    state.apply(encode(Configure(NOW_US, configuration)))
    ids = event_ids(*range(40))
    times = pack_times([NOW_US - 1, NOW_US] * 20)
    outcomes = state.apply(encode(Commit(NOW_US, [b"a"], [40], ids, times, [OWN])))
    assert isinstance(outcomes, bytes)
    mine = (hash_ids(ids) % np.uint64(2) == 1) & (np.arange(40) % 2 == 1)
    assert [outcome == WON for outcome in outcomes] == mine.tolist()


def test_small_batches_are_routed_as_single_ids_are() -> None:
    """What is true of all ids of a batch under one interval need not be under the other."""
    configuration = Configuration(1, (Interval(BEGINNING, (0, 1)), Interval(NOW_US, (0, 1, 2))))
    for number in range(60):
        ids = event_ids(number, number + 100)
        for times in (
            pack_times([NOW_US - 1, NOW_US]),
            pack_times([HORIZON, NOW_US]),
            same_times(2, HORIZON),
        ):
            state = ShardState(1)
            state.apply(encode(Configure(NOW_US, configuration)))
            outcomes = state.apply(encode(Commit(NOW_US, [b"a"], [2], ids, times, [OWN])))
            owned = configuration.shard_of(ids, times) == 1
            assert outcomes == np.where(owned, np.uint8(WON), np.uint8(MISROUTED)).tobytes()


def test_a_prepared_interval_takes_nothing_until_it_is_decided() -> None:
    """Else an id could be registered under the old mapping after the new one was found to fit."""
    state = new_state()
    state.apply(commit_command((b"a", [1]), time_us=NOW_US))
    assert state.latest_us == NOW_US
    start_us = NOW_US + 1
    assert state.apply(encode(Prepare(NOW_US, 2, start_us))) == Prepared(2, start_us, True)
    assert state.apply(commit_command((b"a", [2]), time_us=start_us)) == bytes([MISROUTED])
    assert state.apply(commit_command((b"a", [2]), time_us=NOW_US)) == bytes([WON])
    assert state.apply(commit_command((b"a", [3]), time_us=HORIZON)) == bytes([WON])
    state.apply(encode(Configure(NOW_US, one_shard(version=2))))
    assert state.prepared is None
    assert state.apply(commit_command((b"a", [4]), time_us=start_us)) == bytes([WON])


def test_a_configuration_never_goes_back_and_an_old_proposal_is_ignored() -> None:
    state = new_state()
    newer = Configuration(5, (Interval(BEGINNING, (0,)), Interval(NOW_US, (0, 1, 2))))
    assert state.apply(encode(Configure(NOW_US, newer))) == 5
    assert state.apply(encode(Configure(NOW_US, one_shard(version=5)))) == 5
    assert state.configuration == newer
    assert state.apply(encode(Prepare(NOW_US, 5, NOW_US))) is None
    assert state.apply(encode(Prepare(NOW_US, 7, NOW_US))) is None, "6 is still to come, and would undo it"
    state.apply(encode(Prepare(NOW_US, 6, NOW_US + 5)))
    state.apply(encode(Prepare(NOW_US, 6, NOW_US)))
    state.apply(encode(Configure(NOW_US, Configuration(5, newer.intervals))))
    assert state.prepared == Prepared(6, NOW_US + 5, True), "what is still to be decided stays prepared"
    state.apply(encode(Configure(NOW_US, Configuration(6, newer.intervals))))
    assert state.prepared is None


# --- fencing, release


def test_a_fenced_incarnation_registers_nothing_and_is_not_told_that_it_won(settle) -> None:
    """Recovery may have released what it holds."""
    state = new_state()
    command = commit_command((TOKEN.pack(), [1, 2]), (b"other", [3]))
    state.apply(command)
    settle(state)
    assert state.apply(encode(Fences(NOW_US, 0, (9, TOKEN.incarnation)))) == state.fences == 2
    assert state.apply(command) == bytes([FENCED, FENCED, WON])
    again = commit_command(
        (replace(TOKEN, time_us=5).pack(), [4]), (replace(TOKEN, incarnation=6).pack(), [4])
    )
    assert state.apply(again) == bytes([FENCED, WON])


def test_release_deletes_what_the_fenced_token_holds_and_nothing_else(settle) -> None:
    """3.3.3, made safe: compare and delete, and only once the incarnation can't write any more."""
    state = new_state()
    other = replace(TOKEN, time_us=1001)
    state.apply(commit_command((TOKEN.pack(), [1, 2]), (other.pack(), [3])))
    settle(state)
    assert state.apply(release(TOKEN, [1])) == bytes([NOT_FENCED])
    state.apply(encode(Fences(NOW_US, 0, (TOKEN.incarnation,))))
    outcomes = state.apply(release(TOKEN, [1, 1, 3, 4]))
    assert outcomes == bytes([RELEASED, NOT_THERE, OTHER, NOT_THERE])
    assert contents(state) == {event_id(2): TOKEN.pack(), event_id(3): other.pack()}
    assert state.ids == 2
    assert look(state, 1, 2, 3) == bytes([ABSENT, PRESENT, PRESENT])
    assert state.apply(commit_command((b"new", [1, 2]))) == bytes([WON, DUPLICATE])
    settle(state)
    assert contents(state)[event_id(1)] == b"new"
    assert state.apply(release(TOKEN, [1])) == bytes([OTHER]), "it is not the fenced one's any more"


# --- scan, memory


def test_photon_ids_of_one_server_and_opaque_ids_of_one_shard_spread_over_the_sub_dicts() -> None:
    """Else one dict would hold all, and stop everything while it grows."""
    packer = IdPacker()
    photon = packer.pack([f"10.0.0.1:42:{NOW_US + 20 * n}" for n in range(20_000)])
    opaque = packer.pack([f"event-{n}" for n in range(20_000)])
    for ids in (photon, opaque):
        of_shard = np.frombuffer(ids, "V16")[hash_ids(ids) % np.uint64(4) == 1].tobytes()
        state = new_state(1, 4)
        count = len(of_shard) // 16
        state.apply(encode(Commit(NOW_US, [b"a"], [count], of_shard, same_times(count), [OWN])))
        assert state.ids == count
        subs = state._facts.table._layout.subs
        assert max(map(len, subs)) < 3 * count / len(subs)


def fill(state: ShardState, ids: int, time_us: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(ids // 1000):
        batch = rng.bytes(16_000)
        state.apply(encode(Commit(time_us, [TOKEN.pack()], [1000], batch, same_times(1000, time_us), [OWN])))


def test_sealed_ids_take_under_three_bytes_of_memory_and_what_is_expired_none(tmp_path: Path) -> None:
    state = filed_state(tmp_path / "files")
    fill(state, 200_000, NOW_US, 1)
    assert state.filing_due() is None, "too few, and too new"
    state.apply(encode(Boundary(NOW_US + 2 * idtable.SEAL_AFTER_US, 0)))
    file_all(state)
    ids, _, filters = sealed(state)
    assert ids == 200_000
    assert not any(state._facts.table._layout.subs)
    assert filters < 3 * 200_000
    assert sum(file.size for file in state.files() or ()) < 36 * 200_000
    state.apply(encode(Boundary(NOW_US, NOW_US + BUCKET_US)))
    file_all(state)
    assert (sealed(state)[0], state.ids) == (0, 0)


def test_what_is_committed_while_a_segment_is_written_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = filed_state(tmp_path / "files")
    for number in range(0, 60, 3):
        state.apply(commit_command((TOKEN.pack(), [number, number + 1, number + 2])))
        seal(state)
        write_files(state, 1)
    for _ in range(2):
        assert state.apply(commit_command((b"again", range(60)))) == bytes([DUPLICATE] * 60)
        merge(state)
        write_files(state)
    assert sealed(state)[:2] == (60, 1)


def test_dicts_are_sealed_and_written_while_a_merge_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge of hundreds of millions takes a minute, and memory would fill up with what comes meanwhile."""
    monkeypatch.setattr(idtable, "PART_IDS", 10)
    monkeypatch.setattr(idtable, "SEAL_IDS", 20)
    monkeypatch.setattr(idtable, "SEAL_IDS_MIN", 20)
    state = filed_state(tmp_path / "files")
    for number in range(4):
        state.apply(commit_command((TOKEN.pack(), range(100 * number, 100 * number + 50))))
        seal(state)
        write_files(state)
    state.apply(encode(state.filing_due() or Boundary(NOW_US, 0)))
    write_files(state, 2)
    assert state.files() is not None and sealed(state)[1] == 1
    state.apply(commit_command((TOKEN.pack(), range(900, 950))))
    seal_now = state.filing_due()
    assert isinstance(seal_now, Seal)
    state.apply(encode(seal_now))
    while state.files() is None:
        write_files(state, 1)
    segments = state._facts.table.segments
    assert [idtable.is_written(segment) for segment in segments] == [False, True]
    write_files(state)
    assert sealed(state)[:2] == (250, 2)
    assert len(contents(state)) == 250


@pytest.mark.parametrize("written", ["sealed", "merged", "restored"])
def test_what_is_released_in_a_segment_stays_released(tmp_path: Path, written: str) -> None:
    state = filed_state(tmp_path / "files")
    for numbers in (range(10), range(10, 20)):
        state.apply(commit_command((TOKEN.pack(), numbers)))
        seal(state)
    write_files(state)
    state.apply(encode(Fences(NOW_US, 0, (TOKEN.incarnation,))))
    assert state.apply(release(TOKEN, [3, 13])) == bytes([RELEASED, RELEASED])
    left = sorted({*range(20)} - {3, 13})
    if written != "sealed":
        merge(state)
        assert contents(state).keys() == set(map(event_id, left)), "while it is merged"
        write_files(state)
    if written == "restored":
        chunks, state = list(state.freeze()), ShardState(0, SegmentFiles)
        state.open_in(tmp_path / "files")
        state.prepare(chunks)()
    assert contents(state).keys() == set(map(event_id, left))
    assert state.ids == 18
    assert state.apply(release(TOKEN, [3])) == bytes([NOT_THERE])
    again = state.apply(commit_command((b"again", [2, 3, 13])))
    assert again == bytes([DUPLICATE, WON, WON])
    seal(state)
    merge(state)
    write_files(state)
    assert contents(state)[event_id(3)] == b"again"


def test_a_segment_is_written_anew_when_half_of_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idtable, "SEAL_IDS", 50_000)
    monkeypatch.setattr(idtable, "SEAL_IDS_MIN", 1)
    state = filed_state(tmp_path / "files")
    for number, hour in enumerate((0, 1, 2, 3, 4)):
        fill(state, 10_000, NOW_US + hour * BUCKET_US, number)
    file_all(state)
    kept = []
    for hour in (1, 2, 3, 5):
        state.apply(encode(Boundary(NOW_US, NOW_US + hour * BUCKET_US)))
        file_all(state)
        kept.append(sealed(state)[0])
    assert kept == [50_000, 50_000, 20_000, 0]
    assert len(contents(state)) == state.ids == 0


def test_segments_stay_few_and_each_is_written_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idtable, "SEAL_IDS", 1000)
    monkeypatch.setattr(idtable, "SEAL_IDS_MIN", 1000)
    state = filed_state(tmp_path / "files")
    for number in range(100):
        fill(state, 1000, NOW_US, number)
        file_all(state)
        assert sealed(state)[1] <= 3 * (1 + math.log(number + 1, 4))
    assert sealed(state)[0] == len(contents(state)) == 100_000
    assert state._facts.table.next_number < 140


def test_the_pressure_grows_with_the_next_segment_and_with_those_that_wait_to_be_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idtable, "SEAL_IDS", 4000)
    monkeypatch.setattr(idtable, "MERGE_IDS_MAX", 16_000)
    state = filed_state(tmp_path / "files")
    assert state.pressure() == 0.0
    fill(state, 1000, NOW_US, 0)
    assert state.pressure() == 0.25
    fill(state, 5000, NOW_US, 1)
    assert state.pressure() == 1.0, "more than the next segment is there"
    seal(state)
    assert state.pressure() == 0.0, "what is sealed is being written"
    fill(state, 1000, NOW_US, 9)
    seal(state)
    assert state.pressure() == 1.0, "two of them are in memory"
    write_files(state)
    merge(state)
    write_files(state)
    assert state.pressure() == 0.0, "one that is as large as any becomes waits for nothing"
    for number in range(4):
        fill(state, 1000, NOW_US, 2 + number)
        seal(state)
        write_files(state)
    assert state.pressure() == 0.5
    merge(state)
    write_files(state)
    assert state.pressure() == 0.0


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([], ()),
        ([(1, 100, 0), (2, 100, 0), (3, 100, 0)], ()),
        ([(1, 100, 0), (2, 100, 0), (3, 100, 0), (4, 100, 0)], (1, 2, 3, 4)),
        ([(n, 1 << 20, 0) for n in (5, 6, 7, 8)] + [(n, 100, 0) for n in (9, 10, 11, 12)], (9, 10, 11, 12)),
        ([(1, 1 << 27, 0), (2, 1 << 27, 0), (3, 1 << 27, 0), (4, 1 << 27, 0)], ()),
        ([(1, 500, 500), (2, 100, 0), (3, 70, 70)], (1, 3)),
        ([(1, 0, 0), (2, 100, 0)], ()),
        ([(1, 1 << 20, 1 << 19), (2, 100, 0)], (1,)),
        ([(1, 1 << 20, (1 << 19) - 1), (2, 100, 0)], ()),
    ],
)  # fmt: skip
def test_which_segments_are_merged(segments: list[tuple[int, int, int]], expected: tuple[int, ...]) -> None:
    assert idtable.to_merge(segments) == expected


@pytest.mark.parametrize("again", ["seal", "merge"])
def test_a_command_of_another_number_changes_nothing(tmp_path: Path, again: str) -> None:
    """As one that a leader proposed twice."""
    state = filed_state(tmp_path / "files")
    state.apply(commit_command((TOKEN.pack(), range(10))))
    seal(state)
    table = state._facts.table
    for number in (0, 1, 3):
        command = Seal(NOW_US, number) if again == "seal" else Merge(NOW_US, number, (1,))
        assert state.apply(encode(command)) == 2
    assert state.apply(encode(Merge(NOW_US, 2, (1, 7)))) == 2, "there is no 7"
    assert [segment.number for segment in table.segments] == [1]


@pytest.mark.parametrize("at", range(0, 60_000, 1_501))
def test_a_damaged_file_is_never_taken_for_an_absence(tmp_path: Path, at: int) -> None:
    """Every id would be won a second time of which a bit has changed."""
    state = filed_state(tmp_path / "files")
    fill(state, 1000, NOW_US, 1)
    held = list(contents(state))
    seal(state)
    write_files(state)
    chunks, (file,) = list(state.freeze()), state.files() or ()
    path = tmp_path / "files" / file.name
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << at % 8
    path.write_bytes(data)
    assert not state.verify(path, file)
    with pytest.raises(CorruptStateError, match="segment file"):
        other = ShardState(0, SegmentFiles)
        other.open_in(tmp_path / "files")
        other.prepare(chunks)()
        for start in range(0, 1000, 20):
            ids = b"".join(held[start : start + 20])
            assert other.lookup(ids, same_times(20)) == bytes([PRESENT] * 20)


@pytest.mark.long
def test_lookups_in_other_threads_never_miss_what_was_committed_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though ids move from dicts to segments, and from segment to segment, all the while."""
    monkeypatch.setattr(idtable, "SEAL_IDS", 400)
    monkeypatch.setattr(idtable, "SEAL_IDS_MIN", 400)
    state = filed_state(tmp_path / "files")
    rng = np.random.default_rng(3)
    committed: list[bytes] = []
    missed: list[bytes] = []
    scanned_short: list[int] = []
    done = threading.Event()

    def look_up() -> None:
        at = 0
        while not done.is_set():
            for ids in [*committed[-5:], *committed[at : at + 1]]:
                if state.lookup(ids, same_times(200)) != bytes([PRESENT] * 200):
                    missed.append(ids)
            at = (at + 1) % max(1, len(committed))

    def scan() -> None:
        while not done.is_set():
            least = len(committed) * 200
            found = len(contents(state))
            if found < least:
                scanned_short.append(found - least)

    readers = [threading.Thread(target=work) for work in (look_up, scan)]
    for reader in readers:
        reader.start()
    for _ in range(120):
        ids = rng.bytes(16 * 200)
        state.apply(encode(Commit(NOW_US, [b"t"], [200], ids, same_times(200), [OWN])))
        committed.append(ids)
        if (command := state.filing_due()) is not None:
            state.apply(encode(command))
        write_files(state, 1)
    done.set()
    for reader in readers:
        reader.join()
    assert not missed
    assert not scanned_short
