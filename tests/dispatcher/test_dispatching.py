"""A whole dispatcher over real files and a real ledger, with a registry and a joiner in memory."""

import os
import random
import re
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from dispatcher import sender
from dispatcher.rules.pacing import PER_SENDER
from photon.core.clock import SystemClock
from photon.core.columns import split_ids, unpack_times
from photon.core.errors import OverloadedError, UnavailableError, UsageError
from photon.core.fates import RETRIED, Joined
from photon.core.ids import IdPacker
from photon.core.settings import parse_settings
from tests.dispatcher.fakes import (
    FakeJoiner,
    Site,
    adds_up,
    click_number,
    clicks,
    fast_settings,
    full_beyond,
    lines,
)
from tests.health import NOT_SERVING, SERVING, await_health, health, status_of
from tests.waiting import wait_until

NAME = "photon.dispatcher.v1.Dispatcher"


class Moody:
    """Answers by the dice, but always the same kind of end for a line."""

    ENDS = tuple(end for end in Joined if end not in RETRIED)

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.said = Counter()

    def answer(self, line, _tries):
        dice = self.rng.random()
        if dice < 0.3:
            return (Joined.RETRY_ABSENT if dice < 0.2 else Joined.RETRY_UNAVAILABLE), None
        end = self.ENDS[click_number(line) % len(self.ENDS)]
        self.said[end] += 1
        return end, None

    def before(self, _events):
        dice = self.rng.random()
        if dice < 0.1:
            raise UnavailableError("connection reset")
        if dice < 0.2:
            raise OverloadedError("too much in flight")


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_joiner_answers_each_line_gets_one_fate(site, seed):
    moody = Moody(seed)
    site.joiner.answer, site.joiner.before = moody.answer, moody.before
    for number in range(5):
        text = clicks(number * 300, number * 300 + 300)
        (site.logs / f"{number}.jsonl").write_bytes(text[:500] + b"\nnot json\n" + text[500:])
    status = site.drain(fast_settings(batch_events_max=64, batches_in_flight_max=4))
    cut = 5 * 2  # each bad line broke a good one: both halves are malformed
    fates = status["fates"]
    assert adds_up(status) and status["pending"] == 0 and status["in_flight"] == 0
    assert status["foreign_events"] == sum(fates.values()) == 1500 - 5 + cut + 5
    said = {end.name.lower(): count for end, count in moody.said.items()}
    assert {name: count for name, count in fates.items() if name != "malformed"} == said
    assert status["wasted_joins"] == said["duplicate"]
    assert sum(status["latency_us"]["counts"]) == said["joined"]
    letters = Counter(letter["fate"] for letter in site.letters())
    assert letters == {n: c for n, c in fates.items() if n not in ("joined", "duplicate")}
    for letter in site.letters():
        rest = Path(letter["file"]).read_bytes()[letter["offset"] :]
        if letter["fate"] != "malformed":
            assert rest.startswith(lines([letter["event"]]).rstrip())


def test_what_is_in_the_registry_is_not_sent_again(site):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 10))
    ids = IdPacker(b"photon").pack([f"click-{n}" for n in range(10)])
    site.registry.present = {ids[16 * n : 16 * n + 16] for n in range(4)}
    site.registry.expired = {ids[16 * 4 : 16 * 5]}
    status = site.drain()
    assert (status["fates"]["duplicate"], status["fates"]["joined"], status["fates"]["expired"]) == (4, 5, 1)
    assert status["registered"] == 9 and status["wasted_joins"] == 0
    assert sorted(map(click_number, site.joiner.handed)) == list(range(5, 10))


def test_without_the_lookup_the_registry_is_not_asked(site):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 10))
    assert site.drain(fast_settings(lookup_before_send=False))["fates"]["joined"] == 10
    assert site.registry.calls == 0


def test_run_again_over_the_same_directory_it_reads_only_what_is_new(site):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 100))
    site.drain()
    with (site.logs / "a.jsonl").open("ab") as file:
        file.write(clicks(100, 130))
    status = site.drain()
    assert status["foreign_events"] == status["fates"]["joined"] == 130
    assert set(site.joiner.handed.values()) == {1} and len(site.joiner.handed) == 130


def test_lines_are_sent_as_they_are_written_and_a_torn_one_when_it_is_whole(site, running):
    path = site.logs / "a.jsonl"
    server = running()
    with path.open("ab", buffering=0) as file:
        for number in range(50):
            text = clicks(number, number + 1)
            file.write(text[:20])
            wait_until(lambda: server.status()["unended"] == {str(path): 20})
            file.write(text[20:])
            wait_until(lambda: len(site.joiner.handed) == number + 1)
    wait_until(lambda: server.status()["fates"]["joined"] == 50)
    assert server.status()["fates"]["malformed"] == 0


def test_a_line_is_sent_and_a_click_whose_query_is_a_moment_late_joined_within_tens_of_milliseconds(
    site, running
):
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 1))
    server = running(parse_settings({}))
    wait_until(lambda: server.status()["fates"]["joined"] == 1)
    first: dict[bytes, float] = {}
    sent: list[float] = []
    took: list[float] = []

    def late(line, _tries):
        now = time.monotonic()
        if line not in first:
            sent.append(now - written)
        if now - first.setdefault(line, now) < 0.03:
            return Joined.RETRY_ABSENT, None
        took.append(now - first[line])
        return Joined.JOINED, None

    site.joiner.answer = late
    with path.open("ab", buffering=0) as file:
        for number in range(20):
            written = time.monotonic()
            file.write(clicks(1 + number, 2 + number))
            wait_until(lambda: len(took) == number + 1)
    assert sorted(sent)[10] < 0.05
    assert sorted(took)[10] < 0.15


def test_a_file_that_is_rotated_by_renaming_goes_on_where_it_was(site, running):
    server = running()
    current = site.logs / "current.jsonl"
    for round_ in range(4):
        current.write_bytes(clicks(round_ * 10, round_ * 10 + 5))
        wait_until(lambda: server.status()["fates"]["joined"] == round_ * 10 + 5)
        with current.open("ab") as file:
            current.rename(site.logs / f"old-{round_}.jsonl")
            file.write(clicks(round_ * 10 + 5, round_ * 10 + 10))
        wait_until(lambda: server.status()["fates"]["joined"] == round_ * 10 + 10)
    assert set(site.joiner.handed.values()) == {1}


@pytest.mark.long
@pytest.mark.parametrize("how", ["truncated", "replaced"])
def test_a_file_that_shrank_or_was_replaced_is_read_again_and_that_is_told(site, running, how):
    server = running()
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 20))
    wait_until(lambda: server.status()["fates"]["joined"] == 20)
    if how == "truncated":
        path.write_bytes(clicks(100, 110))
    else:
        (site.root / "new").write_bytes(clicks(100, 110))
        (site.root / "new").rename(path)
    wait_until(lambda: server.status()["fates"]["joined"] == 30)
    wait_until(lambda: any("a.jsonl" in notice for notice in server.status()["notices"]))
    assert adds_up(server.status())


def test_blank_lines_are_no_events_and_draining_ends_though_a_last_line_is_not_whole_and_tells_of_it(site):
    (site.logs / "empty.jsonl").write_bytes(b"")
    (site.logs / "blank.jsonl").write_bytes(b"\n\n  \n\n")
    (site.logs / "some.jsonl").write_bytes(b"\n" + clicks(0, 1) + b"\n\n" + clicks(1, 2) + b"\n")
    (site.logs / "whole.jsonl").write_bytes(clicks(2, 5).rstrip(b"\n"))
    (site.logs / "torn.jsonl").write_bytes(clicks(5, 7)[:-9])
    status = site.drain()
    assert status["foreign_events"] == 6
    assert status["unended"] == {str(site.logs / "torn.jsonl"): len(clicks(6, 7)) - 9}


def test_a_directory_that_is_not_there_is_named(site):
    with pytest.raises(UsageError, match=r"no such directory: .*/absent"):
        site.server(patterns=[str(site.root / "absent" / "*.jsonl")])


def test_malformed_lines_are_dead_letters_with_file_and_offset_and_the_rest_goes_on(site):
    bad = [
        b"{",
        b"\xff\xfe",
        b'{"id":1}',
        b'{"id":"a","primary_id":"b"}',
        b"[]",
        b'{"id":"a\xff","primary_id":"b"}',
    ]
    text, places = b"", []
    for number, line in enumerate(bad):
        text += clicks(number, number + 1)
        places.append(len(text))
        text += line + b"\n"
    (site.logs / "a.jsonl").write_bytes(text)
    status = site.drain()
    assert (status["fates"]["malformed"], status["fates"]["joined"]) == (len(bad), len(bad))
    letters = site.letters()
    assert [letter["offset"] for letter in letters] == places
    assert {letter["file"] for letter in letters} == {str(site.logs / "a.jsonl")}
    assert letters[1]["event_base64"] == "//4="
    assert "ts_us" in letters[3]["reason"]


def test_a_file_whose_name_is_no_utf8_is_read_and_its_letters_name_it_as_the_status_does(site):
    with open(os.fsencode(site.logs) + b"/\xff.jsonl", "wb") as file:
        file.write(clicks(0, 3) + b"bad\n")
    site.joiner.answer = lambda _line, tries: (Joined.RETRY_ABSENT if tries < 2 else Joined.FILTERED, None)
    status = site.drain()
    assert (status["fates"]["filtered"], status["fates"]["malformed"]) == (3, 1)
    assert {letter["file"] for letter in site.letters()} == {rf"{site.logs}/\xff.jsonl"}
    assert site.drain()["foreign_events"] == 4


class SetClock(SystemClock):
    """Somebody sets the machine's clock a day forward."""

    day_us = 0

    def now_us(self):
        return super().now_us() + self.day_us


def test_setting_the_machines_clock_makes_no_event_old_and_its_latency_is_by_the_new_time(site):
    """One that is old, and was tried often, is given up."""
    site.clock, ages = SetClock(), []

    def join(batch, real=site.joiner.join):
        ages.extend(unpack_times(batch.ages).tolist())
        return real(batch)

    def answer(_line, tries):
        site.clock.day_us = 86_400_000_000 * (tries >= 2)
        return (Joined.JOINED if tries == 5 else Joined.RETRY_ABSENT), None

    site.joiner.join, site.joiner.answer = join, answer
    event = {"id": "c", "primary_id": "q", "ts_us": site.clock.now_us()}
    (site.logs / "a.jsonl").write_bytes(lines([event]))
    status = site.drain()
    assert status["fates"]["joined"] == 1
    assert len(ages) == 6 and max(ages) < 60_000_000
    assert sum(status["latency_us"]["counts"][:-1]) == 1
    edges, counts = status["event_latency_us"].values()
    assert edges[counts.index(1)] >= 86_400_000_000


def test_retries_wait_longer_and_longer_and_tell_the_joiner_how_often_the_primary_was_not_there(site):
    seen: dict[bytes, list[float]] = {}

    def answer(line, tries):
        at = seen.setdefault(line, [])
        assert tries == len(at)
        at.append(time.monotonic())
        return (Joined.JOINED if tries == 5 else Joined.RETRY_ABSENT), None

    site.joiner.answer = answer
    (site.logs / "a.jsonl").write_bytes(clicks(0, 3))
    status = site.drain(fast_settings(retry_delay_ms_min=20, retry_delay_ms_max=80))
    assert status["fates"]["joined"] == 3
    for at in seen.values():
        gaps = [b - a for a, b in pairwise(at)]
        assert all(gap >= least for gap, least in zip(gaps, [0.014, 0.018, 0.023, 0.029, 0.036], strict=True))


class Late:
    """Event 0 waits for its primary; the others join, each at its second try."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.tried: list[int] = []
        self.joined_at = 0.0

    def answer(self, line, tries):
        if click_number(line):
            return (Joined.JOINED if tries else Joined.RETRY_ABSENT), None
        self.tried.append(tries)
        if not self.there.is_set():
            return Joined.RETRY_ABSENT, None
        self.joined_at = time.monotonic()
        return Joined.JOINED, None


@pytest.mark.parametrize("busy", [False, True])
def test_an_event_early_by_seconds_is_joined_within_about_half_of_that_after_its_primary(site, running, busy):
    late = Late()
    site.joiner.answer = late.answer
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 1))
    server = running(fast_settings(retry_delay_ms_min=20, absent_delay_ms_max=3_600_000))
    wait_until(lambda: late.tried)
    began, number = time.monotonic(), 1
    while time.monotonic() < began + 2.0:
        if busy:
            with path.open("ab") as file:
                file.write(clicks(number, number + 5))
            number += 5
        time.sleep(0.02)  # the pace of the traffic
    late.there.set()
    early_s = time.monotonic() - began
    wait_until(lambda: late.joined_at)
    assert late.joined_at - (began + early_s) < 0.5 * early_s + 0.5
    if busy:
        assert len(late.tried) > late.tried[-1] + 1, "what was tried before its time counts for nothing"
    wait_until(lambda: server.status()["fates"]["joined"] == number)


@pytest.mark.long
def test_a_poison_event_does_not_block_the_others(site, running):
    def before(events):
        if any(click_number(line) == 77 for line in events):
            raise UnavailableError("the joiner died")

    site.joiner.before = before
    (site.logs / "a.jsonl").write_bytes(clicks(0, 500))
    server = running()
    wait_until(lambda: server.status()["fates"]["joined"] == 499)
    with (site.logs / "a.jsonl").open("ab") as file:
        file.write(clicks(500, 600))
    wait_until(lambda: server.status()["fates"]["joined"] == 599)
    assert server.status()["pending"] == 1
    assert any("the joiner died" in notice for notice in server.status()["notices"])


def test_reading_stops_while_no_joiner_answers_and_goes_on_after(site, running):
    down = threading.Event()
    down.set()

    def before(_events):
        if down.is_set():
            raise UnavailableError("connection refused")

    site.joiner.before = before
    (site.logs / "a.jsonl").write_bytes(clicks(0, 20_000))
    server = running(fast_settings(batch_events_max=100, batches_in_flight_max=3))
    bound = 100 * 3 * PER_SENDER
    wait_until(lambda: server.status()["in_flight"] == bound)
    time.sleep(0.2)
    assert (server.status()["in_flight"], server.status()["pending"]) == (bound, 0)
    down.clear()
    wait_until(lambda: server.status()["fates"]["joined"] == 20_000)


def test_reading_pauses_when_the_ledger_is_full_of_waiting_events_and_says_so_and_goes_on_as_it_empties(
    site, running
):
    open_ = threading.Event()
    site.joiner.answer = lambda _line, _tries: (
        Joined.JOINED if open_.is_set() else Joined.RETRY_ABSENT,
        None,
    )
    long_lines = clicks(0, 20_000).replace(b"}", b', "pad": "%s"}' % (b"x" * 1_500))
    (site.logs / "a.jsonl").write_bytes(long_lines)
    server = running(fast_settings(batch_events_max=50, batches_in_flight_max=2, state_bytes_max=32 << 20))
    wait_until(lambda: server.status()["paused"])
    assert "'state_bytes_max' is 33554432" in server.status()["paused"]
    assert any("dispatcher.state_bytes_max" in notice for notice in server.status()["notices"])
    status = server.status()
    unread = 20_000 - status["foreign_events"] - status["in_flight"]
    assert abs(status["backlog"]["events"] - unread) < 2_000 and status["backlog"]["seconds"] > 1e8
    time.sleep(0.3)
    assert 0.75 <= server.status()["waiting_bytes"] / 2**25 <= 0.95
    open_.set()
    wait_until(lambda: server.status()["fates"]["joined"] == 20_000)
    wait_until(lambda: server.status()["paused"] is None)
    wait_until(lambda: server.status()["backlog"] == {"bytes": 0, "events": 0, "seconds": 0.0})


def test_what_finishes_before_an_earlier_batch_of_its_file_is_not_counted_yet(site, running):
    held = threading.Event()

    def before(events):
        if click_number(events[0]) == 0:
            assert held.wait(60)

    site.joiner.before = before
    site.joiner.answer = lambda line, _tries: (Joined(2 if click_number(line) % 2 else 0), None)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 40))
    server = running(fast_settings(batch_events_max=10, batches_in_flight_max=4))
    wait_until(lambda: sum(site.joiner.batches) == 30)
    (site.logs / "b.jsonl").write_bytes(clicks(40, 50))
    wait_until(lambda: server.status()["foreign_events"] == 10)
    assert (server.status()["in_flight"], len(site.letters())) == (40, 5)
    held.set()
    wait_until(lambda: server.status()["foreign_events"] == 50)
    assert (server.status()["in_flight"], len(site.letters())) == (0, 25)


def test_stopping_records_what_is_under_way_and_the_next_start_goes_on(site, running):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 30_000))
    for _ in range(4):
        server = running(fast_settings(batch_events_max=100))
        before = len(site.joiner.handed)
        wait_until(lambda: len(site.joiner.handed) > before + 1_000)
        server.stop()
        assert server.wait(0)
    assert site.drain()["fates"]["joined"] == 30_000
    assert set(site.joiner.handed.values()) == {1}


def test_stopping_while_no_joiner_answers_takes_a_moment_and_loses_nothing(site, running):
    def refuse(_events):
        raise UnavailableError("gone")

    site.joiner.before = refuse
    (site.logs / "a.jsonl").write_bytes(clicks(0, 1_000))
    server = running()
    wait_until(lambda: server.status()["in_flight"])
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 2
    assert server.wait(0)
    site.joiner.before = lambda _: None
    assert site.drain()["fates"]["joined"] == 1_000


def test_on_a_full_disk_it_does_not_serve_and_says_why_and_work_goes_on_when_there_is_space(site, running):
    site.joiner.answer = lambda line, tries: (
        Joined.RETRY_ABSENT if tries < 2 else Joined.FILTERED if click_number(line) % 2 else Joined.JOINED,
        None,
    )
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 20_000))
    server = running(fast_settings(retry_delay_ms_max=10))
    assert health(server.address) in (SERVING, NOT_SERVING)
    with full_beyond(200_000):
        await_health(NOT_SERVING, server.address, NAME)
        assert re.search(r"(no space left|disk is full).*nothing .*is lost", server.status()["storage_error"])
        assert adds_up(server.status())
    wait_until(lambda: sum(server.status()["fates"].values()) == 20_000)
    await_health(SERVING, server.address, NAME)
    assert server.status()["storage_error"] is None
    assert server.status()["fates"]["filtered"] == len(site.letters()) == 10_000
    assert len({letter["offset"] for letter in site.letters()}) == 10_000


def test_health_is_told_before_the_work_that_is_under_way_has_ended(site, running, monkeypatch):
    server = running()
    seen = []
    stop = server._worker.driver.stop
    monkeypatch.setattr(
        server._worker.driver, "stop", lambda: (seen.append(health(server.address, NAME)), stop())
    )
    server.stop()
    assert seen == [NOT_SERVING]
    assert health(server.address) == "UNAVAILABLE"


def test_a_state_that_outgrows_its_bound_is_told_and_goes_on_with_a_larger_one(site, running):
    site.joiner.answer = lambda _line, _tries: (Joined.RETRY_ABSENT, None)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 20_000))
    server = running(fast_settings(state_bytes_max=1 << 20))
    wait_until(lambda: server.status()["storage_error"])
    assert "dispatcher.state_bytes_max" in server.status()["storage_error"]
    server.stop()
    site.joiner.answer = lambda _line, _tries: (Joined.JOINED, None)
    assert site.drain()["fates"]["joined"] == 20_000


def test_an_unexpected_failure_ends_the_dispatcher_instead_of_a_thread(site, running):
    def broken(_events):
        raise ZeroDivisionError

    site.joiner.before = broken
    (site.logs / "a.jsonl").write_bytes(clicks(0, 10))
    server = site.server()
    server.start()
    with pytest.raises(ZeroDivisionError):
        server.wait(10)
    server.stop()
    site.joiner.before = lambda _: None
    assert site.drain()["fates"]["joined"] == 10


def test_stopping_twice_or_before_the_start_does_no_harm(site):
    server = site.server()
    server.stop()
    server.stop()
    site.server().stop()


def test_status_is_served(site, running):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 10))
    server = running(drain=True)
    wait_until(lambda: status_of("dispatcher", server.address)["drained"])
    status = status_of("dispatcher", server.address)
    assert status["fates"]["joined"] == status["registered"] == 10
    assert len(status["latency_us"]["counts"]) == len(status["latency_us"]["edges"]) + 1
    assert status.keys() >= {"in_flight", "notices", "pending", "storage_error", "unended", "wasted_joins"}
    with pytest.raises(UnavailableError, match=r"dispatcher 127\.0\.0\.1:1"):
        status_of("dispatcher", "127.0.0.1:1")


def test_a_stop_while_other_joiners_register_the_first_batch_records_the_later_ones(site, monkeypatch):
    monkeypatch.setattr(sender, "UNDER_WAY_S", 60.0)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 300))
    first = IdPacker().pack([f"click-{number}" for number in range(50)])
    site.registry.pending = dict.fromkeys(split_ids(first), 10**9)
    server = site.server(fast_settings(batch_events_max=50))
    server.start()
    wait_until(lambda: sum(site.joiner.batches) == 250)
    server.stop()
    site.registry.pending.clear()
    site.registry.present = set(split_ids(first))
    status = site.drain()
    assert (status["fates"]["joined"], status["fates"]["duplicate"]) == (250, 50)
    assert set(site.joiner.handed.values()) == {1}, "none of them was sent again"


JOINERS = {"e:1": "east", "w:1": "west"}


def datacenters(root: Path, count: int) -> tuple[Site, Site]:
    """East and west, each with its own copy of the same clicks and its own joiner, over one registry."""
    sites = []
    for name in JOINERS.values():
        (root / name).mkdir()
        site = Site(root / name)
        for file in range(3):
            low, high = file * count // 3, (file + 1) * count // 3
            (site.logs / f"{file}.jsonl").write_bytes(clicks(low, high))
        sites.append(site)
    east, west = sites
    west.registry = east.registry
    east.registry.holders = list(JOINERS)
    for site in sites:
        site.joiner = FakeJoiner(registry=east.registry)
    return east, west


def server_of(site: Site, datacenter: str, **given):
    settings = fast_settings(batch_events_max=100, **given)
    return site.server(settings, drain=True, datacenter=datacenter, joiners=JOINERS)


def test_two_datacenters_join_each_event_once_and_neither_does_what_the_other_has_done(tmp_path):
    east, west = datacenters(tmp_path, 3000)
    servers = [server_of(east, "east"), server_of(west, "west")]
    try:
        for server in servers:
            server.start()
        wait_until(lambda: all(server.status()["drained"] for server in servers), 60)
        told = [server.status() for server in servers]
    finally:
        for server in servers:
            server.stop()
    assert all(adds_up(status) and status["foreign_events"] == 3000 for status in told)
    joined = [status["fates"]["joined"] for status in told]
    assert sum(joined) == 3000 and not east.joiner.joined.keys() & west.joiner.joined.keys()
    assert sum(status["wasted_joins"] for status in told) < 0.05 * 3000
    assert sum(sum(site.joiner.handed.values()) for site in (east, west)) < 1.05 * 3000


def test_a_datacenter_joins_all_where_the_other_holds_a_lease_and_does_nothing(tmp_path):
    east, _ = datacenters(tmp_path, 3000)
    server = server_of(east, "east")
    server.start()
    try:
        wait_until(lambda: server.status()["drained"], 60)
        status = server.status()
    finally:
        server.stop()
    assert adds_up(status) and status["fates"]["joined"] == 3000
    assert set(east.joiner.joined.values()) == {1} and len(east.joiner.joined) == 3000
    assert (status["in_flight"], status["homes"]["live"]) == (0, ["east", "west"])


def test_a_long_backlog_is_done_where_the_other_holds_a_lease_and_does_nothing(tmp_path):
    """It is passed over: then whole batches are this one's, and recorded only after the few that wait."""
    east, _ = datacenters(tmp_path, 15_000)
    server = server_of(east, "east")
    server.start()
    try:
        wait_until(lambda: server.status()["drained"], 90, lambda: str(server.status()))
        assert server.status()["fates"]["joined"] == 15_000
    finally:
        server.stop()


def test_an_old_event_that_nobody_can_join_keeps_no_other_from_being_recorded(tmp_path):
    """Old ones come one after the other, the first without its query in both datacenters."""
    east, west = datacenters(tmp_path, 0)
    servers = []
    for site, name in ((east, "east"), (west, "west")):
        site.joiner.answer = lambda line, _: (
            (Joined.RETRY_ABSENT, None) if click_number(line) < 3 else (Joined.JOINED, None)
        )
        slow = {"retry_delay_ms_min": 60_000, "retry_delay_ms_max": 60_000}
        servers.append(
            site.server(fast_settings(batch_events_max=100, **slow), datacenter=name, joiners=JOINERS)
        )
        servers[-1].start()
    written = 0

    def feed(count):
        nonlocal written
        for site in (east, west):
            with (site.logs / "a.jsonl").open("ab") as file:
                file.write(clicks(written, written + count))
        written += count

    def recorded():
        feed(1)
        return min(server.status()["foreign_events"] for server in servers) > 20

    try:
        feed(3)
        wait_until(recorded, 30, lambda: str([server.status() for server in servers]))
    finally:
        for server in servers:
            server.stop()


def test_a_dispatcher_that_is_stopped_leaves_no_event_that_waits_for_its_home_behind(tmp_path):
    east, _ = datacenters(tmp_path, 300)
    server = server_of(east, "east")
    server.start()
    own = 100
    wait_until(lambda: len(east.joiner.joined) >= own, 60)
    server.stop()
    joined_here = len(east.joiner.joined)
    after = server_of(east, "east")
    try:
        status = after.status()
        assert adds_up(status) and status["fates"]["joined"] == joined_here == status["foreign_events"]
    finally:
        after.stop()


def test_without_a_hedge_every_datacenter_joins_what_it_reads(tmp_path):
    east, _ = datacenters(tmp_path, 300)
    server = server_of(east, "east", home_hedge_ms=0)
    server.start()
    try:
        wait_until(lambda: server.status()["drained"], 60)
        assert server.status()["homes"]["live"] == ["east"]
    finally:
        server.stop()
    assert len(east.joiner.joined) == 300
