"""The journal is a list that survives: any history of calls, any torn tail, any damaged byte."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon.core import disk
from photon.core.errors import CorruptStateError, DiskFullError, StorageError
from photon.core.journal import MARK_BYTES
from photon.raft.journal import NO_OP, Entry, Journal
from tests.in_memory import memory_directory

SEGMENT_BYTES = 300

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(max_size=60)),
        st.tuples(st.just("truncate"), st.integers(0, 12)),
        st.tuples(st.just("drop"), st.integers(0, 12)),
        st.tuples(st.just("reset"), st.integers(1, 5)),
        st.tuples(st.just("sync"), st.none()),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=60,
)


def entries_of(count: int, size: int = 20) -> list[Entry]:
    return [(b"%d" % index * (size // 2), index, index // 3) for index in range(1, count + 1)]


def filled(directory: Path, entries: list[Entry], segment_bytes: int = SEGMENT_BYTES) -> Journal:
    journal = Journal(directory, segment_bytes)
    for entry in entries:
        journal.append(*entry)
        journal.sync()
    return journal


def reopened(directory: Path, segment_bytes: int = 1 << 20) -> list[Entry]:
    """What the next life finds; it ends at once."""
    journal = Journal(directory, segment_bytes)
    journal.abandon()
    return journal.entries


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("journal-*.log"))


def half_synced(directory: Path, entries: list[Entry]) -> tuple[Path, bytes, bytes]:
    """A segment with the first three of the entries, and what would be written of the others."""
    journal = filled(directory, entries[:3], segment_bytes=1 << 20)
    for entry in entries[3:]:
        journal.append(*entry)
    batch = b"".join(journal._pending)
    journal.abandon()
    path = files(directory)[-1]
    return path, path.read_bytes(), batch


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_any_history_of_calls_leaves_the_same_as_a_list(steps: list[tuple[str, object]]) -> None:
    with memory_directory() as directory:
        journal = Journal(directory, SEGMENT_BYTES)
        journal.append(b"\x01", 1, 0)
        model: list[Entry] = [(b"\x01", 1, 0)]
        term = 0
        for step, argument in steps:
            first, last = model[0][1], model[-1][1]
            if step == "append":
                term += 1
                journal.append(argument, last + 1, term)  # type: ignore[arg-type]
                model.append((argument, last + 1, term))  # type: ignore[arg-type]
            elif step == "truncate":
                index = max(first + 1, last + 1 - argument)  # type: ignore[operator]
                journal.truncate(index)
                model = [entry for entry in model if entry[1] < index]
            elif step == "drop":
                index = min(last, first + argument)  # type: ignore[operator]
                journal.drop_before(index)
                model = [entry for entry in model if entry[1] >= index]
            elif step == "reset":
                index = last + argument  # type: ignore[operator]
                journal.reset(index, term)
                model = [(b"\x01", index, term)]
            elif step == "sync":
                journal.sync()
            else:
                journal.close()
                journal = Journal(directory, SEGMENT_BYTES)
            # Whole segments are dropped on disk: after a reopen older entries may be back, below the first.
            held = [entry for entry in journal.entries if entry[1] >= model[0][1]]
            assert held == model
        journal.close()


def test_a_torn_tail_is_cut_at_any_byte_and_the_rest_is_kept(tmp_path: Path) -> None:
    entries = entries_of(6)
    path, safe, batch = half_synced(tmp_path, entries)
    whole = safe + batch
    for length in range(len(safe), len(whole) + 1):
        path.write_bytes(whole[:length])
        again = Journal(tmp_path, 1 << 20)
        kept = len(again.entries)
        assert again.entries == entries[:kept]
        assert kept >= 3
        # What is kept goes on: the next entry is there after one more opening.
        again.append(b"next", kept + 1, 9)
        again.close()
        assert reopened(tmp_path) == [*entries[:kept], (b"next", kept + 1, 9)]


def test_a_hole_in_what_was_not_synced_is_cut_off(tmp_path: Path) -> None:
    entries = entries_of(6)
    path, safe, batch = half_synced(tmp_path, entries)
    path.write_bytes(safe + bytes(30) + batch[30:])
    assert reopened(tmp_path) == entries[:3]


@pytest.mark.parametrize("segment_bytes", [200, 1 << 20])
def test_any_flipped_byte_in_what_was_synced_stops_or_changes_nothing(
    tmp_path: Path, segment_bytes: int
) -> None:
    entries = entries_of(12)
    journal = filled(tmp_path, entries, segment_bytes)
    journal.close()
    stopped = 0
    for path in files(tmp_path):
        good = path.read_bytes()
        for at in range(len(good)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
            before = {file: file.read_bytes() for file in files(tmp_path)}
            try:
                again = Journal(tmp_path, segment_bytes)
            except CorruptStateError:
                stopped += 1
                assert {file: file.read_bytes() for file in files(tmp_path)} == before, "evidence was touched"
            else:
                assert again.entries == entries, (path.name, at)
                again.abandon()
                for file in files(tmp_path):
                    if file not in before:
                        file.unlink()
                for file, content in before.items():
                    file.write_bytes(content)
            path.write_bytes(good)
    assert stopped > sum(len(command) for command, _, _ in entries)


def test_a_missing_segment_stops_wherever_it_is(tmp_path: Path) -> None:
    filled(tmp_path, entries_of(12), 200).close()
    paths = files(tmp_path)
    assert len(paths) > 3
    for path in paths[1:]:
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CorruptStateError, match="this journal segment is missing"):
            Journal(tmp_path, 200)
        path.write_bytes(content)


def test_what_a_killed_process_left_unsynced_is_synced_before_it_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = filled(tmp_path, entries_of(2), 1 << 20)
    journal.append(*entries_of(3)[2])
    with files(tmp_path)[-1].open("ab") as file:
        file.write(b"".join(journal._pending))
    journal.abandon()
    synced, rewritten = [], []
    real = disk.sync_data
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (rewritten.append(data), pwrite(fd, data, at))[1])
    monkeypatch.setattr(disk, "sync_data", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd))[1])
    again = Journal(tmp_path, 1 << 20)
    assert len(again.entries) == 3
    assert rewritten[0].endswith(b"".join(journal._pending))
    assert len(rewritten[0]) == len(b"".join(journal._pending)) + MARK_BYTES
    assert synced == [files(tmp_path)[-1].stat().st_size - MARK_BYTES]
    again.abandon()


def test_dropping_deletes_whole_segments_and_a_gap_is_never_left(tmp_path: Path) -> None:
    journal = filled(tmp_path, entries_of(30), 200)
    before = len(files(tmp_path))
    journal.drop_before(25)
    assert journal.first_index == 25
    assert len(files(tmp_path)) < before
    journal.close()
    assert reopened(tmp_path, 200)[-6:] == entries_of(30)[-6:]


def test_many_segments_are_dropped_over_many_turns_oldest_first(tmp_path: Path) -> None:
    journal = filled(tmp_path, entries_of(30), 60)
    before = len(files(tmp_path))
    journal.drop_before(29)
    left = [files(tmp_path)]
    while len(left) == 1 or len(left[-1]) < len(left[-2]):
        journal.tidy()
        left.append(files(tmp_path))
    dropped = [len(some) - len(fewer) for some, fewer in pairwise(left)]
    assert before - len(left[0]) == 4 == max(dropped) and len(dropped) > 3
    assert all(fewer == some[len(some) - len(fewer) :] for some, fewer in pairwise(left))
    journal.append(b"x", 31, 99)
    journal.close()
    assert reopened(tmp_path, 60)[-3:] == [*entries_of(30)[-2:], (b"x", 31, 99)]


def test_a_crash_after_dropping_finds_the_entry_that_follows_the_snapshot(tmp_path: Path) -> None:
    journal = filled(tmp_path, entries_of(6), 100)
    journal.append(b"x" * 100, 7, 3)
    journal.drop_before(7)
    journal.abandon()  # a crash, in the same turn
    assert reopened(tmp_path, 100) == [(b"x" * 100, 7, 3)]


def test_a_sync_reaches_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(tmp_path, entries_of(1), 1 << 20)
    calls = []
    for name in ("fdatasync", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, name=name, real=real: (calls.append(name), real(fd))[1])
    journal.append(b"x", 2, 1)
    assert calls == []
    journal.sync()
    assert calls == ["fdatasync"]
    disk.write_file(tmp_path / "small", b"content")
    assert calls == ["fdatasync", "fsync", "fsync"], "the file, then its tmp_path"
    journal.abandon()


def test_after_a_failed_sync_nothing_is_ever_accepted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    journal = filled(tmp_path, entries_of(2), 1 << 20)
    journal.append(b"x", 3, 1)
    monkeypatch.setattr(disk, "sync_data", full)
    with pytest.raises(DiskFullError, match="no space left"):
        journal.sync()
    monkeypatch.undo()
    with pytest.raises(StorageError):
        journal.sync()
    with pytest.raises(StorageError):
        journal.append(b"y", 4, 1)
    journal.abandon()


def test_a_command_that_looks_like_a_record_or_a_mark_is_only_a_command(tmp_path: Path) -> None:
    journal = filled(tmp_path, entries_of(3), 1 << 20)
    journal.close()
    body = files(tmp_path)[0].read_bytes()
    again = Journal(tmp_path, 1 << 20)
    again.append(body, 4, 4)
    again.sync()
    again.append(body, 5, 4)
    batch = b"".join(again._pending)
    again.abandon()
    path = files(tmp_path)[0]
    # Torn within a command that holds marks of this very file: still a torn tail, not damage.
    path.write_bytes(path.read_bytes() + batch[:-3])
    assert [command for command, _, _ in reopened(tmp_path)[3:]] == [body]


def test_a_reset_is_durable_on_return(tmp_path: Path) -> None:
    journal = filled(tmp_path, entries_of(3))
    journal.reset(9, 2)
    journal.abandon()
    assert reopened(tmp_path) == [(NO_OP, 9, 2)]


def test_entries_with_a_gap_between_them_stop_the_start(tmp_path: Path) -> None:
    journal = filled(tmp_path, entries_of(2))
    journal.entries.append((b"", 7, 1))
    journal.append(b"", 8, 1)
    journal.close()
    with pytest.raises(CorruptStateError, match="entry 8 follows entry 2"):
        Journal(tmp_path, SEGMENT_BYTES)
