"""How many fresh batches are on their way."""

from dispatcher.rules.read_ahead import PATIENCE_S, PER_SENDER, SMALL, ReadAhead


def ahead() -> ReadAhead:
    return ReadAhead(senders=2, events_max=4_000, bytes_max=1_000_000)


def fill(reading: ReadAhead, events: int, size: int, now: float = 0.0) -> int:
    """Batches sent until there is no room."""
    sent = 0
    while reading.room(now):
        reading.sent(events, size, now)
        sent += 1
    return sent


def test_full_batches_are_read_far_ahead() -> None:
    assert fill(ahead(), 4_000, 600_000) == 2 * PER_SENDER


def test_batches_full_of_long_lines_are_full_too() -> None:
    assert fill(ahead(), 10, 900_000) == 2 * PER_SENDER


def test_of_small_ones_few_are_on_their_way_until_one_is_recorded() -> None:
    reading = ahead()
    assert fill(reading, 20, 3_000) == SMALL
    reading.answered()
    reading.recorded(20, 3_000, 0.01)
    assert fill(reading, 20, 3_000, 0.01) == 1


def test_small_ones_that_do_not_come_back_hold_the_others_up_for_a_moment_only() -> None:
    """A distant registry: one more than the senders can take, and the rest makes the next one larger."""
    reading = ahead()
    fill(reading, 20, 3_000)
    assert not reading.room(PATIENCE_S - 0.001)
    assert reading.room(PATIENCE_S)
    reading.sent(20, 3_000, PATIENCE_S)
    assert not reading.room(10 * PATIENCE_S)


def test_an_old_one_that_is_never_answered_does_not_hold_up_those_behind_it() -> None:
    """A poison event: what comes after is answered, though it can't be recorded before it."""
    reading = ahead()
    now = 0.0
    for _ in range(2 * PER_SENDER - 1):
        now += 1.01 * PATIENCE_S
        assert reading.room(now)
        reading.sent(20, 3_000, now)
        reading.answered()
    reading.sent(20, 3_000, now)
    assert not reading.room(now + 10 * PATIENCE_S)


def test_counts_are_of_what_is_on_its_way() -> None:
    reading = ahead()
    reading.sent(5, 100, 0.0)
    reading.sent(7, 100, 0.0)
    reading.recorded(5, 100, 0.0)
    assert (reading.batches, reading.events) == (1, 7)
