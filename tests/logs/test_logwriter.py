"""Rotating logs: whole lines or none, shared syncs, repair after a crash."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from photon.core.errors import DiskFullError, StorageError
from photon.logs.writer import LogPosition, RotatingLog
from tests.full import full_after, no_space


def test_a_log_rotates_before_it_grows_over_its_size_and_splits_no_append(tmp_path):
    log = RotatingLog(tmp_path / "deep" / "er", "a", 10)
    ends = [log.append(data) for data in (b"12345\n", b"123\n", b"x\n", b"longer than a file\n", b"y\n")]
    assert ends == [
        LogPosition(0, 6),
        LogPosition(0, 10),
        LogPosition(1, 2),
        LogPosition(2, 19),
        LogPosition(3, 2),
    ]
    assert ends == sorted(ends)
    assert log.path(0).read_bytes() == b"12345\n123\n"
    log.close()
    again = RotatingLog(tmp_path / "deep" / "er", "a", 10)
    assert again.append(b"z\n") == LogPosition(3, 4)


def test_a_log_goes_on_in_a_later_file_where_it_is_told_to(tmp_path):
    RotatingLog(tmp_path, "a", 10).append(b"one\n")
    assert RotatingLog(tmp_path, "a", 10, first=0).position == LogPosition(0, 4)
    assert RotatingLog(tmp_path, "a", 10, first=3).position == LogPosition(3, 0)
    assert RotatingLog(tmp_path, "a", 10, first=1).position == LogPosition(3, 0)
    assert RotatingLog(tmp_path, "b", 10, first=5).file_numbers() == [5]


def test_logs_of_similar_names_do_not_mix(tmp_path):
    for stem in ("joiner", "joiner-1", "[joiner"):
        RotatingLog(tmp_path, stem, 10).append(stem.encode())
    assert RotatingLog(tmp_path, "joiner", 10).path(0).read_bytes() == b"joiner"
    assert RotatingLog(tmp_path, "[joiner", 10).file_numbers() == [0]


def test_a_torn_last_line_is_cut_and_the_rest_is_kept(tmp_path):
    (tmp_path / "a-000000.jsonl").write_bytes(b"one\ntwo\nthr")
    log = RotatingLog(tmp_path, "a", 100)
    assert log.cut_torn_line() == 3
    assert log.cut_torn_line() == 0
    log.append(b"three\n")
    assert log.path(0).read_bytes() == b"one\ntwo\nthree\n"


def test_truncate_cuts_later_files_too(tmp_path):
    log = RotatingLog(tmp_path, "a", 4)
    for data in (b"one\n", b"two\n", b"six\n"):
        log.append(data)
    log.truncate(LogPosition(1, 0))
    assert log.file_numbers() == [0, 1]
    assert log.append(b"new\n") == LogPosition(1, 4)


def test_a_failed_append_leaves_no_partial_line_and_the_next_one_works(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path, "a", 100)
    log.append(b"one\n")
    with monkeypatch.context() as full:
        full_after(full, 2)
        with pytest.raises(DiskFullError, match=r"a-000000\.jsonl: no space left"):
            log.append(b"two\n")
    log.append(b"three\n")
    assert log.path(0).read_bytes() == b"one\nthree\n"


def test_what_was_written_of_an_append_stays_where_a_reader_may_be_past_it(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path, "a", 100, read_at_once=True)
    log.append(b"one\n")
    with monkeypatch.context() as full:
        full_after(full, 6)
        with pytest.raises(DiskFullError):
            log.append(b"two\nthree\n")
    for act in (log.sync, lambda: log.append(b"four\n"), log.rotate):
        with pytest.raises(DiskFullError):
            act()
    assert log.path(0).read_bytes() == b"one\ntwo\nth"
    again = RotatingLog(tmp_path, "a", 100, read_at_once=True)
    assert (again.cut_torn_line(), again.append(b"three\n")) == (2, LogPosition(0, 14))


def test_after_a_failed_sync_nothing_is_written_or_synced_any_more(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path, "a", 100)
    log.append(b"one\n")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", lambda _: no_space())
        with pytest.raises(DiskFullError):
            log.sync()
    for act in (log.sync, lambda: log.append(b"two\n"), log.rotate):
        with pytest.raises(DiskFullError):
            act()


def test_threads_that_wait_together_share_a_sync(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path, "a", 1 << 20)
    running, go_on = threading.Event(), threading.Event()
    syncs = []

    def slow_sync(_fd):
        syncs.append(log.position)
        running.set()
        assert go_on.wait(60)

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(lambda: log.sync(log.append(b"first\n")))
        assert running.wait(60.0)
        ends = [log.append(b"line\n") for _ in range(8)]
        others = [pool.submit(log.sync, end) for end in ends]
        assert not any(waiter.done() for waiter in others)
        go_on.set()
        for waiter in (first, *others):
            waiter.result(60.0)
    assert syncs == [LogPosition(0, 6), ends[-1]]
    assert log._synced == ends[-1]
    log.sync(ends[3])
    assert len(syncs) == 2


def test_a_sync_survives_the_rotation_of_its_file(tmp_path):
    log = RotatingLog(tmp_path, "a", 8)

    def write(number):
        for row in range(50):
            log.sync(log.append(f"{number}{row:03}\n".encode()))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    lines = b"".join(log.path(number).read_bytes() for number in log.file_numbers()).split()
    assert len(lines) == len(set(lines)) == 200


def test_a_closed_log_says_so(tmp_path):
    log = RotatingLog(tmp_path, "a", 8)
    log.close()
    log.close()
    with pytest.raises(StorageError, match="already closed"):
        log.append(b"x\n")


def test_whatever_was_written_since_is_synced_also_before_a_rotation_and_over_a_cut(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path, "a", 100)
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")[-7]))
    log.append(b"one\n")
    log.rotate()
    log.append(b"two\n")
    log.sync()
    assert synced == ["0", "1"]
    log.truncate(LogPosition(1, 0))
    log.append(b"six\n")
    log.sync()
    assert synced == ["0", "1", "1"]


def test_the_name_of_a_new_file_is_durable_before_a_line_in_it(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr("photon.logs.writer.sync_directory", lambda path: names.append(len(os.listdir(path))))
    log = RotatingLog(tmp_path, "a", 100)
    log.rotate()
    RotatingLog(tmp_path, "a", 100)  # who made the second may have been killed before it was synced
    assert names == [1, 2, 2]


def test_behind_half_a_line_that_could_not_be_cut_nothing_is_written(tmp_path, monkeypatch):
    log = RotatingLog(tmp_path, "a", 100)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda *_: no_space())
        full.setattr(os, "ftruncate", lambda *_: no_space())
        with pytest.raises(DiskFullError):
            log.append(b"half\n")
    with pytest.raises(DiskFullError):
        log.append(b"behind it\n")


def test_a_rotation_goes_on_past_every_number_that_was_given(tmp_path):
    log = RotatingLog(tmp_path, "a", 100, first=9)
    log.rotate()
    assert log.position == LogPosition(10, 0)
    log.rotate(past=999_999)
    assert log.file_numbers() == [9, 10, 1_000_000]
    log.rotate(past=5)
    assert RotatingLog(tmp_path, "a", 100).position == LogPosition(1_000_001, 0)


def test_a_torn_line_longer_than_a_block_is_cut_at_its_start(tmp_path):
    (tmp_path / "a-000000.jsonl").write_bytes(b"a" * 70_000 + b"\n" + b"b" * 140_000)
    assert RotatingLog(tmp_path, "a", 100).cut_torn_line() == 140_000
