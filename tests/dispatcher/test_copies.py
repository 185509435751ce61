"""Copies of one event that differ: counted apart from plain repetitions, and kept to be listed."""

import dataclasses

import numpy as np
import pytest

from dispatcher.rules.copies import REMEMBERED, Copies
from photon.cluster.dead_letters import REPLAYED, Filter, count_letters, replay
from photon.core.columns import pack_times
from photon.core.fates import Differing, Joined, Verdict
from tests.dispatcher.fakes import Site, adds_up, lines, some_events

HOUR_US = 3_600_000_000
OPAQUE = b"\xe0" * 16


def copies_of(*rows):
    """(content, primary, time us) of lines of one id."""
    contents, primaries, times = zip(*rows, strict=True)
    return dataclasses.replace(
        some_events(len(rows)),
        ids=OPAQUE * len(rows),
        primary_ids=b"".join(name.encode().ljust(16, b".") for name in primaries),
        times=pack_times(times),
        lines=list(contents),
    )


def told(copies, verdict, *rows):
    found = copies.differing(copies_of(*rows), np.full(len(rows), verdict, np.uint8))
    return [found.get(row) for row in range(len(rows))]


FIRST = (b"a", "q", 0)


@pytest.mark.parametrize("first", [Joined.JOINED, Joined.DUPLICATE, Verdict.REGISTERED])
@pytest.mark.parametrize("second", [Joined.DUPLICATE, Verdict.REGISTERED])
def test_a_duplicate_is_told_by_how_it_differs_from_the_first_line_of_its_id(first, second):
    """Whoever joined that one: here, or in another datacenter."""
    copies = Copies(HOUR_US)
    assert told(copies, first, FIRST) == [None]
    seen = [
        FIRST,
        (b"b", "q", HOUR_US),
        (b"b", "q", HOUR_US + 1),
        (b"b", "q", -HOUR_US - 1),
        (b"b", "p", HOUR_US + 1),
        FIRST,
    ]
    kinds = [None, Differing.CONTENT, Differing.TIME, Differing.TIME, Differing.PRIMARY, None]
    assert told(copies, second, *seen) == kinds


def test_what_was_joined_stands_for_its_id_though_another_line_was_seen_first():
    copies = Copies(HOUR_US)
    events = copies_of(FIRST, (b"b", "q", 0), (b"b", "q", 0))
    verdicts = np.array([Joined.DUPLICATE, Joined.JOINED, Joined.DUPLICATE], np.uint8)
    assert copies.differing(events, verdicts) == {0: Differing.CONTENT}


def test_what_waits_or_ends_otherwise_than_registered_is_no_copy():
    copies = Copies(HOUR_US)
    for verdict in {*Joined, *Verdict} - {Joined.JOINED, Joined.DUPLICATE, Verdict.REGISTERED}:
        assert told(copies, verdict, FIRST, (b"b", "q", 0)) == [None, None]
    assert told(copies, Joined.DUPLICATE, (b"b", "q", 0)) == [None]


def test_of_many_ids_none_is_taken_for_another_and_the_last_are_remembered():
    rng, copies = np.random.default_rng(1), Copies(HOUR_US)
    ids, some = rng.bytes(16 * 3 * REMEMBERED), some_events(4096)
    for start in range(0, len(ids), 16 * 4096):
        events = dataclasses.replace(some, ids=ids[start : start + 16 * 4096])
        for verdict in (Joined.DUPLICATE, Joined.JOINED):
            assert copies.differing(events, np.full(4096, verdict, np.uint8)) == {}
    others = dataclasses.replace(events, lines=[line + b" " for line in events.lines])
    assert len(copies.differing(others, np.full(4096, Joined.DUPLICATE, np.uint8))) > 3900


def test_duplicates_that_differ_are_counted_apart_kept_and_never_replayed(tmp_path):
    site = Site(tmp_path)
    site.joiner.registry = site.registry
    first = {"id": "c", "primary_id": "q", "ts_us": 5}
    copies = [first, first, {**first, "x": 1}, {**first, "primary_id": "p"}, {**first, "ts_us": 10**12}]
    (site.logs / "a.jsonl").write_bytes(lines([first]))
    site.drain()
    assert site.drain()["differing"] == {"primary": 0, "time": 0, "content": 0}
    (site.logs / "b.jsonl").write_bytes(lines(copies))
    status = site.drain()
    assert adds_up(status)
    assert (status["fates"]["joined"], status["fates"]["duplicate"]) == (1, 5)
    assert status["differing"] == {"primary": 1, "time": 1, "content": 1}
    assert site.drain()["differing"] == status["differing"]
    letters = {letter["offset"]: letter["reason"] for letter in site.letters()}
    places = [len(lines(copies[:row])) for row in (2, 3, 4)]
    assert [*letters] == places
    assert [row["fate"] for row in count_letters(site.dead_letters, Filter())] == ["duplicate"] * 3
    assert sum(replay(site.dead_letters, site.root / "state" / "inbox", "replay-1", Filter(REPLAYED))) == 0
