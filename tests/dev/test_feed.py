"""The generator of `photon dev`: the same events in every datacenter's copy of the logs."""

import json
import os
import random
import resource
import threading
import time

import pytest

from photon.core.errors import DiskFullError, StorageError
from photon.dev import feeder as dev_feeding
from photon.dev.feeder import (
    DatacenterLogs,
    Feed,
    Feeder,
    fed_events,
    feed,
    last_life,
)
from tests.system import write_lines
from tests.waiting import wait_until


class Time:
    def __init__(self):
        self.us = 1_700_000_000_000_000

    def __call__(self):
        return self.us


def test_the_feeder_writes_what_was_asked_for_and_clicks_name_earlier_queries(tmp_path):
    began_us = time.time_ns() // 1_000
    fed = feed(Feed([str(tmp_path)], 4_000, 20_000, 1, seconds=0.5), threading.Event(), print)
    queries, clicks = (
        [json.loads(line) for line in (tmp_path / name / "fed-000000.jsonl").read_bytes().splitlines()]
        for name in ("queries", "clicks")
    )
    assert len(queries) == fed.queries == 2_000
    assert len(clicks) == fed.clicks == 10_000
    assert fed.seconds >= 0.5
    asked = {query["id"]: query["ts_us"] for query in queries}
    assert len(asked) == len(queries)
    assert len({click["id"] for click in clicks}) == len(clicks)
    assert all(asked[click["primary_id"]] < click["ts_us"] for click in clicks)
    assert all(began_us <= click["ts_us"] <= time.time_ns() // 1_000 for click in clicks)


def test_two_copies_hold_the_same_lines_in_the_same_order_each_with_its_own_delay(tmp_path):
    rng = random.Random(1)
    copies = [DatacenterLogs(tmp_path / name, "a.jsonl", rng, 0.5) for name in ("east", "west")]
    differed = False
    for tick in range(300):
        now = tick * 0.01
        for copy in copies:
            copy.put(now, b"q%d\n" % tick, b"c%d\n" % tick)
            copy.write(now)
        sizes = {(tmp_path / name / "clicks" / "a.jsonl").stat().st_size for name in ("east", "west")}
        differed = differed or len(sizes) == 2
    for copy in copies:
        copy.close()
    assert differed
    for kind in ("queries", "clicks"):
        lines = b"".join(b"%s%d\n" % (kind[:1].encode(), tick) for tick in range(300))
        for name in ("east", "west"):
            assert (tmp_path / name / kind / "a.jsonl").read_bytes() == lines


def test_a_log_that_cannot_be_written_ends_the_feed(tmp_path):
    (tmp_path / "clicks").mkdir()
    os.mkfifo(tmp_path / "clicks" / "a.jsonl")
    reader = os.open(tmp_path / "clicks" / "a.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    logs = DatacenterLogs(tmp_path, "a.jsonl", random.Random(1), 0.0)
    os.close(reader)
    logs.put(0.0, b"q\n", b"c\n")
    with pytest.raises(StorageError, match=r"a.jsonl: Broken pipe"):
        logs.write(1.0)


@pytest.fixture
def limit():
    """Files of this process get no larger than so many bytes: a disk that is full, and no longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_does_not_fit_on_a_full_disk_is_written_when_it_does(tmp_path, limit):
    logs = DatacenterLogs(tmp_path, "a.jsonl", random.Random(1), 0.0)
    logs.put(0.0, b"query one\n", b"click one\n")
    logs.put(0.0, b"query two\n", b"click two\n")
    limit(15)
    for _ in range(2):
        with pytest.raises(DiskFullError, match=r"a.jsonl: no space left"):
            logs.write(1.0)
    limit(1000)
    logs.close()
    assert (tmp_path / "queries" / "a.jsonl").read_bytes() == b"query one\nquery two\n"
    assert (tmp_path / "clicks" / "a.jsonl").read_bytes() == b"click one\nclick two\n"


def events_of(directory):
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.fixture
def feeder(tmp_path):
    """One that feeds two datacenters."""
    made = Feeder(Feed([str(tmp_path / name) for name in ("east", "west")], 1_000.0, 500.0, 1))
    yield made
    made.stop()


def test_a_feeder_that_is_stopped_leaves_whole_logs_with_all_that_it_held_back(tmp_path, feeder):
    homes = [tmp_path / name for name in ("east", "west")]
    wait_until(lambda: len(events_of(homes[1] / "clicks")) > 200, 60)
    feeder.stop()
    assert not feeder.failed
    for home in homes:
        queries = {event["id"] for event in events_of(home / "queries")}
        assert {event["primary_id"] for event in events_of(home / "clicks")} <= queries
    assert events_of(homes[0] / "clicks") == events_of(homes[1] / "clicks")


def test_a_feeder_on_a_full_disk_makes_no_events_tells_so_and_goes_on_when_there_is_room(
    tmp_path, limit, feeder
):
    east = tmp_path / "east"
    wait_until(lambda: len(events_of(east / "clicks")) > 10, 60)
    limit((east / "queries" / "fed-000000.jsonl").stat().st_size + 5_000)
    wait_until(lambda: feeder.notices, 60)
    (notice,) = feeder.notices
    assert "fed-000000.jsonl: no space left" in notice and "makes no events meanwhile" in notice
    full_us = time.time_ns() // 1_000
    wait_until(lambda: time.time_ns() // 1_000 > full_us + 1_000_000, 60)
    room_us = time.time_ns() // 1_000
    limit(resource.RLIM_INFINITY)
    wait_until(lambda: len(feeder.notices) == 2, 60)
    assert "it goes on" in feeder.notices[1]
    wait_until(lambda: events_of(east / "clicks")[-1]["ts_us"] > room_us, 60)
    feeder.stop()
    queries, clicks = (events_of(east / kind) for kind in ("queries", "clicks"))
    assert {click["primary_id"] for click in clicks} <= {query["id"] for query in queries}
    assert not [one for one in queries if full_us < one["ts_us"] < room_us]


def test_a_feeder_that_is_told_to_end_while_the_disk_is_full_says_so(tmp_path, limit, feeder):
    wait_until(lambda: len(events_of(tmp_path / "east" / "clicks")) > 10, 60)
    limit(1)
    wait_until(lambda: feeder.notices, 60)
    feeder.stop()
    limit(resource.RLIM_INFINITY)
    assert "fed-000000.jsonl: no space left" in feeder.failed


def test_a_feeder_that_does_not_end_when_told_is_told_of(monkeypatch):
    monkeypatch.setattr(dev_feeding, "END_S_MAX", 0.1)
    gate = threading.Event()
    monkeypatch.setattr(dev_feeding, "feed", lambda *_: gate.wait())
    feeder = Feeder(Feed([], 1.0, 1.0, 1))
    feeder.stop()
    gate.set()
    assert "did not write its last events within 0.1 s; its logs" in feeder.failed


def test_a_feeder_that_cannot_write_says_why(tmp_path):
    (tmp_path / "east").write_text("no directory")
    feeder = Feeder(Feed([str(tmp_path / "east")], 1_000.0, 500.0, 1))
    why = wait_until(lambda: feeder.failed, 60)
    assert "east" in why and "Not a directory" in why


def test_two_lives_at_the_same_time_of_the_clock_have_no_id_in_common():
    ids = []
    for life in (0, 1):
        events = fed_events(Feed([], 400.0, 100.0, 1), Time(), life)
        lines = [line for at in (1.0, 2.0) for _, _, some in events.tick(at) for line in some]
        ids.append({json.loads(line)["id"] for line in lines})
    assert len(ids[0]) == len(ids[1]) > 400 and ids[0].isdisjoint(ids[1])


def test_each_life_is_counted_by_the_files_of_the_earlier_ones(tmp_path):
    assert last_life(str(tmp_path)) == -1
    for name in ("fed-000000.jsonl", "fed-000011.jsonl", "own-000099.jsonl"):
        write_lines(tmp_path / "clicks" / name, [])
    assert last_life(str(tmp_path)) == 11
