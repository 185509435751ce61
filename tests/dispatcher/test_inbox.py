"""Events that are fed in again, and what is known of events that wait."""

import json
import os

import pytest

from dispatcher.client import DispatcherClient
from dispatcher.workers import RECOVERED, Inbox, put
from photon.core.columns import split_ids
from photon.core.errors import StorageError, UnavailableError
from photon.core.fates import Joined
from photon.core.ids import IdPacker
from photon.logs.files import FileState
from tests.dispatcher.fakes import Site, clicks, fast_settings
from tests.power_cut import PowerCuts
from tests.waiting import wait_until


def feed(site, name: str, data: bytes):
    """As `photon dead-letters replay` does."""
    path = site.root / "state" / "inbox" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)
    return path


def test_what_is_put_into_the_inbox_is_read_and_the_file_is_deleted_when_all_of_it_is_recorded(site, running):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 10))
    server = running()
    wait_until(lambda: server.status()["fates"]["joined"] == 10)
    path = feed(site, "again.jsonl", clicks(10, 500) + b"bad\n")
    wait_until(lambda: not path.exists())
    status = server.status()
    assert (status["fates"]["joined"], status["fates"]["malformed"]) == (500, 1)
    assert (site.logs / "a.jsonl").exists()
    second = feed(site, "again.jsonl", clicks(500, 600))
    wait_until(lambda: not second.exists())
    assert server.status()["fates"]["joined"] == 600
    wait_until(lambda: server.status()["worker"]["files"] == 1)
    assert server.status()["notices"] == []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stopped", [False, True], ids=["live", "stopped between"])
def test_the_same_events_that_are_fed_in_again_are_tried_again(tmp_path, workers, stopped):
    """Their file has the bytes of the last one, and often its inode: only its name is another."""
    site = Site(tmp_path)

    def start():
        return [site.server(worker=worker, workers=workers) for worker in range(workers)]

    def counted():
        return sum(server.status()["foreign_events"] for server in servers)

    servers = start()
    for server in servers:
        server.start()
    try:
        for times in (1, 2, 3, 4):
            path = feed(site, f"replay-{times}.jsonl", clicks(0, 100))
            wait_until(lambda path=path: not path.exists())
            if stopped:
                for server in servers:
                    server.stop()
                servers = start()
                for server in servers:
                    server.start()
            wait_until(lambda times=times: counted() == 100 * times, 20, f"time {times}")
    finally:
        for server in servers:
            server.stop()


def test_a_file_in_the_inbox_stays_while_any_of_it_is_unrecorded_and_an_empty_one_goes(site, running):
    def refuse(_events):
        raise UnavailableError("gone")

    site.joiner.before = refuse
    path, empty = feed(site, "again.jsonl", clicks(0, 100)), feed(site, "empty.jsonl", b"")
    server = running()
    wait_until(lambda: server.status()["in_flight"] == 100 and not empty.exists())
    assert path.exists()
    server.stop()
    assert path.exists()
    site.joiner.before = lambda _: None
    server = running()
    wait_until(lambda: not path.exists())
    assert server.status()["foreign_events"] == 100


def test_a_file_that_was_recorded_before_a_crash_is_deleted_at_the_next_start_and_not_read_again(
    site, running, monkeypatch
):
    path = feed(site, "again.jsonl", clicks(0, 100))
    with monkeypatch.context() as crash:
        crash.setattr(Inbox, "sweep", lambda _self, _states: None)
        server = running()
        wait_until(lambda: server.status()["foreign_events"] == 100)
        server.stop()
    assert path.exists()
    assert site.drain()["foreign_events"] == 100
    assert not path.exists()


def test_a_power_cut_right_after_a_file_was_deleted_takes_none_of_its_events(
    site, running, monkeypatch, tmp_path
):
    cuts = PowerCuts(monkeypatch, tmp_path / "state", tmp_path)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 10))
    server = running()
    wait_until(lambda: server.status()["fates"]["joined"] == 10)
    feed(site, "again.jsonl", clicks(10, 500))
    wait_until(lambda: "again.jsonl" in dict(cuts.left))
    server.stop()
    left = dict(cuts.left)["again.jsonl"]
    monkeypatch.undo()
    cuts.restore(left)
    assert site.drain()["foreign_events"] == 500


def test_a_file_stays_in_the_inbox_while_the_ledger_cannot_be_synced(tmp_path):
    def fail():
        raise StorageError("EIO")

    inbox = Inbox(tmp_path, fail)
    path = tmp_path / "inbox" / "again.jsonl"
    path.write_bytes(b"line\n")
    status = path.stat()
    inbox.sweep([FileState(0, str(path), str(path), status.st_dev, status.st_ino, status.st_size)])
    assert path.exists()


def test_a_directory_whose_name_looks_like_a_pattern_has_an_inbox_too(tmp_path):
    root = tmp_path / "run[1]*"
    root.mkdir()
    site = Site(root)
    path = feed(site, "again.jsonl", clicks(0, 3))
    server = site.server(patterns=[str(tmp_path)])
    server.start()
    wait_until(lambda: not path.exists())
    server.stop()
    assert len(site.joiner.handed) == 3


def test_what_is_known_of_events_that_wait_is_told_for_each_id(site, running):
    site.joiner.answer = lambda line, _tries: (
        (Joined.RETRY_ABSENT if b"click-3" in line else Joined.JOINED),
        None,
    )
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 10))
    server = running(fast_settings(absent_delay_ms_max=50))
    client = DispatcherClient(server.address)
    ids = IdPacker(b"photon").pack(["click-2", "click-3", "click-99"])
    wait_until(lambda: (client.pending(ids)[1] or {}).get("tries", 0) >= 3)
    joined, waits, unknown = client.pending(ids)
    assert joined is None and unknown is None
    assert waits["sends"] >= waits["tries"] >= 3
    assert (waits["file"], waits["offset"], waits["worker"]) == (str(path), len(clicks(0, 3)), 0)
    assert waits["due_us"] > waits["waiting_since_us"] > 0
    assert waits["line"].encode() + b"\n" == clicks(3, 4)
    assert client.pending(b"") == []
    client.close()


def test_all_waiting_events_are_found_however_many_pages_that_takes(site, running, monkeypatch):
    monkeypatch.setattr("dispatcher.ledger.SCANNED_MAX", 7)
    site.joiner.answer = lambda _line, _tries: (Joined.RETRY_ABSENT, None)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 100))
    server = running(fast_settings(retry_delay_ms_min=60_000, retry_delay_ms_max=60_000))
    wait_until(lambda: server.status()["pending"] == 100)
    client = DispatcherClient(server.address)
    found = client.pending(IdPacker(b"photon").pack([f"click-{n}" for n in range(101)]))
    assert [entry is not None for entry in found] == [True] * 100 + [False]
    client.close()


def test_what_recovery_released_goes_to_a_joiner_though_a_lagging_replica_still_calls_it_present(
    site, running, tmp_path
):
    """A lookup's "present" is final but for what recovery releases (paper 3.3.3)."""
    lines = tmp_path / "plan.jsonl"
    lines.write_bytes(clicks(0, 5))
    packed = IdPacker().pack([json.loads(line)["id"] for line in clicks(0, 10).splitlines()])
    site.registry.present = set(split_ids(packed))
    inbox = site.root / "state" / "inbox"
    put(lines, inbox, f"{RECOVERED}1.jsonl")
    feed(site, "again.jsonl", clicks(5, 10))
    server = running()
    wait_until(lambda: not list(inbox.glob("*.jsonl")))
    fates = server.status()["fates"]
    assert (fates["joined"], fates["duplicate"]) == (5, 5)


def test_a_file_that_is_in_the_inbox_already_is_left_alone(tmp_path):
    lines, inbox = tmp_path / "plan.jsonl", tmp_path / "inbox"
    lines.write_bytes(clicks(0, 5))
    put(lines, inbox, "a.jsonl")
    inode = (inbox / "a.jsonl").stat().st_ino
    put(lines, inbox, "a.jsonl")
    assert [path.name for path in inbox.iterdir()] == ["a.jsonl"]
    assert (inbox / "a.jsonl").stat().st_ino == inode
    assert lines.exists()


def test_a_file_that_a_killed_recovery_had_renamed_is_made_durable_before_its_plan_is_forgotten(
    tmp_path, monkeypatch
):
    lines, inbox = tmp_path / "plan.jsonl", tmp_path / "inbox"
    lines.write_bytes(clicks(0, 5))
    put(lines, inbox, "a.jsonl")
    synced = []
    monkeypatch.setattr("dispatcher.workers.sync_directory", synced.append)
    put(lines, inbox, "a.jsonl")
    assert synced == [inbox]


@pytest.mark.parametrize("replaced", [False, True])
def test_only_the_file_that_was_read_is_deleted(tmp_path, replaced):
    inbox = Inbox(tmp_path, lambda: None)
    path = tmp_path / "inbox" / "again.jsonl"
    path.write_bytes(b"one\n")
    status = path.stat()
    state = FileState(1, str(path), str(path), status.st_dev, status.st_ino, offset=4)
    if replaced:
        path.rename(tmp_path / "inbox" / "elsewhere.jsonl")
        path.write_bytes(b"two\n")
    inbox.sweep([state])
    assert path.exists() is replaced


def test_a_file_comes_into_the_inbox_when_it_is_durable_and_then_durably(tmp_path, monkeypatch):
    steps, real = [], os.fsync
    (tmp_path / "lines").write_bytes(clicks(0, 1))
    inbox = tmp_path / "inbox"
    inbox.mkdir()

    def fsync(fd):
        steps.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), (inbox / "a.jsonl").exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    put(tmp_path / "lines", inbox, "a.jsonl")
    assert steps[-2:] == [(".a.jsonl.partial", False), ("inbox", True)]
