"""Consistent hashing: who holds an event in its cache, and who reads a log (paper 3.4.1)."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eventstore.peers import Membership
from eventstore.rules.ring import Ring, version_of

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
    without = names(Ring(["home:1", *others], virtual_nodes))
    ring_with = names(Ring(["home:1", *others, one], virtual_nodes))
    moved = without != ring_with
    assert (ring_with[moved] == one).all()
    assert (ring_with[~moved] != one).all()


@given(members.flatmap(lambda m: st.tuples(st.just(m), st.permutations(m))))
def test_rings_of_the_same_members_agree_in_whatever_order_they_are_named(pair):
    first, second = (Ring(["home:1", *m], 64) for m in pair)
    assert (names(first) == names(second)).all()


@given(members, st.integers(0, 300))
def test_splitting_gives_each_row_to_its_owner_once(others, count):
    ring = Ring(["home:1", *others], 16)
    ids = IDS[: 16 * count]
    owners = names(ring, ids) if count else []
    parts = ring.split(ids)
    assert sorted(row for rows in parts.values() for row in rows.tolist()) == list(range(count))
    for member, rows in parts.items():
        assert len(rows) and (np.diff(rows) > 0).all()
        assert all(owners[row] == member for row in rows)


def test_shares_are_balanced_with_64_virtual_nodes_for_ids_of_every_kind():
    for count in (2, 4, 8, 16):
        ring = Ring(["home:1", *[f"127.0.0.1:{4000 + n}" for n in range(count - 1)]], 64)
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


def test_the_version_is_that_of_the_members_in_whatever_order():
    assert version_of(["a", "b"]) == version_of(["b", "a"]) != version_of(["a"])
    assert version_of(["ab"]) != version_of(["a", "b"])


def test_a_log_keeps_its_reader_through_rotation_and_few_change_theirs_when_one_comes():
    logs = [f"/logs/{n}.jsonl" for n in range(500)]
    before, after = (Membership(Ring([f"h{k}:1" for k in range(n)], 64)) for n in (3, 4))
    assert {before.reader(log) for log in logs} == set(before.members)
    moved = [log for log in logs if before.reader(log) != after.reader(log)]
    assert {after.reader(log) for log in moved} == {"h3:1"}
    assert 0 < len(moved) < 250
    assert all(before.reader(log) == before.reader(log + ".1.gz") for log in logs)
