"""Each rule that closes a hole of the library: these fail when the rule is taken away."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from photon.raft.follower import HeldAcks
from photon.raft.port import Applied, Members, Unknown
from photon.raft.rules.codec import MessageError, SnapshotPiece
from photon.raft.rules.guards import Conflict, conflict_start, fit, next_index_of
from photon.raft.rules.members import command_of
from photon.raft.snapshot import SnapshotId
from tests.raft.kit import SMALL, Lone, Make, regular, snapshot_of


def acks(lone: Lone, peer: str = "b") -> list[dict[str, object]]:
    return [message for to, message in lone.wire.take("next_node_idx") if to == peer]


def test_s1_a_piece_of_a_snapshot_commits_nothing_of_the_log_it_finds(lone: Lone, tmp_path: Path) -> None:
    """An old leader's own conflicting entries must not pass for committed while a snapshot comes in."""
    lone.hear_entries([1, 1, 1], commit=1)
    lone.hear_snapshot(snapshot_of(tmp_path, 50, 2), 50, 2, end=10, term=2, commit=60)
    lone.turn()
    assert lone.replica.core.commit_index == 1
    assert lone.machine.count == 0


def test_s2_a_repeated_message_never_truncates_what_matches(lone: Lone) -> None:
    lone.hear_entries([1, 1, 1, 1])
    lone.turn()
    assert acks(lone)[-1]["next_node_idx"] == 6
    lone.hear_entries([1])
    lone.turn()
    assert lone.terms() == [1, 1, 1, 1]
    # Only what the message has shown to match is acknowledged.
    assert acks(lone)[-1] == {
        "type": "next_node_idx",
        "term": 1,
        "next_node_idx": 3,
        "reset": False,
        "success": True,
    }


def test_s2_a_heartbeat_commits_no_further_than_it_has_compared(lone: Lone) -> None:
    lone.hear_entries([1, 1, 1, 1])
    lone.hear_entries([], after=(2, 1), term=2, commit=5, peer="c")
    lone.turn()
    assert lone.replica.core.commit_index == 2


def test_s2_a_conflicting_tail_is_replaced_from_where_it_conflicts(lone: Lone) -> None:
    lone.hear_entries([1, 1, 1, 1])
    lone.hear_entries([1, 2, 2], after=(2, 1), term=2, commit=1, peer="c")
    lone.turn()
    assert lone.terms() == [1, 1, 2, 2]
    assert acks(lone, "c")[-1]["next_node_idx"] == 6


def test_a_message_from_before_the_log_is_judged_by_what_is_committed(lone: Lone) -> None:
    lone.hear_entries([1, 1, 1, 1], commit=4)
    lone.hear_entries([1, 1, 1, 1, 1], commit=4, after=(1, 1))
    lone.turn()
    assert lone.terms() == [1, 1, 1, 1, 1]


def test_s3_an_acknowledgement_of_another_term_does_not_count(lone: Lone) -> None:
    term = lone.lead()
    outcomes = lone.propose(b"x")
    lone.turn()
    lone.acknowledge("b", 99, term=term - 1)
    lone.turn()
    lone.turn()
    assert not outcomes
    lone.acknowledge("b", 4)
    lone.turn()
    assert outcomes == [Applied(3, True)]


def test_s9_an_older_snapshot_never_replaces_what_is_committed(lone: Lone, tmp_path: Path) -> None:
    lone.hear_entries([1, 1, 1, 1], commit=5)
    lone.turn()
    before = dict(lone.machine.tokens)
    acks(lone)
    lone.hear_snapshot(snapshot_of(tmp_path, 4), 4, commit=5)
    lone.take_in()
    assert lone.machine.tokens == before
    assert lone.replica.store.snapshots.current is None
    # The leader learns that it need not send the rest.
    assert acks(lone)[-1]["next_node_idx"] == 6


def test_an_installed_snapshot_keeps_the_matching_tail_of_the_log(lone: Lone, tmp_path: Path) -> None:
    lone.hear_entries([1, 1, 1, 1], commit=1)
    lone.turn()
    acks(lone)
    lone.hear_snapshot(snapshot_of(tmp_path, 3), 3)
    lone.take_in()
    assert [index for _, index, _ in lone.replica.store.journal.entries] == [3, 4, 5]
    assert acks(lone)[-1]["next_node_idx"] == 4
    assert lone.machine.tokens[b"snap3"] == 3


def test_an_installed_snapshot_replaces_a_log_that_conflicts_with_it(lone: Lone, tmp_path: Path) -> None:
    lone.hear_entries([1, 1, 1, 1], commit=1)
    lone.hear_snapshot(snapshot_of(tmp_path, 3, 2), 3, 2, term=2)
    lone.take_in()
    assert [(index, term) for _, index, term in lone.replica.store.journal.entries] == [(3, 2)]
    assert acks(lone)[-1]["next_node_idx"] == 4


def test_a_damaged_snapshot_replaces_nothing(
    lone: Lone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone.hear_entries([1, 1], commit=1)
    data = bytearray(snapshot_of(tmp_path, 9))
    data[-20] ^= 1
    with caplog.at_level("WARNING"):
        lone.hear_snapshot(bytes(data), 9)
        lone.take_in()
    assert lone.replica.store.snapshots.current is None
    assert lone.terms() == [1, 1]
    assert not acks(lone)[-1]["success"]
    (told,) = [line for line in caplog.messages if "damaged on its way" in line]
    assert "asked for again" in told
    assert "replace this node" not in told, "its own disk is good"


def test_a_snapshot_that_misses_a_piece_is_asked_for_again(lone: Lone, tmp_path: Path) -> None:
    data = snapshot_of(tmp_path, 9)
    half = len(data) // 2
    lone.hear_snapshot(data, 9, end=half)
    lone.hear_snapshot(data, 9, begin=half + 1)
    lone.take_in()
    assert lone.replica.store.snapshots.current is None
    for begin, end in ((0, half), (half, half), (half, len(data))):
        lone.hear_snapshot(data, 9, begin=begin, end=end)
    lone.take_in()
    assert lone.replica.store.snapshots.current == SnapshotId(9, 1)


def test_l1_a_divergent_follower_sends_the_leader_back_to_the_start_of_the_conflict(lone: Lone) -> None:
    lone.hear_entries([1] + [2] * 8, term=2)
    lone.turn()
    acks(lone)
    lone.hear_entries([], after=(9, 3), term=3, peer="c")
    lone.turn()
    assert [(ack["reset"], ack["next_node_idx"]) for ack in acks(lone, "c")] == [(True, 3)]


def test_l1_backing_off_never_bounces_forward(lone: Lone) -> None:
    """Of several refused messages under way, a later one (past the log's end) must not undo the earlier
    hint.
    """
    lone.hear_entries([1] + [2] * 8, term=2)
    lone.turn()
    acks(lone)
    lone.hear_entries([], after=(9, 3), term=3, peer="c")
    lone.hear_entries([], after=(40, 3), term=3, peer="c")
    lone.turn()
    assert [ack["next_node_idx"] for ack in acks(lone, "c")] == [3, 3]


def test_a_vote_counts_once_a_voter(make: Make) -> None:
    lone = make(peers="bcde")
    lone.stand()
    term = lone.replica.core.term
    for _ in range(3):
        lone.hear("b", type="response_vote", term=term)
    assert not lone.replica.is_leader
    lone.hear("c", type="response_vote", term=term)
    assert lone.replica.is_leader


def test_a_vote_is_on_disk_before_it_is_given(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.hear("b", type="request_vote", term=5, last_log_index=1, last_log_term=0)
    assert lone.wire.take("response_vote") == [("b", {"type": "response_vote", "term": 5})]
    lone.crash()
    again = Lone(tmp_path)
    again.hear("c", type="request_vote", term=5, last_log_index=9, last_log_term=4)
    again.turn()
    assert again.wire.take("response_vote") == []
    again.crash()


def test_entries_are_acknowledged_only_once_they_are_synced(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.hear_entries([1, 1])
    lone.replica.tick()
    assert lone.wire.take("next_node_idx") == []
    lone.crash()
    again = Lone(tmp_path)
    assert again.terms() == []
    again.hear_entries([1, 1])
    again.turn()
    assert len(again.wire.take("next_node_idx")) == 1
    again.crash()
    third = Lone(tmp_path)
    assert third.terms() == [1, 1]
    third.crash()


def test_a_leader_counts_itself_only_for_what_it_has_synced(make: Make) -> None:
    lone = make(peers="bc")
    lone.lead()
    outcomes = lone.propose(b"x")
    lone.replica.tick()
    lone.acknowledge("b", 4)
    order: list[str] = []
    journal, machine = lone.replica.store.journal, lone.machine
    sync, apply = journal.sync, machine.apply
    journal.sync = lambda: (order.append("sync"), sync())[1]  # type: ignore[method-assign]
    machine.apply = lambda body: (order.append("apply"), apply(body))[1]  # type: ignore[method-assign]
    lone.replica.tick()
    assert order[:2] == ["sync", "apply"]
    assert outcomes == [Applied(3, True)]


def test_an_acknowledgement_does_not_make_the_leader_send_again_what_is_under_way(lone: Lone) -> None:
    lone.lead()
    for number in range(3):
        lone.propose(b"x%d" % number)
        lone.turn()
    lone.wire.take()
    lone.acknowledge("b", 3)
    lone.turn()
    lone.propose(b"y")
    lone.turn()
    sent = [message for peer, message in lone.wire.take("append_entries") if peer == "b"]
    assert [[index for _, index, _ in message["entries"]] for message in sent] == [[6]]


def test_a_lost_connection_makes_the_leader_ask_anew(lone: Lone) -> None:
    lone.lead()
    lone.acknowledge("b", 3)
    lone.propose(b"x")
    lone.turn()
    lone.replica.peer_down("b")
    lone.replica.peer_up("b")
    assert lone.replica.core.match_index("b") == 0
    lone.wire.take()
    lone.turn()
    lone.acknowledge("b", 3, success=False, reset=True)
    lone.propose(b"y")
    lone.turn()
    sent = [message for peer, message in lone.wire.take("append_entries") if peer == "b"]
    assert [index for _, index, _ in sent[-1]["entries"]] == [3, 4]


def test_waiting_proposals_are_unknown_as_soon_as_leadership_is_lost(lone: Lone) -> None:
    term = lone.lead()
    outcomes = lone.propose(b"x")
    lone.turn()
    lone.hear_entries([], term=term + 1, peer="c")
    lone.turn()
    assert outcomes == [Unknown()]
    assert lone.replica.in_flight == 0


def test_nothing_of_a_message_with_a_bad_list_of_members_is_taken(lone: Lone) -> None:
    lone.hear_entries([1, 1])
    cut = command_of(Members(("a", "b")))[:-1]
    with pytest.raises(MessageError):
        lone.hear_commands((regular(3), 2), (cut, 2), after=(2, 1), term=2, peer="c")
    lone.turn()
    assert (lone.terms(), lone.replica.core.term) == ([1, 1], 1)


def test_entries_of_a_term_before_what_is_committed_are_refused(lone: Lone) -> None:
    lone.hear_entries([1, 2, 2], term=2, commit=4)
    with pytest.raises(MessageError, match="committed"):
        lone.hear_entries([1, 1, 1, 1], term=2, after=(1, 0))
    assert lone.terms() == [1, 2, 2]


def test_a_snapshot_of_more_bytes_than_any_may_have_is_refused(make: Make) -> None:
    lone = make(limits=replace(SMALL, snapshot_bytes_max=500))
    for total, refused in ((500, False), (501, True)):
        piece = SnapshotPiece(9, 1, 0, total, b"x")
        with pytest.raises(MessageError, match="snapshot_bytes_max = 500") if refused else nullcontext():
            lone.hear("b", type="append_entries", term=1, commit_index=9, serialized=piece)


class View:
    """A log as the rules see it."""

    def __init__(self, first: int, terms: list[int]) -> None:
        self.first_index = first
        self.last_index = first + len(terms) - 1
        self._terms = terms

    def term_at(self, index: int) -> int | None:
        at = index - self.first_index
        return self._terms[at] if 0 <= at < len(self._terms) else None


def test_nothing_that_is_committed_is_ever_compared_or_cut() -> None:
    log = View(10, [1, 1, 1, 2, 2])
    message = {
        "prevLogIdx": 5,
        "prevLogTerm": 1,
        "commit_index": 20,
        "entries": [(b"", at, 9) for at in range(6, 16)],
    }
    fitted = fit(log, 12, message)
    assert fitted.message["prevLogIdx"] == 12
    assert [index for _, index, _ in fitted.message["entries"]] == [13, 14, 15]
    assert conflict_start(log, 12, 14) == 13
    assert conflict_start(log, 12, 99) is None


def test_a_conflict_of_another_term_is_forgotten() -> None:
    conflict = Conflict()
    conflict.note(3, 10)
    assert (conflict.bound(3, 40), conflict.bound(4, 40)) == (10, 40)
    conflict.note(3, 20)
    assert conflict.bound(3, 40) == 10
    conflict.note(4, 20)
    assert conflict.bound(4, 40) == 20
    conflict.clear()
    assert conflict.bound(4, 40) == 40


def test_an_acknowledgement_points_into_the_log() -> None:
    assert [next_index_of(acked, 10) for acked in (0, 1, 2, 11, 12, 1 << 63)] == [2, 2, 2, 11, 11, 11]


def test_held_acknowledgements_are_cumulative_within_a_term_alone() -> None:
    acks = HeldAcks()

    def hold(term: int, next_index: int, success: bool = True) -> None:
        acks.hold("b", {"term": term, "next_node_idx": next_index, "success": success})

    hold(1, 9)
    hold(1, 7)  # a message that was repeated
    hold(3, 5)
    hold(3, 4, success=False)
    hold(3, 6)
    told = [(ack["term"], ack["next_node_idx"], ack["success"]) for ack in acks.take()["b"]]
    assert told == [(1, 9, True), (3, 5, True), (3, 4, False), (3, 6, True)]
    assert acks.take() == {}
