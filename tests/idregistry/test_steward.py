"""Where a group's members and leader belong, and the steps that bring them there."""

import pytest

from idregistry.rules.commands import Cancel, Found, Replace
from idregistry.rules.directory import DirectoryState, View
from idregistry.rules.steward import Steward, change_due, is_replaced, successor
from photon.core.clock import ManualClock
from photon.core.settings import MAIN_SET
from photon.raft.port import Change, ChangeKind, Members, Status
from tests.idregistry.fake_log import FakeLog
from tests.idregistry.kit import NOW_US, ROWS, directory, row

ADD, PROMOTE, REMOVE = ChangeKind


FOUND = Found(NOW_US, 2, ROWS, bytes(16))


def view(replacing: tuple[str, str] | None = None) -> View:
    replaced = [] if replacing is None else [Replace(NOW_US, replacing[0], row(replacing[1]))]
    return directory(FOUND, *replaced).view


def status(node: str, voters: tuple[str, ...], behind: dict[str, int]) -> Status:
    return Status(1, node, node, True, 1, 9, 9, 9, True, voters, (), behind)


@pytest.mark.parametrize(
    ("voters", "learners", "behind", "due"),
    [
        ("r0 r1 r2", "", {}, Change(ADD, "r3")),
        ("r0 r1 r2", "r3", {}, None),
        ("r0 r1 r2", "r3", {"r3": 50_000}, None),
        ("r0 r1 r2", "r3", {"r3": 3}, Change(PROMOTE, "r3")),
        ("r0 r1 r2 r3", "", {}, Change(REMOVE, "r1")),
        ("r0 r2 r3", "", {}, None),
        ("r0 r2 r3", "r1", {"r1": 0}, Change(REMOVE, "r1")),
    ],
)
def test_the_new_one_learns_then_votes_then_the_old_one_goes(
    voters: str, learners: str, behind: dict[str, int], due: Change | None
) -> None:
    members = Members(tuple(voters.split()), tuple(learners.split()))
    assert change_due(members, ("r0", "r2", "r3"), "r0", behind) == due


def test_a_leader_that_must_go_hands_over_instead_of_removing_itself() -> None:
    members = Members(("r0", "r1", "r2", "r3"))
    assert change_due(members, ("r1", "r2", "r3"), "r0", {}) is None
    leaving = view(("r0", "r3")).staying(MAIN_SET)
    assert successor(0, status("r0", members.voters, {"r1": 0, "r2": 8}), leaving, ()) == "r1"
    assert successor(0, status("r0", members.voters, {"r1": 9, "r2": 8}), leaving, ()) == "r2", (
        "r1 has nothing"
    )


def test_shards_are_led_in_turn_or_by_those_preferred() -> None:
    def leads(turn: int, leaders: tuple[str, ...] = ()) -> str:
        near = dict.fromkeys(("r0", "r1", "r2"), 0)
        return (
            successor(turn, status("r9", ("r0", "r1", "r2", "r9"), near), view().staying(MAIN_SET), leaders)
            or "r9"
        )

    assert [leads(turn) for turn in range(4)] == ["r0", "r1", "r2", "r0"]
    assert [leads(turn, ("r2", "r1")) for turn in range(3)] == ["r2", "r1", "r2"]
    assert leads(1, ("elsewhere",)) == "r1"


@pytest.mark.parametrize("behind", [{}, {"r1": 100_000}, {"r1": 9}])
def test_a_preferred_replica_that_is_away_or_far_behind_is_not_waited_for(behind: dict[str, int]) -> None:
    assert successor(1, status("r0", ("r0", "r1", "r2"), behind), view().staying(MAIN_SET), ()) is None


def test_a_replica_is_gone_when_no_group_has_it() -> None:
    done, not_yet = Members(("r0", "r2", "r3")), Members(("r0", "r1", "r2"), ("r3",))
    assert is_replaced([done], done, ("r1", "r3"), MAIN_SET)
    assert not is_replaced([not_yet], done, ("r1", "r3"), MAIN_SET)
    assert not is_replaced([done], not_yet, ("r1", "r3"), MAIN_SET)
    assert not is_replaced([Members(("r0", "r2"))], done, ("r1", "r3"), MAIN_SET)


def test_one_of_another_set_is_gone_when_neither_its_shards_nor_the_directory_have_it() -> None:
    done = Members(("s0", "s2", "s3"))
    assert is_replaced([done], Members(("r0", "r1", "r2"), ("s0", "s2")), ("s1", "s3"), "b")
    assert not is_replaced([done], Members(("r0", "r1", "r2"), ("s0", "s1", "s2")), ("s1", "s3"), "b")


def test_replicas_of_other_sets_follow_and_never_vote() -> None:
    members, voters = Members(("r0", "r1", "r2"), ("s0",)), ("r0", "r1", "r2")
    assert change_due(members, voters, "r0", {"s0": 0}, ("s0", "s1")) == Change(ADD, "s1")
    assert change_due(members, voters, "r0", {"s0": 0}, ("s0",)) is None
    assert change_due(members, voters, "r0", {"s0": 0}, ()) == Change(REMOVE, "s0")
    new = Members(("r0", "r1", "r2"), ("r3", "s0"))
    assert change_due(new, ("r0", "r2", "r3"), "r0", {"s0": 0, "r3": 0}, ("s0",)) == Change(PROMOTE, "r3")


class Group:
    """A steward on a fake log that is led by r0."""

    def __init__(self, shard: int | None = 1) -> None:
        self.clock = ManualClock()
        self.log = FakeLog(DirectoryState(), of_group=Members(("r0", "r1", "r2")), behind={"r1": 5, "r2": 0})
        self.log._index = 5_000
        self.steward = Steward(shard, (), self.clock)

    def runs(self, seconds: float, of: View) -> bool:
        """Whether proposals went on all the time."""
        going_on = True
        for _ in range(round(seconds * 20)):
            self.clock.advance(0.05)
            going_on &= self.steward.on_tick(self.log, of)
        return going_on


def test_leadership_goes_to_the_preferred_replica_when_it_has_everything() -> None:
    group = Group()
    assert group.runs(4.0, view())
    assert group.log.handed_to[0] == "r1"


def test_proposals_wait_for_the_successor_for_a_moment_only_and_it_is_tried_again_much_later() -> None:
    group = Group()
    group.log.ready = False
    held = [not group.runs(0.05, view()) for _ in range(200)]
    assert 0 < sum(held) <= 2 * 7, "not more than 0.3 s in five seconds"
    group.log.ready = True
    group.runs(6.0, view())
    assert group.log.handed_to == ["r1"]


def test_who_does_not_lead_does_nothing() -> None:
    group = Group()
    group.log.lose_leadership("r2")
    assert group.runs(10.0, view(("r1", "r3")))
    assert (group.log.changes, group.log.handed_to) == ([], [])


def test_a_replacement_is_taken_through_all_its_steps() -> None:
    group = Group(None)
    group.log.behind["r3"] = 10
    group.runs(5.0, view(("r1", "r3")))
    assert group.log.changes == [Change(ADD, "r3"), Change(PROMOTE, "r3"), Change(REMOVE, "r1")]
    assert group.log.members == Members(("r0", "r2", "r3"))


@pytest.mark.parametrize(
    ("members", "due"),
    [
        (Members(("r0", "r1", "r2"), ("r3",)), [Change(REMOVE, "r3")]),
        (Members(("r0", "r1", "r2", "r3")), [Change(REMOVE, "r3")]),
        (Members(("r0", "r2", "r3")), [Change(ADD, "r1"), Change(PROMOTE, "r1"), Change(REMOVE, "r3")]),
    ],
)
def test_a_cancelled_replacement_goes_back_through_its_steps(members: Members, due: list[Change]) -> None:
    cancelled = directory(FOUND, Replace(NOW_US, "r1", row("r3")), Cancel(NOW_US, "r3")).view
    group = Group(None)
    group.log.of_group = members
    group.runs(5.0, cancelled)
    assert group.log.changes == due
    assert group.log.members == Members(("r0", "r1", "r2"))
    assert cancelled.leaving is not None
    assert is_replaced([group.log.members], group.log.members, cancelled.leaving, MAIN_SET)
