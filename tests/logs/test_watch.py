"""What the kernel tells of directories."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from photon.logs import watch as module
from photon.logs.watch import Watch
from tests.logs.following import append


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def watch(woken):
    watch = Watch(woken.set)
    yield watch
    watch.close()


def test_a_write_is_told_to_whoever_asks_after_it(watch, logs):
    append(logs / "a")
    assert watch.cover([str(logs)]) == {}
    assert watch.covers(str(logs))
    assert not watch.changes()
    append(logs / "a")
    assert watch.changes() == module.Changes({f"{logs}/a"})
    os.truncate(logs / "a", 1)
    assert watch.changes().grown == {f"{logs}/a"}
    assert not watch.changes()


def test_files_and_directories_that_come_and_go_are_told(watch, logs):
    (logs / "a").touch()
    watch.cover([str(logs)])
    (logs / "a").rename(logs / "b")
    (logs / "c").touch()
    (logs / "d").mkdir()
    (logs / "c").unlink()
    assert watch.changes().moved == {f"{logs}/a", f"{logs}/b", f"{logs}/c", f"{logs}/d/"}


def test_a_directory_that_is_named_in_two_ways_is_told_in_both(watch, logs):
    (logs.parent / "link").symlink_to(logs)
    watch.cover([str(logs), f"{logs.parent}/link"])
    (logs / "a").touch()
    assert watch.changes().moved == {f"{logs}/a", f"{logs.parent}/link/a"}


def test_a_directory_that_is_deleted_is_told_and_not_covered_any_more(watch, logs):
    watch.cover([str(logs)])
    logs.rmdir()
    assert f"{logs}/" in watch.changes().moved
    assert not watch.covers(str(logs))
    assert list(watch.cover([str(logs)])) == [str(logs)]


def test_what_is_not_to_be_covered_any_more_is_not_told(watch, logs):
    watch.cover([str(logs)])
    watch.cover([])
    append(logs / "a")
    assert not watch.changes()


def test_more_than_the_kernel_keeps_is_told_as_lost(watch, woken, logs, monkeypatch):
    watch.cover([str(logs)])
    with open("/proc/sys/fs/inotify/max_queued_events", encoding="ascii") as file:
        kept = int(file.read())
    watch._mutex.acquire()  # so that nobody reads meanwhile
    try:
        one, other = (
            os.open(logs / "a", os.O_CREAT | os.O_WRONLY),
            os.open(logs / "b", os.O_CREAT | os.O_WRONLY),
        )
        for _ in range(kept // 2 + 10):
            os.write(one, b"x")
            os.write(other, b"x")
    finally:
        watch._mutex.release()
    os.close(one)
    os.close(other)
    deadline = time.monotonic() + 60
    while not watch.changes().lost:
        assert time.monotonic() < deadline
    append(logs / "a")
    assert watch.changes().grown


def test_files_of_network_file_systems_are_not_trusted_to_the_kernel(watch, logs, monkeypatch):
    monkeypatch.setattr(module, "_remote_devices", lambda: {os.stat(logs).st_dev})
    assert watch.cover([str(logs)]) == {str(logs): "a network file system"}
    assert not watch.covers(str(logs))


def test_a_watch_that_is_closed_ends_its_thread_and_tells_nothing(logs):
    watch = Watch(lambda: None)
    watch.cover([str(logs)])
    watch.close()
    watch.close()
    assert not watch._thread.is_alive()
    assert not watch.changes()


def test_a_watch_that_two_threads_close_at_once_closes_nobody_elses_descriptors(logs):
    told, go_on = threading.Event(), threading.Event()

    def wake():
        told.set()
        go_on.wait(30)

    watch = Watch(wake)
    watch.cover([str(logs)])
    append(logs / "a")
    assert told.wait(30)
    with ThreadPoolExecutor(2) as closers:
        closing = [closers.submit(watch.close) for _ in range(2)]
        assert not wait(closing, 0.2).done  # both wait for the watch's thread by then
        go_on.set()
        for one in closing:
            one.result(30)


def test_a_watch_that_is_closed_within_its_own_thread_reads_nobody_elses_descriptors(logs):
    others = []

    def wake():
        watch.close()
        others.extend(os.eventfd(0) for _ in range(2))  # they get the numbers of what was closed

    watch = Watch(wake)
    watch.cover([str(logs)])
    append(logs / "a")
    watch._thread.join(30)
    try:
        assert not watch._thread.is_alive()
    finally:
        for other in others:
            os.close(other)
