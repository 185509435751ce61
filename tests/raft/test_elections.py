"""Who may lead: nobody is disturbed by one that was cut off, was removed, or only learns."""

import errno
from pathlib import Path

import pytest

from photon.core import disk
from photon.core.errors import StorageError
from photon.raft.port import ChangeKind, Members
from photon.raft.rules.members import is_majority
from tests.raft.kit import TIMING, Lone, Make, VirtualClock


def ask_vote(
    lone: Lone, peer: str, term: int, last: tuple[int, int] = (9, 9), transfer: bool = False
) -> bool:
    """Whether it votes for the peer, whose log ends with this (index, term)."""
    index, last_term = last
    lone.hear(
        peer, type="request_vote", term=term, last_log_index=index, last_log_term=last_term, transfer=transfer
    )
    return bool(lone.wire.take("response_vote"))


def ask_pre_vote(lone: Lone, peer: str, term: int = 1, last: tuple[int, int] = (9, 9)) -> bool:
    index, last_term = last
    lone.hear(
        peer, type="request_pre_vote", term=term, round=7, last_log_index=index, last_log_term=last_term
    )
    return [message["round"] for _, message in lone.wire.take("response_pre_vote")] == [7]


def test_asking_raises_no_term_and_casts_no_vote(make: Make) -> None:
    lone = make()
    lone.pre_vote()
    assert {peer for peer, _ in lone.wire.take("request_pre_vote")} == {"b", "c"}
    assert (lone.replica.core.term, lone.replica.store.hard_state.vote) == (0, None)
    assert lone.wire.take("request_vote") == []


def test_a_replica_that_is_cut_off_keeps_its_term_however_long(make: Make, clock: VirtualClock) -> None:
    lone = make()
    for _ in range(50):
        clock.at += TIMING.election_s_max
        lone.turn()
    assert lone.replica.core.term == 0
    assert len(lone.wire.take("request_pre_vote")) > 50


def test_a_majority_that_would_vote_starts_the_election(make: Make) -> None:
    lone = make(peers="bcde")
    lone.stand("b")
    assert lone.replica.core.term == 0
    lone.stand("b", "c")
    assert lone.replica.core.term == 1
    assert {peer for peer, _ in lone.wire.take("request_vote")} == set("bcde")


def test_an_answer_to_an_earlier_question_does_not_count(make: Make) -> None:
    lone = make()
    lone.pre_vote()
    lone.pre_vote()
    lone.granted("b")
    assert lone.replica.core.term == 0
    lone.granted("b", 2)
    assert lone.replica.core.term == 1


def test_a_leader_that_speaks_ends_the_asking(make: Make) -> None:
    lone = make()
    lone.pre_vote()
    lone.hear_entries([], term=3, peer="c")
    lone.granted("b")
    assert (lone.replica.core.term, lone.replica.leader) == (3, "c")


def test_who_has_voted_for_another_stands_no_more_on_an_earlier_question(make: Make) -> None:
    """On slow links the answers come after the vote: standing on them would depose who was just voted for."""
    lone = make()
    lone.pre_vote()
    assert ask_vote(lone, "c", term=1)
    lone.granted("b")
    assert (lone.replica.core.term, lone.wire.take("request_vote")) == (1, [])


def test_a_vote_that_is_not_given_ends_no_asking(make: Make) -> None:
    lone = make()
    lone.pre_vote()
    assert not ask_vote(lone, "c", term=1, last=(0, 0))
    lone.granted("b")
    assert {peer for peer, _ in lone.wire.take("request_vote")} == {"b", "c"}


def test_neither_a_stranger_nor_a_learner_helps_to_win(make: Make) -> None:
    lone = make(peers="bc")
    lone.hear_members(Members(("a", "b", "c"), ("d",)))
    lone.turn()
    lone.pre_vote()
    for helper in "dx":
        lone.granted(helper, term=1)
    assert lone.replica.core.term == 1
    lone.granted("b", term=1)
    assert lone.replica.core.term == 2
    for helper in "dx":
        lone.hear(helper, type="response_vote", term=2)
    assert not lone.replica.is_leader
    lone.hear("c", type="response_vote", term=2)
    assert lone.replica.is_leader


def test_a_vote_is_handed_on_when_it_is_on_disk_and_never_where_it_can_not_be_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone, stored = make(), list[tuple[int, str | None]]()
    state = lone.replica.store.hard_state
    real = lone.wire.send
    monkeypatch.setattr(
        lone.wire, "send", lambda *sent: (stored.append((state.term, state.vote)), real(*sent))
    )
    assert ask_vote(lone, "c", term=8)
    assert stored == [(8, "c")]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(disk, "write_file", full)
    with pytest.raises(StorageError):
        ask_vote(lone, "b", term=9)
    assert not lone.wire.take("response_vote")


def test_a_late_vote_of_an_earlier_term_has_none_of_this_one_counted_twice(make: Make) -> None:
    lone = make(peers="bcde")
    lone.stand("b", "c")
    term = lone.replica.core.term
    for helper, its in (("b", term), ("c", term - 1), ("b", term)):
        lone.hear(helper, type="response_vote", term=its)
    assert not lone.replica.is_leader
    lone.hear("c", type="response_vote", term=term)
    assert lone.replica.is_leader


def test_who_hears_a_live_leader_grants_nothing_and_its_term_stays(make: Make, clock: VirtualClock) -> None:
    lone = make()
    lone.hear_entries([1])
    assert not ask_pre_vote(lone, "c")
    assert not ask_vote(lone, "c", term=8)
    assert lone.replica.core.term == 1
    clock.at += TIMING.election_s_min
    assert ask_pre_vote(lone, "c")
    assert ask_vote(lone, "c", term=8)
    assert lone.replica.core.term == 8


def test_a_leader_is_not_deposed_by_asking(make: Make) -> None:
    lone = make()
    term = lone.lead()
    assert not ask_pre_vote(lone, "c")
    assert not ask_vote(lone, "c", term=term + 5)
    assert (lone.replica.is_leader, lone.replica.core.term) == (True, term)


def test_one_that_has_just_started_hears_a_leader_out_before_it_votes(
    tmp_path: Path, clock: VirtualClock
) -> None:
    lone = Lone(tmp_path, has_listened=False)
    assert ask_vote(lone, "c", term=8), "of a group that nobody has led there is nobody to hear"
    lone.crash()
    lone = Lone(tmp_path, has_listened=False)
    assert not ask_vote(lone, "c", term=9)
    clock.at += TIMING.election_s_min
    assert ask_vote(lone, "c", term=9)
    lone.crash()


@pytest.mark.parametrize(("other", "is_next"), [("c", True), ("A", False)])
def test_when_the_leader_is_gone_one_stands_at_once_and_others_soon(
    make: Make, clock: VirtualClock, other: str, is_next: bool
) -> None:
    lone = make(peers=("b", other), founders=("b", "a", other))
    lone.hear_entries([1], peer="b")
    lone.turn()
    assert not ask_pre_vote(lone, other)
    lone.replica.peer_down("b")
    assert ask_pre_vote(lone, other)
    lone.turn()
    assert bool(lone.wire.take("request_pre_vote")) is is_next
    clock.at += TIMING.election_s_max - TIMING.election_s_min
    lone.turn()
    assert [peer for peer, _ in lone.wire.take("request_pre_vote")] == [other]


def test_a_follower_that_is_gone_says_nothing_of_the_leader(make: Make, clock: VirtualClock) -> None:
    lone = make()
    lone.hear_entries([1], peer="b")
    lone.turn()
    lone.replica.peer_down("c")
    clock.at += 0.9 * TIMING.election_s_min
    lone.turn()
    assert not lone.wire.take("request_pre_vote")
    assert not ask_pre_vote(lone, "c")


def test_a_log_that_lacks_something_moves_nothing(make: Make, clock: VirtualClock) -> None:
    lone = make()
    lone.hear_entries([1, 1])
    clock.at += TIMING.election_s_min
    for behind in ((2, 1), (99, 0)):
        assert not ask_pre_vote(lone, "c", last=behind)
        assert not ask_vote(lone, "c", term=8, last=behind)
    assert lone.replica.core.term == 1
    assert ask_vote(lone, "c", term=8, last=(3, 1))


def test_a_blank_replica_never_votes_never_stands_and_never_leads(make: Make, clock: VirtualClock) -> None:
    lone = make(founders=None)
    assert not ask_pre_vote(lone, "b")
    assert not ask_vote(lone, "b", term=5)
    for _ in range(5):
        clock.at += TIMING.election_s_max
        lone.turn()
    lone.hear_entries([], term=3)
    lone.hear("b", type="timeout_now", term=3)
    lone.turn()
    assert lone.wire.take("request_pre_vote") == lone.wire.take("request_vote") == []
    assert not lone.replica.is_leader
    assert lone.replica.core.term == 3


def test_a_learner_never_stands_but_votes_where_it_is_asked(make: Make, clock: VirtualClock) -> None:
    """It may not have come yet to the entry that made it a voter, and be needed."""
    lone = make(founders=None)
    lone.hear_members(Members(("b", "c"), ("a",)))
    lone.turn()
    lone.hear("b", type="timeout_now", term=1)
    lone.turn()
    clock.at += TIMING.election_s_max
    lone.turn()
    assert lone.wire.take("request_pre_vote") == []
    assert ask_vote(lone, "c", term=2)


def test_the_highest_term_of_those_asked_is_taken_over(make: Make) -> None:
    """Else an election would fail for each term that the others are ahead."""
    lone = make()
    lone.pre_vote()
    lone.granted("b", term=40)
    assert {message["term"] for _, message in lone.wire.take("request_vote")} == {41}


def test_a_leader_that_hands_over_has_its_successor_elected_at_once(make: Make) -> None:
    lone = make()
    lone.hear_entries([1])
    lone.hear("b", type="timeout_now", term=1)
    lone.turn()
    asked = lone.wire.take("request_vote")
    assert [(message["term"], message["transfer"]) for _, message in asked] == [(2, True), (2, True)]
    assert ask_vote(make(), "b", term=9, transfer=True)


def test_a_successor_is_voted_for_though_the_leader_lives(make: Make) -> None:
    lone = make()
    lone.hear_entries([1])
    assert ask_vote(lone, "c", term=2, transfer=True)


def test_only_the_leader_can_hand_over(make: Make) -> None:
    lone = make()
    lone.hear_entries([1])
    lone.hear("c", type="timeout_now", term=1)
    lone.turn()
    assert lone.wire.take("request_vote") == []
    lone.stand()
    asked = lone.wire.take("request_vote")
    assert {message["transfer"] for _, message in asked} == {False}, "it must not pass for a successor later"


def test_a_hand_over_that_its_connection_did_not_survive_is_off(make: Make, clock: VirtualClock) -> None:
    lone = make()
    lone.hear_entries([1])
    lone.hear("b", type="timeout_now", term=1)
    for peer in "bc":
        lone.replica.peer_down(peer)
    lone.turn()
    for peer in "bc":
        lone.replica.peer_up(peer)
    lone.turn()
    assert lone.wire.take("request_vote") == []


def test_one_in_a_later_term_tells_the_leader_which_rises_to_it(make: Make, clock: VirtualClock) -> None:
    """Else it could never follow again: its term is too high for the leader, and nobody votes for it."""
    ahead = make()
    assert ask_vote(ahead, "c", term=8)
    ahead.hear_entries([1], term=1)
    ahead.turn()
    ((peer, told),) = ahead.wire.take("next_node_idx")
    assert (peer, told["term"], told["success"]) == ("b", 8, False)
    leader = make()
    leader.lead()
    leader.hear("x", **told)
    assert leader.replica.is_leader, "of a stranger it takes no word"
    leader.hear("b", **told)
    assert not leader.replica.is_leader
    assert leader.replica.core.term == leader.replica.store.hard_state.term == 8


def test_a_removed_replica_does_not_stand(make: Make, clock: VirtualClock) -> None:
    lone = make()
    lone.hear_members(Members(("b", "c")))
    clock.at += TIMING.election_s_max
    lone.turn()
    assert lone.wire.take("request_pre_vote") == []


def test_one_replica_that_voted_itself_alone_adds_others_and_goes_on(make: Make) -> None:
    lone = make(peers=())
    lone.turn()
    assert lone.replica.is_leader
    lone.turn()
    lone.turn()
    assert lone.change(ChangeKind.ADD_LEARNER, "b") == []
    assert lone.replica.members == Members(("a",), ("b",))


def test_majorities() -> None:
    assert [is_majority(count, 4) for count in (2, 3)] == [False, True]
