"""Placement: whose which share is, whatever order things happen in."""

from hypothesis import given, settings
from hypothesis import strategies as st

from photon.raft.rules.placement import (
    MEMBERS_MAX,
    Leave,
    Move,
    drained,
    due,
    entered,
    founded,
    left,
    moved,
    released,
    written,
)

NAMES = ("a", "b", "c", "d")


def step(group, decided):
    return left(group, decided) if isinstance(decided, Leave) else moved(group, decided)


def settle(group, live, releasing=True):
    """As the leader and obedient owners would; how many shares changed their owner."""
    changed = 0
    for _ in range(10_000):
        before = [share.owner for share in group.shares]
        decided = due(group, live)
        if decided is not None:
            group = step(group, decided)
        elif releasing and (going := [n for n, share in enumerate(group.shares) if share.heir]):
            group = released(group, going[0])
        else:
            return group, changed
        changed += sum(old != now.owner for old, now in zip(before, group.shares))
    raise AssertionError("it does not settle")


def owners(group):
    return [share.owner for share in group.shares]


def group_of(shares, *names):
    group = founded(shares)
    for name in names:
        group = entered(group, name, 1, f"{name}:1")
    return settle(group, names)[0]


def test_each_share_has_an_owner_and_none_has_two_more_than_another():
    for members in (1, 2, 3, 4):
        group = group_of(10, *NAMES[:members])
        counts = [owners(group).count(name) for name in NAMES[:members]]
        assert sum(counts) == 10
        assert max(counts) - min(counts) <= 1


def test_one_that_comes_gets_its_part_and_no_other_share_moves():
    group = group_of(9, "a", "b")
    after, changed = settle(entered(group, "c", 1, "c:1"), ("a", "b", "c"))
    assert owners(after).count("c") == changed == 3


def test_a_share_stays_its_owners_until_that_lets_go():
    group = entered(group_of(4, "a"), "b", 1, "b:1")
    waiting, _ = settle(group, ("a", "b"), releasing=False)
    assert owners(waiting) == ["a"] * 4
    [one, two] = [n for n, share in enumerate(waiting.shares) if share.heir == "b"]
    assert waiting.stands(one, waiting.shares[one].sequencer)
    after = released(waiting, one)
    assert after.shares[one].owner == "b"
    assert not after.stands(one, waiting.shares[one].sequencer)
    assert after.stands(two, waiting.shares[two].sequencer)


def test_the_shares_of_one_that_was_not_heard_go_to_the_others_at_once():
    group = group_of(6, "a", "b", "c")
    after, changed = settle(group, ("a", "c"), releasing=False)
    assert changed == 4  # from it, and to others
    assert sorted(map(owners(after).count, ("a", "c"))) == [3, 3]
    assert "b" not in after.members


def test_a_new_life_has_the_shares_of_the_former_one_which_has_none():
    group = group_of(4, "a", "b")
    after = entered(group, "a", 2, "a:2")
    assert owners(after) == owners(group)
    for number, share in group.owned("a").items():
        assert not after.stands(number, share.sequencer)
    for number, share in group.owned("b").items():
        assert after.stands(number, share.sequencer)
    assert entered(after, "a", 1, "a:1") is None, "of the past"
    assert entered(after, "a", 2, "a:2") is after
    assert left(after, Leave("a", 1)) is after


def test_a_member_that_is_drained_keeps_nothing_if_there_are_others_and_comes_back_as_a_new_life():
    group = drained(group_of(6, "a", "b"), "a")
    after, _ = settle(group, ("a", "b"))
    assert owners(after) == ["b"] * 6
    back, _ = settle(entered(after, "a", 2, "a:1"), ("a", "b"))
    assert sorted(map(owners(back).count, ("a", "b"))) == [3, 3]
    alone = drained(group_of(6, "a"), "a")
    assert due(alone, ("a",)) is None
    assert owners(alone) == ["a"] * 6, "nobody else could have them"
    assert drained(alone, "z") is None


def test_what_was_decided_for_an_earlier_owner_is_not_done():
    group = group_of(2, "a", "b")
    stale = Move(0, group.shares[0].sequencer - 1, "b")
    assert moved(group, stale) is group
    assert moved(group, Move(0, group.shares[0].sequencer, "z")) is group
    assert moved(group, Move(7, 1, "a")) is group


def test_there_are_no_more_members_than_the_bound():
    group = founded(1)
    for number in range(MEMBERS_MAX):
        group = entered(group, f"m{number}", 1, "h:1")
    assert entered(group, "one too many", 1, "h:1") is None
    assert entered(group, "m0", 2, "h:1") is not None


steps = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(NAMES), st.integers(1, 5)),
        st.tuples(st.just("leave"), st.sampled_from(NAMES), st.integers(1, 5)),
        st.tuples(st.just("drain"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("due"), st.sets(st.sampled_from(NAMES)), st.just(0)),
        st.tuples(st.just("release"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("write"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("stale"), st.integers(0, 4), st.sampled_from(NAMES)),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_whatever_happens_a_sequencer_is_of_one_life_of_one_member(script):
    group, holders = founded(5), {}
    for what, who, more in script:
        if what == "enter":
            group = entered(group, who, more, f"{who}:1") or group
        elif what == "leave":
            group = left(group, Leave(who, more))
        elif what == "drain":
            group = drained(group, who) or group
        elif what == "due":
            decided = due(group, who)
            group = group if decided is None else step(group, decided)
        elif what == "release" and group.shares[who].owner:
            group = released(group, who)
        elif what == "write" and group.shares[who].owner:
            group = written(group, who)
        elif what == "stale":
            group = moved(group, Move(who, group.shares[who].sequencer, more))
        for number, share in enumerate(group.shares):
            assert share.written <= share.sequencer
            assert not share.owner or share.owner in group.members
            assert not share.heir or (share.heir in group.members and share.owner)
            if share.owner:
                life = share.owner, group.members[share.owner].life
                assert holders.setdefault((number, share.sequencer), life) == life
    live = {name for name, member in group.members.items()}
    after, _ = settle(group, live)
    if staying := [name for name, member in after.members.items() if not member.leaves]:
        assert set(owners(after)) <= set(staying)
