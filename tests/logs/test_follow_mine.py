"""Followers that share the logs by their names: each reads its own (paper 3.2)."""

import gzip

import pytest

from photon.core.clock import SystemClock
from photon.core.settings import Logs
from photon.logs.follow import LogFollower
from tests.logs.following import Following, append


@pytest.fixture
def following(logs, tmp_path):
    """Of the files whose names begin with the letter."""
    return lambda letter, pattern="*": Following(
        logs / pattern,
        spool=tmp_path / f"spool-{letter}",
        mine=lambda path: path.rpartition("/")[2].startswith(letter),
    )


def test_only_files_that_are_mine_are_read_and_only_they_are_unpacked(logs, tmp_path, following):
    append(logs / "a", b"1\n")
    append(logs / "b", b"2\n")
    for name in "ab":
        (logs / f"{name}.gz").write_bytes(gzip.compress(b"3\n"))
    it = following("a")
    assert it.read() == {"a": b"1\n", "a.gz": b"3\n"}
    assert len(list((tmp_path / "spool-a").iterdir())) == 1
    append(logs / "a", b"4\n")
    append(logs / "b", b"5\n")
    assert it.read() == {"a": b"4\n"}
    assert it.follower.files == 2 and it.follower.caught_up


def test_a_rotated_log_of_mine_is_read_on_under_its_new_name(logs, following):
    append(logs / "a", b"1\n")
    it, other = following("a"), following("b")
    it.read()
    (logs / "a").rename(logs / "a.1")
    append(logs / "a.1", b"2\n")
    append(logs / "a", b"3\n")
    assert it.read() == {"a.1": b"2\n", "a": b"3\n"}
    assert other.read() == {}


def test_a_file_that_gets_a_name_of_the_others_is_let_go_and_read_whole_by_them(logs, following):
    append(logs / "a", b"1\n")
    it, other = following("a"), following("b")
    assert (it.read(), other.read()) == ({"a": b"1\n"}, {})
    (logs / "a").rename(logs / "b")
    append(logs / "b", b"2\n")
    assert (it.read(), other.read()) == ({}, {"b": b"1\n2\n"})
    assert [state.gone for state in it.states.values()] == [True]
    assert "another worker reads it" in it.notices[-1]
    append(logs / "b", b"3\n")
    assert (it.read(), other.read()) == ({}, {"b": b"3\n"})


def test_a_file_of_mine_that_no_pattern_matches_any_more_is_read_on(logs, following):
    append(logs / "a.log", b"1\n")
    it = following("a", "*.log")
    it.read()
    (logs / "a.log").rename(logs / "b.old")
    append(logs / "b.old", b"2\n")
    assert it.read() == {"b.old": b"2\n"}


def test_a_scan_that_fails_is_made_again_at_once_and_nothing_found_is_forgotten(logs, following, monkeypatch):
    append(logs / "a", b"1\n")
    it = following("a")
    it.read()
    append(logs / "a", b"2\n")
    append(logs / "a.new", b"3\n")

    def fail(*_):
        raise OSError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(it.follower._finder, "find", fail)
        it.clock.advance(20.0)
        with pytest.raises(OSError, match="no luck"):
            it.follower.scan_if_due()
    it.keep(it.follower.scan_if_due())
    assert it.rest() == {"a": b"2\n", "a.new": b"3\n"}


def test_the_number_of_a_new_file_was_no_known_ones(logs, tmp_path, following):
    append(logs / "a", b"1\n")
    it = following("a")
    it.read()
    append(logs / "a2", b"2\n")
    again = LogFollower([f"{logs}/*"], tmp_path / "spool", Logs(), SystemClock(), it.states.values())
    (new,) = again.scan_if_due()
    assert new.number == max(it.states) + 1
