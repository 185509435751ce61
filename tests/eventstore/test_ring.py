"""Consistent hashing of the CacheEventStore (paper 3.4.1), and who is a member."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eventstore.cache import MEMBERS_MAX, SILENT_S_MAX, Members
from eventstore.rules.ring import HOME, Ring
from photon.core.clock import ManualClock

IDS = b"".join(hashlib.blake2b(b"%d" % n, digest_size=16).digest() for n in range(4000))
PHOTON_IDS = b"".join(
    bytes([10, 0, 0, n % 4, 0, 0, 0, 7]) + (1_700_000_000_000_000 + n * 37).to_bytes(8, "big")
    for n in range(4000)
)
members = st.lists(st.integers(1, 65_535).map("127.0.0.1:{}".format), unique=True, max_size=12)


def names(ring, ids=IDS):
    return np.array(ring.members)[ring.owners(ids)]


@given(members, st.integers(1, 65_535).map("10.0.0.1:{}".format), st.sampled_from([1, 8, 64, 300]))
def test_a_member_that_comes_or_goes_moves_its_own_share_and_nothing_else(others, one, virtual_nodes):
    without = names(Ring([HOME, *others], virtual_nodes))
    ring_with = names(Ring([HOME, *others, one], virtual_nodes))
    moved = without != ring_with
    assert (ring_with[moved] == one).all()
    assert (ring_with[~moved] != one).all()


@given(members.flatmap(lambda m: st.tuples(st.just(m), st.permutations(m))))
def test_rings_of_the_same_members_agree_in_whatever_order_they_are_named(pair):
    first, second = (Ring([HOME, *m], 64) for m in pair)
    assert (names(first) == names(second)).all()


@given(members, st.integers(0, 300))
def test_splitting_gives_each_row_to_its_owner_once(others, count):
    ring = Ring([HOME, *others], 16)
    ids = IDS[: 16 * count]
    owners = names(ring, ids) if count else []
    parts = ring.split(ids)
    assert sorted(row for rows in parts.values() for row in rows.tolist()) == list(range(count))
    for member, rows in parts.items():
        assert len(rows) and (np.diff(rows) > 0).all()
        assert all(owners[row] == member for row in rows)


def test_shares_are_balanced_with_64_virtual_nodes_for_ids_of_every_kind():
    for count in (2, 4, 8, 16):
        ring = Ring([HOME, *[f"127.0.0.1:{4000 + n}" for n in range(count - 1)]], 64)
        for ids in (IDS, PHOTON_IDS):
            shares = np.bincount(ring.owners(ids), minlength=count) / (len(ids) / 16) * count
            assert shares.min() > 0.5 and shares.max() < 1.6, (count, shares)


def test_more_virtual_nodes_balance_better():
    def unevenness(virtual_nodes):
        shares = [
            np.bincount(
                Ring([f"10.0.{k}.{n}:1" for n in range(8)], virtual_nodes).owners(IDS), minlength=8
            ).std()
            for k in range(10)
        ]
        return np.mean(shares)

    assert unevenness(256) < unevenness(4) / 2


def test_a_member_that_is_silent_or_leaves_is_one_no_more_and_the_version_says_so():
    clock = ManualClock()
    known = Members(clock)
    assert known.membership().version == 0
    known.announce("a")
    known.announce("b")
    clock.advance(2.0)
    both = known.membership()
    assert both.caches == ("a", "b")
    known.announce("a")
    assert known.membership() is both
    clock.advance(SILENT_S_MAX - 1.0)
    after = known.membership()
    assert after.caches == ("a",)
    assert after.version not in (0, both.version)
    known.leave("a")
    assert (known.membership().version, known.membership().caches) == (0, ())
    known.announce("a")
    restarted = Members(clock)
    restarted.announce("a")
    assert restarted.membership().version != known.membership().version, "home was restarted"


def test_there_are_no_more_members_than_the_bound():
    clock = ManualClock()
    known = Members(clock)
    for n in range(MEMBERS_MAX - 1):
        assert known.announce(f"{n}")
    assert not known.announce("one too many")
    assert known.announce("0")
    clock.advance(SILENT_S_MAX + 1)
    assert known.announce("one too many")
