"""What a host's directory remembers, and that a part of it which is gone is noticed."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from photon.core import disk
from photon.core.errors import CorruptStateError, LockedError, StorageError
from photon.raft import store as homes
from photon.raft.store import NO_LIFE, Home

Start = Callable[[Path], Home]


@pytest.fixture
def start() -> Iterator[Start]:
    """A host's directory, where the one that was started before has ended."""
    started: list[Home] = []

    def started_anew(directory: Path) -> Home:
        if started:
            started[-1].close()
        started.append(Home(directory))
        return started[-1]

    yield started_anew
    for home in started:
        home.close()


def with_groups(home: Home, *groups: int) -> Home:
    for group in groups:
        home.group(group).mkdir()
        (home.group(group) / "hard_state").write_bytes(b"x")
        home.added(group)
    return home


def test_the_identity_is_made_once(start: Start, tmp_path: Path) -> None:
    identity = start(tmp_path / "a").identity
    assert len(identity) == 16
    assert start(tmp_path / "a").identity == identity != start(tmp_path / "b").identity


def test_a_directory_is_one_hosts_only(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(LockedError):
        Home(tmp_path)
    home.close()
    Home(tmp_path).close()


def test_a_group_that_was_there_and_is_missing_stops_the_start(start: Start, tmp_path: Path) -> None:
    for loss in (shutil.rmtree, lambda path: (path / "hard_state").unlink()):
        directory = tmp_path / str(loss)
        home = with_groups(start(directory), 0, 3)
        assert home.groups() == [0, 3]
        loss(home.group(3))
        with pytest.raises(CorruptStateError, match=r"group-0003.*replace this node"):
            start(directory)


FILES = ("identity", "groups", "peers", "met", "lives")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b""), "flip"])
def test_a_damaged_or_missing_file_stops_the_start(
    start: Start, tmp_path: Path, name: str, damage: object
) -> None:
    with_groups(start(tmp_path), 0).identity_seen("b", bytes(16))
    path = tmp_path / name
    if callable(damage):
        damage(path)
    else:
        data = bytearray(path.read_bytes())
        data[1] ^= 1
        path.write_bytes(data)
    with pytest.raises(CorruptStateError, match=f"{name}.*replace this node"):
        start(tmp_path)


def test_a_peer_with_another_identity_has_lost_its_disk_and_is_refused(start: Start, tmp_path: Path) -> None:
    home = start(tmp_path)
    assert home.identity_seen("b", b"1" * 16) is None
    assert home.identity_seen("b", b"1" * 16) is None
    assert home.identity_seen("c", b"2" * 16) is None
    again = start(tmp_path)
    reason = again.identity_seen("b", b"3" * 16)
    assert reason is not None and "b does not have the directory it had" in reason
    assert "replace this node" in reason
    assert again.identity_seen("c", b"2" * 16) is None


def test_only_who_was_met_and_not_merely_seen_counts_as_met_and_it_is_remembered(
    start: Start, tmp_path: Path
) -> None:
    home = start(tmp_path)
    home.identity_seen("b", b"1" * 16)
    home.identity_seen("c", b"2" * 16)
    home.met("b", bytes(32))
    assert [start(tmp_path).has_met(peer) for peer in "bcd"] == [True, False, False]


def test_a_birth_that_was_cut_short_is_done_again_and_has_met_nobody(start: Start, tmp_path: Path) -> None:
    home = start(tmp_path)
    home.identity_seen("b", b"1" * 16)
    home.met("b", bytes(32))
    for name in ("identity", "groups", "peers"):
        (tmp_path / name).unlink()
    blank = start(tmp_path)
    blank.identity_seen("b", b"1" * 16)
    assert not blank.has_met("b")


def copied(directory: Path, name: str) -> Path:
    return shutil.copytree(directory, directory.with_name(name))


def life_in(directory: Path) -> bytes:
    """One start and stop."""
    home = Home(directory)
    home.close()
    return home.life


def test_each_start_is_a_life_of_its_own_that_later_ones_remember(start: Start, tmp_path: Path) -> None:
    lives = [life_in(tmp_path / "b") for _ in range(3)]
    assert sorted({*lives}) == lives, "and a later one is greater"
    home = start(tmp_path / "b")
    for life in (NO_LIFE, *lives, home.life):
        home.check_life("a", life)


@pytest.mark.parametrize("starts_since", [0, 1, 5])
def test_a_directory_that_was_put_back_knows_nothing_of_the_life_that_was_met(
    start: Start, tmp_path: Path, starts_since: int
) -> None:
    """Though it may have been started as often as the one that is gone, or more often."""
    life_in(tmp_path / "b")
    copy = copied(tmp_path / "b", "copy")
    met = life_in(tmp_path / "b")
    for _ in range(starts_since):
        life_in(copy)
    with pytest.raises(
        CorruptStateError, match=r"copy: a remembers a later life.*put back.*replace this node"
    ):
        start(copy).check_life("a", met)


def test_a_directory_that_is_another_one_is_for_the_peers_to_refuse(start: Start, tmp_path: Path) -> None:
    """They say why: it has lost its disk."""
    met = life_in(tmp_path / "b")
    start(tmp_path / "other").check_life("a", met)


def test_a_life_from_before_all_that_are_kept_is_believed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "LIVES_MAX", 3)
    lives = [life_in(tmp_path / "b") for _ in range(5)]
    home = start(tmp_path / "b")
    for life in lives:
        home.check_life("a", life)


def test_the_life_a_peer_was_last_met_in_is_remembered(start: Start, tmp_path: Path) -> None:
    home = start(tmp_path)
    assert home.last_life("b") == NO_LIFE
    for life in (b"1" * 32, b"2" * 32):
        home.identity_seen("b", b"1" * 16)
        home.met("b", life)
    assert start(tmp_path).last_life("b") == b"2" * 32


class Crash(Exception):
    pass


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power goes out before the n-th time something is made durable, or deleted."""
    left = step

    def count(real: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return real(*arguments, **named)

        return counted

    for name in ("replace", "write_file", "sync_directory"):
        monkeypatch.setattr(disk, name, count(getattr(disk, name)))
    monkeypatch.setattr(shutil, "rmtree", count(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", count(Path.rename))


def test_a_group_is_deleted_whole_or_not_at_all(start: Start, tmp_path: Path) -> None:
    outcomes = set()
    for step in range(20):
        directory = tmp_path / str(step)
        home = with_groups(start(directory), 0, 1)
        with pytest.MonkeyPatch.context() as patched:
            crash_at(step, patched)
            try:
                home.remove(1)
                crashed = False
            except Crash:
                crashed = True
        again = start(directory)
        assert again.groups() in ([0], [0, 1])
        assert again.group(1).exists() == (1 in again.groups())
        assert not list(directory.glob("*.gone"))
        assert crashed or again.groups() == [0]
        outcomes.add((crashed, len(again.groups())))
    assert outcomes == {(True, 1), (True, 2), (False, 1)}


def test_a_disk_that_fails_is_told_as_such(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = start(tmp_path)

    def fail(path: Path, data: bytes) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "write_file", fail)
    with pytest.raises(StorageError, match="peers"):
        home.identity_seen("b", bytes(16))
    monkeypatch.undo()
    assert home.identity_seen("b", b"1" * 16) is None, "what was not written was not remembered"
