"""The fast path's own rules: bounded, never in the caller's way, and nothing sent twice."""

import threading
import time

import pytest

from photon.core.clock import ManualClock
from photon.core.errors import UnavailableError, UsageError
from photon.core.fates import Joined
from photon.core.ids import IdPacker
from photon.core.settings import Settings, parse_settings, reading_fingerprint
from photon.fastpath.client import Limits
from photon.logs.formats import JsonLines
from tests.fastpath.kit import Rig, click, overloaded, query
from tests.waiting import wait_until


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def rig_of(request, **how):
    rig = Rig(**how)
    request.addfinalizer(rig.close)
    return rig


def assert_adds_up(counts):
    assert counts.waiting == 0
    assert (
        counts.offered == counts.joined + counts.duplicate + counts.left + counts.malformed + counts.dropped
    )


def test_a_click_is_joined_with_the_query_handed_in_before_it(rig):
    rig.hand_in([query("q") + b"\n"], [click("c") + b"\r\n"])
    assert list(rig.joiner.joined.values()) == [click("c")]
    assert (rig.sending.primaries.put, rig.sending.foreigns.joined) == (1, 1)


def test_a_click_waits_for_queries_handed_in_before_it_though_their_put_is_slow(request):
    rig = rig_of(request, primaries_first_s=10.0)
    rig.cache.gate.clear()
    rig.sending.primary(query("q"))
    rig.sending.foreign(click("c"))
    assert not rig.joiner.arrived.acquire(timeout=0.1)
    rig.cache.gate.set()
    assert rig.sending.flush(5)
    assert rig.sending.foreigns.joined == 1


def test_a_click_does_not_wait_for_ever_for_queries_whose_put_hangs(request):
    rig = rig_of(request, primaries_first_s=0.02)
    rig.cache.gate.clear()
    rig.sending.primary(query("q"))
    rig.sending.foreign(click("c"))
    wait_until(lambda: rig.sending.foreigns.left == 1)


def test_ids_and_times_are_those_that_the_log_path_makes_of_the_same_lines(request):
    settings = parse_settings(
        {"foreign": {"id": "cid", "primary_id": "ref", "time": "at", "time_unit": "ms"}, "ids": {"key": "k"}}
    )
    rig = rig_of(request, settings=settings)
    lines = [
        b'  {"cid":"10.0.0.1:7:1700000000000001","ref":7,"at":3}\t\n',
        b'\xef\xbb\xbf{"cid":"c2","ref":"q","at":1.5}',
        b'{"cid":3,"ref":"q","at":-9}\r\n',
    ]
    rig.hand_in(foreigns=lines)
    log_format = JsonLines(settings.primary, settings.foreign, IdPacker(b"k"))
    logged = log_format.parse_foreign(b"\n".join(line.strip(b"\n") for line in lines) + b"\n")
    sent = rig.joiner.batches
    assert b"".join(batch.ids for batch in sent) == logged.ids
    assert b"".join(batch.primary_ids for batch in sent) == logged.primary_ids
    assert b"".join(batch.times for batch in sent) == logged.times
    assert b"".join(batch.events for batch in sent) == b"".join(line + b"\n" for line in logged.lines)


def test_what_the_log_path_takes_for_no_event_is_not_sent(request):
    rig = rig_of(request, settings=parse_settings({"logs": {"line_bytes_max": 1024}}))
    rig.sending.primary(query("q"))
    bad = [
        b"",
        b" \n",
        b"no json",
        b'{"id":"c"}',
        b'{"id":"c","primary_id":"q","ts_us":null}',
        b'{"id":"c","primary_id":"q",\n"ts_us":1}',
        click("c1") + b"\n" + click("c2"),
        b'{"id":"c","primary_id":"q","ts_us":1,"x":"\xff"}',
        click("c")[:-1] + b',"x":"' + b"x" * 1024 + b'"}',
        "text",
        None,
    ]
    counts = rig.hand_in(foreigns=[*bad, click("good")])
    assert (counts.malformed, counts.joined, counts.sent) == (len(bad), 1, 1)
    assert_adds_up(counts)


def test_a_line_as_long_as_the_bound_allows_with_its_newline_is_sent_and_one_longer_is_not(request):
    rig = rig_of(request, settings=parse_settings({"logs": {"line_bytes_max": 1024}}))
    rig.sending.primary(query("q"))
    bare = click("c")[:-1] + b',"x":""}'
    fits = bare[:-2] + b"x" * (1023 - len(bare)) + b'"}'
    assert len(fits) == 1023
    counts = rig.hand_in(foreigns=[fits, fits[:-2] + b'x"}'])
    assert (counts.joined, counts.malformed) == (1, 1)


def test_an_event_handed_in_twice_is_joined_once(rig):
    rig.sending.primary(query("q"))
    for _ in range(5):
        rig.sending.foreign(click("c"))
    counts = rig.hand_in()
    assert (counts.joined, counts.duplicate) == (1, 4)
    assert_adds_up(counts)


@pytest.mark.parametrize(
    "failure", [UnavailableError("joiner: gone"), overloaded(), RuntimeError("a bug"), lambda count: b""]
)
def test_a_batch_that_fails_or_whose_outcome_is_unknown_is_not_sent_again(request, failure):
    clock = ManualClock()
    rig = rig_of(request, clock=clock)
    rig.hand_in([query("q")])
    rig.joiner.failures = [failure]
    rig.hand_in(foreigns=[click("c")])
    assert len(rig.joiner.batches) == 1
    assert (rig.sending.foreigns.left, rig.sending.foreigns.joined) == (1, 0)
    assert rig.sending.notices
    clock.advance(60)
    rig.hand_in(foreigns=[click("d")])
    assert rig.sending.foreigns.joined == 1
    assert [len(batch) for batch in rig.joiner.batches] == [1, 1]


@pytest.mark.parametrize(
    "failure",
    [UnavailableError("joiner: gone"), lambda count: bytes([Joined.RETRY_UNAVAILABLE]) * count],
    ids=["joiner", "its registry"],
)
def test_while_a_joiner_or_its_registry_is_left_alone_events_are_left_to_the_log_at_once(request, failure):
    rig = rig_of(request, clock=ManualClock())
    rig.hand_in([query("q")])
    rig.joiner.failures = [failure]
    rig.hand_in(foreigns=[click("c")])
    counts = rig.hand_in(foreigns=[click(f"d{n}") for n in range(10)])
    assert len(rig.joiner.batches) == 1
    assert counts.left == 11
    assert_adds_up(counts)


@pytest.mark.parametrize("outcome", [Joined.FILTERED, Joined.EXPIRED, Joined.UNJOINABLE, Joined.RETRY_ABSENT])
def test_fates_of_what_is_not_registered_are_left_to_the_log_path(rig, outcome):
    rig.joiner.failures = [lambda count: bytes([outcome]) * count]
    rig.hand_in(foreigns=[click("c")])
    assert (rig.sending.foreigns.left, rig.sending.foreigns.sent) == (1, 1)
    assert_adds_up(rig.sending.foreigns)


def test_a_full_queue_drops_what_is_new_and_never_holds_the_caller(request):
    rig = rig_of(request, queue_events_max=100, batch_events_max=10, requests_in_flight_max=1)
    rig.hand_in([query("q")])
    rig.joiner.gate.clear()
    rig.sending.foreign(click("first"))
    assert rig.joiner.arrived.acquire(timeout=60)
    began = time.monotonic()
    rig.sending.foreign_many([click(f"c{n}") for n in range(500)])
    assert time.monotonic() - began < 1.0
    assert (rig.sending.foreigns.dropped, rig.sending.foreigns.waiting) == (400, 101)
    rig.joiner.gate.set()
    assert rig.sending.flush(5)
    assert rig.sending.foreigns.joined == 101
    assert max(map(len, rig.joiner.batches)) == 10
    assert_adds_up(rig.sending.foreigns)


def test_the_queue_is_bounded_in_bytes_too(request):
    rig = rig_of(request, queue_bytes_max=10_000)
    rig.cache.gate.clear()
    big = query("q")[:-1] + b',"x":"' + b"x" * 4_000 + b'"}'
    for _ in range(20):
        rig.sending.primary(big)
    assert rig.sending.primaries.dropped >= 20 - 3 - 3  # some were taken by the thread, some wait


MINE, AWAY = {"reading": reading_fingerprint(Settings())}, UnavailableError("joiner: away")
OTHER = {"reading": reading_fingerprint(parse_settings({"ids": {"key": "another"}}))}


@pytest.mark.parametrize(
    ("says", "sent", "notice"),
    [
        ([MINE], True, None),
        ([OTHER], False, "other settings"),
        ([MINE, OTHER], False, "other settings"),
        ([AWAY, MINE], True, None),
        ([AWAY], False, "joiner: away"),
        ([{}], False, "other settings"),
    ],
    ids=["alike", "otherwise", "one otherwise", "one away", "all away", "without a word of it"],
)
def test_events_are_sent_only_while_all_joiners_that_answer_read_them_alike(request, says, sent, notice):
    clock = ManualClock()
    rig = rig_of(request, clock=clock)
    rig.joiner.says = says
    counts = rig.hand_in([query("q")], [click("c")])
    assert (bool(rig.joiner.batches), bool(rig.cache.lines)) == (sent, sent)
    assert (counts.joined, counts.left, rig.sending.primaries.left) == ((1, 0, 0) if sent else (0, 1, 1))
    assert notice is None or notice in rig.sending.notices[-1]
    rig.joiner.says = [MINE, AWAY]  # the system was started anew
    clock.advance(60)
    assert rig.hand_in([query("q")], [click("d")]).joined == 1 + sent


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("ids", "key", "another"),
        ("foreign", "id", "x"),
        ("foreign", "primary_id", "x"),
        ("foreign", "time", "x"),
        ("foreign", "time_unit", "ms"),
        ("primary", "id", "x"),
        ("logs", "line_bytes_max", 2048),
    ],
)
def test_settings_that_make_another_event_of_a_line_are_told_apart(section, key, value):
    assert reading_fingerprint(parse_settings({section: {key: value}})) != reading_fingerprint(Settings())


def test_caches_that_are_away_cost_latency_only(rig):
    rig.cache.down = True
    rig.hand_in([query("q")], [click("c")])
    assert (rig.sending.primaries.left, rig.sending.foreigns.left) == (1, 1)


def test_many_threads_hand_in_at_a_time_and_every_event_is_counted_once(request):
    rig = rig_of(request, queue_events_max=500)
    rig.hand_in([query("q")])

    def hand_in(number):
        for n in range(300):
            rig.sending.foreign(click(f"{number}-{n}"))

    threads = [threading.Thread(target=hand_in, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.sending.flush(10)
    counts = rig.sending.foreigns
    assert counts.offered == 2_400
    assert counts.joined == len(rig.joiner.joined) == 2_400 - counts.dropped
    assert_adds_up(counts)


def test_no_line_is_left_lying_while_a_thread_is_free(request):
    """The remainder of a full batch is taken by the next thread, not by the one that is under way."""
    rig = rig_of(request, batch_events_max=10, requests_in_flight_max=2)
    rig.hand_in([query("q")])
    rig.joiner.gate.clear()
    rig.sending.foreign_many([click(f"c{n}") for n in range(15)])
    assert rig.joiner.arrived.acquire(timeout=60)
    assert rig.joiner.arrived.acquire(timeout=60)


def test_a_flush_waits_for_an_old_request_though_newer_ones_are_answered(request):
    rig = rig_of(request, requests_in_flight_max=2)
    rig.hand_in([query("q")])
    rig.joiner.gate.clear()
    rig.sending.foreign(click("slow"))
    assert rig.joiner.arrived.acquire(timeout=60)
    held, rig.joiner.gate = rig.joiner.gate, threading.Event()
    rig.joiner.gate.set()
    rig.sending.foreign_many([click("quick"), click("quick")])
    wait_until(lambda: rig.sending.foreigns.joined == 1)
    assert not rig.sending.flush(0.05)
    held.set()
    assert rig.sending.flush(5)


def test_closing_sends_what_waits_and_then_drops_what_is_handed_in(request):
    rig = rig_of(request)
    rig.sending.primary(query("q"))
    rig.sending.foreign_many([click(f"c{n}") for n in range(50)])
    rig.sending.close()
    assert rig.sending.foreigns.joined == 50
    rig.sending.foreign(click("late"))
    rig.sending.primary(query("late"))
    assert (rig.sending.foreigns.dropped, rig.sending.primaries.dropped) == (1, 1)
    assert rig.cache.closed and rig.joiner.closed
    assert_adds_up(rig.sending.foreigns)


def test_closing_does_not_wait_longer_than_it_was_told_for_servers_that_hang(request):
    rig = rig_of(request, timeout_s=0.05)
    rig.joiner.gate.clear()
    rig.sending.foreign_many([click(f"c{n}") for n in range(5)])
    began = time.monotonic()
    rig.sending.close(grace_s=0.05)
    assert time.monotonic() - began < 2.0


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(UsageError, match="batch_events_max"):
        Limits(batch_events_max=0)
