"""One replica: what becomes of proposals, snapshots and replays."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from photon.core.errors import StorageError
from photon.raft.port import Applied, Outcome, Refusal, Refused, Unknown
from photon.raft.replica import TELL_COMMIT_S, Proposals
from photon.raft.snapshot import StateMachineError
from tests.raft.kit import SMALL, TIMING, Lone, Make, VirtualClock, command


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Lone]:
    """A group of one, which leads itself."""
    lone = Lone(tmp_path, peers=())
    lone.turn()
    assert lone.replica.is_leader
    yield lone
    lone.crash()


def apply_some(lone: Lone, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        lone.propose(b"key%d" % number, number)
        lone.turn()
    lone.turn()


def test_a_group_of_one_commits_by_itself_after_its_own_sync(alone: Lone) -> None:
    first = alone.propose(b"x", 1)
    second = alone.propose(b"x", 2)
    alone.turn()
    assert not first
    assert alone.replica.deadline() == 0.0, "the host must come back at once"
    alone.turn()
    assert (first, second) == ([Applied(3, True)], [Applied(4, False)])


def test_a_follower_refuses_at_once_and_names_the_leader(lone: Lone) -> None:
    before = lone.propose(b"x")
    lone.turn()
    lone.hear_entries([1])
    after = lone.propose(b"x")
    lone.turn()
    assert before == [Refused(Refusal.NOT_LEADER, None)]
    assert after == [Refused(Refusal.NOT_LEADER, "b")]
    status = lone.replica.status()
    assert (status.leader, status.is_leader, status.has_quorum) == ("b", False, True)


def test_more_than_may_be_in_flight_is_refused_and_certainly_not_in_the_log(lone: Lone) -> None:
    lone.lead()
    outcomes = [lone.propose(b"x%d" % number) for number in range(SMALL.in_flight_max + 2)]
    lone.turn()
    assert outcomes[-2:] == [[Refused(Refusal.OVERLOADED, "a")]] * 2
    assert lone.replica.in_flight == SMALL.in_flight_max
    assert lone.replica.store.journal.last_index == 2 + SMALL.in_flight_max


def test_a_command_that_is_too_large_is_the_callers_error(alone: Lone) -> None:
    with pytest.raises(ValueError, match="command_bytes_max = 64"):
        alone.replica.propose(bytes(65), lambda outcome: None)


def test_a_proposal_that_nobody_confirms_is_unknown_in_bounded_time(make: Make, clock: VirtualClock) -> None:
    lone = make(timing=replace(TIMING, proposal_s=3.0))
    lone.lead()
    outcomes = lone.propose(b"x")
    while not outcomes and clock.at < 110:
        lone.acknowledge("b", 2, success=False)  # it hears the leader, but takes nothing
        lone.turn()
        clock.at += 0.1
    assert outcomes == [Unknown()]
    assert lone.replica.is_leader


def test_a_leader_without_a_majority_steps_down_and_tells_who_waits(lone: Lone, clock: VirtualClock) -> None:
    lone.lead()
    assert lone.replica.status().has_quorum
    outcomes = lone.propose(b"x")
    lone.turn()
    clock.at += TIMING.leader_fallback_s + 0.01
    assert not lone.replica.status().has_quorum
    lone.turn()
    assert outcomes == [Unknown()]
    assert not lone.replica.is_leader


def test_that_entries_are_committed_is_told_with_the_next_ones(lone: Lone) -> None:
    lone.lead()
    lone.propose(b"x")
    lone.turn()
    lone.wire.take()
    lone.acknowledge("b", 4)
    lone.turn()
    assert lone.wire.take("append_entries") == []
    lone.propose(b"y")
    lone.turn()
    told = [
        (message["commit_index"], len(message["entries"])) for _, message in lone.wire.take("append_entries")
    ]
    assert told == [(3, 1)] * 2


def test_that_entries_are_committed_is_told_soon_where_no_others_follow(
    lone: Lone, clock: VirtualClock
) -> None:
    lone.lead()
    lone.propose(b"x")
    lone.turn()
    lone.wire.take()
    began = clock.at
    lone.acknowledge("b", 4)
    lone.turn()
    for _ in range(3):  # other things happen meanwhile
        clock.at += TELL_COMMIT_S / 4
        lone.turn()
    assert lone.wire.take("append_entries") == []
    clock.at = lone.replica.deadline()
    assert clock.at == pytest.approx(began + TELL_COMMIT_S, abs=1e-3)
    lone.turn()
    assert [message["commit_index"] for _, message in lone.wire.take("append_entries")] == [3, 3]


def test_stopping_tells_everybody_who_waits_and_refuses_the_rest(lone: Lone) -> None:
    lone.lead()
    waiting = lone.propose(b"x")
    lone.turn()
    lone.replica.stop()
    assert waiting == [Unknown()]
    refused: list[object] = []
    lone.replica.propose(b"y", refused.append)
    assert refused == [Refused(Refusal.STOPPED, None)]


def test_a_state_machine_that_raises_stops_the_replica(alone: Lone) -> None:
    def broken(body: bytes) -> object:
        raise RuntimeError("a bug")

    alone.machine.apply = broken  # type: ignore[method-assign]
    alone.propose(b"x")
    alone.turn()
    with pytest.raises(StateMachineError, match="entry 3: the state machine raised RuntimeError"):
        alone.replica.tick()


@pytest.mark.usefixtures("clock")
def test_a_restart_gives_the_same_state_from_snapshot_and_journal(tmp_path: Path) -> None:
    lone = Lone(tmp_path, peers=())
    lone.turn()
    apply_some(lone, 20)
    assert lone.jobs.busy()
    lone.jobs.finish()
    apply_some(lone, 5, first=20)
    covers = lone.replica.store.snapshots.current
    assert covers is not None and lone.replica.store.journal.first_index > 1
    lone.crash()
    again = Lone(tmp_path, peers=())
    assert 0 < again.machine.count < 25
    for _ in range(3):
        again.turn()
    assert (again.machine.tokens, again.machine.digest) == (lone.machine.tokens, lone.machine.digest)
    again.crash()


@pytest.mark.usefixtures("clock")
def test_the_commit_index_is_never_believed_from_before_a_restart(tmp_path: Path) -> None:
    """S10: a replica that came back applies nothing before a leader has said again what is committed."""
    lone = Lone(tmp_path)
    lone.hear_entries([1, 1, 1], commit=4)
    lone.turn()
    assert lone.machine.count == 3
    lone.crash()
    again = Lone(tmp_path)
    again.turn()
    assert (again.replica.core.commit_index, again.machine.count) == (1, 0)
    again.hear_entries([], after=(4, 1), commit=3)
    again.turn()
    assert again.machine.count == 2
    again.crash()


def test_a_follower_tells_what_stands_in_its_log_before_that_is_applied(lone: Lone) -> None:
    lone.hear_entries([1, 1, 1], commit=2)
    lone.turn()
    under_way = lone.replica.unapplied()
    assert [(i, term, bytes(c)) for i, term, c in under_way] == [
        (index, 1, command(b"%d" % index, index)) for index in (3, 4)
    ]
    lone.hear_entries([], after=(4, 1), commit=4)
    lone.turn()
    assert lone.replica.unapplied() == []


@pytest.mark.usefixtures("clock")
def test_a_replica_knows_how_far_it_is_behind_from_its_own_log_and_then_from_its_leader(
    tmp_path: Path,
) -> None:
    lone = Lone(tmp_path)
    lone.hear_entries([1, 1, 1], commit=4)
    lone.turn()
    assert lone.replica.lag == 0
    lone.crash()
    again = Lone(tmp_path)
    again.turn()
    assert again.replica.lag == 4 - again.replica.core.applied_index > 0, "all that it has may be committed"
    again.hear_entries([], after=(4, 1), commit=100)
    again.turn()
    assert again.replica.lag == 100 - 4
    again.crash()


def test_the_state_goes_on_while_a_snapshot_of_it_is_written(make: Make) -> None:
    lone = make(peers=())
    lone.turn()
    apply_some(lone, 20)
    frozen = lone.jobs.started
    apply_some(lone, 40, first=20)
    assert lone.jobs.started == frozen == 1, "one snapshot at a time"
    assert lone.machine.count == 60
    lone.take_in()
    covers = lone.replica.store.snapshots.current
    assert covers is not None and covers.index < 20


def test_compaction_keeps_a_bounded_tail(make: Make) -> None:
    lone = make(peers=())
    lone.turn()
    apply_some(lone, 16)
    lone.take_in()
    covers = lone.replica.store.snapshots.current
    assert covers is not None
    assert lone.replica.store.journal.first_index == covers.index - SMALL.tail_entries


def test_compaction_is_due_by_bytes_too(make: Make) -> None:
    limits = replace(SMALL, compact_entries=1000, compact_bytes=200)
    lone = make(peers=(), limits=limits)
    lone.turn()
    apply_some(lone, 20)
    assert lone.jobs.started == 1


def test_a_leader_keeps_what_a_slow_but_live_follower_lacks(lone: Lone) -> None:
    lone.lead()
    for number in range(16):
        lone.propose(b"key%d" % number)
        lone.turn()
        lone.acknowledge("b", lone.replica.store.journal.last_index + 1)
        lone.acknowledge("c", 6)
        lone.turn()
    lone.take_in()
    assert lone.replica.store.snapshots.current is not None
    assert lone.replica.store.journal.first_index == 5


def test_a_snapshot_that_fails_to_be_written_stops_the_replica(alone: Lone) -> None:
    apply_some(alone, 16)
    assert alone.jobs.running is not None
    real = alone.jobs.running.work

    def failing() -> None:
        raise StorageError("no disk")

    alone.jobs.running.work = failing
    alone.jobs.finish()
    with pytest.raises(StorageError, match="no disk"):
        alone.replica.tick()
    alone.jobs.running.work = real


def test_a_snapshot_that_finds_no_space_is_written_when_the_log_has_grown_as_much_again(
    alone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_some(alone, 16)
    with monkeypatch.context() as full:

        def fsync(_fd: int) -> None:
            raise OSError(errno.ENOSPC, "no space")

        full.setattr(os, "fsync", fsync)
        alone.take_in()
    assert alone.replica.store.snapshots.current is None
    assert not alone.replica.store.snapshots.own_temporary.exists(), "it takes no space either"
    assert alone.replica.store.journal.first_index == 1
    apply_some(alone, 16, first=16)
    alone.take_in()
    assert alone.replica.store.snapshots.current is not None
    assert alone.replica.store.journal.first_index > 1


def test_a_long_replay_is_cut_into_turns(lone: Lone, clock: VirtualClock) -> None:
    real = lone.machine.apply

    def slow(body: bytes) -> object:
        clock.at += 0.004  # as long as a turn may apply
        return real(body)

    lone.machine.apply = slow  # type: ignore[method-assign]
    lone.hear_entries([1] * 10, commit=11)
    turns = 0
    while lone.machine.count < 10:
        before = lone.machine.count
        lone.turn()
        turns += 1
        assert lone.machine.count - before <= 1
        assert lone.machine.count == 10 or lone.replica.deadline() == 0.0
    assert turns >= 10


def test_entries_go_out_in_batches_as_far_as_there_is_room(lone: Lone) -> None:
    lone.lead()
    lone.wire.free = 50
    for number in range(8):
        lone.propose(bytes([number]) * 50)
    lone.wire.take()
    lone.turn()
    assert all(not message["entries"] for _, message in lone.wire.take("append_entries"))
    lone.wire.free = 1 << 20
    lone.turn()
    sent = [message["entries"] for peer, message in lone.wire.take("append_entries") if peer == "b"]
    assert [index for entries in sent for _, index, _ in entries] == list(range(3, 11))
    assert all(sum(len(body) for body, _, _ in entries) <= SMALL.batch_bytes for entries in sent)


def test_a_replica_just_connected_hears_the_leader_out_before_it_stands_for_election(
    make: Make, clock: VirtualClock
) -> None:
    lone = make(founders=("b", "a", "c"))
    for peer in "bc":
        lone.replica.peer_down(peer)
    clock.at += 30
    lone.turn()
    lone.replica.peer_up("c")
    lone.turn()
    assert lone.wire.take("request_pre_vote") == []
    clock.at += TIMING.election_s_max
    lone.turn()
    assert {peer for peer, _ in lone.wire.take("request_pre_vote")} == {"c"}


def test_a_version_or_membership_command_does_nothing(lone: Lone) -> None:
    for kind in (b"\x02", b"\x03", b""):
        lone.hear_commands((kind + b"anything", 1), commit=2)
    lone.turn()
    assert lone.machine.count == 0
    assert lone.replica.core.applied_index == 2


def test_who_proposed_is_never_told_of_another_leaders_entry() -> None:
    proposals, told = Proposals(), list[Outcome]()
    for index in (5, 6):
        proposals.add(index, 1, 9.0, told.append)
    proposals.applied(5, 2, "another's")
    proposals.applied(6, 1, "its own")
    assert told == [Unknown(), Applied(6, "its own")]
