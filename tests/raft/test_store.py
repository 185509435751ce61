"""What lies on disk is whole, ours alone, and consistent with itself, or the replica does not start."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from photon.core import disk
from photon.core.errors import CorruptStateError, DiskFullError, LockedError, StorageError
from photon.raft.journal import NO_OP
from photon.raft.rules.members import command_of, founding
from photon.raft.snapshot import read_chunks, read_head, write_snapshot
from photon.raft.store import HardState, ReplicaStore
from tests.raft.kit import head

FOUNDED = command_of(founding("abc"))


def opened(directory: Path, node: str = "a", group: int = 0, first: bytes = NO_OP) -> ReplicaStore:
    return ReplicaStore(directory, node, group, 1 << 20, first)


def voted(directory: Path) -> tuple[int, str | None]:
    """After a restart."""
    store = opened(directory)
    store.close()
    return store.hard_state.term, store.hard_state.vote


def grown(directory: Path, entries: int = 10, snapshot_at: int | None = None) -> None:
    """A replica with a history: entries 2.. of term 3, and maybe a snapshot."""
    store = opened(directory)
    store.hard_state.store(3, "b")
    for index in range(2, entries + 1):
        store.journal.append(b"\x00%d" % index, index, 3)
    store.journal.sync()
    if snapshot_at is not None:
        covers = head(snapshot_at, 3)
        write_snapshot(store.snapshots.own_temporary, covers, [b"state"])
        store.snapshots.adopt(store.snapshots.own_temporary, covers)
    store.close()


def test_a_new_replica_begins_with_the_entry_that_all_logs_share(tmp_path: Path) -> None:
    store = opened(tmp_path / "new")
    assert store.journal.entries == [(NO_OP, 1, 0)]
    store.close()


def test_a_term_and_a_vote_that_are_gathered_take_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    real = disk.write_file
    monkeypatch.setattr(disk, "write_file", lambda path, data: (written.append(path), real(path, data)))
    state = HardState(tmp_path, "a", 1)
    with state.gathered():
        state.store(5, None)
        state.store(5, "b")
        assert not written
    assert written == [state.path]
    again = HardState(tmp_path, "a", 1)
    assert (again.term, again.vote) == (state.term, state.vote) == (5, "b")
    with pytest.raises(KeyError), state.gathered():
        state.store(6, None)
        raise KeyError
    assert (HardState(tmp_path, "a", 1).term, len(written)) == (6, 2), "memory has it already"
    with state.gathered():
        pass
    assert len(written) == 2


def test_term_and_vote_are_there_after_a_restart(tmp_path: Path) -> None:
    grown(tmp_path)
    assert voted(tmp_path) == (3, "b")
    store = opened(tmp_path)
    assert store.journal.last_index == 10
    store.hard_state.store(4, None)
    store.close()
    assert voted(tmp_path) == (4, None)
    store = opened(tmp_path)
    store.hard_state.store(4, "c")  # in a term that is known already
    store.close()
    assert voted(tmp_path) == (4, "c")


def test_a_directory_is_worked_on_by_one_only(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(LockedError, match="another process"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_a_directory_of_another_replica_is_refused(tmp_path: Path) -> None:
    grown(tmp_path)
    for node, group in (("b", 0), ("a", 1)):
        with pytest.raises(CorruptStateError, match="this is the state of a in group 0"):
            opened(tmp_path, node, group)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("hard_state", flip),
    ("hard_state", cut),
    ("hard_state", lambda path: path.write_bytes(b"")),
    ("hard_state", Path.unlink),
    ("snapshot", flip),
    ("snapshot", Path.unlink),
    ("journal-000000000001.log", Path.unlink),
    ("journal-000000000001.log", flip),
    ("journal-000000000001.log", lambda path: path.write_bytes(b"")),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damage_stops_the_start_and_says_how_to_mend_it(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    grown(tmp_path, snapshot_at=8)
    store = opened(tmp_path)
    store.journal.drop_before(8)
    store.journal.reset(10, 3)  # from here on the journal does not go back to the beginning
    write_snapshot(store.snapshots.own_temporary, head(10, 3), [b"state"])
    store.snapshots.adopt(store.snapshots.own_temporary, head(10, 3))
    for index in range(11, 20):
        store.journal.append(b"\x00", index, 3)
        store.journal.sync()
    store.close()
    damage(tmp_path / name)
    with pytest.raises(CorruptStateError) as raised:
        again = opened(tmp_path)
        again.close()
        for _ in read_chunks(tmp_path / "snapshot"):
            pass
    assert name.partition("-")[0] in str(raised.value)
    assert "replace this node: start an empty one under a new name" in str(raised.value)


def test_a_birth_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "hard_state").unlink()
    again = opened(tmp_path)
    assert again.journal.last_index == 1
    again.close()


def test_a_founders_log_that_names_nobody_is_of_an_older_version_and_refused(tmp_path: Path) -> None:
    grown(tmp_path)
    with pytest.raises(CorruptStateError, match="names no members: it is of an older version"):
        opened(tmp_path, first=FOUNDED)


def test_a_birth_with_other_founders_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "hard_state").unlink()
    with pytest.raises(CorruptStateError, match="begun with other founders"):
        opened(tmp_path, first=FOUNDED)


def test_a_crash_between_putting_a_snapshot_in_place_and_resetting_the_journal_is_finished(
    tmp_path: Path,
) -> None:
    for number, (index, term) in enumerate([(50, 3), (6, 2)]):
        directory = tmp_path / str(number)
        grown(directory)
        write_snapshot(directory / "snapshot", head(index, term), [b"state"])
        store = opened(directory)
        assert [(at, of) for _, at, of in store.journal.entries] == [(index, term)]
        store.close()


def test_a_journal_that_begins_after_its_snapshot_is_refused(tmp_path: Path) -> None:
    grown(tmp_path, snapshot_at=4)
    store = opened(tmp_path)
    store.journal.reset(8, 3)
    store.close()
    with pytest.raises(CorruptStateError, match="the snapshot ends at 4 but the journal begins at 8"):
        opened(tmp_path)


def test_a_full_disk_is_told_as_such_when_the_vote_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    store = opened(tmp_path)
    monkeypatch.setattr("photon.core.disk.write_all", full)
    with pytest.raises(DiskFullError, match="hard_state"):
        store.hard_state.store(9, "a")
    assert store.hard_state.term == 0
    monkeypatch.undo()
    store.close()


# -- snapshots ------------------------------------------------------------


def test_a_snapshot_gives_back_the_same_chunks(tmp_path: Path) -> None:
    chunks = [b"", b"one", b"x" * 100_000, b""]
    path = tmp_path / "made"
    write_snapshot(path, head(7, 2), chunks)
    assert read_head(path) == head(7, 2)
    assert list(read_chunks(path)) == chunks


def test_any_damaged_byte_or_cut_of_a_snapshot_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "made"
    write_snapshot(path, head(7, 2), [b"one", b"two", b""])
    good = path.read_bytes()
    damaged = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
    damaged += [good[:length] for length in range(len(good))]
    damaged.append(good + b"\0")
    chunk = struct.calcsize("<II") + 3
    first = len(good) - 24 - 8 - 2 * chunk
    damaged.append(good[:first] + good[first + chunk :])  # a whole chunk is missing
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CorruptStateError):
            list(read_chunks(path))


def test_an_older_snapshot_never_takes_the_place_of_a_newer_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for index, placed in ((9, True), (5, False), (9, False), (10, True)):
        write_snapshot(store.snapshots.own_temporary, head(index, 1), [b"%d" % index])
        assert store.snapshots.adopt(store.snapshots.own_temporary, head(index, 1)) is placed
    assert read_head(tmp_path / "snapshot") == head(10, 1)
    store.close()


def test_a_snapshot_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="writing a snapshot"):
        write_snapshot(tmp_path / "no" / "such", head(1, 1), [])


def test_any_damaged_byte_of_term_and_vote_is_noticed(tmp_path: Path) -> None:
    grown(tmp_path)
    path = tmp_path / "hard_state"
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CorruptStateError, match="term and vote are damaged"):
            opened(tmp_path)


def test_who_has_a_log_and_no_vote_is_not_born_again(tmp_path: Path) -> None:
    grown(tmp_path)
    (tmp_path / "hard_state").unlink()
    with pytest.raises(CorruptStateError, match="term and vote are missing"):
        opened(tmp_path)


def test_a_vote_older_than_the_log_stops_the_start(tmp_path: Path) -> None:
    opened(tmp_path).close()
    old = (tmp_path / "hard_state").read_bytes()
    grown(tmp_path)
    (tmp_path / "hard_state").write_bytes(old)
    with pytest.raises(CorruptStateError, match="the journal knows of term 3"):
        opened(tmp_path)


def test_names_are_durable_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown(tmp_path)
    steps: list[object] = []
    monkeypatch.setattr(disk, "sync_directory", steps.append)
    real = HardState._read
    monkeypatch.setattr(HardState, "_read", lambda state: (steps.append("read"), real(state)))
    opened(tmp_path).close()
    assert steps == [tmp_path.parent, tmp_path, "read"]


def test_a_snapshot_is_durable_before_its_name_is_and_its_name_before_a_log_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, steps, real = opened(tmp_path), list[str](), os.fsync

    def fsync(fd: int) -> None:
        steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_snapshot(store.snapshots.own_temporary, head(9, 1), [b"state"])
    store.snapshots.adopt(store.snapshots.own_temporary, head(9, 1))
    assert steps == [store.snapshots.own_temporary.name, tmp_path.name]
    store.close()
