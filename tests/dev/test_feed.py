"""The generator of `photon dev`: the same events in every datacenter's copy of the logs."""

import json
import os
import random
import resource
import signal
import sys
import threading
import time

import pytest

from photon.core.errors import DiskFullError, StorageError
from photon.dev import feeder as dev_feeding
from photon.dev.feeder import (
    EARLY,
    REPEATED,
    DatacenterLogs,
    Feed,
    Feeder,
    FeederEndedError,
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


def sides_of(tick):
    """Lines of queries, lines of clicks."""
    return tuple([line for of, _, lines in tick for line in lines if of == side] for side in (0, 1))


@pytest.fixture
def made():
    """What 20 s of 400 queries/s and 100 clicks/s come to: (lines of queries, lines of clicks) a tick."""
    time = Time()
    events = fed_events(Feed([], 400.0, 100.0, 1, early=EARLY, repeated=REPEATED), time, 0)
    ticks = []
    for tick in range(2_000):
        time.us += 10_000
        ticks.append(sides_of(events.tick((tick + 1) * 0.01)))
    ticks.append(sides_of(events.tick(20.0, last=True)))
    return ticks


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


def test_events_come_at_the_rate_that_is_asked_for(made):
    queries = [line for tick in made for line in tick[0]]
    clicks = [json.loads(line) for tick in made for line in tick[1]]
    distinct = {click["id"] for click in clicks}
    assert len(distinct) == pytest.approx(2_000, rel=0.01)
    # One in a hundred clicks brings a query of its own.
    assert len(queries) == pytest.approx(8_000 + 20, rel=0.01)
    assert len({json.loads(line)["id"] for line in queries}) == len(queries)


def test_every_click_names_a_query_that_is_logged_some_of_them_later(made):
    logged, early = set(), 0
    named = set()
    for queries, clicks in made:
        logged |= {json.loads(line)["id"] for line in queries}
        of = {json.loads(line)["primary_id"] for line in clicks}
        early += len(of - logged)
        named |= of
    assert named <= logged
    assert 5 < early < 50


def test_some_clicks_are_logged_twice_byte_for_byte(made):
    clicks = [line for tick in made for line in tick[1]]
    repeated = len(clicks) - len({*clicks})
    assert len({*clicks}) == len({json.loads(line)["id"] for line in clicks})
    assert 0 < repeated < 20


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


def test_a_feeder_on_a_full_disk_makes_no_events_tells_so_and_goes_on_when_there_is_room(tmp_path):
    feeder = started(tmp_path)
    try:
        size = (tmp_path / "east" / "queries" / "fed-000000.jsonl").stat().st_size + 5_000
        resource.prlimit(feeder.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        def told():
            feeder.check()
            return feeder.notices

        wait_until(told, 60)
        (notice,) = feeder.notices
        assert "fed-000000.jsonl: no space left" in notice and "makes no events meanwhile" in notice
        full_us = time.time_ns() // 1_000
        wait_until(lambda: time.time_ns() // 1_000 > full_us + 1_000_000, 60)
        room_us = time.time_ns() // 1_000
        resource.prlimit(feeder.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        wait_until(lambda: len(told()) == 2, 60)
        assert "it goes on" in feeder.notices[1]
        wait_until(lambda: events_of(tmp_path / "east" / "clicks")[-1]["ts_us"] > room_us, 60)
        feeder.stop()
    finally:
        feeder.kill()
    queries, clicks = (events_of(tmp_path / "east" / kind) for kind in ("queries", "clicks"))
    assert {click["primary_id"] for click in clicks} <= {query["id"] for query in queries}
    assert not [one for one in queries if full_us < one["ts_us"] < room_us]


def test_a_feeder_that_is_told_to_end_while_the_disk_is_full_says_so(tmp_path):
    feeder = started(tmp_path)
    try:
        resource.prlimit(feeder.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        with pytest.raises(FeederEndedError, match=r"\(exit status 1\): .*fed-000000.jsonl: no space left"):
            feeder.stop()
    finally:
        feeder.kill()


def test_a_feeder_that_somebody_kills_is_told_by_the_signal(tmp_path):
    feeder = started(tmp_path)
    os.kill(feeder.pid, signal.SIGKILL)
    assert why_ended(feeder) == "the feeder was killed by signal 9"


def why_ended(feeder):
    """Why it has ended by itself, once it has."""
    why = []

    def has_ended():
        try:
            feeder.check()
        except FeederEndedError as error:
            why.append(str(error))
        return why

    wait_until(has_ended, 60)
    return why[0]


def events_of(directory):
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines]


def test_a_feeder_that_is_stopped_leaves_whole_logs_with_all_that_it_held_back(tmp_path):
    homes = [tmp_path / name for name in ("east", "west")]
    before = {home: last_life(str(home)) for home in homes}
    feeder = Feeder(homes, 1_000.0, 500.0, 1, tmp_path / "feed.log")
    wait_until(feeder.has_begun, 60)
    assert all(last_life(str(home)) > before[home] for home in homes)
    try:
        wait_until(lambda: len(events_of(homes[1] / "clicks")) > 200, 60)
        feeder.check()
        feeder.stop()
    finally:
        feeder.kill()
    for home in homes:
        queries = {event["id"] for event in events_of(home / "queries")}
        assert {event["primary_id"] for event in events_of(home / "clicks")} <= queries
    assert events_of(homes[0] / "clicks") == events_of(homes[1] / "clicks")


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


def started(tmp_path):
    feeder = Feeder([tmp_path / "east"], 1_000.0, 500.0, 1, tmp_path / "feed.log")
    wait_until(lambda: len(events_of(tmp_path / "east" / "clicks")) > 10, 60)
    return feeder


def test_a_feeder_that_does_not_end_when_told_is_killed_and_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(dev_feeding, "END_S_MAX", 0.2)
    feeder = started(tmp_path)
    os.kill(feeder.pid, signal.SIGSTOP)
    with pytest.raises(FeederEndedError, match="was killed; its logs"):
        feeder.stop()


def test_a_feeder_that_fails_at_its_last_write_says_why(tmp_path, monkeypatch):
    # A child that ends as the feeder does when the disk is full at the end.
    child = tmp_path / "child.py"
    child.write_text(
        "import signal, sys\n"
        "def end(*_):\n    sys.stderr.write('photon: a.jsonl: No space left\\n'); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "while True:\n    signal.pause()\n"
    )
    monkeypatch.setattr(dev_feeding, "COMMAND", (sys.executable, str(child)))
    feeder = Feeder([tmp_path / "east"], 1_000.0, 500.0, 1, tmp_path / "feed.log")
    wait_until((tmp_path / "ready").exists, 60)
    with pytest.raises(FeederEndedError, match="No space left"):
        feeder.stop()


def test_a_feeder_that_cannot_write_says_why(tmp_path):
    (tmp_path / "east").write_text("no directory")
    feeder = Feeder([tmp_path / "east"], 1_000.0, 500.0, 1, tmp_path / "feed.log")
    why = why_ended(feeder)
    assert "east" in why and "Not a directory" in why
