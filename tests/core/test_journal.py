"""The journal under Raft's log and the joiner's intents: threads that sync together, and disks that fail.

What any history, any torn tail and any damaged byte leave is tested where records mean something:
tests/raft/test_journal.py and tests/joiner/test_intents.py.
"""

import errno
import os
import threading
from pathlib import Path

import pytest

from photon.core import disk
from photon.core.errors import CorruptStateError
from photon.core.journal import HEADER_BYTES, Place, Record, SegmentedJournal, pack_record


def opened(directory: Path) -> tuple[SegmentedJournal, list[bytes]]:
    found: list[bytes] = []

    def replay(segment: int, path: Path, record: Record) -> None:
        found.append(bytes(record.payload))

    def corrupt(path: Path, what: str) -> CorruptStateError:
        return CorruptStateError(f"{path}: {what}")

    return SegmentedJournal(directory, "things", replay, corrupt), found


def append(journal: SegmentedJournal, payload: bytes) -> Place:
    return journal.append(b"".join(pack_record(journal.salt, 1, payload)))


def found_again(directory: Path) -> list[bytes]:
    journal, found = opened(directory)
    journal.close()
    return found


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, skip: int = 0) -> None:
    """The next call (after `skip` others) of a function of photon.core.disk finds the disk full."""
    real, left = getattr(disk, name), [skip]

    def failing(fd: int, *more: bytes) -> None:
        left[0] -= 1
        if left[0] == -1:
            if more:
                real(fd, more[0][: len(more[0]) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, *more)

    monkeypatch.setattr(disk, name, failing)


def test_threads_that_wait_together_share_one_sync(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    syncs, first, go = [], threading.Event(), threading.Event()
    real = disk.sync_data

    def sync_data(fd: int) -> None:
        syncs.append(fd)
        first.set()
        assert go.wait(60)
        real(fd)

    monkeypatch.setattr(disk, "sync_data", sync_data)
    places = [append(journal, b"0")]
    threads = [threading.Thread(target=journal.sync, args=(places[0],))]
    threads[0].start()
    assert first.wait(60)
    for number in range(1, 9):
        places.append(append(journal, b"%d" % number))
        threads.append(threading.Thread(target=journal.sync, args=(places[number],)))
        threads[-1].start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert journal.synced == places[-1]
    assert len(syncs) == 2
    journal.close()
    assert found_again(tmp_path) == [b"%d" % number for number in range(9)]


def test_what_could_not_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    append(journal, b"first")
    fail_once(monkeypatch, "write_all")
    with pytest.raises(OSError, match="No space"):
        append(journal, b"lost")
    append(journal, b"second")
    journal.close()
    assert found_again(tmp_path) == [b"first", b"second"]


@pytest.mark.parametrize("skip", range(3), ids=["mark", "header of the new segment", "seal"])
def test_a_roll_for_which_there_is_no_space_can_be_tried_again(tmp_path, monkeypatch, skip):
    journal, _ = opened(tmp_path)
    append(journal, b"first")
    fail_once(monkeypatch, "write_all", skip)
    with pytest.raises(OSError, match="No space"):
        journal.roll()
    append(journal, b"second")
    journal.roll()
    assert journal.end == Place(2, HEADER_BYTES)
    append(journal, b"third")
    journal.close()
    assert found_again(tmp_path) == [b"first", b"second", b"third"]


def test_after_a_failed_sync_nothing_is_taken_and_the_next_start_writes_it_once_more(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    append(journal, b"first")
    journal.sync()
    append(journal, b"second")
    fail_once(monkeypatch, "sync_data")
    for attempt in (journal.sync, journal.roll, lambda: append(journal, b"third"), journal.sync):
        with pytest.raises(OSError, match="No space"):
            attempt()
    assert journal.broken
    journal.close()
    again: list[bytes] = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (again.append(data), real(fd, data, at))[1])
    assert found_again(tmp_path) == [b"first", b"second"]
    assert b"second" in again[-1], "the system believes that it is on the disk already"


def test_damage_before_what_a_roll_made_durable_is_never_cut_as_a_torn_tail(tmp_path):
    journal, _ = opened(tmp_path)
    append(journal, b"first")
    journal.roll()
    journal.close()
    path = tmp_path / "things-000000000001.log"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptStateError, match="damaged record at offset"):
        opened(tmp_path)


def step_by_step(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with the disk from now on, each with the number of its segment."""
    steps: list[str] = []

    def number(path: Path) -> int:
        return int(path.stem.removeprefix("things-"))

    def note(name: str, what: str) -> None:
        real = getattr(disk, name)

        def noting(fd: int, *more: bytes) -> None:
            steps.append(f"{what} {number(Path(os.readlink(f'/proc/self/fd/{fd}')))}")
            real(fd, *more)

        monkeypatch.setattr(disk, name, noting)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        steps.append(f"delete {number(path)}")
        os.unlink(path)

    note("write_all", "write")
    note("sync_data", "sync")
    monkeypatch.setattr(disk, "write_again", lambda path, *_: steps.append(f"write again {number(path)}"))
    monkeypatch.setattr(disk, "sync_directory", lambda _: steps.append("sync names"))
    monkeypatch.setattr(Path, "unlink", unlink)
    return steps


def test_a_roll_makes_each_step_durable_before_the_one_that_relies_on_it(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    append(journal, b"first")
    steps = step_by_step(monkeypatch)
    journal.roll()
    assert steps == ["sync 1", "write 1", "write 2", "sync 2", "sync names", "write 1", "sync 1"]


def test_segments_are_deleted_durably_one_by_one_oldest_first_and_never_the_last(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    journal.roll()
    journal.roll()
    steps = step_by_step(monkeypatch)
    journal.drop_before(99)
    assert steps == ["delete 1", "sync names", "delete 2", "sync names"]
    assert list(journal.segments) == [3]
    append(journal, b"goes on")


def test_a_start_makes_durable_what_it_relies_on_the_seal_too(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    journal.roll()
    journal.close()
    steps = step_by_step(monkeypatch)
    opened(tmp_path)[0].close()
    assert steps == ["write again 1", "sync 1", "write again 2", "sync 2", "write 2"]


def test_a_mark_tells_nothing_of_what_came_while_its_sync_was_under_way(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    append(journal, b"first")
    real = disk.sync_data
    with monkeypatch.context() as slow:
        slow.setattr(disk, "sync_data", lambda fd: (real(fd), append(journal, b"late")))
        journal.sync()
    journal.close()
    journal.path.write_bytes(journal.path.read_bytes().replace(b"late", b"l\0\0\0"))
    assert found_again(tmp_path) == [b"first"], "a torn tail"


def test_behind_half_a_record_that_could_not_be_cut_nothing_is_written(tmp_path, monkeypatch):
    journal, _ = opened(tmp_path)
    fail_once(monkeypatch, "write_all")
    with monkeypatch.context() as broken:
        broken.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        with pytest.raises(OSError, match="No space"):
            append(journal, b"half")
    with pytest.raises(OSError, match="No space"):
        append(journal, b"behind it")


def test_a_segment_under_the_name_of_another_one_stops_the_start(tmp_path):
    journal, _ = opened(tmp_path)
    journal.close()
    journal.path.rename(journal.path_of(2))
    with pytest.raises(CorruptStateError, match="header is damaged"):
        opened(tmp_path)
