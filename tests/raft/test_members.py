"""Who belongs to a group: what counts, when, and what of it survives."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.raft.membership import PROMOTED_BEHIND_MAX
from photon.raft.port import Applied, Change, ChangeKind, Members, Refusal, Refused, Unknown
from photon.raft.rules.codec import MessageError
from photon.raft.rules.members import (
    MEMBERS,
    MEMBERS_MAX,
    MemberLog,
    changed,
    command_of,
    founding,
    members_of,
)
from photon.raft.snapshot import read_head
from tests.raft.kit import SMALL, Lone, Make, snapshot_of

ADD, PROMOTE, REMOVE = ChangeKind.ADD_LEARNER, ChangeKind.PROMOTE, ChangeKind.REMOVE
ABC = Members(("a", "b", "c"))


@pytest.fixture
def leader(make: Make) -> Lone:
    """Leads b and c, which have acknowledged all; d is connected and no member."""
    return established(make())


def established(lone: Lone) -> Lone:
    lone.lead()
    settle(lone, "b", "c")
    lone.replica.peer_up("d")
    lone.wire.take()
    return lone


def settle(lone: Lone, *peers: str) -> None:
    """Those acknowledge everything, which commits it."""
    lone.turn()
    for peer in peers:
        lone.acknowledge(peer, lone.replica.store.journal.last_index + 1)
    lone.turn()
    lone.turn()


# -- the lists ----------------------------------------------------------------------------------------------

NAMES = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=6)


@given(NAMES, st.integers(1, 6))
def test_a_list_of_members_survives_the_round_trip(names: list[str], voters: int) -> None:
    members = Members(tuple(names[:voters]), tuple(names[voters:]))
    assert members_of(command_of(members)) == members


@given(st.binary(max_size=40))
def test_a_damaged_list_is_refused_by_its_own_error_only(data: bytes) -> None:
    with suppress(MessageError):
        members_of(MEMBERS + data)


def test_only_founders_that_are_named_once_found_a_group() -> None:
    assert founding("cab") == ABC
    for wrong in ("", "aba"):
        with pytest.raises(ValueError, match="can't found a group"):
            founding(wrong)


@given(st.sets(st.sampled_from("abcde"), min_size=1), st.sets(st.sampled_from("fgh")))
def test_majorities_before_and_after_any_change_meet(voters: set[str], learners: set[str]) -> None:
    before = Members(tuple(sorted(voters)), tuple(sorted(learners)))
    for kind in ChangeKind:
        for node in "abcdefghi":
            after = changed(before, Change(kind, node))
            if after is not None:
                assert len(set(before.voters) ^ set(after.voters)) <= 1
                assert not set(after.voters) & set(after.learners)
                assert after.voters


def test_a_group_has_a_bounded_number_of_members() -> None:
    full = Members(("a",), tuple(map(str, range(MEMBERS_MAX - 1))))
    assert changed(full, Change(ADD, "b")) is None
    assert changed(full, Change(PROMOTE, "0")) is not None


def test_what_is_truncated_is_undone_and_what_a_snapshot_covers_is_ground() -> None:
    member_log = MemberLog()
    assert member_log.newest is None
    for index, voters in ((1, "abc"), (5, "abcd"), (9, "abd")):
        member_log.appended(command_of(founding(voters)), index)
    member_log.appended(b"\x00anything", 10)
    assert member_log.newest == founding("abd")
    assert member_log.at(8) == founding("abcd")
    member_log.truncated(9)
    assert (member_log.newest, member_log.newest_index) == (founding("abcd"), 5)
    member_log.forget_before(7)
    assert (member_log.at(6), member_log.at(4)) == (founding("abcd"), None)
    member_log.restart(20, ABC, [(command_of(founding("x")), 19, 1), (command_of(founding("y")), 21, 1)])
    assert (member_log.at(20), member_log.newest) == (ABC, founding("y"))
    member_log.truncated(2)
    assert member_log.newest is None


# -- what counts --------------------------------------------------------------------------------------------


def test_a_learner_is_sent_everything_and_counts_for_nothing(leader: Lone) -> None:
    leader.change(ADD, "d")
    settle(leader, "b", "c")
    assert leader.replica.members == Members(("a", "b", "c"), ("d",))
    outcomes = leader.propose(b"x")
    settle(leader, "d")
    assert not outcomes
    assert any(message["entries"] for peer, message in leader.wire.take("append_entries") if peer == "d")
    settle(leader, "b")
    assert outcomes == [Applied(4, True)]


def test_a_list_is_committed_once_a_majority_has_it(leader: Lone) -> None:
    before = leader.replica.members
    leader.change(ADD, "d")
    leader.turn()
    assert leader.replica.members == Members(("a", "b", "c"), ("d",))
    assert leader.replica.committed_members == before
    settle(leader, "b")
    assert leader.replica.committed_members == leader.replica.members


def test_one_that_is_no_member_is_sent_nothing_and_its_word_is_nothing(leader: Lone) -> None:
    outcomes = leader.propose(b"x")
    settle(leader, "d")
    assert not outcomes
    assert {peer for peer, _ in leader.wire.take()} == {"b", "c"}


def test_a_promoted_learner_counts_before_its_promotion_is_committed(leader: Lone) -> None:
    leader.change(ADD, "d")
    settle(leader, "b", "c", "d")
    outcomes = leader.change(PROMOTE, "d")
    settle(leader, "b")
    assert not outcomes, "two of four are no majority"
    settle(leader, "d")
    assert outcomes == [Applied(4, None)]


def test_a_removed_voter_counts_no_more_before_its_removal_is_committed(leader: Lone) -> None:
    outcomes = leader.change(REMOVE, "b")
    settle(leader, "b")
    assert not outcomes
    leader.wire.take()
    settle(leader, "c")
    assert outcomes == [Applied(3, None)]
    leader.propose(b"x")
    leader.turn()
    assert {peer for peer, _ in leader.wire.take()} == {"c"}


def test_a_leader_goes_on_by_itself_when_all_others_are_removed(leader: Lone) -> None:
    leader.change(REMOVE, "b")
    settle(leader, "c")
    leader.change(REMOVE, "c")
    outcomes = leader.propose(b"x")
    settle(leader)
    assert outcomes == [Applied(5, True)]
    assert leader.replica.status().has_quorum


# -- what a leader refuses ----------------------------------------------------------------------------------


def test_no_change_before_the_leader_has_committed_an_entry_of_its_term(make: Make) -> None:
    lone = make()
    lone.lead()
    assert lone.change(ADD, "d") == [Refused(Refusal.BUSY, "a")]
    settle(lone, "b")
    assert lone.change(ADD, "d") == []


def test_one_change_at_a_time(leader: Lone) -> None:
    first = leader.change(ADD, "d")
    assert leader.change(REMOVE, "c") == [Refused(Refusal.BUSY, "a")]
    settle(leader, "b")
    assert first == [Applied(3, None)]
    assert leader.change(REMOVE, "c") == []


def test_a_learner_that_lacks_much_is_not_promoted(leader: Lone) -> None:
    leader.change(ADD, "d")
    settle(leader, "b", "c")
    assert leader.change(PROMOTE, "d") == [Refused(Refusal.BEHIND, "a")]
    leader.acknowledge("d", 3)
    assert leader.change(PROMOTE, "d") == [Refused(Refusal.BEHIND, "a")], "it does not know that it belongs"
    leader.acknowledge("d", 4)
    journal = leader.replica.store.journal
    for _ in range(PROMOTED_BEHIND_MAX + 1):
        journal.append(b"\x00", journal.last_index + 1, 1)
    assert leader.change(PROMOTE, "d") == [Refused(Refusal.BEHIND, "a")]
    leader.acknowledge("d", 5)
    assert leader.change(PROMOTE, "d") == []


def test_a_removal_that_would_leave_no_live_majority_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = established(make())
    monkeypatch.setattr(leader.replica.core, "heard_from", lambda peer: 0.0 if peer == "c" else 1e12)
    assert leader.change(REMOVE, "b") == [Refused(Refusal.BEHIND, "a")]
    assert leader.change(REMOVE, "c") == []


def test_what_makes_no_sense_is_refused_for_good(leader: Lone) -> None:
    for kind, node in ((REMOVE, "a"), (PROMOTE, "d"), (ADD, "b"), (ADD, ""), (ADD, "x" * 256)):
        assert leader.change(kind, node) == [Refused(Refusal.UNFIT, "a")], (kind, node)


def test_what_holds_already_is_told_as_done(leader: Lone) -> None:
    assert leader.change(REMOVE, "d") == leader.change(PROMOTE, "c") == [Applied(1, None)]
    leader.change(ADD, "d")
    settle(leader, "b")
    assert leader.change(ADD, "d") == [Applied(3, None)]


def test_only_a_leader_changes_anything(make: Make) -> None:
    lone = make()
    lone.hear_entries([1])
    lone.turn()
    assert lone.change(ADD, "d") == [Refused(Refusal.NOT_LEADER, "b")]
    lone.replica.stop()
    assert lone.change(ADD, "d") == [Refused(Refusal.STOPPED, None)]


def test_a_change_is_unknown_when_leadership_is_lost(leader: Lone) -> None:
    outcomes = leader.change(ADD, "d")
    leader.turn()
    leader.hear_entries([], term=9, peer="c")
    leader.turn()
    assert outcomes == [Unknown()]


# -- followers ----------------------------------------------------------------------------------------------


def test_a_followers_newest_list_counts_at_once_and_is_undone_with_its_entry(make: Make) -> None:
    lone = make()
    lone.hear_members(Members(("a", "b", "c"), ("d",)), founding("abcd"))
    assert lone.replica.members == founding("abcd")
    lone.hear_members(founding("ab"), after=(2, 1), term=2)
    assert lone.replica.members == founding("ab")
    lone.hear_entries([3], after=(1, 0), term=3, peer="c")
    assert lone.replica.members == ABC


def test_one_that_joins_belongs_to_nothing_until_it_is_told(make: Make) -> None:
    lone = make(founders=None)
    assert lone.replica.members == Members()
    lone.hear_members(ABC, Members(("b", "c"), ("a",)))
    assert lone.replica.members == Members(("b", "c"), ("a",))
    lone.hear_entries([2], after=(1, 0), term=2, peer="c")
    assert lone.replica.members == Members(), "what it was told is undone"


# -- what survives ------------------------------------------------------------------------------------------


def reopened(lone: Lone, tmp_path: Path, number: int, **named: object) -> Lone:
    lone.crash()
    return Lone(tmp_path / str(number), **named)  # type: ignore[arg-type]


def test_the_members_survive_a_restart_and_founders_matter_no_more(make: Make, tmp_path: Path) -> None:
    lone = make()
    lone.hear_members(Members(("a", "b", "c"), ("d",)))
    lone.turn()
    again = reopened(lone, tmp_path, 0, peers="xyz", founders=None)
    assert again.replica.members == Members(("a", "b", "c"), ("d",))
    again.crash()


def test_the_members_survive_in_a_snapshot_when_their_entry_is_gone(make: Make, tmp_path: Path) -> None:
    lone = make(peers=())
    for _ in range(3):
        lone.turn()
    lone.change(ADD, "d")
    lone.grow(60)
    assert lone.replica.store.journal.first_index > 3
    assert lone.replica.store.members.at(2) is None, "what is covered is forgotten"
    assert read_head(tmp_path / "0" / "snapshot").members == Members(("a",), ("d",))
    again = reopened(lone, tmp_path, 0)
    assert again.replica.members == Members(("a",), ("d",))
    again.crash()


def test_a_snapshot_carries_the_members_as_they_were_at_its_last_entry(make: Make, tmp_path: Path) -> None:
    lone = make(limits=replace(SMALL, in_flight_max=100))
    lone.lead()
    settle(lone, "b")
    for number in range(SMALL.compact_entries):
        lone.propose(b"%d" % number)
    lone.turn()
    lone.change(ADD, "d")
    lone.turn()
    lone.acknowledge("b", lone.replica.store.journal.last_index)
    lone.turn()
    assert lone.jobs.busy()
    lone.take_in()
    assert read_head(tmp_path / "0" / "snapshot").members == ABC
    assert lone.replica.members == Members(("a", "b", "c"), ("d",))
    again = reopened(lone, tmp_path, 0)
    assert again.replica.members == Members(("a", "b", "c"), ("d",))
    again.crash()


def test_a_snapshot_on_its_way_to_one_that_is_removed_is_given_up(make: Make) -> None:
    lone = make(peers=())
    lone.grow(60)
    lone.replica.peer_up("d")
    lone.change(ADD, "d")
    lone.wire.free = 0
    lone.turn()
    lone.acknowledge("d", 2, success=False, reset=True)
    lone.propose(b"y")
    settle(lone)
    assert lone.replica._sender.transferring
    lone.change(REMOVE, "d")
    assert not lone.replica._sender.transferring


def test_an_installed_snapshot_brings_its_members(make: Make, tmp_path: Path) -> None:
    lone = make(founders=None)
    lone.hear_snapshot(snapshot_of(tmp_path, 9, 1, "bcd", "a"), 9)
    lone.take_in()
    assert lone.replica.members == Members(("b", "c", "d"), ("a",))
    again = reopened(lone, tmp_path, 0, founders=None)
    assert again.replica.members == Members(("b", "c", "d"), ("a",))
    again.crash()


def test_one_that_joins_makes_no_snapshot_before_it_knows_the_members(make: Make) -> None:
    lone = make(founders=None)
    count = SMALL.compact_entries + 5
    lone.hear_entries([1] * count, commit=count + 1)
    lone.turn()
    assert (lone.machine.count, lone.jobs.started) == (count, 0)
    lone.hear_members(Members(("b", "c"), ("a",)), after=(count + 1, 1), commit=count + 2)
    lone.turn()
    assert lone.jobs.started == 1


# -- status, handing over -----------------------------------------------------------------------------------


def test_a_leader_tells_how_far_each_member_is_behind(leader: Lone) -> None:
    leader.change(ADD, "d")
    settle(leader, "b")
    leader.acknowledge("d", 3)
    status = leader.replica.status()
    assert (status.voters, status.learners) == (("a", "b", "c"), ("d",))
    assert status.behind == {"b": 0, "c": 1, "d": 1}


def test_leadership_goes_only_to_a_connected_voter_that_has_everything(leader: Lone) -> None:
    leader.change(ADD, "d")
    settle(leader, "b", "d")
    leader.wire.take()
    assert not leader.replica.hand_over("d"), "a learner"
    assert not leader.replica.hand_over("c"), "it lacks the last entry"
    assert not leader.replica.hand_over("a")
    assert not leader.replica.hand_over("x")
    assert leader.wire.take() == []
    assert leader.replica.hand_over("b")
    assert [peer for peer, message in leader.wire.take("timeout_now")] == ["b"]
    assert leader.replica.hand_over()
    assert [peer for peer, message in leader.wire.take("timeout_now")] == ["b"]
    leader.replica.peer_down("b")
    assert not leader.replica.hand_over()


def test_a_follower_hands_nothing_over(make: Make) -> None:
    lone = make()
    assert not lone.replica.hand_over()
