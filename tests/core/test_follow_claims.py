"""Followers that share the logs: what each reads, and what changes hands (paper 3.2)."""

import dataclasses
import gzip
import itertools

import pytest

from photon.core.claims import Share
from tests.core.following import Following, append


class Claimed:
    """Claims of one follower, by file name, as a test says."""

    numbers = itertools.count(100)

    def __init__(self, *names):
        self.names = set(names)
        self.taken = []
        self.leave = set()
        self.calls = []

    def share(self, seen):
        self.calls.append(seen)
        mine = frozenset(file.source for file in seen if file.name.rpartition("/")[2] in self.names)
        taken, self.taken = self.taken, []
        return Share(mine, tuple(taken), frozenset(self.leave))

    def number(self):
        return next(self.numbers)


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


@pytest.fixture
def following(logs, tmp_path):
    return lambda claims: Following(logs / "*", spool=tmp_path / "spool", claims=claims)


def test_only_files_that_are_mine_are_read_and_only_they_are_unpacked(logs, tmp_path, following):
    append(logs / "a", b"1\n")
    append(logs / "b", b"2\n")
    for name in "cd":
        (logs / f"{name}.gz").write_bytes(gzip.compress(b"3\n"))
    claims = Claimed("a", "c.gz")
    it = following(claims)
    assert it.read() == {"a": b"1\n", "c.gz": b"3\n"}
    assert len(list((tmp_path / "spool").iterdir())) == 1
    assert [file.name.rpartition("/")[2] for file in claims.calls[0]] == ["a", "b", "c.gz", "d.gz"]
    assert min(it.states) >= 100


def test_the_claims_are_asked_at_every_scan_with_the_same_object_while_nothing_changes(logs, following):
    append(logs / "a", b"1\n")
    claims = Claimed("a")
    it = following(claims)
    it.read()
    it.read()
    assert len(claims.calls) == 4
    assert claims.calls[0] is claims.calls[3]


def test_a_file_goes_from_one_follower_to_the_other_and_nothing_is_read_twice(logs, following):
    append(logs / "a", b"1\n")
    left, right = Claimed("a"), Claimed()
    one, other = following(left), following(right)
    assert one.read() == {"a": b"1\n"}
    (number,) = one.states
    append(logs / "a", b"2\n")
    left.leave = {number}
    assert one.read() == {}
    assert one.follower.leaving == {number}
    assert one.follower.caught_up
    one.follower.release(number)
    assert one.follower.leaving == set()
    left.leave, left.names = set(), set()
    right.names, right.taken = {"a"}, list(one.states.values())
    assert other.read() == {"a": b"2\n"}
    append(logs / "a", b"3\n")
    assert one.read() == {}
    assert other.read(scan=False) == {"a": b"3\n"}
    # And back.
    right.names, left.names, left.taken = set(), {"a"}, list(other.states.values())
    other.follower.release(number)
    append(logs / "a", b"4\n")
    assert (other.read(), one.read()) == ({}, {"a": b"4\n"})


def test_a_file_that_is_left_and_then_kept_after_all_is_read_on(logs, following):
    append(logs / "a", b"1\n")
    claims = Claimed("a")
    it = following(claims)
    it.read()
    claims.leave = set(it.states)
    append(logs / "a", b"2\n")
    assert it.read() == {}
    append(logs / "a", b"3\n")
    claims.leave = set()
    assert it.read() == {"a": b"2\n3\n"}


def test_what_was_read_before_a_file_is_to_be_left_is_not_handed_out_again(logs, following):
    append(logs / "a", b"1\n")
    claims = Claimed("a")
    it = following(claims)
    it.keep(it.follower.scan_if_due())
    state, chunk = it.follower.next_chunk()
    claims.leave = {state.number}
    assert it.read() == {}
    assert it.follower.advanced(state.number, chunk.end).offset == 2


def test_a_held_file_that_no_pattern_matches_any_more_stays_with_its_holder(logs, tmp_path):
    append(logs / "a.log", b"1\n")
    it = Following(logs / "*.log", spool=tmp_path / "spool", claims=Claimed("a.log"))
    it.read()
    (logs / "a.log").rename(logs / "a.old")
    append(logs / "a.old", b"2\n")
    assert it.read() == {"a.old": b"2\n"}


def test_the_copy_of_a_taken_archive_is_read_on(logs, following):
    (logs / "a.gz").write_bytes(gzip.compress(b"1\n2\n"))
    one = following(Claimed("a.gz"))
    one.keep(one.follower.scan_if_due())
    (state,) = one.states.values()
    claims = Claimed("a.gz")
    claims.taken = [dataclasses.replace(state, offset=2)]
    assert following(claims).read() == {"a.gz": b"2\n"}


def test_what_a_file_grew_by_while_it_was_not_mine_is_read_when_it_is(logs, following):
    append(logs / "a", b"1\n")
    one, claims = following(Claimed("a")), Claimed()
    one.read()
    it = following(claims)
    it.read()
    append(logs / "a", b"2\n")
    assert it.read(scan=False) == {}
    claims.names, claims.taken = {"a"}, list(one.states.values())
    it.clock.advance(1.5)
    it.follower.scan_if_due()
    assert it.rest() == {"a": b"2\n"}
