"""Followers that share the logs: what each reads, and what changes hands (paper 3.2)."""

import dataclasses
import gzip
import itertools

import pytest

from photon.logs.inventory import Share
from tests.logs.following import Following, append


class Claimed:
    """Claims of one follower, by file name, as a test says."""

    numbers = itertools.count(100)

    def __init__(self, *names):
        self.names = set(names)
        self.taken = []
        self.leave = set()
        self.elsewhere = set()
        self.calls = []

    def share(self, seen):
        self.calls.append(seen)
        mine = frozenset(file.source for file in seen if file.name.rpartition("/")[2] in self.names)
        taken, self.taken = self.taken, []
        return Share(mine, tuple(taken), frozenset(self.leave))

    def held_elsewhere(self, file):
        return file.name.rpartition("/")[2] in self.elsewhere

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


def test_what_another_one_goes_on_with_is_not_read_and_asked_about_at_every_scan(logs, following):
    append(logs / "a.1", b"1\n")
    claims = Claimed("a.1")
    claims.elsewhere = {"a.1"}
    it = following(claims)
    assert it.read() == {}
    assert not it.follower.caught_up
    assert it.follower.settling == {f"{logs}/a.1"}
    claims.elsewhere = set()
    assert it.read() == {"a.1": b"1\n"}
    assert it.follower.caught_up


@pytest.mark.parametrize("broken", ["find", "number", "held_elsewhere"])
def test_a_scan_that_fails_is_made_again_at_once_and_nothing_taken_or_found_is_forgotten(
    logs, following, monkeypatch, broken
):
    append(logs / "a", b"1\n")
    one, claims = following(Claimed("a")), Claimed()
    one.read()
    it = following(claims)
    it.read()
    append(logs / "a", b"2\n")
    new = {} if broken == "find" else {"b": b"3\n"}  # what is new makes another way through a scan
    for name, data in new.items():
        append(logs / name, data)
    claims.names, claims.taken = {"a", "b"}, list(one.states.values())
    owner = it.follower._finder if broken == "find" else claims

    def fail(*_):
        raise OSError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, fail)
        it.clock.advance(1.5)
        with pytest.raises(OSError, match="no luck"):
            it.follower.scan_if_due()
    it.keep(it.follower.scan_if_due())
    assert it.rest() == {"a": b"2\n"} | new


def test_changes_found_by_a_scan_that_failed_are_told_by_the_next(logs, following, monkeypatch):
    append(logs / "a", b"1\n")
    claims = Claimed("a", "b", "c")
    it = following(claims)
    it.read()
    (logs / "a").write_bytes(b"")  # shrank: one is gone, one is new
    append(logs / "b", b"2\n")
    numbers = iter([7])
    with monkeypatch.context() as patch:
        patch.setattr(claims, "number", lambda: next(numbers))
        it.clock.advance(20.0)
        with pytest.raises(StopIteration):
            it.follower.scan_if_due()
    told = it.follower.scan_if_due()
    assert sorted((state.name.rpartition("/")[2], state.gone) for state in told) == [
        ("a", False),
        ("a", True),
        ("b", False),
    ]


def test_a_log_that_is_gone_for_a_while_and_then_turns_up_under_another_name_is_read_on(logs, following):
    """Another one saw the archive first, and handed it over when the log was gone."""
    text = b"".join(b"%06d %s\n" % (n, b"x" * 40) for n in range(100))
    append(logs / "a", text)
    claims = Claimed("a", "b", "a.1.gz")
    it = following(claims)
    it.read()
    (number,) = it.states
    (logs / "a").unlink()
    assert it.read() == {}
    assert it.states[number].gone
    append(logs / "b", b"has the same inode, perhaps\n")
    (logs / "a.1.gz").write_bytes(gzip.compress(text + b"unread\n"))
    assert it.read() == {"b": b"has the same inode, perhaps\n", "a.1.gz": b"unread\n"}
    assert not it.states[number].gone
    assert it.read() == {}
