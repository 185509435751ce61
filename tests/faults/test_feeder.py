"""The feeder of the fault tests: the same logs from the same seed, one copy a datacenter, and their truth."""

import json
import time
from collections import Counter

from tests.faults.kit.feeder import Feed, Feeder, cut_short
from tests.waiting import wait_until

ALL_AT_ONCE = Feed(seed=7, clicks=1_000, clicks_per_s=0)


def fed(tmp_path, feed, names=("east", "west")):
    feeder = Feeder(feed, {name: tmp_path / name for name in names})
    feeder.start()
    feeder.join(60)
    return feeder


def lines_of(directory):
    return [line for path in sorted(directory.glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def event_of(line):
    try:
        event = json.loads(line)
        return event if isinstance(event, dict) and isinstance(event.get("ts_us"), int) else None
    except ValueError:
        return None


def assert_truth_is_logged(feeder):
    """In each datacenter's logs."""
    truth = feeder.truth
    for name, logs in feeder.logs.items():
        lines = lines_of(logs / "clicks")
        events = [event for event in map(event_of, lines) if event is not None]
        queries = [e for e in map(event_of, lines_of(logs / "queries")) if e is not None]
        known = {query["id"] for query in queries}
        assert len(lines) == truth.foreign_lines == feeder.written[name]
        assert len(lines) - len(events) == truth.malformed
        assert {e["id"]: e["primary_id"] for e in events if e["primary_id"] in known} == truth.pairs
        assert {e["id"] for e in events if e["primary_id"] not in known} == truth.orphans.keys()
        assert Counter(e["id"] for e in events if e["id"] in truth.orphans) == truth.orphans
        assert sum(Counter(e["id"] for e in events).values()) - len(truth.clicks) == truth.repeated
        assert known == truth.queries.keys()


def test_the_truth_is_what_each_datacenter_has_in_its_logs(tmp_path):
    feeder = fed(tmp_path, ALL_AT_ONCE)
    assert_truth_is_logged(feeder)
    truth = feeder.truth
    assert truth.orphans and truth.repeated and truth.malformed and truth.malformed_queries


def test_a_seed_makes_the_same_events_again_at_another_time(tmp_path):
    def shape(feeder):
        rows = list(feeder.truth.queries)
        return [rows.index(primary) for primary in feeder.truth.pairs.values()]

    one, again = fed(tmp_path / "one", ALL_AT_ONCE), fed(tmp_path / "again", ALL_AT_ONCE)
    other = fed(tmp_path / "other", Feed(seed=8, clicks=1_000, clicks_per_s=0))
    assert shape(one) == shape(again) != shape(other)
    assert not one.truth.pairs.keys() & {i for i in again.truth.pairs if ":" in i}


def test_some_clicks_are_logged_before_the_query_that_they_name(tmp_path):
    feed = Feed(seed=3, clicks=300, clicks_per_s=600, before_query=0.3, orphans=0, late=0)
    feeder = Feeder(feed, {"east": tmp_path / "east"})
    feeder.start()
    early = set()
    while not feeder.is_done:
        time.sleep(0.01)
        # The queries first: what is missing among them then was not there when the click was.
        queries = set(lines_of(tmp_path / "east" / "queries"))
        clicks = {e["id"] for e in map(event_of, lines_of(tmp_path / "east" / "clicks")) if e}
        truth = feeder.truth
        early |= {text for text in clicks if truth.queries[truth.pairs[text]] not in queries}
    feeder.join(60)
    assert len(early) > 10


def test_a_feed_that_is_cut_short_has_the_truth_of_what_was_logged(tmp_path):
    feed = Feed(seed=5, clicks=20_000, clicks_per_s=1_500, before_query=0.2, orphans=0.05, malformed=0.05)
    feeder = Feeder(feed, {name: tmp_path / name for name in ("east", "west")})
    feeder.start()
    wait_until(lambda: min(feeder.written.values()) >= 500)
    cut_short(feeder)
    feeder.join(60)
    truth = feeder.truth
    assert 500 <= len(truth.clicks) < feed.clicks
    assert feeder.joinable == len(truth.pairs)
    assert_truth_is_logged(feeder)
