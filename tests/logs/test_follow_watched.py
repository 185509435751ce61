"""Followers that the kernel tells what happens; and what they do where it does not (paper 3.2)."""

import dataclasses
import os
import threading
import time

import pytest

from photon.core.clock import SystemClock
from photon.core.settings import Logs
from photon.logs import follow, watch
from photon.logs import watch as finder
from photon.logs.follow import LogFollower
from tests.logs.following import Following, append


@pytest.fixture
def following(logs, tmp_path):
    return lambda *patterns, **options: Following(
        *(patterns or [logs / "*.jsonl"]), spool=tmp_path / "spool", **options
    )


def test_silent_files_cost_no_look_between_scans_nor_at_scans(logs, following, monkeypatch):
    for number in range(300):
        append(logs / f"{number}.jsonl", b"1\n")
    it = following()
    it.read()
    with monkeypatch.context() as patch:
        patch.setattr(
            follow.os, "stat", lambda path, **_: pytest.fail(path) if "jsonl" in str(path) else real(path)
        )
        it.clock.advance(1.5)
        assert it.follower.scan_if_due() == []
        it.follower.poll()
        assert it.follower.next_chunk() is None
    append(logs / "150.jsonl", b"2\n")
    assert it.read(scan=False) == {"150.jsonl": b"2\n"}


real = os.stat


def test_a_new_file_is_found_before_the_next_scan_is_due(logs, following):
    it = following()
    it.read()
    append(logs / "a.jsonl", b"1\n")
    it.clock.advance(0.2)
    it.follower.scan_if_due()
    assert it.rest() == {"a.jsonl": b"1\n"}


def test_files_that_match_nothing_cause_no_scan(logs, following, monkeypatch):
    it = following()
    it.read()
    monkeypatch.setattr("photon.logs.watch.find", None)  # would raise if it were called
    (logs / "a.tmp").touch()
    (logs / "a.tmp").rename(logs / "b.tmp")
    it.clock.advance(1.5)
    assert it.follower.scan_if_due() == []


def test_a_directory_that_appears_later_is_watched_too(logs, following):
    it = following(logs / "*" / "*.jsonl")
    it.read()
    (logs / "east").mkdir()
    append(logs / "east" / "a.jsonl", b"1\n")
    it.clock.advance(0.2)
    it.follower.scan_if_due()
    assert it.rest() == {"a.jsonl": b"1\n"}
    append(logs / "east" / "a.jsonl", b"2\n")
    assert it.read(scan=False) == {"a.jsonl": b"2\n"}


def test_a_link_that_leads_to_another_directory_by_now_is_noticed_at_the_next_scan(logs, tmp_path, following):
    for day in ("monday", "tuesday"):
        (logs / day).mkdir()
        append(logs / day / "a.jsonl", day.encode() + b"\n")
    today = tmp_path / "today"
    today.symlink_to(logs / "monday")
    it = following(today / "*.jsonl")
    assert it.read() == {"a.jsonl": b"monday\n"}
    today.unlink()
    today.symlink_to(logs / "tuesday")
    it.clock.advance(1.5)
    it.keep(it.follower.scan_if_due())
    assert it.rest() == {"a.jsonl": b"tuesday\n"}


def test_a_file_that_is_written_through_another_name_is_polled(logs, tmp_path, following):
    for number, link in enumerate((os.link, os.symlink)):
        elsewhere = tmp_path / f"elsewhere-{number}"
        append(elsewhere, b"1\n")
        link(elsewhere, logs / f"{number}.jsonl")
    it = following()
    it.read()
    for number in range(2):
        append(tmp_path / f"elsewhere-{number}", b"2\n")
    assert it.read(scan=False) == {"0.jsonl": b"2\n", "1.jsonl": b"2\n"}


@pytest.mark.parametrize("broken", ["no inotify", "no watches"])
def test_where_the_kernel_can_tell_nothing_files_are_polled_and_that_is_said(
    logs, following, monkeypatch, broken
):
    def refuse(*_):
        raise OSError(28, "none left")

    monkeypatch.setattr(watch.Watch, "__init__" if broken == "no inotify" else "_add", refuse)
    append(logs / "a.jsonl", b"1\n")
    it = following()
    assert it.read() == {"a.jsonl": b"1\n"}
    assert len(it.notices) == 1
    assert "none left" in it.notices[0]
    assert "polled" in it.notices[0]
    append(logs / "a.jsonl", b"2\n")
    assert it.read(scan=False) == {"a.jsonl": b"2\n"}
    append(logs / "b.jsonl", b"3\n")
    it.clock.advance(1.5)
    it.follower.scan_if_due()
    assert it.rest() == {"b.jsonl": b"3\n"}


def test_what_the_kernel_could_not_keep_is_found_by_a_scan(logs, following, monkeypatch):
    append(logs / "a.jsonl", b"1\n")
    it = following()
    it.read()
    append(logs / "a.jsonl", b"2\n")
    lost = watch.Changes(lost=True)
    monkeypatch.setattr(watch.Watch, "changes", lambda _: lost)
    it.clock.advance(1.5)
    it.follower.scan_if_due()
    assert it.rest() == {"a.jsonl": b"2\n"}


def test_what_the_kernel_does_not_tell_is_found_all_the_same(logs, following, monkeypatch):
    append(logs / "a.jsonl", b"1\n")
    it = following()
    it.read()
    monkeypatch.setattr(watch.Watch, "changes", lambda _: watch.Changes())
    append(logs / "a.jsonl", b"2\n")
    assert it.read(scans=1) == {"a.jsonl": b"2\n"}


def test_a_file_on_a_device_with_another_number_goes_on(logs, following):
    """A remount or a reboot: the same file by path, inode and head."""
    append(logs / "a.jsonl", b"1\n")
    it = following()
    it.read()
    (state,) = it.states.values()
    append(logs / "a.jsonl", b"2\n")
    old = dataclasses.replace(
        state, device=state.device + 1, source=(state.device + 1, state.inode), tail_at=0
    )
    again = following(states=[old])
    assert again.read() == {"a.jsonl": b"2\n"}
    assert again.states[0].device == state.device
    assert again.states[0].source == state.source
    (logs / "a.jsonl").write_bytes(b"another\n")
    other = following(states=[old])
    assert other.read() == {"a.jsonl": b"another\n"}
    assert other.states[0].gone


def test_a_waiting_reader_is_woken_and_has_the_line_within_moments(logs, tmp_path):
    woken = threading.Event()
    follower = LogFollower([str(logs)], tmp_path / "spool", Logs(), SystemClock(), wake=woken.set)
    append(logs / "a.jsonl", b"1\n")
    follower.scan_if_due()
    assert follower.next_chunk() is not None
    assert follower.patience_s > 0.5
    woken.clear()
    append(logs / "a.jsonl", b"2\n")
    assert woken.wait(60)
    follower.poll()
    assert follower.next_chunk()[1].data == b"2\n"
    follower.close()


def test_a_follower_that_nobody_holds_watches_no_more(logs, tmp_path):
    follower = LogFollower([str(logs)], tmp_path / "spool", Logs(), SystemClock())
    follower.scan_if_due()
    thread = follower._finder._watch._thread
    del follower
    deadline = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_growing_files_are_read_whole_by_one_look_each(logs, following, monkeypatch):
    it = following()
    for number in range(20):
        append(logs / f"{number}.jsonl", b"1\n")
    it.read()
    for number in range(20):
        append(logs / f"{number}.jsonl", b"2\n")
    reads = []
    one = follow.read_chunk
    monkeypatch.setattr(follow, "read_chunk", lambda *args: reads.append(args[0]) or one(*args))
    assert len(it.read(scan=False)) == len(reads) == 20


def test_a_file_that_comes_between_the_listing_and_the_watch_is_found(logs, following, monkeypatch):
    find = finder.find

    def find_and_be_late(*arguments):
        found = find(*arguments)
        append(logs / "a.jsonl", b"1\n")
        return found

    monkeypatch.setattr(finder, "find", find_and_be_late)
    it = following()
    it.follower.scan_if_due()
    assert it.rest()["a.jsonl"].startswith(b"1\n")


def test_directories_that_are_made_all_the_time_do_not_keep_a_scan_from_ending(logs, tmp_path, monkeypatch):
    find, listings = finder.find, []

    def find_and_one_more(*arguments):
        found = find(*arguments)
        listings.append(1)
        assert len(listings) < 100, "it lists for ever"
        (logs / f"{len(listings)}").mkdir()
        append(logs / f"{len(listings)}" / "a.jsonl", b"1\n")
        return found

    monkeypatch.setattr(finder, "find", find_and_one_more)
    it = Following(logs / "*" / "*.jsonl", spool=tmp_path / "spool")
    it.follower.scan_if_due()
    assert it.rest() != {}
    monkeypatch.setattr(finder, "find", find)
    it.clock.advance(0.5)  # sooner than a scan is due
    it.keep(it.follower.scan_if_due())
    it.rest()
    assert len(it.states) == len(listings)
