"""The table of the pacing, row by row: what it was told, and what it answers."""

import pytest

from dispatcher.rules.pacing import (
    CATCHING_UP_EVENTS,
    HEDGED_BYTES_MAX,
    HELD_A_SENDER,
    HELD_S_MAX,
    PATIENCE_S,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    PAYS_FROM,
    PER_SENDER,
    PROBE_EVERY,
    PROBE_INTERVAL_S,
    SLOW_S,
    SMALL,
    Pacing,
    Reading,
)
from photon.logs.text import ALL_READ

READ, AHEAD, FULL, BEHIND = Reading.READ, Reading.AHEAD, Reading.FULL, Reading.BEHIND
MANY = CATCHING_UP_EVENTS
HOUR_US = 3_600_000_000
FULL_BATCH, LONG_LINES, FEW_LINES = (4_000, 600_000), (10, 900_000), (20, 3_000)


def paced(senders: int = 2) -> Pacing:
    return Pacing(senders, 4_000, 1_000_000)


def fill(pacing: Pacing, batch: tuple[int, int], now: float = 0.0) -> int:
    """Batches read until there is no room."""
    count = 0
    while pacing.may_read(0, now) is READ:
        pacing.read(*batch, now)
        count += 1
    return count


@pytest.mark.parametrize(
    ("batch", "ahead"), [(FULL_BATCH, 2 * PER_SENDER), (LONG_LINES, 2 * PER_SENDER), (FEW_LINES, SMALL)]
)
def test_full_batches_are_read_far_ahead_and_of_small_ones_few(batch, ahead):
    assert fill(paced(), batch) == ahead


def test_a_small_one_is_read_as_one_is_recorded():
    pacing = paced()
    fill(pacing, FEW_LINES)
    pacing.answered()
    pacing.recorded(*FEW_LINES, 0.01)
    assert fill(pacing, FEW_LINES, 0.01) == 1
    assert (pacing.fresh_batches, pacing.fresh_events) == (2, 40)


def test_small_ones_that_do_not_come_back_hold_the_others_up_for_a_moment_only():
    """A distant registry: one more than the senders can take, and the rest makes the next one larger."""
    pacing = paced()
    fill(pacing, FEW_LINES)
    assert pacing.may_read(0, PATIENCE_S - 0.001) is AHEAD
    assert pacing.may_read(0, PATIENCE_S) is READ
    pacing.read(*FEW_LINES, PATIENCE_S)
    assert pacing.may_read(0, 10 * PATIENCE_S) is AHEAD


def test_an_old_one_that_is_never_answered_does_not_hold_up_those_behind_it():
    """A poison event: what comes after is answered, though it can't be recorded before it."""
    pacing, now = paced(), 0.0
    for _ in range(2 * PER_SENDER - 1):
        now += 1.01 * PATIENCE_S
        assert pacing.may_read(0, now) is READ
        pacing.read(*FEW_LINES, now)
        pacing.answered()
    pacing.read(*FEW_LINES, now)
    assert pacing.may_read(0, now + 10 * PATIENCE_S) is AHEAD


def test_no_more_are_read_while_as_many_wait_as_may():
    pacing = paced()
    assert pacing.may_read(MANY, 0.0, full=True) is FULL
    assert pacing.may_read(MANY, 0.0) is READ


@pytest.mark.parametrize(
    ("told", "waiting", "may"),
    [
        ([], MANY, READ),
        ([(4096, 4000)], MANY - 1, READ),
        ([(4096, 4000)], MANY, BEHIND),
        ([(4096, 4000), (4096, 1000)], MANY, READ),
        ([(10, 4)] * 100, 500_000, READ),
        ([(10, 10)] * 6 + [(40, 0)], MANY, READ),
    ],
)
def test_while_most_fresh_events_wait_reading_does_too(told, waiting, may):
    pacing = paced()
    pacing.may_read(MANY, 0.0)
    for events, again in told:
        pacing.resolved(events, again)
    if may is BEHIND:
        assert [pacing.may_read(waiting, 1.0, all_read=True) for _ in range(3)] == [READ] * 3, "parked"
        assert pacing.may_read(waiting, 1.0) is READ, "a probe"
        assert pacing.may_read(waiting, 1.0 + PROBE_INTERVAL_S * 0.9) is BEHIND
        assert pacing.may_read(waiting, 1.0 + PROBE_INTERVAL_S) is READ, "another one"
    else:
        assert [pacing.may_read(waiting, 1.0) for _ in range(2)] == [may, may]


def test_retries_in_vain_slow_down_retries_and_successes_do_not():
    pacing = paced(senders=8)
    pacing.retried(100, 0, False, 5.0)
    assert pacing.may_retry(5.0)
    pacing.retried(4096, 4096, False, 5.0)
    assert 0.05 < pacing.wait_s(5.0) < 0.5
    assert not pacing.may_retry(5.0) and pacing.may_retry(6.0)


@pytest.mark.parametrize(("senders", "batches"), [(1, 1), (3, 1), (4, 2)])
def test_half_of_the_senders_are_left_to_fresh_batches(senders, batches):
    pacing = paced(senders)
    for _ in range(batches):
        assert pacing.may_retry(0.0)
        pacing.taken(10)
    assert pacing.wait_s(0.0) is None and not pacing.may_retry(0.0)
    assert (pacing.retry_batches, pacing.retry_events) == (batches, 10 * batches)
    pacing.retry_recorded(10)
    assert pacing.may_retry(0.0)


@pytest.mark.parametrize(
    ("told", "now", "early"),
    [
        ([], 0.0, 0),
        ([(10, 5, False)], 0.0, 0),
        ([(10, 4, False)], 0.0, 20),
        ([(3_900, 0, True)], 0.0, 4_000),
        ([(10, 10, True), (10, 0, False)], PAUSE_S_MIN * 0.9, 0),
        ([(10, 10, True), (10, 0, False)], PAUSE_S_MIN, 20),
        ([(10, 10, True), (10, 10, True), (10, 0, False)], PAUSE_S_MIN * 1.9, 0),
        ([(10, 10, True), (10, 10, True), (10, 0, False)], PAUSE_S_MIN * 2, 20),
    ],
)
def test_retries_that_join_bring_others_before_their_time_but_for_a_while_after_some_in_vain(
    told, now, early
):
    pacing = paced()
    for events, again, before_its_time in told:
        pacing.retried(events, again, before_its_time, 0.0)
    assert [pacing.early(now), pacing.early(now)] == [early, 0]


def test_retries_in_vain_before_their_time_grow_rare_though_others_join_all_the_while():
    pacing, now, vain = paced(), 0.0, 0
    while now < 6 * 3600:
        pacing.retried(10, 0, False, now)
        if pacing.early(now):
            vain += 1
            pacing.retried(20, 20, True, now)
        now += 1.0
    assert vain < 60
    now += PAUSE_S_MAX
    pacing.retried(10, 0, False, now)
    assert pacing.early(now)
    pacing.retried(20, 0, True, now)
    assert pacing.early(now), "they join: at once again"


REFUSED, GOOD, SLOW = "refused", "good", "slow"


@pytest.mark.parametrize(
    ("told", "requests"),
    [
        ([], 16),
        ([(REFUSED, 1.0, 1.1), (REFUSED, 1.05, 1.2)], 8),
        ([(REFUSED, 1.0, 1.1), (REFUSED, 1.3, 1.4)], 4),
        ([(REFUSED, 1.0, 1.1), (REFUSED, 1.3, 1.4)] + [(GOOD, 2.0, 2.1)] * 5, 5),
        ([(REFUSED, 1.0, 1.1)] + [(GOOD, 2.0, 2.1)] * 1000, 16),
        ([(GOOD, n * 4, n * 4 + SLOW_S + 0.1) for n in range(9)], 1),
        ([(GOOD, 0.0, SLOW_S)], 16),
    ],
)
def test_requests_are_halved_once_by_what_was_under_way_together_and_grow_by_one_a_window(told, requests):
    pacing = paced(16)
    for what, sent_at, now in told:
        (pacing.request_refused if what is REFUSED else pacing.request_answered)(sent_at, now)
    assert pacing.requests_max == requests


def asked(pacing: Pacing, batches: int) -> int:
    return sum(pacing.lookup_pays() for _ in range(batches))


NOTHING_KNOWN = [(0, 1_000)] * 40
LITTLE, ENOUGH = int(1_000 * PAYS_FROM) - 5, int(1_000 * PAYS_FROM) + 5


@pytest.mark.parametrize(
    ("known", "in_vain", "asks"),
    [
        ([], 0, PROBE_EVERY),
        ([(0, 0)], 0, PROBE_EVERY),
        (NOTHING_KNOWN, 0, 1),
        ([*NOTHING_KNOWN, (30, 1_000)], 0, PROBE_EVERY),
        (NOTHING_KNOWN + [(LITTLE, 1_000)] * 50, 0, 1),
        (NOTHING_KNOWN + [(ENOUGH, 1_000)] * 50, 0, PROBE_EVERY),
        (NOTHING_KNOWN, 29, 1),
        (NOTHING_KNOWN, 30, PROBE_EVERY),
    ],
)
def test_each_batch_is_looked_up_where_enough_is_known_and_else_one_in_so_many(known, in_vain, asks):
    pacing = paced()
    for row in known:
        pacing.looked_up(*row)
    pacing.joined_in_vain(in_vain, 1_000)
    assert asked(pacing, PROBE_EVERY) == asks
    assert asked(pacing, 10 * PROBE_EVERY) == 10 * asks


def test_hedged_batches_make_room_for_others_until_too_many_events_or_bytes_wait():
    pacing = paced()
    for _ in range(100):  # live traffic: many small ones within a hedge
        assert pacing.may_read(0, 0.0) is READ
        pacing.read(*FEW_LINES, 0.0)
        pacing.hedged(*FEW_LINES)
        pacing.answered()
        pacing.recorded(*FEW_LINES, 0.0)
    assert (pacing.fresh_batches, pacing.hedged_events) == (0, 100 * FEW_LINES[0])
    pacing.hedged(10, HEDGED_BYTES_MAX)
    assert not pacing.has_room_to_hedge and pacing.may_read(0, 0.0) is AHEAD
    pacing.hedged_recorded(10, HEDGED_BYTES_MAX)
    assert pacing.may_read(0, 0.0) is READ
    pacing.hedged(2 * PER_SENDER * FULL_BATCH[0], 0)
    assert not pacing.has_room_to_hedge and pacing.may_read(0, 0.0) is AHEAD


@pytest.mark.parametrize(
    ("newest_us", "read_to_us", "held_s"),
    [
        (1_000, 999, HELD_S_MAX),
        (1_000, 1_000, 0.0),
        (HOUR_US - 59_000_000, 1_000, 0.0),
        (HOUR_US - 61_000_000, 1_000, HELD_S_MAX),
        (HOUR_US - 61_000_000, ALL_READ, 0.0),
        (2 * HOUR_US, 1_000, 0.0),
    ],
)
def test_what_is_older_than_a_minute_waits_for_the_event_store_to_read_its_primaries(
    newest_us, read_to_us, held_s
):
    assert Pacing.hold_s(newest_us, read_to_us, HOUR_US) == held_s


def test_few_batches_are_read_while_others_are_held():
    pacing = paced(senders=2)
    assert pacing.may_read(0, 0.0, 2 * HELD_A_SENDER - 1) is READ
    assert pacing.may_read(0, 0.0, 2 * HELD_A_SENDER) is AHEAD
