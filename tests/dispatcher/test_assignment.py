"""Which worker reads which file: pure rules."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.assignment import owners, plan

sources_ = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2**64 - 1)), unique=True, max_size=40)
slots_ = st.sets(st.integers(0, 63), min_size=1, max_size=8)


@given(sources_, slots_)
def test_every_file_belongs_to_one_worker_that_is_there_whatever_the_order(sources, slots):
    of = dict(zip(sources, owners(sources, slots), strict=True))
    assert set(of.values()) <= slots
    turned = sources[::-1]
    assert dict(zip(turned, owners(turned, sorted(slots, reverse=True)), strict=True)) == of


@given(sources_, slots_, st.integers(0, 63))
def test_a_worker_that_comes_takes_only_what_becomes_its_own(sources, slots, newcomer):
    before = owners(sources, slots)
    after = owners(sources, slots | {newcomer})
    assert all(new in (old, newcomer) for old, new in zip(before, after, strict=True))


@given(sources_, slots_)
def test_a_file_stays_with_its_worker_when_its_device_is_mounted_under_another_number(sources, slots):
    assert owners(sources, slots) == owners([(device + 7, inode) for device, inode in sources], slots)


def test_neighbouring_inodes_are_spread_evenly():
    counts = Counter(owners([(1, inode) for inode in range(100_000, 103_000)], range(4)))
    assert sorted(counts) == [0, 1, 2, 3]
    assert all(650 < count < 850 for count in counts.values())


@given(sources_, slots_, st.data())
def test_what_somebody_holds_is_claimed_by_nobody_and_what_is_free_by_just_one(sources, slots, data):
    holders = {
        source: data.draw(st.sampled_from(sorted(slots))) for source in sources if data.draw(st.booleans())
    }
    seen = {source for source in sources if data.draw(st.booleans())}
    claimed, left = [], []
    for slot in slots:
        todo = plan(slot, slots, holders, sources, seen)
        assert all(holders.get(source) is None for source in todo.claim)
        assert all(holders[source] == slot and source in seen for source in todo.leave)
        claimed += todo.claim
        left += todo.leave
    assert sorted(claimed) == sorted(set(sources) - holders.keys())
    owner = dict(zip(sources, owners(sources, slots), strict=True))
    assert set(left) == {s for s in seen & holders.keys() if owner[s] != holders[s]}
